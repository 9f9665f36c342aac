"""Between an engine of several ranks and its managers: one call a step, on every rank.

    group = Agreement(kv, transport, Terms(axis="tensor", every=8))
    with group:                            # a rank that raises in here stops the others as well
        while serving:
            turn = group.boundary()        # on every rank, whether there is work or not
            if not turn.drain:             # pipelines: begin no new micro-batch until this is over
                ...                        # schedule, kv.step, commit, as ever

At the ticks, every `every` steps, ranks exchange ballots while the step runs, and conclude them at
the next boundary. `propose` asks for a change; it is made on all ranks at the same boundary, or on
none.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING, Self
from zlib import crc32

import numpy as np

from kvtide.errors import (
    ConfigError,
    DeviceError,
    DivergenceError,
    RankFailedError,
    RanksError,
    UsageError,
)
from kvtide.ranks.ballot import Reason, Tally
from kvtide.ranks.change import MOST_MOVES, Change, decode, encode, words_for
from kvtide.ranks.member import Answer, Member, Observed, Phase, Rules

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtide.manager import KVManager
    from kvtide.ranks.member import Axis, Decision, Mode
    from kvtide.ranks.transport import Transport

_log = logging.getLogger("kvtide.ranks")

_KEPT = 1024
"""Durations kept for percentiles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What all ranks of a group are set up with, equally.

    `axis` is how the group's ranks split the model:

    - tensor, context: books must be equal in everything; plans of granules.
    - pipeline: pages must be equal, bytes are each stage's own; changes are numbers of pages.
    - attention_data: books are each rank's own; ranks only pause at the same step.

    Numbers of pages are changed on any axis when nothing is in flight on any rank.

    With `mode` leader only rank 0's proposals count, with replicated every rank has to make the
    same. A tick comes every `every` steps, and at every step while a change is open. `deadline`
    seconds may pass until the others are heard; a change for which steps in flight were not over
    within `drain_ticks` is given up.
    """

    axis: Axis = "tensor"
    mode: Mode = "replicated"
    every: int = 8
    deadline: float = 30.0
    drain_ticks: int = 64

    def __post_init__(self) -> None:
        """Refuse impossible values."""
        for field, value, choices in (
            ("axis", self.axis, ("tensor", "context", "pipeline", "attention_data")),
            ("mode", self.mode, ("leader", "replicated")),
        ):
            if value not in choices:
                raise ConfigError(f"{field} is {value!r}; use one of {', '.join(choices)}")
        if self.every < 1:
            raise ConfigError(f"every is {self.every}; ticks come every 1 or more steps")
        if not self.deadline > 0:
            raise ConfigError(f"deadline is {self.deadline} s; use more than 0")
        if self.drain_ticks < 1:
            raise ConfigError(f"drain_ticks is {self.drain_ticks}; use 1 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What a boundary came to. `drain`: admit nothing and begin no step until the next boundary.
    `changed`: capacity was changed here, on all ranks. `refused`: why a proposal was given up, if
    one was. `wanted`: in leader mode, some rank has proposed something; the leader may take it up.
    """

    drain: bool = False
    changed: bool = False
    refused: str | None = None
    wanted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """Counts of a group since it began, as this rank sees them; seconds at percentiles 50 and 99 of
    a tick: begun and concluded, waiting included.
    """

    steps: int
    ticks: int
    proposals: int
    commits: int
    aborts: int
    refusals: int
    pauses: int
    deferrals: int
    seconds_p50: float
    seconds_p99: float


class Agreement:
    """One rank's part in a group that changes capacity together."""

    def __init__(
        self,
        kv: KVManager,
        transport: Transport,
        terms: Terms | None = None,
        *,
        allow: Callable[[Change], bool] | None = None,
    ) -> None:
        """Begin, with all ranks at step 0. `allow(change)` may veto a change on this rank."""
        self.kv = kv
        self.terms = terms or Terms()
        self._transport = transport
        self._names = tuple(kv.pools)
        self._is_equal = self.terms.axis != "attention_data"
        names = ("terms", *kv.peer.digest_names) if self._is_equal else ("terms",)
        self._rules = Rules(
            size=transport.size,
            axis=self.terms.axis,
            mode=self.terms.mode,
            names=names,
            payload=words_for(len(self._names)),
            drain_ticks=self.terms.drain_ticks,
        )
        self._member = Member(transport.rank, self._rules)
        self._allow = allow or _anything
        self._wanted: Change | None = None
        self._asked: Change | None = None
        self._granted: Change | None = None
        self._terms_sum = crc32(repr(self.terms).encode())
        self._facts: tuple[int, ...] = ()
        self._steps = 0
        self._counts = dict.fromkeys(("prepare", "commit", "abort", "refusal", "pause", "defer"), 0)
        self._seconds = np.zeros(_KEPT)
        self._spent = 0.0
        self._count_completed(0)  # what completes before the first tick counts with it

    @property
    def is_leader(self) -> bool:
        """Whether this rank's proposals count in leader mode."""
        return self._transport.rank == 0

    @property
    def is_open(self) -> bool:
        """Whether a change of this rank waits, or one of the group is being voted on."""
        return self._wanted is not None or self._member.phase != 0

    def propose(self, change: Change) -> None:
        """Ask for a change, at the next tick that has nothing else open; replaces an earlier one.

        Where ranks must be equal: on every rank in replicated mode; in leader mode that of rank 0
        counts, and others only let it know that there is something to do. UsageError if the change
        is not of this axis's kind.
        """
        change.require_for(self.terms.axis, self._names)
        self._wanted = change

    # -- the one call --------------------------------------------------------------------------

    def boundary(self, in_flight: int = 0) -> Turn:
        """Between two steps, on every rank: conclude the tick begun before, begin the next.

        `in_flight`: steps or micro-batches begun and not over, if more than the manager knows of
        by their fences. Raises RanksError, and from then on always, once the group has stopped.
        """
        if self._member.error is not None:
            raise self._member.error
        turn = Turn()
        if self._member.is_cast:
            turn = self._conclude()
        if self._steps % self.terms.every == 0 or self._member.phase is not Phase.IDLE:
            self._cast(in_flight)  # while something is open every step is a tick, on all ranks
        self._steps += 1
        return turn

    def close(self) -> None:
        """Conclude the tick that is under way, if any: the last call, after equally many boundaries
        on all ranks. Raises RanksError if the others are not heard.
        """
        if self._member.error is None and self._member.is_cast:
            self._conclude()

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        """Close; or, if this rank raised, let the others know at once."""
        if error is None:
            self.close()
        elif not isinstance(error, RanksError):
            self.halt(f"{type(error).__name__}: {error}")

    def halt(self, why: str) -> None:
        """This rank cannot go on: let the others stop at once instead of at their deadline."""
        self._member.fail(RanksError(f"this rank has stopped: {why}"))
        self._transport.halt(why)

    def facts(self) -> RankFacts:
        """Counts so far."""
        ticks, counts = self._member.tick, self._counts
        seconds = self._seconds[: min(ticks, _KEPT)]
        p50, p99 = np.percentile(seconds, (50, 99)) if len(seconds) else (0.0, 0.0)
        return RankFacts(
            steps=self._steps,
            ticks=ticks,
            proposals=counts["prepare"],
            commits=counts["commit"],
            aborts=counts["abort"],
            refusals=counts["refusal"],
            pauses=counts["pause"],
            deferrals=counts["defer"],
            seconds_p50=float(p50),
            seconds_p99=float(p99),
        )

    # -- ticks ---------------------------------------------------------------------------------

    def _cast(self, in_flight: int) -> None:
        started = perf_counter()
        digest = self.kv.peer.digest(self._member.tick) if self._is_equal else ()
        self._facts = (self._terms_sum, *digest)
        if self._member.phase is Phase.DRAINING and self._granted is not None:
            self._member.answer(self._prepare(self._granted))  # as things are now
        elif self._member.phase is Phase.IDLE and self._wanted is None:
            self._wanted = self._wish()
        wanted = self._asked = self._wanted
        ballot = self._member.cast(
            Observed(
                facts=self._facts,
                in_flight=max(in_flight, self._num_in_flight()),
                completed=self.kv.peer.num_completed,
                wants=wanted is not None,
                proposal=None if wanted is None else encode(wanted, self._names),
            )
        )
        self._transport.start(ballot)
        self._spent = perf_counter() - started

    def _num_in_flight(self) -> int:
        """Stages have to be empty: each says what it sees. Other ranks drain together: they go by
        what is over on all, lest fences that pass apart look like steps that not all have begun.
        """
        is_stage = self.terms.axis == "pipeline"
        return self.kv.peer.num_in_flight if is_stage else self.kv.num_in_flight

    def _conclude(self) -> Turn:
        started = perf_counter()
        try:
            folded = self._transport.finish(self.terms.deadline)
            decision = self._member.conclude(Tally(folded, self._rules.shape))
        except DivergenceError as error:
            raise self._explained(error) from error
        except RankFailedError as error:  # who failed has told everybody
            raise self._member.fail(error) from None
        except RanksError as error:
            self._transport.halt(str(error))
            raise self._member.fail(error) from None
        tick = decision.tick % _KEPT
        self._seconds[tick] = self._spent + perf_counter() - started
        self._count_completed(decision.completed)
        turn = self._act(decision)
        is_news = decision.kind == "nothing" and self.terms.mode == "leader"
        return replace(turn, wanted=True) if is_news and decision.wants else turn

    def _count_completed(self, step: int) -> None:
        """Steps come free together, except where ranks run steps, and number them, on their own."""
        if self._is_equal:
            self.kv.peer.count_completed(step)

    def _explained(self, error: DivergenceError) -> DivergenceError:
        """The same with every rank's value of what differs: all ranks are here, and ask alike."""
        try:
            words = np.array(self._facts, np.int64)
            told = self._transport.gather(words, self.terms.deadline)
        except RanksError:
            return error
        by_name: list[list[int]] = told.T.tolist()
        lines = [
            f"{name}: {dict(enumerate(values))}"
            for name, values in zip(self._rules.names, by_name, strict=True)
            if len(set(values)) > 1
        ]
        whole = DivergenceError("; by rank ".join((str(error), *lines)))
        self._member.error = whole
        return whole

    def _act(self, decision: Decision) -> Turn:
        if decision.kind in self._counts:
            self._counts[decision.kind] += 1
        match decision.kind:
            case "prepare":
                self._granted = decode(decision.payload, self._names)
                if self._wanted is self._asked:  # else it is a newer one, for when this is over
                    self._wanted = None
                answer = self._prepare(self._granted)
                self._counts["refusal"] += not answer.ready
                self._member.answer(answer)
                return Turn(drain=bool(self._granted.pages))  # on all, whoever refuses
            case "commit":
                self._granted = None
                self._apply(decode(decision.payload, self._names))
                return Turn(changed=True)
            case "pause":
                return self._use_pause()
            case "abort":
                self._granted = None
                return Turn(refused=self._refusal(decision))
            case "defer":
                return Turn(drain=True)
            case _:
                return Turn()

    def _use_pause(self) -> Turn:
        """All ranks stand still: make this one's own change, whatever the others make."""
        change, self._wanted = self._wanted, None
        if change is None:
            return Turn()
        answer = change.feasible(self.kv)
        if not answer.ready:
            return Turn(refused=answer.reason.name.lower())
        if answer.offer is not None:
            if self.kv.num_in_flight:
                return Turn(refused=Reason.BUSY.name.lower())
            change = decode(answer.offer, self._names)
        self._apply(change)
        return Turn(changed=True)

    def _wish(self) -> Change | None:
        """What the leader's manager would have moved by itself, were it alone (mode `dry_run`)."""
        if self.terms.mode != "leader" or self.kv.options.mode != "dry_run":
            return None
        plan = self.kv.peer.wishes()[:MOST_MOVES]
        if not plan:
            return None
        return (
            Change(pages=self.kv.peer.pages_after(plan))
            if self.terms.axis == "pipeline"
            else Change(plan=plan)
        )

    def _prepare(self, change: Change) -> Answer:
        """Can this be done here? Changes nothing."""
        if not self._allow(change):
            return Answer(ready=False, reason=Reason.VETO)
        return change.feasible(self.kv)

    def _apply(self, change: Change) -> None:
        """Make the change; a rank that cannot any more stops, and with it the group."""
        try:
            change.apply(self.kv)
            if self.terms.axis == "attention_data":
                self.kv.settle()  # now is the time: every other rank waits as well
        except (ConfigError, DeviceError, UsageError) as error:
            failed = RanksError(
                f"a change that all ranks had agreed on failed on rank {self._transport.rank}: "
                f"{error}; the group has stopped, start it again"
            )
            self._member.fail(failed)
            self._transport.halt(str(error))
            raise failed from error
        _log.info("epoch %d: %s", self._member.epoch, change)

    def _refusal(self, decision: Decision) -> str:
        change = decode(decision.payload, self._names)
        numbers = f": needs {decision.needed:,}, has {decision.available:,}"
        why = f"{decision.reason.name.lower()}{numbers if decision.needed else ''}"
        _log.warning("given up at tick %d (%s): %s", decision.tick, why, change)
        return why


def _anything(change: Change) -> bool:
    """Nobody says no."""
    del change
    return True
