"""The mechanism: granules leave one pool and appear in another, at fixed addresses.

Every verb is all or nothing: if memory refuses halfway, books and mappings are as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvtide.rebalance.decide import cheapest_granules
from kvtide.types import IntArray, PageArray, ceil_div

if TYPE_CHECKING:
    from kvtide.memory import Budget
    from kvtide.pool import Fences, Pool
    from kvtide.prefix import Prefixes
    from kvtide.rebalance.allowance import Allowance

Relabel = Callable[[int, PageArray], None]
"""(group, remap): page ids of a group changed, `remap[old]` is the new one; fix every table."""


class Mover:
    """Grows pools from the budget and has them give granules back.

    While a step is in flight, pages it may touch stay where they are; only idle ground moves then.
    """

    def __init__(
        self,
        pools: Sequence[Pool],
        prefixes: Prefixes,
        budget: Budget,
        fences: Fences,
        allowance: Allowance,
    ) -> None:
        self.pools = pools
        self.prefixes = prefixes
        self.budget = budget
        self.fences = fences
        self._allowance = allowance
        self.relabel: Relabel = _nobody
        self.floors = [0] * len(pools)
        """Least granules of each pool, by group."""
        self.ceilings = [pool.space.num_granules for pool in pools]
        """Most granules of each pool, by group."""
        self.epoch = 0
        """Goes up whenever a granule came or went or a page changed places."""
        self.num_relocated = 0
        self.num_yielded = [0] * len(pools)
        """Cached pages that each pool dropped so that another could have the ground."""

    def bottom(self, group: int) -> int:
        """Granules below which the pool never goes: its floor, and the sink's."""
        return max(self.floors[group], self.pools[group].space.granules_for(1))

    def left(self) -> int:
        """Granules that may still move at this step beyond what the step itself lacks."""
        return self._allowance.left(self.fences.issued)

    def remaining(self) -> int:
        """Granules that may still move within these thousand steps for anything but live demand."""
        return self._allowance.remaining(self.fences.issued)

    # -- growing -------------------------------------------------------------------------------

    def grow(self, group: int, num_pages: int) -> bool:
        """Add up to `num_pages` pages (at least one) from the budget's free granules; False if
        none.
        """
        pool = self.pools[group]
        free = min(self.budget.num_free, self.ceilings[group] - pool.num_mapped)
        if free <= 0:
            return False  # the usual case once the budget is used up: no page can be looked for
        space = pool.space
        num_pages = min(num_pages, free * space.granule_bytes // space.page_bytes + 1)
        while num_pages > 0:
            granules = pool.growth_for(num_pages)
            if 0 < len(granules) <= free:
                return self._grow_at(group, granules)
            if not len(granules):
                return False
            num_pages -= max(1, (len(granules) - free) * space.granule_bytes // space.page_bytes)
        return False

    def grow_granules(self, group: int, count: int) -> int:
        """Add up to `count` free granules of the budget at the pool's lowest free addresses; how
        many came.
        """
        pool = self.pools[group]
        room = min(count, self.budget.num_free, self.ceilings[group] - pool.num_mapped)
        absent = np.flatnonzero(~pool.mapped)[: max(0, room)]
        return len(absent) if len(absent) and self._grow_at(group, absent) else 0

    def _grow_at(self, group: int, granules: IntArray) -> bool:
        if not self.pools[group].grow(granules):
            return False
        self.epoch += 1
        self._allowance.spend(self.fences.issued, len(granules))
        return True

    # -- giving --------------------------------------------------------------------------------

    def give(self, donor: int, count: int, keep: int = 0, *, sparing: bool = False) -> int:
        """Return up to `count` granules of a pool to the budget, leaving `keep` free pages; how
        many went.

        Drops the pool's coldest cached pages until the rest fits, then moves what still stands on
        the chosen granules to free pages elsewhere in the pool. `sparing`: only as many
        granules as may still move at this step with what has to be copied for them, but one.
        """
        pool = self.pools[donor]
        count = min(count, pool.num_mapped - self.bottom(donor))
        while count > 0:
            granules = self._clear_granules(donor, count, keep, sparing=sparing)
            if granules is not None:
                self.epoch += 1
                return pool.shrink(granules)
            count //= 2
        return 0

    def exchange(self, donor: int, receiver: int, count: int, *, sparing: bool = False) -> int:
        """Move up to `count` granules from one pool to another; how many went (`sparing` as in
        `give`). If the receiver cannot take them the donor has as many as before.
        """
        room = self.ceilings[receiver] - self.pools[receiver].num_mapped
        given = self.give(donor, min(count, room), sparing=sparing)
        if not given:
            return 0
        came = 0
        try:
            came = self.grow_granules(receiver, min(count, given))  # a neighbour may have come free
        finally:
            if came < given and not self.budget.overdraft:
                self.grow_granules(donor, given - came)
        return came

    def cut(self, group: int, num_pages: int) -> bool:
        """Leave a pool its `num_pages` lowest pages, the sink apart; False if live ones are more.

        Drops the coldest cached pages until the rest fits, then moves down what stands above.
        """
        pool, books, limit = self.pools[group], self.pools[group].books, num_pages + 1
        books.drain()
        if books.num_leased + books.num_in_flight > num_pages:
            return False
        room = int(np.count_nonzero(books.exists[1:limit]))  # a plan may have left holes
        over = books.num_leased + books.num_cached + books.num_in_flight - room
        if over > 0:
            before = self.prefixes.eviction.num_evicted[group]
            self.prefixes.eviction.evict(group, over)
            self.num_yielded[group] += self.prefixes.eviction.num_evicted[group] - before
            books.drain()
        above = np.flatnonzero(books.exists & ~books.free_mask())
        above = above[above >= limit].astype(np.int32)
        if len(above):
            forbidden = np.arange(books.max_pages) >= limit
            below = books.take_outside(forbidden, len(above))
            if below is None:
                return False
            self._relocate(group, above, below)
        pool.lower_limit(limit)
        self.epoch += 1
        return True

    def raise_to(self, group: int, num_pages: int) -> bool:
        """Let a pool have its `num_pages` lowest pages, the sink apart; False, changing nothing, if
        the budget has not the granules.
        """
        if not self.pools[group].raise_limit(num_pages + 1):
            return False
        self.epoch += 1
        return True

    def _clear_granules(
        self, donor: int, count: int, keep: int, *, sparing: bool
    ) -> IntArray | None:
        """Vacate `count` granules of a pool (`sparing`: or fewer) and return them, or None if they
        cannot be.
        """
        pool, books = self.pools[donor], self.pools[donor].books
        books.drain()
        lost = min(pages_lost(pool, count), books.num_pages)
        if lost + keep > books.num_free:
            eviction = self.prefixes.eviction
            before = eviction.num_evicted[donor]
            eviction.evict(donor, lost + keep - books.num_free)
            self.num_yielded[donor] += eviction.num_evicted[donor] - before
            books.drain()
        chosen = self._choose(pool, count, work=self.left() if sparing else None)
        if len(chosen) < (1 if sparing else count):
            return None
        doomed = pool.space.touching(chosen)
        doomed = doomed[books.exists[doomed]]
        free = books.free_mask()
        occupied = doomed[~free[doomed]]
        if books.num_free - (len(doomed) - len(occupied)) - len(occupied) < keep:
            return None
        if len(occupied):
            avoid = np.zeros(books.max_pages, np.bool_)
            avoid[doomed] = True
            target = books.take_outside(avoid, len(occupied))
            if target is None:
                return None
            self._relocate(donor, occupied, target)
        return chosen

    def _choose(self, pool: Pool, count: int, work: int | None) -> IntArray:
        """The `count` granules to vacate (ascending), fewer if they and the copies for them are
        more than `work` granules, or if not so many may go.
        """
        space, books = pool.space, pool.books
        used = books.lease > 0
        leased, cached = space.count(used), space.count((books.owner > 0) & ~used)
        leased[: space.granules_for(1)] = -1  # the sink's
        if not self.fences.quiesced:
            fixed = np.concatenate([books.in_flight_pages(), books.busy_pages()])
            leased[space.under(fixed)] = -1
        mapped = np.flatnonzero(pool.mapped)
        if not space.is_even:
            # A hole would cost the pages that straddle its edges, and what fits would no longer be
            # a matter of counting: give from the top, so that the mapped granules stay a prefix.
            stays = mapped[leased[mapped] < 0]
            order = mapped[mapped > stays.max(initial=-1)][-count:][::-1]
        else:
            order = cheapest_granules(mapped, leased, cached, count)
        if work is not None:
            copies = (leased[order] + cached[order]) * pool.page_bytes / space.granule_bytes
            within = int(np.searchsorted(np.cumsum(1 + copies), work, side="right"))
            order = order[: max(1, within)]
        return np.sort(order)

    def _relocate(self, group: int, src: PageArray, dst: PageArray) -> None:
        """Move pages and every name they have: bytes, books, tree, tables."""
        pool = self.pools[group]
        try:
            pool.copy(src, dst)
        except BaseException:
            pool.books.release(dst)
            raise
        owners = pool.books.owner[src].copy()
        pool.books.move(src, dst)
        remap = np.arange(len(pool.books.lease) + 1, dtype=np.int32)
        remap[-1] = -1
        remap[src] = dst
        self.prefixes.relabel(group, owners, remap)
        self.relabel(group, remap)
        self.num_relocated += len(src)
        copied = ceil_div(len(src) * pool.page_bytes, pool.space.granule_bytes)
        self._allowance.spend(self.fences.issued, copied)


def pages_lost(pool: Pool, granules: int) -> int:
    """Pages a pool may lose with so many granules: two more than fit may straddle their edges."""
    return ceil_div(granules * pool.space.granule_bytes, pool.page_bytes) + 2


def granules_spared(pool: Pool, pages: int) -> int:
    """Most granules a pool can do without if it may lose so many pages: `pages_lost` turned round.
    0 or less if not one.
    """
    return (pages - pages_lost(pool, 0)) * pool.page_bytes // pool.space.granule_bytes


def _nobody(group: int, remap: PageArray) -> None:
    """Before anyone holds pages there is nothing to rename."""
