"""What every rank says at a tick, as int64 words, and the fold of what all have said.

A fold keeps the smallest and the largest of each word. That is enough to vote (the smallest vote),
to want something together (the largest wish), to take the least of several offers, and to see that
numbers which ought to be equal are. It is one all-reduce of a few hundred bytes, however many ranks
there are.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from kvtide.types import IntArray

_NEUTRAL = np.iinfo(np.int64).max
"""Changes no minimum: stands where a rank says nothing."""


class Vote(IntEnum):
    """What a rank answers to the open proposal. The least of all votes counts."""

    REFUSED = 0
    READY = 1
    NONE = 2
    """Nothing is open."""


class Reason(IntEnum):
    """Why a rank refuses a proposal, or cannot go on. The largest of several is reported."""

    NOTHING = 0
    FLOOR = 1
    """A pool would fall below its floor, or one longest sequence would not fit."""
    PINNED = 2
    """Live sequences, or steps in flight, hold more than the pool would have."""
    VETO = 3
    """The engine said no."""
    MEMORY = 4
    """Memory refused to map."""
    ENGINE = 5
    """The engine itself gave up."""
    BUSY = 6
    """Steps in flight were not over in time."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Numbers of words: `facts` that must be equal, `payload` of a proposal."""

    facts: int
    payload: int

    @property
    def words(self) -> int:
        """Words of a ballot; it is sent twice, as it is and negated."""
        return len(_HEAD) + self.facts + 2 * self.payload


_HEAD = (
    "tick", "phase", "epoch", "vote", "reason", "needed", "available",
    "wants", "in_flight", "completed", "trouble", "proposes",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Ballot:
    """One rank's words at one tick.

    `phase` and `epoch` are the member's own; `completed` the last step whose fence has passed;
    `in_flight` steps (micro-batches) that are not over; `wants`: something is to be done together;
    `proposal` and `offer`: see `Member`.
    """

    tick: int
    phase: int
    epoch: int
    facts: tuple[int, ...]
    vote: Vote = Vote.NONE
    reason: Reason = Reason.NOTHING
    needed: int = 0
    available: int = 0
    wants: bool = False
    in_flight: int = 0
    completed: int = 0
    trouble: Reason = Reason.NOTHING
    proposal: tuple[int, ...] | None = None
    offer: tuple[int, ...] | None = None

    def pack(self, shape: Shape) -> IntArray:
        """Words to be folded by their minimum, int64 [2 * shape.words]."""
        nothing = (_NEUTRAL,) * shape.payload
        available = self.available if self.vote is Vote.REFUSED else _NEUTRAL
        head = (
            self.tick, self.phase, self.epoch, self.vote, self.reason, self.needed, available,
            self.wants, self.in_flight, self.completed, self.trouble, self.proposal is not None,
        )  # fmt: skip
        words = np.array(
            (*head, *self.facts, *(self.proposal or nothing), *(self.offer or nothing)), np.int64
        )
        negated = np.where(words == _NEUTRAL, _NEUTRAL, -words)
        return np.concatenate([words, negated])


@dataclass(frozen=True, slots=True)
class Range:
    """Smallest and largest value of one word over all ranks."""

    low: int
    high: int

    @property
    def is_equal(self) -> bool:
        """Whether all ranks said the same."""
        return self.low == self.high


class Tally:
    """The fold of all ballots of one tick."""

    def __init__(self, folded: IntArray, shape: Shape) -> None:
        low = folded[: shape.words]
        high = -folded[shape.words :]
        self._low: list[int] = low.tolist()
        self._high: list[int] = high.tolist()
        self._shape = shape

    def __getattr__(self, name: str) -> Range:
        """A word of the head by its name, such as `tally.vote`."""
        try:
            return self._at(_HEAD.index(name))
        except ValueError:
            raise AttributeError(name) from None

    def _at(self, index: int) -> Range:
        return Range(self._low[index], self._high[index])

    @property
    def facts(self) -> list[Range]:
        """Each fact over all ranks."""
        start = len(_HEAD)
        return [self._at(i) for i in range(start, start + self._shape.facts)]

    @property
    def proposal(self) -> list[Range]:
        """Each word of the proposal over the ranks that made one."""
        start = len(_HEAD) + self._shape.facts
        return [self._at(i) for i in range(start, start + self._shape.payload)]

    @property
    def least_offer(self) -> tuple[int, ...] | None:
        """The least of all offers, word by word; None if no rank has made one."""
        start = len(_HEAD) + self._shape.facts + self._shape.payload
        offer = tuple(self._low[start : start + self._shape.payload])
        return None if _NEUTRAL in offer else offer


def fold(ballots: list[IntArray]) -> IntArray:
    """Fold packed ballots as an all-reduce with minimum does."""
    return np.minimum.reduce(ballots)
