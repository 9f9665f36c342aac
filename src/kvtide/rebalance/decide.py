"""Who gives ground to whom: pure functions over the pools' numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvtide.prefix.order import Rank
from kvtide.types import IntArray, ceil_div

PATIENCE = 1.25
"""A donor's coldest page must have been idle this much longer than the receiver's own coldest.

Without it two pools of equal age would hand the same granule back and forth.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolNeed:
    """One pool's live demand, in pages of `page_bytes`: what is leased or in flight, and what is asked."""

    page_bytes: int
    busy: int
    wanted: int
    floor_granules: int
    limit_pages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """`granules` granules from pool `donor` to pool `receiver` (names)."""

    donor: str
    receiver: str
    granules: int
    reason: str


Plan = tuple[Move, ...]


def granules_needed(need: PoolNeed, granule_bytes: int) -> int:
    """Fewest granules that hold the sink and the live demand, never below the floor."""
    pages = 1 + need.busy + need.wanted
    return max(need.floor_granules, ceil_div(pages * need.page_bytes, granule_bytes))


def refusing_pool(needs: Sequence[PoolNeed], num_granules: int, granule_bytes: int) -> int | None:
    """The pool that cannot be served although every cached page were dropped; None if all can.

    With movable capacity, admission over all pools is one inequality: the granules that live
    demand needs, summed over the pools, must not exceed the budget. Where it fails, the pool that
    asks for the most granules is named.
    """
    for index, need in enumerate(needs):
        if need.busy + need.wanted > need.limit_pages and need.wanted:
            return index
    demand = [granules_needed(need, granule_bytes) for need in needs]
    if sum(demand) <= num_granules:
        return None
    asked = [need.wanted * need.page_bytes for need in needs]
    return int(np.argmax(asked))


def colder(donor: Rank, own: Rank | None, clock: int) -> bool:
    """Should a page of rank `donor` in another pool go before one of rank `own` in the short pool?"""
    if own is None:
        return True
    if donor[:2] != own[:2]:
        return donor[:2] < own[:2]
    return clock - donor[2] > PATIENCE * (clock - own[2]) + 1


def cheapest_granules(mapped: IntArray, leased: IntArray, cached: IntArray, count: int) -> IntArray:
    """Which `count` of the `mapped` granules to vacate: fewest live pages, then fewest cached.

    `leased` and `cached` count pages per granule, over all granules; -1 in `leased` marks one that may
    not go. Ties go to the highest address, so that a pool keeps to its low end.
    """
    allowed = mapped[leased[mapped] >= 0]
    order = np.lexsort((-allowed, cached[allowed], leased[allowed]))
    return np.sort(allowed[order[:count]])
