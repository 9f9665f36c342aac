"""What attention costs: operations and bytes for every key a query sees, per layer group."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, NamedTuple, TypedDict

from kvtide.layout import (
    CompressedSpec,
    FullSpec,
    IndexerSpec,
    LatentSpec,
    Mirror,
    Window,
    WindowSpec,
)

if TYPE_CHECKING:
    from kvtide.layout import Layout
    from kvtide.layout.fields import Fields
    from kvtide.layout.grouping import LayerGroup
    from kvtide.sim.costs.architecture import Architecture

_STATE_FLOPS = 6
"""Operations per element of a recurrent state and token: decay and add an outer product, after
reading what is there for the key (delta rule), then read it for the query."""

_CONV_FLOPS = 2
"""Operations per kept input of a short convolution and token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reads:
    """Layers of one group that see equally far, on one rank.

    `pair_flops`: operations for one query and one key, over those layers and this rank's heads.
    `token_bytes`: bytes of one token in those layers. A query sees itself and what is before it, at
    most `limit` tokens (None: all): the last ones, or if `picks` those an indexer picks.

    Over latents, `pair_flops` is of queries that were multiplied into the latents' space. A chunk
    may instead widen every token it reads into the keys and values of all heads, `widen_flops` a
    token, and then pay `wide_pair_flops` a pair.
    """

    group: str
    pair_flops: float
    token_bytes: float
    limit: int | None = None
    picks: bool = False
    wide_pair_flops: float = 0.0
    widen_flops: float = 0.0


class StateCost(NamedTuple):
    """Recurrent layers on one rank: `flops` per token, `row_bytes` read and written per row of a
    step, `token_bytes` per token."""

    flops: float
    row_bytes: float
    token_bytes: float


def reads_of(model: Architecture, layout: Layout, ranks: int) -> tuple[Reads, ...]:
    """The attention of every layer group that keeps tokens; a drafter's groups are left out.

    `layout` is one rank's, and `ranks` of them share the query heads.
    """
    found: list[Reads] = []
    for group in layout.groups:
        if group.is_state or isinstance(group.lifetime, Mirror):
            continue
        parts: dict[tuple[int | None, bool], list[int]] = {}
        for layer in _readers(model, group):
            parts.setdefault(_limit(model, group, layer), []).append(layer)
        bytes_per_layer = (group.bytes_per_token or 0) / len(group.layers)
        found.extend(
            Reads(
                group=group.name,
                pair_flops=sum(_pair_flops(model, group, layer, ranks) for layer in layers),
                token_bytes=bytes_per_layer * len(layers),
                limit=limit,
                picks=picks,
                **_widened(model, group, layers, ranks, picks=picks),
            )
            for (limit, picks), layers in parts.items()
        )
    return tuple(found)


def state_cost(layout: Layout) -> StateCost:
    """The recurrent layers of a layout. A row reads and writes its state once a step; of what
    waits to be folded it writes one token's and later reads it."""
    flops = row_bytes = token_bytes = 0.0
    for group in layout.groups:
        for buffer in group.buffers if group.is_state else ():
            elements = prod(buffer.shape) * len(group.layers)
            num_bytes = buffer.bytes * len(group.layers)
            if buffer.name.startswith(("recurrent", "conv")):
                per_element = _CONV_FLOPS if buffer.name.startswith("conv") else _STATE_FLOPS
                flops += per_element * elements
                row_bytes += 2 * num_bytes
            else:
                token_bytes += 2 * num_bytes / buffer.shape[0]
    return StateCost(flops, row_bytes, token_bytes)


def index_heads(fields: Fields) -> int:
    """Query heads of an indexer."""
    sparse = fields.inner("sparse_attention_config")
    if sparse is not None and sparse.has("sparse_num_index_heads"):
        return sparse.size("sparse_num_index_heads")
    return fields.size("index_n_heads", "indexer_n_heads")


def index_dim(fields: Fields) -> int:
    """Elements of one index key."""
    sparse = fields.inner("sparse_attention_config")
    if sparse is not None and sparse.has("sparse_index_dim"):
        return sparse.size("sparse_index_dim")
    return fields.size("index_head_dim", "indexer_head_dim")


def picked_tokens(fields: Fields) -> int:
    """How many tokens (or entries) an indexer picks for a query."""
    sparse = fields.inner("sparse_attention_config")
    if sparse is not None and sparse.has("sparse_topk_blocks"):
        return sparse.size("sparse_topk_blocks") * sparse.size("sparse_block_size")
    if fields.has("index_topk_blocks"):
        return fields.size("index_topk_blocks") * fields.size("index_block_size")
    return fields.size("index_topk", "indexer_budget")


def _readers(model: Architecture, group: LayerGroup) -> list[int]:
    """Layers that attend over the keys of this group, those that borrow them included."""
    if group.buffers[0].name == "index_key":
        return list(group.layers)
    own = set(group.layers)
    return [layer for layer, source in enumerate(model.sources) if source in own]


def _limit(model: Architecture, group: LayerGroup, layer: int) -> tuple[int | None, bool]:
    """How many tokens a query of this layer sees, and whether an indexer picks them."""
    if isinstance(group.lifetime, Window):
        return group.lifetime.tokens + group.lifetime.sinks, False
    name = group.buffers[0].name
    if name != "index_key" and model.kinds[layer] in ("indexed", "folded_indexed"):
        return picked_tokens(model.fields) * group.ratio, True
    return None, False


class _Widened(TypedDict, total=False):
    wide_pair_flops: float
    widen_flops: float


def _widened(
    model: Architecture, group: LayerGroup, layers: list[int], ranks: int, *, picks: bool
) -> _Widened:
    """Latents as keys and values of heads; not where an indexer picks, which every head obeys
    alike: kernels read the picked latents as they are. Nothing if the fields do not say."""
    fields = model.fields
    plain, value = fields.size_or_none("qk_nope_head_dim"), fields.size_or_none("v_head_dim")
    spec = model.spec(layers[0], LatentSpec)
    if spec is None or picks or group.buffers[0].name != "latent" or not (plain and value):
        return {}
    heads = sum(model.heads(layer) for layer in layers) / ranks
    return {
        "wide_pair_flops": 2 * heads * (plain + spec.rope_dim + value),
        "widen_flops": 2 * heads * spec.rank * (plain + value),
    }


def _pair_flops(model: Architecture, group: LayerGroup, layer: int, ranks: int) -> float:
    """Scores and weighted values, a multiplication and an addition each."""
    match group.buffers[0].name:
        case "index_key":
            spec = model.spec(layer, IndexerSpec)
            assert spec is not None
            return 2 * index_heads(model.fields) * index_dim(model.fields) / spec.ratio
        case "latent":
            spec = model.spec(layer, LatentSpec)
            assert spec is not None
            width = 2 * spec.rank + spec.rope_dim
        case "compressed":
            spec = model.spec(layer, CompressedSpec)
            assert spec is not None
            width = 2 * spec.dim / spec.ratio
        case _:
            spec = model.spec(layer, (FullSpec, WindowSpec))
            assert spec is not None
            width = spec.head_dim + (spec.v_head_dim or spec.head_dim)
    return 2 * model.heads(layer) / ranks * width
