"""A change of capacity that ranks make together, and its words in a ballot."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvtide.errors import ConfigError, UsageError
from kvtide.ranks.ballot import Reason
from kvtide.ranks.member import Answer
from kvtide.rebalance import Move, Plan

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvtide.manager import KVManager
    from kvtide.ranks.member import Axis

MOST_MOVES = 8
"""Moves that fit into one ballot: a plan with more is made in several changes."""

_UNCHANGED = -1

_MOST = 1 << 62
"""Largest number that may travel; the largest a word could hold stands for nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What is to change: granules from pool to pool, the budget, or pools' sizes in pages.

    `plan` and `budget_bytes` go as `KVManager.rebalance` and `set_budget` do, a little at each
    step, equal on all ranks. `pages` goes as `KVManager.resize` does, all at once, and is the only
    kind that a pipeline can make: there a page has other bytes on every stage.
    """

    plan: Plan = ()
    budget_bytes: int | None = None
    pages: Mapping[str, int] = field(default_factory=dict[str, int])

    def require_for(self, axis: Axis, names: Sequence[str]) -> None:
        """UsageError unless ranks of this axis, with these pools, can make this change."""
        if axis == "pipeline" and (self.plan or self.budget_bytes is not None):
            raise UsageError(
                "stages of a pipeline have pages of different bytes; give the change as pages"
            )
        if self.pages and (self.plan or self.budget_bytes is not None):
            raise UsageError("a change has either pages, or a plan and a budget; make two")
        if len(self.plan) > MOST_MOVES:
            raise UsageError(
                f"the plan has {len(self.plan)} moves, a ballot holds {MOST_MOVES}; make several"
            )
        if not (self.plan or self.pages or self.budget_bytes is not None):
            raise UsageError("the change is empty; there is nothing to agree on")
        self._require_sense(names)

    def _require_sense(self, names: Sequence[str]) -> None:
        moved = [name for move in self.plan for name in (move.donor, move.receiver)]
        unknown = [name for name in (*self.pages, *moved) if name not in names]
        if unknown:
            raise UsageError(f"pool {unknown[0]!r} is unknown; pools are {', '.join(names)}")
        self._require_numbers()

    def _require_numbers(self) -> None:
        """What a manager would refuse once all ranks have voted, or a word of a ballot not hold."""
        for move in self.plan:
            if move.donor == move.receiver:
                raise UsageError(f"plan moves granules from {move.donor!r} to itself; leave it out")
        numbers = [(1, move.granules, "granules") for move in self.plan]
        numbers += [(0, count, f"pages of pool {name!r}") for name, count in self.pages.items()]
        if self.budget_bytes is not None:
            numbers.append((0, self.budget_bytes, "bytes of budget"))
        for least, number, what in numbers:
            if not least <= number <= _MOST:
                raise UsageError(f"the change has {number} {what}; use {least} to {_MOST}")

    def feasible(self, kv: KVManager) -> Answer:
        """Whether this rank can make the change now; changes nothing."""
        if self.pages:
            return self._feasible_pages(kv)
        if self.budget_bytes is not None:
            try:
                kv.set_budget(self.budget_bytes, dry_run=True)
            except ConfigError:
                return Answer(ready=False, reason=Reason.FLOOR, needed=self.budget_bytes)
        asked = sum(move.granules for move in self.plan)
        could = kv.rebalance(self.plan, dry_run=True).moved if self.plan else 0
        if asked and not could:
            return Answer(ready=False, reason=Reason.PINNED, needed=asked, available=could)
        return Answer(ready=True)

    def _feasible_pages(self, kv: KVManager) -> Answer:
        try:
            granted = kv.resize(self.pages, dry_run=True)
        except UsageError:
            needed = max(self.pages.values())
            return Answer(ready=False, reason=Reason.FLOOR, needed=needed)
        offer = encode(Change(pages=granted), tuple(kv.pools))
        return Answer(ready=True, offer=offer)

    def apply(self, kv: KVManager) -> None:
        """Make the change, or begin it. Raises ConfigError, DeviceError or UsageError."""
        if self.pages and (granted := kv.resize(self.pages)) != self.pages:
            raise UsageError(f"pools were to have {self.pages} pages and can have {granted}")
        if self.budget_bytes is not None:
            kv.set_budget(self.budget_bytes)
        if self.plan:
            kv.rebalance(self.plan)


def words_for(num_pools: int) -> int:
    """Words of any change over so many pools."""
    return 1 + max(num_pools, 3 * MOST_MOVES)


def encode(change: Change, names: Sequence[str]) -> tuple[int, ...]:
    """The words of a change: its budget, then either (donor, receiver, granules) of each move or
    the pages of each pool, told apart by the sign of the first.
    """
    if change.pages:
        pages = [change.pages.get(name, _UNCHANGED) for name in names]
        words = [_PAGES, *pages]
    else:
        words = [_UNCHANGED if change.budget_bytes is None else change.budget_bytes]
        for move in change.plan:
            words += (names.index(move.donor), names.index(move.receiver), move.granules)
    return (*words, *(_UNCHANGED,) * (words_for(len(names)) - len(words)))


_PAGES = -2


def decode(words: Sequence[int], names: Sequence[str]) -> Change:
    """The change that `encode` made these words of; reasons do not travel."""
    budget, rest = words[0], words[1:]
    if budget == _PAGES:
        return Change(
            pages={n: count for n, count in zip(names, rest, strict=False) if count != _UNCHANGED}
        )
    moves = [rest[i : i + 3] for i in range(0, 3 * MOST_MOVES, 3)]
    plan = tuple(
        Move(donor=names[donor], receiver=names[receiver], granules=granules, reason="agreed")
        for donor, receiver, granules in moves
        if granules != _UNCHANGED
    )
    return Change(plan=plan, budget_bytes=None if budget == _UNCHANGED else budget)
