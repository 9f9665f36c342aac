"""A small group of ranks, the messages between them, and what may still go wrong: one global state.

The members are the real ones; what surrounds them is made up. States compare by what their futures
depend on, so that two ways to the same place count once.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, TypeAlias

from kvtide.ranks.member import Member

if TYPE_CHECKING:
    from kvtide.ranks.member import Answer, Axis, Decision, Mode

Payload: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A group, what its ranks may choose, and how often things may go wrong.

    While nothing is open each rank proposes one of `proposals` at the first `proposal_ticks` ticks
    (in leader mode a follower asks for 9, which must never be done). It answers ready with one of
    `offers` (None: with none), or refuses. `in_flight`: steps it may report while a change is open.
    """

    size: int = 2
    axis: Axis = "tensor"
    mode: Mode = "leader"
    ticks: int = 4
    drain_ticks: int = 2
    proposals: tuple[int | None, ...] = (None, 5)
    proposal_ticks: int = 2
    offers: tuple[int | None, ...] = (None,)
    may_refuse: bool = True
    in_flight: tuple[int, ...] = (0,)
    lies: int = 0
    """Ballots with facts that are not those of the others."""
    losses: int = 0
    """Ballots that are lost; those of a dead rank, and halts, may always be."""
    copies: int = 0
    """Messages that arrive twice."""
    crashes: int = 0
    failures: int = 0
    """Changes that cannot be applied, though the rank was ready."""
    early_deadlines: int = 0
    """Deadlines that pass although what is awaited is on its way."""


@dataclass(frozen=True, slots=True)
class Said:
    """What a rank said at a tick, as the explorer knows it."""

    facts: Payload
    proposal: int | None
    answer: Answer | None
    in_flight: int


@dataclass(frozen=True, slots=True, order=True)
class Message:
    """A ballot of a tick, or a halt, on its way."""

    source: int
    target: int
    tick: int
    words: bytes


@dataclass(slots=True)
class Rank:
    """A member and the toy application it decides for. Never changed: copied, then changed."""

    member: Member
    applied: tuple[Payload, ...] = ()
    todo: Decision | None = None
    """Decided, not acted upon."""
    answer: Answer | None = None
    opened: Payload = ()
    """The proposal this rank was asked to prepare."""
    heard: frozenset[tuple[int, int]] = frozenset()
    """(rank, tick) of the ballots that have arrived, from this tick on."""
    is_dead: bool = False
    known: tuple[object, ...] | None = None
    """The key, once somebody has asked for it."""

    @property
    def is_running(self) -> bool:
        """Neither dead nor stopped."""
        return not self.is_dead and self.member.error is None

    @property
    def key(self) -> tuple[object, ...]:
        """All that its future depends on."""
        if self.known is None:
            self.known = self._key() if self.is_running else ("dead or stopped", self.is_dead)
        return self.known

    def _key(self) -> tuple[object, ...]:
        m = self.member
        return (
            self.applied, self.todo, self.answer, self.opened, self.heard,
            m.tick, m.epoch, m.phase, m.is_cast, m._open, m._answer, m._patience,
            frozenset((r, b.tobytes()) for r, b in m._came.items()),
            frozenset((r, b.tobytes()) for r, b in m._early.items()),
        )  # fmt: skip


@dataclass(slots=True)
class World:
    """One global state."""

    ranks: tuple[Rank, ...]
    flight: tuple[Message, ...]
    """Messages on their way, sorted."""
    faults: Counter[str]
    """How often each may still happen, by its name in `Case`."""
    said: dict[tuple[int, int], Said]
    """By (rank, tick), as long as a running rank has not concluded the tick."""
    decided: dict[int, tuple[Decision, tuple[Payload, ...]]]
    """What the first rank to conclude a tick decided, and what it had applied until then."""

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for states with equal futures."""
        return (
            tuple(rank.key for rank in self.ranks),
            self.flight,
            tuple(sorted(self.faults.items())),
            frozenset(self.said.items()),
            frozenset(self.decided.items()),
        )

    def copy(self) -> World:
        """To be changed without a trace in this one."""
        return World(self.ranks, self.flight, self.faults, self.said, self.decided)

    def put(self, rank: Rank) -> None:
        """Replace a rank."""
        at = rank.member.rank
        self.ranks = (*self.ranks[:at], rank, *self.ranks[at + 1 :])

    def spend(self, fault: str) -> None:
        """One fault fewer may still happen."""
        self.faults = Counter(self.faults)
        self.faults[fault] -= 1

    def send(self, source: int, tick: int, words: bytes, targets: list[int]) -> None:
        """Messages to those ranks that still listen."""
        new = [Message(source, r, tick, words) for r in targets if self.ranks[r].is_running]
        self.flight = tuple(sorted((*self.flight, *new)))

    def without(self, message: Message) -> tuple[Message, ...]:
        """The messages on their way but this one."""
        at = self.flight.index(message)
        return self.flight[:at] + self.flight[at + 1 :]

    def forget(self) -> None:
        """Drop what can make no difference any more."""
        running = [rank for rank in self.ranks if rank.is_running]
        self.flight = tuple(m for m in self.flight if self.ranks[m.target].is_running)
        first = min((rank.member.tick for rank in running), default=1 << 30)
        if any(tick < first for _, tick in self.said):
            self.said = {at: said for at, said in self.said.items() if at[1] >= first}
            self.decided = {t: found for t, found in self.decided.items() if t >= first}


_NAMES = tuple(f.name for f in fields(Member))


def fresh(rank: Rank) -> Rank:
    """A copy whose member may be changed."""
    old = rank.member
    member = object.__new__(type(old))
    for name in _NAMES:
        setattr(member, name, getattr(old, name))
    member._came, member._early = dict(old._came), dict(old._early)
    return replace(rank, member=member, known=None)
