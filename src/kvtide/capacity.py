"""Capacity on request: plans and budgets carried out between steps, and what is in their way."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvtide.errors import ConfigError, DeviceError, UsageError
from kvtide.sequence.groups import StateGroup
from kvtide.types import ceil_div

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvtide.assembly import Parts
    from kvtide.rebalance import Plan
    from kvtide.sequence import Sequence

_log = logging.getLogger("kvtide.rebalance")

_DISCARDED = 1
"""Granules whose memory goes back to the system at a step: for 2 MiB that is half a millisecond."""


@dataclass(frozen=True, slots=True)
class Holder:
    """A live sequence that holds `num_bytes` of a pool that has to give."""

    sequence: Sequence
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Progress:
    """What a request for capacity has achieved so far; the rest goes on by itself at each step.

    `moved` granules went by this call and `pending` are still to go. `blocked_by`: if nothing more
    can go now, the live sequences that hold pages in the pools that have to give, largest first;
    empty while it is only a matter of time.
    """

    moved: int
    pending: int
    blocked_by: tuple[Holder, ...] = ()

    @property
    def done(self) -> bool:
        """Nothing is left to do."""
        return self.pending == 0


class Capacity:
    """Carries plans and budgets out over the parts of one manager."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def rebalance(self, plan: Plan, *, dry_run: bool = False) -> Progress:
        """Begin a plan; see `KVManager.rebalance`."""
        names = list(self._parts.pools)
        for move in plan:
            if move.donor == move.receiver:
                raise UsageError(f"plan moves granules from {move.donor!r} to itself; leave it out")
            for name in (move.donor, move.receiver):
                if name not in names:
                    raise UsageError(f"plan names pool {name!r}; pools are {', '.join(names)}")
            if move.granules < 0:
                raise UsageError(f"plan moves {move.granules} granules; use 0 or more")
        if dry_run:
            self._parts.fences.poll()
            asked, could = sum(move.granules for move in plan), self._parts.backlog.feasible(plan)
            return Progress(could, asked - could)
        self._parts.backlog.plan(plan)
        for move in plan:
            _log.info(
                "plan: %d granules from %s to %s: %s",
                move.granules, move.donor, move.receiver, move.reason,
            )  # fmt: skip
        return self._go_on(self._parts.mover.left())

    def set_budget(self, num_bytes: int, *, dry_run: bool = False) -> Progress:
        """Use so many bytes from now on; see `KVManager.set_budget`."""
        parts = self._parts
        granules = self._require_budget(num_bytes)
        if dry_run:
            return Progress(0, max(0, parts.budget.num_taken - granules))
        _log.info("budget: %d granules, was %d", granules, parts.budget.quota)
        parts.budget.set_quota(granules)
        return self._go_on(parts.mover.left())

    def _require_budget(self, num_bytes: int) -> int:
        """The granules of a budget. ConfigError if it is less than what is needed whatever
        happens, or more than the memory has.
        """
        parts, size, least = self._parts, self._parts.memory.granule_bytes, self._least()
        granules, need = num_bytes // size, sum(least.values())
        most = parts.budget.num_granules
        if not need <= granules <= most:
            raise ConfigError(
                f"a budget of {num_bytes:,} bytes was asked for; one longest sequence, "
                f"floors and registered padding need {need * size:,}, the memory has "
                f"{most * size:,}: choose a value between them"
            )
        parts.backlog.require_split(granules, least)
        return granules

    def resize(self, pages: Mapping[str, int], *, dry_run: bool = False) -> dict[str, int]:
        """Give pools these numbers of pages; see `KVManager.resize`."""
        parts = self._parts
        self._require_sizes(pages)
        parts.fences.poll()
        granted = self._granted(pages)
        if dry_run or granted != dict(pages):
            return granted
        if not parts.fences.quiesced:
            raise UsageError(
                f"{parts.fences.issued - parts.fences.completed} steps are in flight; resize "
                "between steps"
            )
        before = {name: parts.pools[name].num_usable for name in pages}
        try:
            self._set_sizes(pages)
        except BaseException:
            with suppress(DeviceError, UsageError):
                self._set_sizes(before)
            raise
        finally:
            parts.backlog.recut()
        largest = max(pool.num_usable for pool in parts.pools.values())
        parts.prefixes.tree.remember(int(parts.ghost_ratio * largest))  # equal where pages are
        return granted

    def _set_sizes(self, pages: Mapping[str, int]) -> None:
        """Cut first, so that there is ground to grow on."""
        parts, groups = self._parts, {name: g for g, name in enumerate(self._parts.pools)}
        for change in (parts.mover.cut, parts.mover.raise_to):
            for name, count in pages.items():
                if not change(groups[name], count):
                    raise UsageError(
                        f"pool {name!r} cannot have its {count} lowest pages: a plan has left "
                        "holes in it; use either rebalance or resize"
                    )
        for name in pages:
            pool = parts.pools[name]
            parts.mover.ceilings[groups[name]] = pool.space.granules_for(pool.limit)

    def _require_sizes(self, pages: Mapping[str, int]) -> None:
        parts = self._parts
        if parts.ground.is_elastic:
            raise UsageError("resize sets a split that stays; use mode='static' or 'dry_run'")
        for name, count in pages.items():
            if name not in parts.pools:
                raise UsageError(f"pool {name!r} is unknown; pools are {', '.join(parts.pools)}")
            least = parts.least_pages[name]
            if count < least:
                raise UsageError(
                    f"pool {name!r} was to have {count} pages; one longest sequence and its floor "
                    f"need {least}"
                )

    def _granted(self, pages: Mapping[str, int]) -> dict[str, int]:
        """Of these numbers what the pools can have now: not less than is live, and no more than the
        budget's granules.
        """
        parts = self._parts
        granted = {name: pool.num_usable for name, pool in parts.pools.items()}
        for name, count in pages.items():
            books = parts.pools[name].books
            books.drain()
            if count < granted[name]:
                granted[name] = min(
                    granted[name], max(count, books.num_leased + books.num_in_flight)
                )
        free = parts.budget.quota - sum(
            parts.pools[name].space.granules_for(1 + count) for name, count in granted.items()
        )
        for name, count in pages.items():
            space, has = parts.pools[name].space, granted[name]
            if count > has:
                most = space.pages_in(space.granules_for(1 + has) + free) - 1
                granted[name] = min(count, max(has, most))
                free -= space.granules_for(1 + granted[name]) - space.granules_for(1 + has)
        return {name: granted[name] for name in pages}

    def _least(self) -> dict[str, int]:
        """Granules each pool needs whatever happens: for one longest sequence, its floor, and what
        registered padding keeps.
        """
        held = self._parts.ledger.holdings
        rows = [row for row, seq in held.live.items() if seq.registered]
        least = dict(self._parts.least)
        for group in held.groups:
            pages = int(np.count_nonzero(group.table.rows[rows] >= 0))
            space = group.pool.space
            least[group.pool.name] += ceil_div(pages * space.page_bytes, space.granule_bytes)
        return least

    def settle(self) -> Progress:
        """Carry out what is pending now, without the limit per step; see `KVManager.settle`."""
        return self._go_on(None)

    def advance(self) -> None:
        """Between two steps: carry on with what is pending, within the limit; with nothing to move,
        memory goes back to the system.

        If memory refuses, the plan is given up and the step goes on: its pools are whole.
        """
        parts, moved = self._parts, 0
        try:
            if parts.backlog.pending:
                parts.fences.poll()
                moved = parts.backlog.advance(parts.mover.left())
            if not moved:
                parts.budget.discard(_DISCARDED)
        except DeviceError:
            _log.exception("memory refused; a plan is given up, what goes to the system goes later")

    def _go_on(self, limit: int | None) -> Progress:
        parts = self._parts
        parts.fences.poll()
        asked = parts.backlog.pending
        moved = parts.backlog.advance(limit)
        if limit is None or not moved:
            parts.budget.discard(None if limit is None else _DISCARDED)
        pending = parts.backlog.pending
        blocked = pending > 0 and moved < (asked if limit is None else min(limit, asked))
        return Progress(moved, pending, self._holders() if blocked else ())

    def _holders(self) -> tuple[Holder, ...]:
        """Who holds how much of the pools that have to give."""
        givers, held = self._parts.backlog.donors(), self._parts.ledger.holdings
        found: list[Holder] = []
        for row, seq in held.live.items():
            num_bytes = 0
            for group in held.groups:
                if group.index in givers:
                    pages = int(np.count_nonzero(group.table.rows[row] >= 0))
                    if isinstance(group, StateGroup):
                        pages += len(held.snapshots.pages(seq, group))
                    num_bytes += pages * group.pool.page_bytes
            if num_bytes:
                found.append(Holder(seq, num_bytes))
        return tuple(sorted(found, key=lambda h: -h.num_bytes))
