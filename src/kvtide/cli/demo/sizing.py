"""How much memory, and how a start-up that only knows the first traffic would cut it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtide.layout import needed_blocks
from kvtide.types import align_up

if TYPE_CHECKING:
    from kvtide.layout import LayerGroup, Layout

SLACK = 1.15


def group_bytes(group: LayerGroup, num_tokens: int) -> int:
    """Bytes that a sequence of `num_tokens` tokens needs of a group to go on."""
    spans = needed_blocks(group.lifetime, num_tokens, group.block_tokens)
    blocks = sum(span.stop - span.start for span in spans)
    return (1 if group.is_state else blocks) * group.page_bytes


def startup_ratio(layout: Layout, num_tokens: int) -> dict[str, float]:
    """Shares of the pools, by what requests of `num_tokens` tokens need: the split at start-up."""
    needs = {group.name: group_bytes(group, num_tokens) for group in layout.groups}
    total = sum(needs.values())
    return {name: need / total for name, need in needs.items()}


def memory_for(layout: Layout, ratio: dict[str, float], longest: int, *, granule_bytes: int) -> int:
    """Bytes with which the split just holds one sequence of `longest` tokens in every pool."""
    least = max(
        group_bytes(group, longest + group.block_tokens) / ratio[group.name]
        for group in layout.groups
    )
    return align_up(int(least * SLACK), granule_bytes)
