"""Parameters of feed-forward layers, dense or of experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from kvtide.layout.fields import Fields
    from kvtide.sim.costs.architecture import Architecture

_UNGATED = (
    "apertus",
    "arcee",
    "gpt_neox",
    "jais2",
    "nanochat",
    "nemotron",
    "nemotron_h",
    "opt",
    "persimmon",
    "phi",
    "starcoder2",
)
"""Families whose feed-forward layers have two matrices; the others have a gate as well."""

_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
_ACTIVE = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "experts_per_token",
    "moe_k",
    "moe_topk",
    "top_k_experts",
    "n_activated_experts",
)


class FeedForward(NamedTuple):
    """Parameters of one layer: `dense` used by every token, `expert` those of one expert."""

    dense: float
    expert: float


NOTHING = FeedForward(0, 0)


def expert_numbers(fields: Fields) -> tuple[int, int]:
    """Experts of a layer, and how many of them a token uses."""
    return fields.size(*_EXPERTS), fields.size(*_ACTIVE)


def feed_forward(model: Architecture, layer: int) -> FeedForward:
    """The feed-forward part of a layer."""
    fields = model.fields.at(layer)
    hidden = fields.size("hidden_size")
    matrices = 2 if model.family in _UNGATED else 3
    match feed_forward_kind(model, layer):
        case "none":
            return NOTHING
        case "dense":
            return FeedForward(matrices * hidden * _width(fields, layer), 0)
        case _:
            num, _ = expert_numbers(fields)
            width = fields.size("moe_intermediate_size", "moe_inter_dim", "intermediate_size")
            shared = matrices * hidden * _shared_width(fields, width)
            latent = fields.size_or_none("moe_latent_size")
            projections = 2 * hidden * latent if latent else 0
            router = hidden * num
            if fields.flag("enable_moe_block", default=False):  # Gemma 4: beside a dense layer
                shared += matrices * hidden * _width(fields, layer)
            return FeedForward(shared + router + projections, matrices * (latent or hidden) * width)


def _width(fields: Fields, layer: int) -> int:
    if isinstance(fields.values.get("intermediate_size"), list | tuple):
        widths = fields.listed("intermediate_size") or []
        return fields.with_values(intermediate_size=widths[layer]).size("intermediate_size")
    return fields.size("intermediate_size", "inter_dim")


def _shared_width(fields: Fields, width: int) -> int:
    """Width of all shared experts of a layer together."""
    single = fields.count_or_none("shared_expert_intermediate_size")
    if single is not None:
        return single
    number = fields.count_or_none("n_shared_experts", "num_shared_experts") or 0
    return number * (fields.size_or_none("moe_shared_expert_intermediate_size") or width)


def feed_forward_kind(model: Architecture, layer: int) -> str:
    """What a layer has beside its mixer: "none", "dense" or "sparse"."""
    fields = model.fields
    if model.family == "nemotron_h":
        return _of_pattern(fields, layer)
    if all(fields.count_or_none(name) in (None, 0) for name in _EXPERTS):
        return "dense"
    listed = fields.listed("mlp_layer_types")
    if listed is not None:
        return str(listed[layer])
    if layer in (fields.listed("mlp_only_layers") or ()):
        return "dense"
    if layer < (fields.count_or_none("first_k_dense_replace", "n_dense_layers") or 0):
        return "dense"
    every = fields.values.get("moe_layer_freq")
    if isinstance(every, list | tuple):
        return "sparse" if (fields.listed("moe_layer_freq") or [])[layer] else "dense"
    step = fields.size_or_none("decoder_sparse_step")
    if step is not None:
        return "sparse" if (layer + 1) % step == 0 else "dense"
    step = fields.size_or_none("moe_layer_freq") or 1
    return "sparse" if layer % step == 0 else "dense"


def _of_pattern(fields: Fields, layer: int) -> str:
    """Nemotron-H, whose layers are one thing each."""
    words = {"-": "dense", "E": "sparse", "mlp": "dense", "moe": "sparse"}
    pattern = fields.text_or_none("hybrid_override_pattern")
    listed = fields.listed("layers_block_type") or fields.listed("layer_types")
    word = pattern[layer] if pattern is not None else str((listed or [])[layer])
    return words.get(word, "none")
