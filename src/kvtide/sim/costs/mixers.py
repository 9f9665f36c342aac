"""Parameters of the layers that mix tokens: attention over heads or latents, recurrent layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtide.layout import FullSpec, IndexerSpec, LatentSpec, WindowSpec
from kvtide.sim.costs.reads import index_dim, index_heads

if TYPE_CHECKING:
    from kvtide.layout.fields import Fields
    from kvtide.sim.costs.architecture import Architecture

_GATED = ("qwen3_next", "qwen3_5", "qwen4")
"""Families whose queries come with a gate on the output, unless `attn_output_gate` denies it."""


def mixer_params(model: Architecture, layer: int) -> int:
    """The matrices of one layer's attention, or of its recurrence."""
    match model.kinds[layer]:
        case "none":
            return 0
        case "linear":
            return _recurrent(model, layer)
        case "conv":
            return 4 * model.fields.size("hidden_size") ** 2
        case _ if model.family == "deepseek_v4":
            return _folding(model, layer)
        case _:
            attends = _heads if model.spec(layer, LatentSpec) is None else _latent
            return attends(model, layer) + _indexer(model, layer)


def _heads(model: Architecture, layer: int) -> int:
    """Queries, keys, values and output; a layer that borrows keys and values has none."""
    spec = model.spec(layer, (FullSpec, WindowSpec))
    if spec is None:
        return 0
    fields = model.fields.at(layer)
    queries = model.heads(layer) * spec.head_dim
    value_dim = spec.v_head_dim or spec.head_dim
    per_hidden = queries + model.heads(layer) * value_dim
    if model.family.startswith(_GATED) and fields.flag("attn_output_gate", default=True):
        per_hidden += queries
    if model.sources[layer] == layer:
        per_hidden += spec.kv_heads * (
            spec.head_dim + (0 if _is_key_value(fields, spec) else value_dim)
        )
    return fields.size("hidden_size") * per_hidden


def _is_key_value(fields: Fields, spec: FullSpec | WindowSpec) -> bool:
    """Whether keys are values too: Gemma 4's full layers."""
    return fields.flag("attention_k_eq_v", default=False) and isinstance(spec, FullSpec)


def _latent(model: Architecture, layer: int) -> int:
    fields = model.fields.at(layer)
    spec = model.spec(layer, LatentSpec)
    assert spec is not None
    hidden, heads = fields.size("hidden_size"), model.heads(layer)
    plain, value_dim = fields.size("qk_nope_head_dim"), fields.size("v_head_dim")
    queries = heads * (plain + fields.count("qk_rope_head_dim"))
    rank = fields.size_or_none("q_lora_rank")
    to_queries = hidden * queries if rank is None else rank * (hidden + queries)
    to_latent = hidden * (spec.rank + spec.rope_dim)
    from_latent = spec.rank * heads * (plain + value_dim)
    return to_queries + to_latent + from_latent + heads * value_dim * hidden


def _folding(model: Architecture, layer: int) -> int:
    """DeepSeek-V4: queries and output of low rank, the output's in groups; one key that is its
    value; what folds tokens into entries, and into index keys; mixing of the residual streams."""
    fields = model.fields
    hidden, dim = fields.size("hidden_size"), fields.size("head_dim")
    rank, width = fields.size("q_lora_rank"), model.heads(layer) * dim
    out, groups = fields.size("o_lora_rank"), fields.size("o_groups")
    streams = fields.size("hc_mult")
    params = rank * (hidden + width) + hidden * dim + width * out + groups * out * hidden
    params += 2 * (2 + streams) * streams * streams * hidden
    if model.kinds[layer] == "folded":
        params += 2 * hidden * dim
    if model.kinds[layer] == "folded_indexed":
        heads, index = index_heads(fields), index_dim(fields)
        params += 4 * hidden * (dim + index) + rank * heads * index + hidden * heads
    return params


def _indexer(model: Architecture, layer: int) -> int:
    if model.spec(layer, IndexerSpec) is None:
        return 0
    fields = model.fields
    hidden, heads, dim = fields.size("hidden_size"), index_heads(fields), index_dim(fields)
    into_queries = fields.size_or_none("q_lora_rank") or hidden
    return into_queries * heads * dim + hidden * (dim + heads)


def _recurrent(model: Architecture, layer: int) -> int:
    fields = model.fields.at(layer)
    if fields.has("linear_num_key_heads"):
        return _delta_net(fields)
    if fields.has("mamba_num_heads"):
        return _mamba2(fields)
    if fields.has("linear_attn_config") or fields.has("linear_num_heads"):
        return _kimi_delta(fields)
    return _lightning(model, layer)


def _delta_net(fields: Fields) -> int:
    """Qwen: queries, keys, values, gate; two numbers a value head; output; convolution."""
    hidden, heads = fields.size("hidden_size"), fields.size("linear_num_value_heads")
    keys = fields.size("linear_num_key_heads") * fields.size("linear_key_head_dim")
    values = heads * fields.size("linear_value_head_dim")
    kernel = fields.size("linear_conv_kernel_dim")
    return hidden * (2 * keys + 3 * values + 2 * heads) + kernel * (2 * keys + values)


def _mamba2(fields: Fields) -> int:
    """Nemotron-H: gate, values, keys, queries and steps; output; convolution."""
    hidden, heads = fields.size("hidden_size"), fields.size("mamba_num_heads")
    inner = heads * fields.size("mamba_head_dim")
    keys = 2 * fields.size("n_groups") * fields.size("ssm_state_size")
    return hidden * (3 * inner + keys + heads) + fields.size("conv_kernel") * (inner + keys)


def _kimi_delta(fields: Fields) -> int:
    """Kimi: queries, keys, values, output; decay and gate of low rank; a number a head."""
    inner = fields.inner("linear_attn_config") or fields
    heads = inner.size("num_heads", "linear_num_heads")
    dim = inner.size("linear_head_dim") if inner is fields else inner.size("head_dim")
    kernel = inner.size("short_conv_kernel_size", "linear_conv_kernel_dim")
    hidden, width = fields.size("hidden_size"), heads * dim
    low_rank = 2 * dim * (hidden + width)
    return hidden * (4 * width + heads) + low_rank + kernel * 3 * width


def _lightning(model: Architecture, layer: int) -> int:
    """MiniMax: queries, keys, values, gate and output of equally many heads."""
    hidden = model.fields.size("hidden_size")
    dim = model.fields.size_or_none("head_dim") or hidden // model.heads(layer)
    return 5 * hidden * model.heads(layer) * dim
