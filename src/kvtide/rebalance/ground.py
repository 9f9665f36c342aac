"""Elastic growth on this rank: which pool's ground serves live demand, and who keeps its cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtide.rebalance.decide import PATIENCE, PoolNeed, refusing_pool, should_give
from kvtide.rebalance.journal import price_reason
from kvtide.rebalance.mover import granules_spared, pages_lost

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvtide.config import Mode
    from kvtide.rebalance.journal import Journal
    from kvtide.rebalance.mover import Mover

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
    and no pool goes below what live sequences need.
    """

    def __init__(self, mover: Mover, journal: Journal, mode: Mode) -> None:
        self._mover = mover
        self._pools = mover.pools
        self._budget = mover.budget
        self._fences = mover.fences
        self._prefixes = mover.prefixes
        self._journal = journal
        self.is_elastic = mode == "elastic"
        self._observes = mode == "dry_run"
        self.yield_optional: Callable[[], None] = _nothing
        self._recent_need = [(0.0, 0)] * len(self._pools)
        self._pressed_at = [-_RECENT - 1] * len(self._pools)

    # -- answers -------------------------------------------------------------------------------

    def limit(self, group: int) -> int:
        """Most pages the pool could ever hand out, with every other pool at its floor."""
        pool, mover = self._pools[group], self._mover
        if not self.is_elastic:
            return pool.num_usable
        others = sum(mover.bottom(g) for g in range(len(self._pools)) if g != group)
        granules = min(self._budget.quota - others, mover.ceilings[group])
        return min(pool.limit, pool.space.pages_in(granules)) - 1

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
                floor_granules=self._mover.floors[g] if self.is_elastic else pool.num_mapped,
                limit_pages=self._most(g),
            )
            for g, pool in enumerate(self._pools)
        ]
        return refusing_pool(needs, self._budget.quota, self._pools[0].space.granule_bytes)

    def _most(self, group: int) -> int:
        pool = self._pools[group]
        if not self.is_elastic:
            return pool.num_usable
        return min(pool.limit, pool.space.pages_in(self._mover.ceilings[group])) - 1

    def secure(self, wanted: Sequence[int], *, learn: bool = True) -> int | None:
        """Make `wanted[g]` pages free in every pool g; returns the pool that refused, or None.

        What is wanted counts as recent demand only if `learn`: warm-up and padding teach nothing.

        A refusal before anything was dropped is the rule; one afterwards (pages in flight, or
        ground cut up by pages that may not move now) loses cached pages, never live ones.
        """
        if learn:
            self._note(wanted)
        short = [g for g, pool in enumerate(self._pools) if pool.books.num_free < wanted[g]]
        if short:
            self._fences.poll()
            for pool in self._pools:  # the others' too: they may have to give
                pool.books.drain()
        if all(self._pools[g].books.num_free >= wanted[g] for g in short):
            return None
        refused = self.refusing(wanted)
        if refused is not None:
            self.yield_optional()
            refused = self.refusing(wanted)
        if refused is not None:
            self._pressed_at[refused] = self._fences.issued
            if self._observes:
                self._observe_demand(refused, wanted)
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
        if self.is_elastic and self._mover.grow(group, max(missing, self._ample(group))):
            return True
        if self.is_elastic and self._take_idle(group, missing, wanted):
            return True
        eviction = self._prefixes.eviction
        if not priced:
            freed = eviction.evict_worthless(group, missing)
            pool.books.drain()
            return freed > 0
        self._pressed_at[group] = self._fences.issued
        freed = eviction.evict_worthless(group, missing)
        if not freed and (self.is_elastic or self._observes) and self._take(group, missing, wanted):
            return True
        if not freed:
            own = eviction.offer(group) if self.is_elastic else None  # the next one may be dearer
            freed = eviction.evict(group, missing if own is None else min(missing, own.pages))
        pool.books.drain()
        return freed > 0 or (self.is_elastic and self._take_at_any_price(group, missing, wanted))

    def _ample(self, group: int) -> int:
        """Pages by which a pool grows while the budget lasts: few calls, no long one."""
        pool = self._pools[group]
        granules = min(self._budget.num_free // 4, self._mover.left())
        return min(pool.num_usable // _STEP, granules * pool.space.granule_bytes // pool.page_bytes)

    def _take(self, group: int, missing: int, wanted: Sequence[int]) -> bool:
        """Take ground from the first pool that gives some below the price of the short pool's own
        coldest pages. False if nobody does.
        """
        most = self._mover.remaining()
        if not self._has_donors(group) or not self._may_grow(group, most):
            return False
        keeps = self._peaks(wanted)
        for donor in self._donors(group):
            share = min(most, self._share(donor, group, missing))
            if self._observes:
                self._observe(donor, group, share, keeps[donor])
                continue
            lacking = share - self._budget.num_free + self._budget.overdraft
            reason = self._reason(donor, group)
            given = self._afford(donor, group, lacking, wanted[donor], keeps[donor])
            given = self._mover.give(donor, given, wanted[donor])
            if given and self._mover.grow(group, self._pages_of(group, missing, share)):
                self._journal.note(donor, group, given, "price", reason)
                return True
        return False

    def _take_idle(self, group: int, missing: int, wanted: Sequence[int]) -> bool:
        """Take ground that is free elsewhere and was not used lately: nobody has to drop a page."""
        most = self._mover.remaining()
        if not self._has_donors(group) or not self._may_grow(group, most):
            return False
        keeps = self._peaks(wanted)
        for donor in self._donors(group):
            pool = self._pools[donor]
            pool.books.drain()
            idle = granules_spared(pool, pool.books.num_free - keeps[donor])
            if idle <= 0:
                continue
            granules = min(most, self._share(donor, group, missing), idle)
            given = self._mover.give(donor, granules, keeps[donor]) if granules > 0 else 0
            if given and self._mover.grow(group, self._pages_of(group, missing, granules)):
                self._journal.note(donor, group, given, "idle", "free, and not used lately")
                return True
        return False

    def _take_at_any_price(self, group: int, missing: int, wanted: Sequence[int]) -> bool:
        """Live demand with nothing left to drop: others give all they do not need this moment."""
        for donor in self._donors(group):
            share = self._share(donor, group, missing)
            lacking = max(0, share - self._budget.num_free + self._budget.overdraft)
            given = self._mover.give(donor, lacking, wanted[donor])
            if lacking and not given:
                continue
            if self._mover.grow(group, self._pages_of(group, missing, share)):
                reason = f"{missing:,} pages for live sequences, nothing cached left to drop"
                self._journal.note(donor, group, given, "demand", reason)
                return True
        return False

    def _pages_of(self, group: int, missing: int, share: int) -> int:
        pool = self._pools[group]
        return max(missing, share * pool.space.granule_bytes // pool.page_bytes)

    def _reason(self, donor: int, receiver: int) -> str:
        """Both prices in words, if anybody reads them."""
        if not self._journal.is_read:
            return ""
        offers = [self._prefixes.eviction.offer(g) for g in (donor, receiver)]
        sizes = [self._pools[g].page_bytes for g in (donor, receiver)]
        return price_reason(offers[0], sizes[0], offers[1], sizes[1])

    def _observe(self, donor: int, receiver: int, granules: int, keep: int) -> None:
        """Note the trade that `elastic` would begin here; changes nothing."""
        pool, eviction = self._pools[donor], self._prefixes.eviction
        if pool.num_available - keep < pages_lost(pool, 1):
            return
        offer, own = (eviction.offer(g) for g in (donor, receiver))
        idle = pool.books.num_free - keep >= pages_lost(pool, 1)
        own_bytes = self._pools[receiver].page_bytes
        if idle or (offer is not None and should_give(offer, pool.page_bytes, own, own_bytes)):
            self._journal.decline(donor, receiver, granules, self._reason(donor, receiver))

    def _observe_demand(self, receiver: int, wanted: Sequence[int]) -> None:
        """Note the trade without which live sequences are refused; changes nothing."""
        missing = wanted[receiver] - self._pools[receiver].num_available
        for donor in self._donors(receiver):
            pool = self._pools[donor]
            spare = granules_spared(pool, pool.num_available - wanted[donor])
            spare = min(spare, pool.num_mapped - self._mover.bottom(donor))
            granules = min(self._share(donor, receiver, missing), spare)
            if granules > 0:
                reason = f"{missing:,} pages for live sequences, nothing cached left to drop"
                self._journal.decline(donor, receiver, granules, reason)
                return

    def _peaks(self, wanted: Sequence[int]) -> list[int]:
        """Pages each pool would have to have free or cached to serve its recent peak again."""
        clock = self._prefixes.num_admitted
        faded = [int(peak * _FORGET ** (clock - then)) for peak, then in self._recent_need]
        return [
            max(now, peak - pool.books.num_leased - pool.books.num_in_flight)
            for now, peak, pool in zip(wanted, faded, self._pools, strict=True)
        ]

    def _may_grow(self, group: int, most: int) -> bool:
        """Whether `most` granules are enough for one more page of the pool."""
        space = self._pools[group].space
        enough = space.page_bytes // space.granule_bytes + 2  # wherever a page may stand
        return most >= enough or most >= len(self._pools[group].growth_for(1))

    def _has_donors(self, group: int) -> bool:
        return any(
            d != group and pool.num_mapped > self._mover.bottom(d)
            for d, pool in enumerate(self._pools)
        )

    def _donors(self, group: int) -> list[int]:
        """Pools above their floors: those with the most idle free pages come first."""
        donors = [
            (-pool.books.num_free * pool.page_bytes, d)
            for d, pool in enumerate(self._pools)
            if d != group and pool.num_mapped > self._mover.bottom(d)
        ]
        return [d for _, d in sorted(donors)]

    def _share(self, donor: int, receiver: int, missing: int) -> int:
        """Granules of a trade: what is missing, or a small part of the smaller pool if this step's
        allowance has room for it.
        """
        pool, giver = self._pools[receiver], self._pools[donor]
        part = min(giver.num_mapped, pool.num_mapped) // _STEP
        return max(1, min(part, self._mover.left()), len(pool.growth_for(missing)))

    def _afford(self, donor: int, receiver: int, granules: int, keep: int, peak: int) -> int:
        """Make room in a pool until it can give up to `granules` for less than they are worth to
        `receiver`; how many it can. It keeps `keep` pages free and `peak` pages free or cached.

        Free pages cost nothing, nor do those that no match can use, but for `peak` of them, which
        live sequences will ask back; then the coldest go, one by one, for as long as dropping them
        costs less than the receiver's own coldest would.
        """
        pool, books = self._pools[donor], self._pools[donor].books
        pages = min(pages_lost(pool, granules), pool.num_available - max(keep, peak))
        if pages < pages_lost(pool, 1):
            return 0
        eviction = self._prefixes.eviction
        before, patience = eviction.num_evicted[donor], PATIENCE
        own, own_bytes = eviction.offer(receiver), self._pools[receiver].page_bytes
        eviction.evict_worthless(donor, pages + max(keep, peak) - books.num_free)
        books.drain()
        keep = max(keep, min(peak, books.num_free))
        while (lacking := pages + keep - books.num_free) > 0:
            offer = eviction.offer(donor)
            if offer is None:
                break
            if not should_give(offer, pool.page_bytes, own, own_bytes, patience):
                break
            if not eviction.evict(donor, min(lacking, offer.pages)):
                break
            books.drain()
            patience = 1.0  # what was begun is carried through
        self._mover.num_yielded[donor] += eviction.num_evicted[donor] - before
        return max(0, min(granules, granules_spared(pool, books.num_free - keep)))


def _nothing() -> None:
    """Before anyone holds pages there is nothing to yield."""
