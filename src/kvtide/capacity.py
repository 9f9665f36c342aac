"""Capacity on request: plans and budgets carried out between steps, and what is in their way."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvtide.errors import ConfigError, DeviceError, UsageError
from kvtide.sequence.groups import StateGroup
from kvtide.types import ceil_div

if TYPE_CHECKING:
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

    def set_budget(self, num_bytes: int) -> Progress:
        """Use so many bytes from now on; see `KVManager.set_budget`."""
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
        _log.info("budget: %d granules, was %d", granules, parts.budget.quota)
        parts.budget.set_quota(granules)
        return self._go_on(parts.mover.left())

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
