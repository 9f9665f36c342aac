"""The protocol by which ranks change capacity together: a state machine without input or output.

Ranks speak at ticks, which all know beforehand: each casts one ballot, and who has the fold of all
ballots of a tick concludes it. All conclude alike, because all conclude from the same numbers.

    IDLE      nothing open. A ballot may carry a proposal; it is open once its tick is concluded
    VOTING    every rank has prepared: the next ballots say ready, or refused and why
    DRAINING  all are ready, steps are in flight: no new ones until they are over
    STOPPED   for good: a rank is lost, has failed, or differs

From VOTING and DRAINING a tick leads to COMMIT, at the very step of its conclusion, or to ABORT,
which changes nothing. What was applied is part of the next ballots' facts. A rank that does not
learn the outcome of a tick stops; the others notice at the next one, by its silence or its halt.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Literal, NoReturn

from kvtide.errors import DivergenceError, RankFailedError, RankLostError, RanksError, UsageError
from kvtide.ranks.ballot import Ballot, Reason, Shape, Tally, Vote, fold

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtide.types import IntArray

Axis = Literal["tensor", "context", "pipeline", "attention_data"]
"""How the ranks of a group split the model: what must be equal on them follows from it."""

Mode = Literal["leader", "replicated"]
"""Who decides: rank 0 alone, or every rank for itself and all the same."""


class Phase(IntEnum):
    """Where a member is in the protocol."""

    IDLE = 0
    VOTING = 1
    DRAINING = 2
    STOPPED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What a group has agreed on before it began.

    `names` are those of the facts, for messages. A group gives a change up that has not been
    drained after `drain_ticks`.
    """

    size: int
    axis: Axis = "tensor"
    mode: Mode = "replicated"
    names: tuple[str, ...] = ()
    payload: int = 1
    drain_ticks: int = 64

    @property
    def shape(self) -> Shape:
        """Words of a ballot."""
        return Shape(len(self.names), self.payload)

    def is_drained(self, tally: Tally) -> bool:
        """Whether the steps in flight allow what is to be done now.

        A pipeline must be empty on all stages, and so must all ranks for what they make offers of.
        Elsewhere draining is a step that all take part in, so either all ranks have something in
        flight or none has.
        """
        flying = tally.in_flight
        if self.axis == "pipeline" or tally.least_offer is not None:
            return flying.high == 0
        return (flying.low > 0) == (flying.high > 0)


Kind = Literal["nothing", "prepare", "commit", "abort", "pause", "defer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What a tick came to, the same on every rank that concluded it.

    prepare: answer whether `payload` can be done here. commit: do `payload` now. abort: it will not
    be done, for `reason`. pause: every rank may now do what it wants to do for itself. defer: not
    yet, steps are in flight. `completed`: the last step that is over on all ranks. `wants`: some
    rank would like a change, which only the leader can propose.
    """

    kind: Kind
    tick: int
    epoch: int
    completed: int
    wants: bool = False
    payload: tuple[int, ...] = ()
    reason: Reason = Reason.NOTHING
    needed: int = 0
    available: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A rank's vote on the open proposal.

    `offer`: the most of it that can be done here, for what can be done in part, and only when
    nothing is in flight. Then the least of all offers is made.
    """

    ready: bool
    reason: Reason = Reason.NOTHING
    needed: int = 0
    available: int = 0
    offer: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What a rank reports at a tick beside its vote."""

    facts: tuple[int, ...] = ()
    in_flight: int = 0
    completed: int = 0
    wants: bool = False
    proposal: tuple[int, ...] | None = None
    trouble: Reason = Reason.NOTHING


@dataclass(slots=True)
class Member:
    """One rank's side of the protocol: `cast` a ballot, then `conclude` the tick.

    With a transport that folds (an all-reduce) give `conclude` the fold; with one that carries
    messages give `receive` each rank's ballot. `expire` when the deadline has passed.
    """

    rank: int
    rules: Rules
    tick: int = 0
    epoch: int = 0
    phase: Phase = Phase.IDLE
    is_cast: bool = False
    error: RanksError | None = None
    _open: tuple[int, ...] = ()
    _answer: Answer | None = None
    _patience: int = 0
    _came: dict[int, IntArray] = field(default_factory=dict[int, "IntArray"])
    _early: dict[int, IntArray] = field(default_factory=dict[int, "IntArray"])

    # -- speaking ------------------------------------------------------------------------------

    def cast(self, seen: Observed) -> IntArray:
        """This rank's packed ballot for the next tick. UsageError if the last one is not concluded
        or an answer is owed; the group's error once it has stopped.
        """
        self._require_alive()
        if self.is_cast:
            raise UsageError(f"tick {self.tick} is not concluded; conclude it before the next")
        if self.phase is not Phase.IDLE and self._answer is None:
            raise UsageError("a proposal is open; answer it before the next tick")
        answer = self._answer
        vote = Vote.NONE if answer is None else Vote.READY if answer.ready else Vote.REFUSED
        may_propose = self.phase is Phase.IDLE and (
            self.rules.mode == "replicated" or not self.rank
        )
        ballot = Ballot(
            tick=self.tick,
            phase=self.phase,
            epoch=self.epoch,
            facts=seen.facts,
            vote=vote,
            reason=Reason.NOTHING if answer is None else answer.reason,
            needed=0 if answer is None else answer.needed,
            available=0 if answer is None else answer.available,
            wants=seen.wants,
            in_flight=seen.in_flight,
            completed=seen.completed,
            trouble=seen.trouble,
            proposal=seen.proposal if may_propose else None,
            offer=None if answer is None else answer.offer,
        )
        self.is_cast = True
        return ballot.pack(self.rules.shape)

    def answer(self, answer: Answer) -> None:
        """This rank's vote on the open proposal, for the next ballots."""
        if self.phase not in (Phase.VOTING, Phase.DRAINING):
            raise UsageError("no proposal is open; there is nothing to answer")
        self._answer = answer

    # -- hearing -------------------------------------------------------------------------------

    def receive(self, rank: int, tick: int, ballot: IntArray) -> Decision | None:
        """A rank's ballot (one's own as well). The decision, once all have come.

        A ballot that came twice counts once; who is a tick ahead is remembered. A rank that says
        two different things at one tick is a failed one.
        """
        self._require_alive()
        if tick < self.tick:
            return None  # of a tick that is concluded: it can only be a copy
        box = self._came if tick == self.tick else self._early
        known = box.get(rank)
        if tick > self.tick + 1 or (known is not None and (known != ballot).any()):
            self._stop(RankFailedError(f"rank {rank} sent a ballot of tick {tick} out of turn"))
        box[rank] = ballot
        if not self.is_cast or len(self._came) < self.rules.size:
            return None
        return self.conclude(Tally(fold(list(self._came.values())), self.rules.shape))

    def conclude(self, tally: Tally) -> Decision:
        """The decision of this tick. Raises the error, and stops for good, if ranks differ or one
        has reported trouble.
        """
        self._require_alive()
        if not self.is_cast:
            raise UsageError("conclude needs a ballot of this rank; cast it first")
        self._require_alike(tally)
        decision = self._decide(tally)
        self.tick += 1
        self.is_cast = False
        self._came, self._early = self._early, {}
        return decision

    def expire(self, missing: Sequence[int] | None = None) -> RanksError:
        """The deadline of this tick has passed: stop for good. Returns the error to be raised.

        `missing`: the ranks that said nothing, if the transport knows; else those whose ballots did
        not come by `receive`.
        """
        if missing is None:
            missing = [rank for rank in range(self.rules.size) if rank not in self._came]
        return self._end(RankLostError.silent(missing, self.tick))

    def fail(self, error: RanksError) -> RanksError:
        """Stop for good, for a reason found outside. Returns the error to be raised from now on."""
        return self._end(error)

    def halt(self, rank: int, why: str) -> RanksError:
        """Another rank has stopped: stop for good. Returns the error to be raised."""
        return self._end(RankFailedError(f"rank {rank} has stopped: {why}"))

    # -- deciding ------------------------------------------------------------------------------

    def _decide(self, tally: Tally) -> Decision:
        match self.phase:
            case Phase.IDLE if self.rules.axis == "attention_data":
                return self._pause(tally)
            case Phase.IDLE:
                return self._open_proposal(tally)
            case _:
                return self._count(tally)

    def _pause(self, tally: Tally) -> Decision:
        if not tally.wants.high:
            return self._say(tally, "nothing")
        if not self.rules.is_drained(tally):
            return self._say(tally, "defer")
        self.epoch += 1
        return self._say(tally, "pause")

    def _open_proposal(self, tally: Tally) -> Decision:
        if not tally.proposes.high:
            return self._say(tally, "nothing")
        words = tally.proposal
        if self.rules.mode == "replicated":
            alike = tally.proposes.is_equal and all(word.is_equal for word in words)
            if not alike:
                what = "different plans" if tally.proposes.is_equal else "a plan, others none"
                self._stop(DivergenceError(f"at tick {self.tick} some ranks propose {what}"))
        self.phase, self._open, self._answer = Phase.VOTING, tuple(w.low for w in words), None
        self._patience = self.rules.drain_ticks
        return self._say(tally, "prepare", payload=self._open)

    def _count(self, tally: Tally) -> Decision:
        if tally.vote.low == Vote.REFUSED:
            return self._abort(
                tally, Reason(tally.reason.high), tally.needed.high, tally.available.low
            )
        if not self.rules.is_drained(tally):
            self.phase = Phase.DRAINING
            self._patience -= 1
            if self._patience <= 0:
                return self._abort(tally, Reason.BUSY, 0, tally.in_flight.high)
            return self._say(tally, "defer", payload=self._open)
        payload = tally.least_offer or self._open
        self._close()
        self.epoch += 1
        return self._say(tally, "commit", payload=payload)

    def _abort(self, tally: Tally, reason: Reason, needed: int, available: int) -> Decision:
        payload = self._open
        self._close()
        return self._say(
            tally, "abort", payload=payload, reason=reason, needed=needed, available=available
        )

    def _close(self) -> None:
        self.phase, self._open, self._answer = Phase.IDLE, (), None

    def _say(
        self,
        tally: Tally,
        kind: Kind,
        *,
        payload: tuple[int, ...] = (),
        reason: Reason = Reason.NOTHING,
        needed: int = 0,
        available: int = 0,
    ) -> Decision:
        return Decision(
            kind=kind,
            tick=self.tick,
            epoch=self.epoch,
            completed=tally.completed.low,
            wants=bool(tally.wants.high),
            payload=payload,
            reason=reason,
            needed=needed,
            available=available,
        )

    # -- stopping ------------------------------------------------------------------------------

    def _require_alike(self, tally: Tally) -> None:
        trouble = Reason(tally.trouble.high)
        if trouble:
            self._stop(
                RankFailedError(
                    f"at tick {self.tick} a rank reported that it cannot go on: "
                    f"{trouble.name.lower()}; the group has stopped, start it again"
                )
            )
        words = [("tick", tally.tick), ("phase", tally.phase), ("epoch", tally.epoch)]
        words += zip(self.rules.names, tally.facts, strict=True)
        apart = [(name, word) for name, word in words if not word.is_equal]
        if apart:
            told = "; ".join(f"{name} from {word.low} to {word.high}" for name, word in apart)
            self._stop(DivergenceError(f"at tick {self.tick} ranks differ: {told}"))

    def _require_alive(self) -> None:
        if self.error is not None:
            raise self.error

    def _end(self, error: RanksError) -> RanksError:
        if self.error is None:
            self.error, self.phase = error, Phase.STOPPED
        return self.error

    def _stop(self, error: RanksError) -> NoReturn:
        raise self._end(error)
