"""Pages that sequences need of one layer group: running ones, cached prefixes, what all share.

A running sequence of n tokens is counted while its last token is computed: it holds what that token
reads, and the page it is written to.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from kvtide.layout import Mirror, State, Window, needed_blocks
from kvtide.sizing import least_pages
from kvtide.types import ceil_div

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtide.layout import LayerGroup, Layout
    from kvtide.planner.workload import Request, Workload

SINK_PAGES = 1
"""Page 0 of every pool holds no sequence's data."""

SNAPSHOTS = 1
"""State snapshots kept for a running sequence beside the live state: the end of its prompt."""


def running_pages(
    group: LayerGroup, length: int, *, shared_blocks: int = 0, snapshots: int = SNAPSHOTS
) -> int:
    """Pages a running sequence of `length` tokens holds, the first `shared_blocks` blocks apart."""
    block = group.block_tokens
    match group.lifetime:
        case State():
            return 1 + snapshots
        case Mirror(look_ahead):
            return max(0, ceil_div(length + look_ahead, block) - shared_blocks)
        case _:
            spans = needed_blocks(group.lifetime, length - 1, block)
            written = (length - 1) // block
            is_read = any(span.start <= written < span.stop for span in spans)
            read = sum(max(0, span.stop - max(span.start, shared_blocks)) for span in spans)
            return read if is_read else read + 1


def cached_pages(group: LayerGroup, length: int, *, shared_blocks: int = 0) -> int:
    """Pages that keep the first `length` tokens reusable, the first `shared_blocks` blocks apart.

    Whole blocks alone are reusable: full attention keeps them all, a window those that cover it at
    the end (and the sinks), a state one snapshot.
    """
    blocks = length // group.block_tokens
    if blocks <= shared_blocks:
        return 0
    match group.lifetime:
        case State():
            return 1
        case _:
            spans = needed_blocks(group.lifetime, blocks * group.block_tokens, group.block_tokens)
            return sum(max(0, span.stop - max(span.start, shared_blocks)) for span in spans)


def prefix_bytes(group: LayerGroup, length: int) -> float:
    """Bytes that a reusable prefix of `length` tokens takes, not rounded to pages, on average."""
    match group.lifetime:
        case State():
            tokens = 0
        case Window(window, sinks):
            tokens = min(length, window - 1 + sinks)
        case _:
            tokens = length
    return (group.bytes_per_state or 0) + tokens * (group.bytes_per_token or 0)


def growth_bytes(group: LayerGroup, length: int) -> float:
    """Bytes that one more token adds to a sequence of `length` tokens, on average."""
    if (
        isinstance(group.lifetime, Window)
        and length >= group.lifetime.tokens + group.lifetime.sinks
    ):
        return 0
    return group.bytes_per_token or 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Pages of one pool: `fixed` whatever runs (the sink page, the shared prefix), `running` a
    sequence that runs and `cached` a prefix that is kept, both on average. `floor`: fewest pages,
    sink and all, with which a manager takes the pool in a split.
    """

    name: str
    page_bytes: int
    fixed: int
    running: Fraction
    cached: Fraction
    floor: int = 0


def loads_of(layout: Layout, workload: Workload, max_tokens: int | None = None) -> list[Load]:
    """The load of every pool, in their order; with the floors of sequences of `max_tokens` tokens.

    A running sequence counts at its end, prompt and answer, so that all that are admitted can end.
    """
    shared = workload.shared_prefix // layout.block_tokens

    def shared_by(request: Request) -> int:
        reusable = min(workload.shared_prefix, request.input_tokens - 1)
        return reusable // layout.block_tokens

    def load(group: LayerGroup) -> Load:
        running = workload.mean(
            lambda request: running_pages(
                group,
                request.length,
                shared_blocks=shared_by(request),
                snapshots=workload.snapshots,
            )
        )
        cached = workload.mean(
            lambda request: cached_pages(group, request.length, shared_blocks=shared_by(request))
        )
        fixed = SINK_PAGES + cached_pages(group, shared * layout.block_tokens)
        return Load(
            name=group.name,
            page_bytes=group.page_bytes,
            fixed=fixed,
            running=running,
            cached=cached,
            floor=_floor(group, max_tokens),
        )

    return [load(group) for group in layout.groups]


def loads_at(layout: Layout, length: int, max_tokens: int | None = None) -> list[Load]:
    """The loads of sequences of `length` tokens that share nothing; floors as in `loads_of`."""
    return [
        Load(
            name=group.name,
            page_bytes=group.page_bytes,
            fixed=SINK_PAGES,
            running=Fraction(running_pages(group, length)),
            cached=Fraction(cached_pages(group, length)),
            floor=_floor(group, max_tokens),
        )
        for group in layout.groups
    ]


def _floor(group: LayerGroup, max_tokens: int | None) -> int:
    return 0 if max_tokens is None else SINK_PAGES + least_pages(group, max_tokens)


def sequence_bytes(groups: Sequence[LayerGroup], length: int) -> dict[str, int]:
    """Bytes of the pages of one running sequence of `length` tokens, by group."""
    return {g.name: running_pages(g, length) * g.page_bytes for g in groups}
