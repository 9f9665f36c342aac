"""The model families: how each says what its layers are, and what a layer of each kind stores."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeAlias

from kvtide.errors import ConfigError
from kvtide.layout import kinds as rule
from kvtide.layout import reader as attention
from kvtide.layout import states
from kvtide.layout.fields import Fields
from kvtide.layout.spec import FullSpec, Spec, WindowSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvtide.layout.kinds import Kind
    from kvtide.layout.reader import Reader

    Stores: TypeAlias = Callable[[Reader, int], tuple[Spec, ...]]

HEADS: Mapping[Kind, Stores] = MappingProxyType(
    {
        "full": attention.full,
        "sliding": attention.sliding,
        "chunked": attention.chunked,
        "none": attention.nothing,
    }
)
"""Layers that cache keys and values of heads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Models that are read alike.

    `kinds(fields, num_layers)` is the kind of every layer, `stores[kind](reader, layer)` what it
    caches, `drafts` the kind of the model's own layers for multi-token prediction. `derives`: see
    `Reader`. `reuses(fields, kinds)` gives for every layer the one whose keys and values it reads.
    """

    kinds: Callable[[Fields, int], list[Kind]]
    stores: Mapping[Kind, Stores] = field(default_factory=lambda: HEADS)
    derives: bool = False
    drafts: Kind = "full"
    reuses: Callable[[Fields, list[Kind]], list[int]] | None = None


def _indexed_latent(reader: Reader, layer: int) -> tuple[Spec, ...]:
    """DeepSeek-V3.2, GLM-5: latents, and index keys where the layer has an indexer of its own."""
    owns = rule.owns_indexer(reader.fields, reader.fields.size("num_hidden_layers"))
    latents = reader.latent()
    if layer < len(owns) and not owns[layer]:
        return (latents,)
    return latents, reader.lightning_index()


def _mistral_large(reader: Reader, layer: int) -> tuple[Spec, ...]:
    """Mistral-Large-4: as GLM-5; every so many layers have no rotary key."""
    num_layers = reader.fields.size("num_hidden_layers")
    ropes = reader.fields.per_layer("no_rope_layers", num_layers)
    if ropes is None:
        period = reader.fields.size_or_none("no_rope_layer_interval") or 4
        ropes = [int((i + 1) % period != 0) for i in range(num_layers)]
    owns = rule.owns_indexer(reader.fields, num_layers)
    latents = reader.latent(has_rope=layer >= num_layers or bool(ropes[layer]))
    if layer < num_layers and not owns[layer]:
        return (latents,)
    return latents, reader.lightning_index()


def _pooled_index(reader: Reader, layer: int) -> tuple[Spec, ...]:
    """GLM-5.3: latents, and index keys pooled over `index_kpool` tokens.

    As serving kernels keep them: a key per pool, and the tokens of the pool begun as a state. With
    an index dtype that is not theirs, as transformers does: of every token a key, a gate and
    whether it is there, pooled anew in every forward.
    """
    owns = rule.owns_indexer(reader.fields, reader.fields.size("num_hidden_layers"))
    latents = reader.latent()
    if layer < len(owns) and not owns[layer]:
        return (latents,)
    dim = reader.fields.size("index_head_dim")
    if reader.storage.index not in attention.INDEX_FORMATS:
        return latents, reader.plain_index(2 * dim + 1)
    pool = reader.fields.size("index_kpool")
    keys = reader.lightning_index(ratio=pool)
    return (latents, keys, *states.pool_begun(reader, pool, dim))


def _block_sparse(reader: Reader, layer: int) -> tuple[Spec, ...]:
    """MiniMax-M3: keys and values of heads, and one head of index keys."""
    sparse = reader.fields.inner("sparse_attention_config")
    dim = sparse.size("sparse_index_dim") if sparse else reader.fields.size("index_head_dim")
    return reader.full(), reader.plain_index(dim)


def _query_sparse(reader: Reader, layer: int) -> tuple[Spec, ...]:
    """Qwen4: keys and values of heads, and index keys."""
    fields = reader.fields
    dim = fields.size("indexer_kv_heads") * fields.size("indexer_head_dim")
    return reader.full(), reader.plain_index(dim)


def _gemma4_full(reader: Reader, layer: int) -> tuple[Spec, ...]:
    """Gemma 4: full layers have heads of their own size, and of their own number if K = V."""
    fields = reader.fields
    if fields.has("per_layer_config"):
        return attention.full(reader, layer)
    values = {**fields.values, "head_dim": fields.size("global_head_dim")}
    heads = fields.size_or_none("num_global_key_value_heads")
    if heads is not None and fields.flag("attention_k_eq_v", default=False):
        values["num_key_value_heads"] = heads
    changed = Fields(values, fields.where)
    return attention.full(attention.replace_fields(reader, changed), layer)


def _searched(reader: Reader, layer: int) -> tuple[Spec, ...]:
    """Nemotron NAS: every layer says itself how many heads share a key, or that it is none."""
    blocks = reader.fields.per_layer("block_configs", reader.fields.size("num_hidden_layers"))
    if blocks is None:
        raise reader.fields.missing("block_configs")
    block = blocks[layer]
    if not isinstance(block, dict):
        raise reader.fields.unknown("block_configs", block, "objects")
    said = Fields(block, f"block_configs[{layer}] of {reader.fields.where}").inner("attention")  # pyright: ignore[reportUnknownArgumentType]
    if said is None:
        raise reader.fields.missing(f"block_configs[{layer}].attention")
    if said.flag("no_op", default=False) or said.flag("replace_with_linear", default=False):
        return ()
    for odd in ("sparsify", "num_sink_tokens"):
        if said.has(odd):
            raise said.unknown(odd, said.values[odd], "null")
    heads = reader.fields.size("num_attention_heads") // said.size("n_heads_in_group")
    values = {**reader.fields.values, "num_key_value_heads": heads}
    own = attention.replace_fields(reader, Fields(values, reader.fields.where))
    window = said.size_or_none("window_length")
    if window is None or said.flag("use_prefill_window_attention", default=False):
        return (own.full(),)
    full: FullSpec = own.full()
    return (
        WindowSpec(window=window, kv_heads=full.kv_heads, head_dim=full.head_dim, dtype=full.dtype),
    )


def _last_of_type(fields: Fields, kinds: list[Kind]) -> list[int]:
    """Gemma 3n and 4: the last `num_kv_shared_layers` read the last earlier layer of their type."""
    num_layers = len(kinds)
    shared = fields.count_or_none("num_kv_shared_layers") or 0
    first = num_layers - shared
    if not 0 < first <= num_layers:
        raise ConfigError(
            f"num_kv_shared_layers of {fields.where} is {shared} of {num_layers} layers; "
            "at least one must have keys and values of its own"
        )
    sources = list(range(num_layers))
    for layer in range(first, num_layers):
        earlier = [i for i in range(first) if kinds[i] == kinds[layer]]
        if not earlier:
            raise ConfigError(
                f"layer {layer} of {fields.where} shares keys and values, but no layer of its type "
                f"({kinds[layer]}) before layer {first} has any; check layer_types"
            )
        sources[layer] = earlier[-1]
    return sources


def _source_layers(fields: Fields, kinds: list[Kind]) -> list[int]:
    """Mistral-Large-4: `kv_source_layers` says it for every layer."""
    given = fields.per_layer("kv_source_layers", len(kinds))
    if given is None:
        return list(range(len(kinds)))
    sources: list[int] = []
    for layer, source in enumerate(given):
        if not isinstance(source, int) or not 0 <= source <= layer:
            raise fields.unknown("kv_source_layers", source, f"0 to {layer} for layer {layer}")
        sources.append(source)
    return sources


_PLAIN = Family(kinds=rule.from_window("all"), derives=True)
_PLAIN_STRICT = Family(kinds=rule.from_window(None))
_LATENT = Family(kinds=rule.every("full"), stores={"full": attention.latent})
_INDEXED_LATENT = Family(
    kinds=rule.every("indexed"), stores={"indexed": _indexed_latent}, drafts="indexed"
)
_DELTA_NET = Family(
    kinds=rule.at_intervals("linear", "full"),
    stores={**HEADS, "linear": states.gated_delta_net},
)
_QWEN4 = Family(
    kinds=rule.at_intervals("linear", "indexed"),
    stores={"indexed": _query_sparse, "linear": states.gated_delta_net},
    drafts="indexed",
)
_M3 = Family(kinds=rule.minimax, stores={**HEADS, "indexed": _block_sparse})
_LIGHTNING = Family(
    kinds=rule.lightning,
    stores={**HEADS, "linear": states.lightning_attention},
    derives=True,
)
_GEMMA4 = Family(
    kinds=rule.from_window(6),
    stores={**HEADS, "full": _gemma4_full},
    reuses=_last_of_type,
)
_GLM5_NEXT = Family(
    kinds=rule.delta_attention("indexed"),
    stores={"indexed": _pooled_index, "linear": states.kimi_delta_attention},
    drafts="indexed",
)
_MISTRAL_LARGE = Family(
    kinds=rule.every("indexed"),
    stores={"indexed": _mistral_large},
    drafts="indexed",
    reuses=_source_layers,
)

_PLAIN_OTHERS = [
    "afmoe",
    "arcee",
    "aria_text",
    "cohere2_moe",
    "cwm",
    "diffllama",
    "ernie4_5",
    "helium",
    "hunyuan_v1_dense",
    "hunyuan_v1_moe",
    "hyperclovax",
    "internlm3",
    "jais2",
    "sarvam_moe",
    "seed_oss",
    "solar_open",
    "vaultgemma",
]
"""Types whose head_dim is a field of its own."""

_DERIVING_OTHERS = [
    "apertus",
    "bitnet",
    "cohere",
    "doge",
    "ernie4_5_moe",
    "exaone4",
    "exaone_moe",
    "flex_olmo",
    "gpt_neox",
    "granite",
    "granitemoe",
    "granitemoeshared",
    "nanochat",
    "olmo",
    "olmo2",
    "olmo3",
    "olmoe",
    "opt",
    "persimmon",
    "phi",
    "phimoe",
    "smollm3",
    "stablelm",
    "starcoder2",
]
"""Types that divide the hidden size among the heads where there is no head_dim."""

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        # DeepSeek
        "deepseek_v2": _LATENT,
        "deepseek_v3": _LATENT,
        "deepseek_v32": _INDEXED_LATENT,
        "deepseek_v4": Family(
            kinds=rule.deepseek_v4,
            stores={
                "sliding": states.v4_window,
                "folded": states.folded,
                "folded_indexed": states.folded_indexed,
            },
            drafts="sliding",
        ),
        # GLM
        "glm": _PLAIN_STRICT,
        "glm4": _PLAIN_STRICT,
        "glm4_moe": _PLAIN_STRICT,
        "glm4_moe_lite": _LATENT,
        "glm_moe_dsa": _INDEXED_LATENT,
        "glm5_next": _GLM5_NEXT,
        "glm5_next_text": _GLM5_NEXT,
        # GPT-OSS
        "gpt_oss": Family(kinds=rule.from_window(2)),
        # Mistral
        "mistral": _PLAIN,
        "mixtral": _PLAIN,
        "ministral": _PLAIN,
        "ministral3": _PLAIN,
        "mistral4": _LATENT,
        "mistral_large4": _MISTRAL_LARGE,
        "mistral_large4_text": _MISTRAL_LARGE,
        # Kimi
        "kimi_k2": _LATENT,
        "kimi_k25": _LATENT,
        "kimi_linear": Family(
            kinds=rule.delta_attention("full"),
            stores={"full": attention.latent, "linear": states.kimi_delta_attention},
        ),
        # MiniMax
        "minimax": _LIGHTNING,
        "minimax_m1": _LIGHTNING,
        "minimax_text_01": _LIGHTNING,
        "minimax_m2": Family(kinds=rule.minimax),
        "minimax_m3": _M3,
        "minimax_m3_vl": _M3,
        "minimax_m3_vl_text": _M3,
        # Nemotron
        "nemotron": Family(kinds=rule.every("full"), derives=True),
        "nemotron-nas": Family(kinds=rule.every("full"), stores={"full": _searched}, derives=True),
        "nemotron_h": Family(kinds=rule.nemotron_h, stores={**HEADS, "linear": states.mamba2}),
        # Qwen
        "qwen2": _PLAIN,
        "qwen2_moe": _PLAIN,
        "qwen3": _PLAIN_STRICT,
        "qwen3_moe": _PLAIN_STRICT,
        "qwen3_vl_text": _PLAIN_STRICT,
        "qwen3_vl_moe_text": _PLAIN_STRICT,
        "qwen3_next": _DELTA_NET,
        "qwen3_5": _DELTA_NET,
        "qwen3_5_text": _DELTA_NET,
        "qwen3_5_moe": _DELTA_NET,
        "qwen3_5_moe_text": _DELTA_NET,
        "qwen4_exp": _QWEN4,
        "qwen4_exp_text": _QWEN4,
        # Gemma
        "gemma": Family(kinds=rule.every("full")),
        "gemma2": Family(kinds=rule.from_window(2)),
        "gemma3": Family(kinds=rule.from_window(6)),
        "gemma3_text": Family(kinds=rule.from_window(6)),
        "gemma3n": Family(kinds=rule.from_window(5), reuses=_last_of_type),
        "gemma3n_text": Family(kinds=rule.from_window(5), reuses=_last_of_type),
        "gemma4": _GEMMA4,
        "gemma4_text": _GEMMA4,
        # Others whose transformers classes cache plain keys and values (tests/torch hold it)
        "llama": _PLAIN,
        "llama4_text": _PLAIN_STRICT,
        "phi3": _PLAIN,
        "cohere2": Family(kinds=rule.from_window(4), derives=True),
        "lfm2": Family(
            kinds=rule.from_window(None),
            stores={**HEADS, "conv": states.short_convolution},
            derives=True,
        ),
        **dict.fromkeys(_PLAIN_OTHERS, _PLAIN_STRICT),
        **dict.fromkeys(_DERIVING_OTHERS, Family(kinds=rule.from_window(None), derives=True)),
    }
)
"""By `model_type`."""
