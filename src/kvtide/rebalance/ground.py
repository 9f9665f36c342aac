"""Elastic growth on this rank: find pages for live demand, by moving granules between pools if need
be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvtide.rebalance.decide import (
    PATIENCE,
    Move,
    PoolNeed,
    cheapest_granules,
    refusing_pool,
    should_give,
)
from kvtide.types import SINK, IntArray, PageArray, ceil_div

if TYPE_CHECKING:
    from kvtide.memory import Budget
    from kvtide.pool import Fences, Pool
    from kvtide.prefix import Prefixes

Relabel = Callable[[int, PageArray], None]
"""(group, remap): page ids of a group changed, `remap[old]` is the new one; fix every table."""

_FORGET = 0.99
"""Per admission: how fast a pool's peak of live demand fades; half of it after 70."""

_STEP = 128
"""A trade is at least this fraction (1/n) of the smaller pool, so that trades stay few."""

_RECENT = 32
"""Steps for which a pool that was short counts as under pressure."""


class Ground:
    """Where pages come from when a pool is short.

    In order: the pool's free pages, the budget's free granules, then whichever is colder: the
    pool's own cached pages or another pool's ground. Live pages are moved only inside the donor,
    only while no step is in flight, and never below what live sequences need.
    """

    def __init__(
        self,
        pools: Sequence[Pool],
        prefixes: Prefixes,
        budget: Budget,
        fences: Fences,
    ) -> None:
        self._pools = pools
        self._prefixes = prefixes
        self._budget = budget
        self._fences = fences
        self.relabel: Relabel = _nobody
        self.yield_optional: Callable[[], None] = _nothing
        self.elastic = True
        self.floors = [0] * len(pools)
        self._recent_need = [(0.0, 0)] * len(pools)
        self._pressed_at = [-_RECENT - 1] * len(pools)
        self.num_relocated = 0
        self.num_yielded = [0] * len(pools)
        """Cached pages that each pool dropped so that another could have the ground."""
        self.num_moved = 0

    # -- answers -------------------------------------------------------------------------------

    def limit(self, group: int) -> int:
        """Most pages the pool could ever hand out, with every other pool at its floor."""
        pool = self._pools[group]
        if not self.elastic:
            return pool.num_usable
        others = sum(
            max(f, p.space.granules_for(1)) for f, p in zip(self.floors, self._pools, strict=True)
        )
        others -= max(self.floors[group], pool.space.granules_for(1))
        return pool.space.pages_in(self._budget.num_granules - others) - 1

    def refusing(self, wanted: Sequence[int]) -> int | None:
        """The pool that cannot give `wanted` pages now, whatever cached pages are dropped; None if
        all can.
        """
        if all(n <= pool.num_available for n, pool in zip(wanted, self._pools, strict=True)):
            return None  # every pool can serve itself
        needs = [
            PoolNeed(
                page_bytes=pool.page_bytes,
                busy=pool.books.num_leased + pool.books.num_in_flight,
                wanted=wanted[g],
                available=pool.num_available,
                floor_granules=self.floors[g] if self.elastic else pool.num_mapped,
                limit_pages=pool.space.num_pages - 1 if self.elastic else pool.num_usable,
            )
            for g, pool in enumerate(self._pools)
        ]
        return refusing_pool(needs, self._budget.num_granules, self._pools[0].space.granule_bytes)

    def secure(self, wanted: Sequence[int]) -> int | None:
        """Make `wanted[g]` pages free in every pool g; returns the pool that refused, or None.

        A refusal before anything was dropped is the rule; one afterwards (pages in flight, or
        ground cut up by pages that may not move now) loses cached pages, never live ones.
        """
        self._note(wanted)
        short = [g for g, pool in enumerate(self._pools) if pool.books.num_free < wanted[g]]
        if short:
            self._fences.poll()
        for g in short:
            self._pools[g].books.drain()
        if all(self._pools[g].books.num_free >= wanted[g] for g in short):
            return None
        refused = self.refusing(wanted)
        if refused is not None:
            self.yield_optional()
            refused = self.refusing(wanted)
        if refused is not None:
            self._pressed_at[refused] = self._fences.issued
            return refused
        return next((g for g in short if not self._fill(g, wanted)), None)

    def _fill(self, group: int, wanted: Sequence[int]) -> bool:
        """Relieve a short pool until it has what is wanted; False if it cannot be."""
        books = self._pools[group].books
        while books.num_free < wanted[group]:
            if not self._relieve(group, wanted):
                return False
        return True

    def pressed(self) -> set[int]:
        """Pools that had to evict, take ground or refuse within the last steps."""
        now = self._fences.issued
        return {g for g, step in enumerate(self._pressed_at) if now - step <= _RECENT}

    def _note(self, wanted: Sequence[int]) -> None:
        """Remember what each pool's live sequences held and asked for at their recent peak: ground
        they will ask back is not to spare.
        """
        clock = self._prefixes.num_admitted
        for g, pages in enumerate(wanted):
            if pages:
                books = self._pools[g].books
                peak, then = self._recent_need[g]
                peak *= _FORGET ** (clock - then)
                live = pages + books.num_leased + books.num_in_flight
                self._recent_need[g] = (max(peak, live), clock)

    def spare(self, groups: Sequence[int], *, priced: bool) -> bool:
        """Make one page free in each of these pools at the cost of nothing live: free budget, else
        what is coldest; nothing that has a price unless `priced`.
        """
        wanted = [int(g in groups) for g in range(len(self._pools))]
        while short := [g for g in groups if not self._pools[g].books.num_free]:
            if not self._relieve(short[0], wanted, priced=priced):
                return False
        return True

    # -- acting --------------------------------------------------------------------------------

    def _relieve(self, group: int, wanted: Sequence[int], *, priced: bool = True) -> bool:
        """Free some pages in a short pool, of those without a price unless `priced`; False if
        nothing more can be done.
        """
        pool = self._pools[group]
        missing = wanted[group] - pool.books.num_free
        if self.elastic and self._budget.num_free:
            ample = self._budget.num_free * pool.space.granule_bytes // (4 * pool.page_bytes)
            if self.grow(group, max(missing, min(pool.num_usable // _STEP, ample))):
                return True
        eviction = self._prefixes.eviction
        if not priced:
            freed = eviction.evict_worthless(group, missing)
            pool.books.drain()
            return freed > 0
        self._pressed_at[group] = self._fences.issued
        freed = eviction.evict_worthless(group, missing)
        movable = self.elastic and self._fences.quiesced
        if not freed and movable and self._take(group, missing, wanted):
            return True
        freed = freed or eviction.evict(group, missing)
        pool.books.drain()
        # Live demand with nothing left to drop: others give all they do not need this moment.
        return freed > 0 or (movable and self._take(group, missing, wanted, at_any_price=True))

    def _take(
        self, group: int, missing: int, wanted: Sequence[int], *, at_any_price: bool = False
    ) -> bool:
        """Take ground from the first pool that gives some: below the price of the short pool's own
        coldest pages, or `at_any_price`. False if nobody does.
        """
        kept = None if at_any_price else self._peaks(wanted)
        return any(
            self._trade(d, group, missing, wanted[d], None if kept is None else kept[d])
            for d in self._donors(group)
        )

    def _peaks(self, wanted: Sequence[int]) -> list[int]:
        """What each pool needed at its recent peak: it would ask that ground back at once."""
        clock = self._prefixes.num_admitted
        faded = [int(peak * _FORGET ** (clock - then)) for peak, then in self._recent_need]
        return [
            max(now, peak - pool.books.num_leased - pool.books.num_in_flight)
            for now, peak, pool in zip(wanted, faded, self._pools, strict=True)
        ]

    def _donors(self, group: int) -> list[int]:
        """Pools above their floors: those with the most idle free pages come first."""
        donors = [
            (-pool.books.num_free * pool.page_bytes, d)
            for d, pool in enumerate(self._pools)
            if d != group and pool.num_mapped > max(self.floors[d], pool.space.granules_for(1))
        ]
        return [d for _, d in sorted(donors)]

    def _afford(self, donor: int, receiver: int, granules: int, keep: int, peak: int) -> int:
        """Make room in a pool until it can give up to `granules` for less than they are worth to
        `receiver`; how many it can. It keeps `keep` pages free and `peak` pages free or cached.

        Free pages cost nothing, nor do those that no match can use, but for `peak` of them, which
        live sequences will ask back; then the coldest go, one by one, for as long as dropping them
        costs less than the receiver's own coldest would.
        """
        pool, books = self._pools[donor], self._pools[donor].books
        pages = min(_pages_lost(pool, granules), pool.num_available - max(keep, peak))
        if pages < _pages_lost(pool, 1):
            return 0
        eviction, clock = self._prefixes.eviction, self._prefixes.clock
        before, patience = eviction.num_evicted[donor], PATIENCE
        own, own_bytes = eviction.offer(receiver, clock), self._pools[receiver].page_bytes
        eviction.evict_worthless(donor, pages + max(keep, peak) - books.num_free)
        books.drain()
        keep = max(keep, min(peak, books.num_free))
        while (lacking := pages + keep - books.num_free) > 0:
            offer = eviction.offer(donor, clock)
            if offer is None:
                break
            if not should_give(offer, pool.page_bytes, own, own_bytes, patience):
                break
            if not eviction.evict(donor, min(lacking, offer.pages)):
                break
            books.drain()
            patience = 1.0  # what was begun is carried through
        self.num_yielded[donor] += eviction.num_evicted[donor] - before
        room = books.num_free - keep - _pages_lost(pool, 0)
        return max(0, min(granules, room * pool.page_bytes // pool.space.granule_bytes))

    def grow(self, group: int, num_pages: int) -> bool:
        """Add up to `num_pages` pages (at least one) from the budget's free granules; False if
        none.
        """
        pool, free = self._pools[group], self._budget.num_free
        space = pool.space
        num_pages = min(num_pages, free * space.granule_bytes // space.page_bytes + 1)
        while num_pages > 0:
            granules = pool.growth_for(num_pages)
            if 0 < len(granules) <= free:
                return pool.grow(granules)
            if not len(granules):
                return False
            num_pages -= max(1, (len(granules) - free) * space.granule_bytes // space.page_bytes)
        return False

    def _trade(self, donor: int, receiver: int, missing: int, keep: int, peak: int | None) -> bool:
        """Move a little ground from one pool to another, so that the receiver gets at least a page:
        what is missing, or a small part of the smaller pool.

        What the donor drops for it is worth less than what the receiver would drop instead, unless
        `peak` is None: live demand without an instead.
        """
        pool, giver = self._pools[receiver], self._pools[donor]
        share = max(
            1,
            min(giver.num_mapped, pool.num_mapped) // _STEP,
            len(pool.growth_for(missing)),
        )
        given, lacking = 0, share - self._budget.num_free
        if lacking > 0:
            if peak is not None:
                lacking = self._afford(donor, receiver, lacking, keep, peak)
            given = self.give(donor, lacking, keep)
            if not given:
                return False
        space = pool.space
        moved = self.grow(receiver, max(missing, share * space.granule_bytes // pool.page_bytes))
        if moved:
            self.num_moved += given
        return moved

    def give(self, donor: int, count: int, keep: int = 0) -> int:
        """Return up to `count` granules of a pool to the budget, leaving `keep` free pages; how
        many went.

        Drops the pool's coldest cached pages until the rest fits, then moves what still stands on
        the chosen granules to free pages elsewhere in the pool. Needs a quiesced engine.
        """
        pool = self._pools[donor]
        bottom = max(self.floors[donor], pool.space.granules_for(1))
        count = min(count, pool.num_mapped - bottom)
        while count > 0:
            granules = self._clear_granules(donor, count, keep)
            if granules is not None:
                return pool.shrink(granules)
            count //= 2
        return 0

    def _clear_granules(self, donor: int, count: int, keep: int) -> IntArray | None:
        """Vacate `count` granules of a pool and return them, or None if they cannot be."""
        pool, books = self._pools[donor], self._pools[donor].books
        books.drain()
        lost = min(_pages_lost(pool, count), books.num_pages)
        if lost + keep > books.num_free:
            eviction = self._prefixes.eviction
            before = eviction.num_evicted[donor]
            eviction.evict(donor, lost + keep - books.num_free)
            self.num_yielded[donor] += eviction.num_evicted[donor] - before
            books.drain()
        chosen = self._choose(pool, count)
        if len(chosen) < count:
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

    def _choose(self, pool: Pool, count: int) -> IntArray:
        space, books = pool.space, pool.books
        leased = space.load(np.flatnonzero(books.lease > 0))
        cached = space.load(np.flatnonzero((books.lease == 0) & (books.owner > 0)))
        fixed = books.in_flight_pages()
        leased[space.under(np.concatenate([[SINK], fixed]))] = -1
        mapped = np.flatnonzero(pool.mapped)
        if space.granule_bytes % pool.page_bytes:
            # A hole would cost the pages that straddle its edges, and what fits would no longer be
            # a matter of counting: give from the top, so that the mapped granules stay a prefix.
            return mapped[leased[mapped] >= 0][-count:]
        return cheapest_granules(mapped, leased, cached, count)

    def _relocate(self, group: int, src: PageArray, dst: PageArray) -> None:
        """Move pages and every name they have: bytes, books, tree, tables."""
        pool = self._pools[group]
        pool.copy(src, dst)
        owners = pool.books.owner[src].copy()
        pool.books.move(src, dst)
        remap = np.arange(len(pool.books.lease) + 1, dtype=np.int32)
        remap[-1] = -1
        remap[src] = dst
        self._prefixes.relabel(group, owners, remap)
        self.relabel(group, remap)
        self.num_relocated += len(src)

    def move(self, move: Move, index: dict[str, int]) -> int:
        """Carry out one planned move now; returns the granules that changed hands."""
        donor, receiver = index[move.donor], index[move.receiver]
        self.give(donor, move.granules)
        pool = self._pools[receiver]
        absent = np.flatnonzero(~pool.mapped)[: min(move.granules, self._budget.num_free)]
        if not len(absent) or not pool.grow(absent):
            return 0
        self.num_moved += len(absent)
        return len(absent)


def _pages_lost(pool: Pool, granules: int) -> int:
    """Pages a pool may lose with so many granules: two more than fit may straddle their edges."""
    return ceil_div(granules * pool.space.granule_bytes, pool.page_bytes) + 2


def _nobody(group: int, remap: PageArray) -> None:
    """Before anyone holds pages there is nothing to rename."""


def _nothing() -> None:
    """Before anyone holds pages there is nothing to yield."""
