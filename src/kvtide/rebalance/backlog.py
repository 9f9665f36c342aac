"""Moves that were asked for and are carried out a little at each step: a plan, a new budget."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvtide.errors import ConfigError
from kvtide.rebalance.decide import loss
from kvtide.rebalance.mover import granules_spared, pages_lost
from kvtide.sizing import granules_by_share

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvtide.rebalance.decide import Move, Plan
    from kvtide.rebalance.journal import Journal
    from kvtide.rebalance.mover import Mover

_AT_ONCE = 64
"""Granules vacated by one search of a pool; the search looks at all its pages."""


class Backlog:
    """What is still to be moved. `advance` does some of it; nothing is done halfway.

    A plan in hand is replaced by the next one; what floors and ceilings forbid of it is given up. A
    shrinking budget comes before any plan. With `keeps_split` (static pools) the pools' shares
    follow the budget down and up again.
    """

    def __init__(self, mover: Mover, journal: Journal, *, keeps_split: bool) -> None:
        self._mover = mover
        self._journal = journal
        self._keeps_split = keeps_split
        self._index = {pool.name: g for g, pool in enumerate(mover.pools)}
        self._moves: list[tuple[Move, int]] = []
        self._weights = [float(pool.num_mapped) for pool in mover.pools]

    # -- asking --------------------------------------------------------------------------------

    def plan(self, plan: Plan) -> None:
        """Carry out this plan, in order, instead of what was left of the one before."""
        self._moves = [(move, move.granules) for move in plan if move.granules]

    @property
    def pending(self) -> int:
        """Granules that are still to go."""
        budget = self._mover.budget
        return budget.overdraft + sum(n for _, n in self._moves) + sum(self._missing())

    def require_split(self, quota: int, least: Mapping[str, int]) -> None:
        """ConfigError if a static pool's share of `quota` granules is less than it needs."""
        if not self._keeps_split:
            return
        for (name, need), share in zip(least.items(), self.targets(quota), strict=True):
            if share < need:
                raise ConfigError(
                    f"a budget of {quota} granules leaves pool {name!r} {share} by its share; one "
                    f"longest sequence and its floor need {need}: keep more, or use elastic mode"
                )

    def donors(self) -> set[int]:
        """Pools that have to give for what is pending."""
        found = {self._index[move.donor] for move, _ in self._moves}
        if self._mover.budget.overdraft:
            found.update(g for g, _ in self._givers())
        return found

    def feasible(self, plan: Plan) -> int:
        """Granules of `plan` that could go now, all its moves considered; changes nothing."""
        mover, spent, total = self._mover, [0] * len(self._index), 0
        for move in plan:
            d, r = self._index[move.donor], self._index[move.receiver]
            pool = mover.pools[d]
            pool.books.drain()
            spare = min(
                pool.num_mapped - mover.bottom(d), granules_spared(pool, pool.num_available)
            )
            room = mover.ceilings[r] - mover.pools[r].num_mapped + spent[r]
            granules = max(0, min(move.granules, spare - spent[d], room))
            spent[d] += granules
            spent[r] -= granules
            total += granules
        return total

    # -- doing ---------------------------------------------------------------------------------

    def advance(self, limit: int | None = None) -> int:
        """Move up to `limit` granules (None: all that can go now); how many went.

        If memory refuses, the error is raised, the plan is given up, and nothing is half done.
        """
        try:
            if limit is None:
                return self._advance(self.pending, sparing=False)
            return self._advance(limit, sparing=True)
        except BaseException:
            self._moves = []
            raise

    def _advance(self, limit: int, *, sparing: bool) -> int:
        went = self._pay(limit, sparing=sparing)
        for group, count in enumerate(self._missing()):
            if count and went < limit:
                went += self._mover.grow_granules(group, min(count, limit - went))
        left: list[tuple[Move, int]] = []
        for move, remaining in self._moves:
            done = self._carry_out(move, min(remaining, limit - went), sparing=sparing)
            went += done
            if done < remaining and self._room(move):
                left.append((move, remaining - done))
        self._moves = left
        return went

    def _room(self, move: Move) -> bool:
        """Whether the donor's floor and the receiver's ceiling leave anything of the move to do."""
        mover, d, r = self._mover, self._index[move.donor], self._index[move.receiver]
        can_give = mover.pools[d].num_mapped > mover.bottom(d)
        return can_give and mover.pools[r].num_mapped < mover.ceilings[r]

    def _pay(self, limit: int, *, sparing: bool) -> int:
        """Give back what the budget is overdrawn by, from the cheapest pools."""
        mover, budget, went = self._mover, self._mover.budget, 0
        while budget.overdraft and went < limit and not (sparing and went and not mover.left()):
            count = min(budget.overdraft, limit - went, _AT_ONCE)
            given = 0
            for donor, most in self._givers():
                given = mover.give(donor, min(count, most), sparing=sparing)
                if given:
                    reason = f"the budget is {budget.quota:,} granules now"
                    self._journal.note(donor, None, given, "budget", reason)
                    break
            if not given:
                break
            went += given
        return went

    def _carry_out(self, move: Move, count: int, *, sparing: bool) -> int:
        done = 0
        while done < count:
            donor, receiver = self._index[move.donor], self._index[move.receiver]
            most = min(count - done, _AT_ONCE)
            went = self._mover.exchange(donor, receiver, most, sparing=sparing)
            if not went:
                break
            self._journal.note(donor, receiver, went, "plan", move.reason)
            shift = went * sum(self._weights) / self._mover.budget.quota
            self._weights[donor] -= shift
            self._weights[receiver] += shift
            done += went
            if sparing and went < most:
                break  # the rest of this step's allowance went into copies
        return done

    def _givers(self) -> list[tuple[int, int]]:
        """Pools that can give for a smaller budget and how many granules, cheapest first: idle,
        then by price a byte.
        """
        mover, offers = self._mover, self._mover.prefixes.eviction
        if self._keeps_split:
            targets = self.targets(self._mover.budget.quota)
            excess = [pool.num_mapped - targets[g] for g, pool in enumerate(mover.pools)]
            return [(g, granules) for g, granules in enumerate(excess) if granules > 0]
        ranked: list[tuple[bool, float, int, int]] = []
        for g, pool in enumerate(mover.pools):
            most = pool.num_mapped - mover.bottom(g)
            if most > 0:
                offer = offers.offer(g)
                price = 0.0 if offer is None else loss(offer, pool.page_bytes)
                ranked.append((pool.books.num_free < pages_lost(pool, 1), price, g, most))
        return [(g, most) for _, _, g, most in sorted(ranked)]

    def recut(self) -> None:
        """The pools as they are now are the split to keep; what was pending is given up."""
        self._moves = []
        self._weights = [float(pool.num_mapped) for pool in self._mover.pools]

    def targets(self, quota: int) -> list[int]:
        """Granules of each static pool under a budget of `quota` granules."""
        total = sum(self._weights)
        shares = {
            pool.name: w / total for pool, w in zip(self._mover.pools, self._weights, strict=True)
        }
        return list(granules_by_share(shares, quota).values())

    def _missing(self) -> list[int]:
        """Granules each static pool lacks for its share of the budget."""
        if not self._keeps_split:
            return [0] * len(self._index)
        free = self._mover.budget.num_free
        mover = self._mover
        targets = np.minimum(self.targets(mover.budget.quota), mover.ceilings).tolist()
        lacking: list[int] = []
        for pool, target in zip(mover.pools, targets, strict=True):
            lacking.append(min(free, max(0, target - pool.num_mapped)))
            free -= lacking[-1]
        return lacking
