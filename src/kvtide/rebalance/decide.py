"""Who gives ground to whom: pure functions over the pools' numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvtide.types import IntArray, ceil_div

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtide.prefix.eviction import Offer

PATIENCE = 1.25
"""How much cheaper a donor's loss must be than the short pool's own before ground changes hands.

Without it two pools of equal worth would hand the same granule back and forth.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolNeed:
    """One pool's live demand, in pages of `page_bytes`: what is leased or in flight, what is asked,
    and what the pool has for it, free or cached.
    """

    page_bytes: int
    busy: int
    wanted: int
    available: int
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
    lacks the most bytes is named.
    """
    for index, need in enumerate(needs):
        if need.busy + need.wanted > need.limit_pages and need.wanted:
            return index
    demand = [granules_needed(need, granule_bytes) for need in needs]
    if sum(demand) <= num_granules:
        return None
    missing = [(need.wanted - need.available) * need.page_bytes for need in needs]
    return int(np.argmax(missing))


def loss(offer: Offer, page_bytes: int) -> float:
    """Hit tokens lost per byte freed, times the chance of a use: one over the age, as LRU assumes.

    It makes pages of different pools comparable. A state snapshot is a few bytes that carry a whole
    run's tokens; a page of full attention carries one block's.
    """
    return offer.tokens / (offer.age * offer.pages * page_bytes)


def should_give(
    donor: Offer, donor_bytes: int, own: Offer | None, own_bytes: int, patience: float = PATIENCE
) -> bool:
    """Should another pool drop `donor` rather than the short pool drop `own`? Sizes are page
    bytes.
    """
    if own is None or donor.priority != own.priority:
        return own is None or donor.priority < own.priority
    return loss(donor, donor_bytes) * patience < loss(own, own_bytes)


def cheapest_granules(mapped: IntArray, leased: IntArray, cached: IntArray, count: int) -> IntArray:
    """Which `count` of the `mapped` granules to vacate, cheapest first: fewest live pages, then
    fewest cached.

    `leased` and `cached` count pages per granule, over all granules; -1 in `leased` marks one that
    may not go. Ties go to the highest address, so that a pool keeps to its low end.
    """
    allowed = mapped[leased[mapped] >= 0]
    order = np.lexsort((-allowed, cached[allowed], leased[allowed]))
    return allowed[order[:count]]
