"""What designs with one page size for all layers would take for the same sequences.

Two rules, computed from the same layer groups (docs/planner.md says what is assumed):

- equal pages, as vLLM groups layers: every group gets the same number of layers and the same bytes
  a page, so small pages get longer blocks, states get padded and groups get empty layers;
- the least common multiple, as Jenga: large pages that every small page divides, each cut into
  small pages of one kind and used by one sequence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvtide.layout import Full, Mirror
from kvtide.planner.demand import running_pages
from kvtide.types import ceil_div

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtide.layout import LayerGroup

GROUP_BY_LARGEST = 1.5
"""Groups are as large as the largest kind of layers if that has fewer than this times the least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EqualKind:
    """One kind of layers under the rule of equal pages. `padding_bytes` of a layer's page are empty
    in every page; `padding_layers` of its groups are layers of nothing.
    """

    name: str
    block_tokens: int
    num_groups: int
    padding_layers: int
    padding_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EqualPages:
    """A layout under the rule of equal pages: a page is `layers_per_group` x `layer_bytes`."""

    layers_per_group: int
    layer_bytes: int
    kinds: tuple[EqualKind, ...]

    @property
    def page_bytes(self) -> int:
        """Bytes of every page."""
        return self.layers_per_group * self.layer_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthFit:
    """Running sequences of one length in pools of their own: bytes of one, and how many fit."""

    bytes: int
    sequences: int | None
    memory_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Padded:
    """Running sequences of one length under both rules: bytes of one, and how many fit (None
    without memory).
    """

    equal_pages_bytes: int
    equal_pages_sequences: int | None
    common_multiple_bytes: int
    common_multiple_sequences: int | None


def equal_pages(groups: Sequence[LayerGroup]) -> EqualPages | None:
    """The layout under the rule of equal pages; None if all layers keep every token, so that they
    share one block table and need no equal pages.
    """
    if all(isinstance(group.lifetime, Full | Mirror) for group in groups):
        return None
    pages = {group.name: group.page_bytes // len(group.layers) for group in groups}
    tokens = [group for group in groups if not group.is_state]
    state = max((pages[g.name] for g in groups if g.is_state), default=0)
    attention = max((pages[g.name] for g in tokens), default=state)
    longer = max(1, ceil_div(state, attention))
    layer_bytes = attention * longer
    counts = [len(group.layers) for group in groups]
    size = min(counts)
    if max(counts) < GROUP_BY_LARGEST * size:
        size = max(counts)
    kinds: list[EqualKind] = []
    for group in groups:
        page, block = pages[group.name], group.block_tokens
        if not group.is_state:
            page, block = page * longer, block * longer
            if layer_bytes % page == 0:
                page, block = layer_bytes, block * (layer_bytes // page)
        num_groups = ceil_div(len(group.layers), size)
        kinds.append(
            EqualKind(
                name=group.name,
                block_tokens=block,
                num_groups=num_groups,
                padding_layers=num_groups * size - len(group.layers),
                padding_bytes=layer_bytes - page,
            )
        )
    return EqualPages(layers_per_group=size, layer_bytes=layer_bytes, kinds=tuple(kinds))


def equal_blocks(groups: Sequence[LayerGroup], rule: EqualPages, length: int) -> int:
    """Pages of one running sequence of `length` tokens under the rule of equal pages."""
    return sum(
        kind.num_groups * running_pages(_with_blocks(group, kind.block_tokens), length)
        for group, kind in zip(groups, rule.kinds, strict=True)
    )


def common_multiple(groups: Sequence[LayerGroup]) -> int:
    """Bytes of a large page that the pages of all groups divide."""
    return math.lcm(*(group.page_bytes for group in groups))


def large_pages(groups: Sequence[LayerGroup], large_bytes: int, length: int) -> int:
    """Large pages that one running sequence of `length` tokens cuts up, each for one group."""
    return sum(
        ceil_div(running_pages(group, length) * group.page_bytes, large_bytes) for group in groups
    )


def padded(groups: Sequence[LayerGroup], length: int, ours: LengthFit) -> Padded:
    """Both rules for sequences of `length` tokens, of which `ours` says what they take in pools of
    their own. The rule of equal pages keeps one page for padding, as we do in each pool.
    """
    memory = ours.memory_bytes
    equal, large = equal_pages(groups), common_multiple(groups)
    equal_bytes, equal_fit = ours.bytes, ours.sequences
    if equal is not None:
        blocks = equal_blocks(groups, equal, length)
        equal_bytes = blocks * equal.page_bytes
        equal_fit = None if memory is None else max(0, memory // equal.page_bytes - 1) // blocks
    num_large = large_pages(groups, large, length)
    return Padded(
        equal_pages_bytes=equal_bytes,
        equal_pages_sequences=equal_fit,
        common_multiple_bytes=num_large * large,
        common_multiple_sequences=None if memory is None else memory // large // num_large,
    )


def _with_blocks(group: LayerGroup, block_tokens: int) -> LayerGroup:
    return replace(group, block_tokens=block_tokens)
