"""How many fit: into one budget that any pool may take granules of, or into pools of fixed size."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtide.types import ceil_div

if TYPE_CHECKING:
    from collections.abc import Sequence
    from fractions import Fraction

    from kvtide.planner.demand import Load


@dataclass(frozen=True, slots=True)
class Ramp:
    """Pages of one pool when n of something are there: `fixed + ceil(n * each)`, or `floor`."""

    page_bytes: int
    fixed: int
    each: Fraction
    floor: int = 0

    def pages(self, count: int) -> int:
        """Pages in use when `count` are there."""
        return self.fixed + math.ceil(self.each * count)

    def bytes(self, count: int) -> int:
        """Bytes of these pages."""
        return self.pages(count) * self.page_bytes

    def granules(self, count: int, granule_bytes: int) -> int:
        """Granules under these pages, packed from address 0, and no fewer than the floor's."""
        return ceil_div(max(self.pages(count), self.floor) * self.page_bytes, granule_bytes)

    def most(self, num_granules: int, granule_bytes: int) -> int | None:
        """Most that fit into `num_granules`; None if there is no limit."""
        room = num_granules * granule_bytes // self.page_bytes - self.fixed
        if room < 0:
            return 0
        return int(room / self.each) if self.each else None


def running_ramps(loads: Sequence[Load]) -> list[Ramp]:
    """Pages by the number of running sequences."""
    return [Ramp(load.page_bytes, load.fixed, load.running, load.floor) for load in loads]


def cached_ramps(loads: Sequence[Load], running: int) -> list[Ramp]:
    """Pages by the number of cached prefixes, while `running` sequences run."""
    return [
        Ramp(load.page_bytes, ramp.pages(running), load.cached, load.floor)
        for load, ramp in zip(loads, running_ramps(loads), strict=True)
    ]


def most_in_budget(ramps: Sequence[Ramp], num_granules: int, granule_bytes: int) -> int | None:
    """Most that fit if any pool may take any granule: the sum over the pools must not exceed
    `num_granules`. None if there is no limit, 0 if not even the fixed pages fit.
    """
    if not any(ramp.each for ramp in ramps):
        return None
    low, high = 0, 1
    while _need(ramps, high, granule_bytes) <= num_granules:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if _need(ramps, middle, granule_bytes) <= num_granules:
            low = middle
        else:
            high = middle
    return low


def most_in_pools(ramps: Sequence[Ramp], granules: Sequence[int], granule_bytes: int) -> int | None:
    """Most that fit into pools of these sizes: the pool that runs out first decides."""
    limits = limits_of(ramps, granules, granule_bytes)
    return min((limit for limit in limits if limit is not None), default=None)


def limits_of(
    ramps: Sequence[Ramp], granules: Sequence[int], granule_bytes: int
) -> list[int | None]:
    """Most that fit into each pool by itself; None if it sets no limit."""
    return [ramp.most(held, granule_bytes) for ramp, held in zip(ramps, granules, strict=True)]


def _need(ramps: Sequence[Ramp], count: int, granule_bytes: int) -> int:
    return sum(ramp.granules(count, granule_bytes) for ramp in ramps)
