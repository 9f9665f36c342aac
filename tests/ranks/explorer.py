"""Every state that a small group of `kvtide.ranks.member.Member` can come to.

The members are the real ones; everything around them is made up and may go wrong: a network that
delays, reorders, loses and copies messages, ranks that crash or cannot apply a change, deadlines
that pass. What each rank says is remembered here, apart from the members, and every decision is
held against it.

A transition is one thing that happens: a rank acts on its last decision and casts its next ballot,
a message arrives, is lost or copied, a deadline passes, a rank dies. Ticks, messages and faults are
bounded, and no transition can be undone, so there are no cycles: a group that could wait for ever
shows as a state from which nothing can happen while a live rank waits.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
from tests.ranks.world import Case, Message, Rank, Said, World, fresh

from kvtide.errors import DivergenceError, RankFailedError, RanksError
from kvtide.ranks.ballot import Reason
from kvtide.ranks.member import Answer, Decision, Member, Observed, Phase, Rules

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.ranks.world import Payload

_HALT = -1
"""Stands for a tick in messages of a rank that stops."""


class Violation(AssertionError):
    """The members broke a promise; the message has the steps that lead there."""


@dataclass(slots=True)
class Found:
    """What an exploration came across."""

    states: int = 0
    transitions: int = 0
    ends: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    """Decisions by kind, once a transition."""
    errors: Counter[str] = field(default_factory=Counter)
    """Ends of ranks by the class of their error, once a transition."""
    reasons: Counter[Reason] = field(default_factory=Counter)
    """Aborts by reason."""


class Explorer:
    """Visits all states of a case once, with members of the given classes, one for each rank."""

    def __init__(self, case: Case, *members: type[Member]) -> None:
        self.case = case
        self.found = Found()
        self._rules = Rules(
            size=case.size,
            axis=case.axis,
            mode=case.mode,
            names=("fact",),
            payload=1,
            drain_ticks=case.drain_ticks,
        )
        self._members = members or (Member,) * case.size

    def run(self) -> Found:
        """Visit everything. Raises Violation at the first promise broken."""
        ranks = tuple(Rank(make(r, self._rules)) for r, make in enumerate(self._members))
        faults = ("lies", "losses", "copies", "crashes", "failures", "early_deadlines")
        start = World(ranks, (), Counter({f: getattr(self.case, f) for f in faults}), {}, {})
        seen = {start.key}
        stack: list[tuple[World, object]] = [(start, None)]
        while stack:
            world, trace = stack.pop()
            try:
                last = self._visit(world, trace, seen, stack)
            except Violation as error:
                raise Violation(f"{error}\n{_told(trace)}") from error
            self.found.ends += last
        self.found.states = len(seen)
        return self.found

    def _visit(
        self, world: World, trace: object, seen: set[object], stack: list[tuple[World, object]]
    ) -> bool:
        """Put every new state that follows on the stack; whether none follows, new or not."""
        is_last = True
        for label, following in self._following(world):
            is_last = False
            self.found.transitions += 1
            following.forget()
            key = following.key
            if key not in seen:
                seen.add(key)
                stack.append((following, (label, trace)))
        if is_last:
            self._require_ended(world)
        return is_last

    def _following(self, world: World) -> Iterator[tuple[str, World]]:
        for rank in world.ranks:
            if rank.is_running and not self._is_done(rank):
                yield from self._of_rank(world, rank)
        for message in dict.fromkeys(world.flight):
            yield from self._of_message(world, message)

    def _is_done(self, rank: Rank) -> bool:
        return rank.member.tick == self.case.ticks and rank.todo is None

    # -- ranks ---------------------------------------------------------------------------------

    def _of_rank(self, world: World, rank: Rank) -> Iterator[tuple[str, World]]:
        r = rank.member.rank
        if not rank.member.is_cast:
            for acted in self._acts(world, rank):
                yield from self._casts(acted, acted.ranks[r])
        elif may := self._may_expire(world, rank):
            late = world.copy()
            if may == "early":
                late.spend("early_deadlines")
            yield f"deadline of {r}", self._expired(late, fresh(rank))
        if world.faults["crashes"]:
            dead = world.copy()
            dead.spend("crashes")
            dead.put(replace(rank, is_dead=True, known=None))
            yield f"{r} dies", dead

    def _acts(self, world: World, rank: Rank) -> Iterator[World]:
        """All ways in which a rank may act on its last decision."""
        case, todo = self.case, rank.todo
        kind = "nothing" if todo is None else todo.kind
        reopened = rank.member.phase is Phase.DRAINING
        if kind == "prepare" or reopened:
            offers = [None if offer is None else (offer,) for offer in case.offers]
            answers = [Answer(ready=True, offer=offer) for offer in offers]
            if case.may_refuse:
                answers.append(Answer(ready=False, reason=Reason.PINNED, needed=7, available=2))
            for answer in answers:
                yield self._answered(world, rank, answer)
            return
        new = fresh(rank)
        new.todo = None
        if todo is not None and kind in ("commit", "pause"):
            done = todo.payload if kind == "commit" else (todo.epoch,)
            new.applied = (*rank.applied, done)
            if world.faults["failures"]:
                yield self._failed(world, rank)
        acted = world.copy()
        acted.put(new)
        yield acted

    def _answered(self, world: World, rank: Rank, answer: Answer) -> World:
        new = fresh(rank)
        new.todo, new.answer = None, answer
        with _only_ranks_errors("answer"):
            new.member.answer(answer)
        acted = world.copy()
        acted.put(new)
        return acted

    def _failed(self, world: World, rank: Rank) -> World:
        """All were ready, and it does not work: the rank has not applied the change."""
        acted, new = world.copy(), fresh(rank)
        acted.spend("failures")
        new.todo = None
        acted.put(new)
        new.member.fail(RanksError("a change failed"))
        if new.member.error is not None:
            self._stopped(acted, new, tells=True)
        return acted

    def _casts(self, world: World, rank: Rank) -> Iterator[tuple[str, World]]:
        """All that a rank may say at its next tick; nothing, if it has stopped or that was all."""
        r, tick = rank.member.rank, rank.member.tick
        if not rank.is_running or tick == self.case.ticks:
            yield f"{r} acts", world
            return
        for said in self._sayings(world, rank):
            new, cast = fresh(rank), world.copy()
            if said.facts != (0,):
                cast.spend("lies")
            with _only_ranks_errors("cast"):
                words = new.member.cast(
                    Observed(
                        facts=said.facts,
                        in_flight=said.in_flight,
                        completed=tick + r,
                        wants=said.proposal is not None,
                        proposal=None if said.proposal is None else (said.proposal,),
                    )
                )
            cast.put(new)
            cast.said = {**world.said, (r, tick): said}
            everybody = list(range(self.case.size))
            if self.case.size > 2:  # to keep it small; a rank hears itself at once
                everybody.remove(r)
            cast.send(r, tick, words.tobytes(), everybody)
            if self.case.size > 2:
                cast = self._delivered(cast, Message(r, r, tick, words.tobytes()))
            yield f"{r} says {said}", cast

    def _sayings(self, world: World, rank: Rank) -> Iterator[Said]:
        case, member = self.case, rank.member
        is_idle = member.phase is Phase.IDLE
        proposals: tuple[int | None, ...] = (None,)
        if is_idle and member.tick < case.proposal_ticks:
            follows = case.mode == "leader" and member.rank > 0
            proposals = (None, 9) if follows else case.proposals
        may_fly = not is_idle or case.axis == "attention_data"
        for proposal in proposals:
            for in_flight in case.in_flight if may_fly else (0,):
                for fact in (0, 1) if world.faults["lies"] else (0,):
                    answer = None if is_idle else rank.answer
                    yield Said((fact,), proposal, answer, in_flight)

    def _may_expire(self, world: World, rank: Rank) -> str:
        """Why a deadline may pass: for nothing, or because something cannot come any more."""
        me, tick = rank.member.rank, rank.member.tick
        coming = {m.source for m in world.flight if m.target == me and m.tick == tick}
        for other in world.ranks:
            r = other.member.rank
            if (r, tick) in rank.heard or r in coming:
                continue
            will_say = other.is_running and (other.member.tick, other.member.is_cast) <= (tick, 0)
            if not will_say:
                return "lost"
        return "early" if world.faults["early_deadlines"] else ""

    def _expired(self, world: World, rank: Rank) -> World:
        with _only_ranks_errors("expire"):
            after = rank.member.expire()
        world.put(rank)
        if rank.member.error is not None:
            self._stopped(world, rank, tells=True)
        else:  # a member that goes on must at least be right about it
            self._concluded(world, rank, after)
        return world

    def _stopped(self, world: World, rank: Rank, *, tells: bool) -> None:
        error = rank.member.error
        if not isinstance(error, RanksError):
            raise Violation(f"rank {rank.member.rank} stopped with {error!r}")
        self.found.errors[type(error).__name__] += 1
        try:
            with _only_ranks_errors("a stopped rank's cast"):
                rank.member.cast(Observed(facts=(0,)))
        except RanksError as again:
            if again is not error:
                raise Violation(f"first {error!r}, then {again!r}") from again
        else:
            raise Violation(f"rank {rank.member.rank} has stopped and still votes")
        if tells:
            others = [r for r in range(self.case.size) if r != rank.member.rank]
            world.send(rank.member.rank, _HALT, b"", others)

    # -- messages ------------------------------------------------------------------------------

    def _of_message(self, world: World, message: Message) -> Iterator[tuple[str, World]]:
        name = f"{message.source}->{message.target} at {message.tick}"
        arrived = world.copy()
        arrived.flight = world.without(message)
        yield f"arrives {name}", self._delivered(arrived, message)
        is_free = message.tick == _HALT or world.ranks[message.source].is_dead
        if message.source != message.target and (is_free or world.faults["losses"]):
            lost = world.copy()
            lost.flight = world.without(message)
            if not is_free:
                lost.spend("losses")
            yield f"lost {name}", lost
        if world.faults["copies"]:
            twice = world.copy()
            twice.spend("copies")
            twice.flight = tuple(sorted((*world.flight, message)))
            yield f"copied {name}", twice

    def _delivered(self, world: World, message: Message) -> World:
        rank = fresh(world.ranks[message.target])
        world.put(rank)
        if message.tick == _HALT:
            rank.member.halt(message.source, "told so")
            self._stopped(world, rank, tells=False)
            return world
        rank.heard |= {(message.source, message.tick)}
        ballot = np.frombuffer(message.words, np.int64)
        tick = rank.member.tick
        try:
            with _only_ranks_errors("receive"):
                decision = rank.member.receive(message.source, message.tick, ballot)
        except RanksError as error:
            self._require_cause(world, tick, error)
            self._stopped(world, rank, tells=isinstance(error, RankFailedError))
            return world
        if decision is not None:
            self._concluded(world, rank, decision)
        return world

    # -- promises ------------------------------------------------------------------------------

    def _concluded(self, world: World, rank: Rank, decision: object) -> None:
        """A rank has decided: hold it against what all have said, and what others decided."""
        assert isinstance(decision, Decision), decision
        tick = decision.tick
        told = {r: world.said.get((r, tick)) for r in range(self.case.size)}
        silent = [r for r, said in told.items() if said is None]
        if silent:
            raise Violation(f"{decision} though ranks {silent} have not voted")
        votes = [said for said in told.values() if said is not None]
        if self._differ(votes):
            raise Violation(f"{decision} though ranks differ: {votes}")
        self._require_valid(rank, decision, votes)
        mine = (decision, rank.applied)
        first = world.decided.get(tick, mine)
        if first[0] != decision:
            raise Violation(f"one rank decides {first[0]}, another {decision}")
        if first[1] != rank.applied:
            raise Violation(f"at tick {tick} ranks have applied {first[1]} and {rank.applied}")
        world.decided = {**world.decided, tick: mine}
        rank.todo = decision
        rank.heard = frozenset(at for at in rank.heard if at[1] > tick)
        if decision.kind == "prepare":
            rank.opened = decision.payload
        self.found.kinds[decision.kind] += 1
        if decision.kind == "abort":
            self.found.reasons[decision.reason] += 1

    def _require_valid(self, rank: Rank, decision: Decision, votes: list[Said]) -> None:
        """Hold a decision against what the explorer knows that all have said."""
        if decision.completed != decision.tick:  # rank r has completed tick + r
            raise Violation(f"{decision} counts steps that are not over everywhere")
        flying = {said.in_flight > 0 for said in votes}
        is_whole = self.case.axis == "pipeline" or self.case.offers != (None,)
        is_drained = flying == {False} if is_whole else len(flying) == 1
        agreed, proposed = self._agreed(rank, votes), self._proposed(votes)
        refused = any(said.answer is not None and not said.answer.ready for said in votes)
        given_up = decision.reason is Reason.BUSY and not is_drained
        is_idle = rank.member.phase is Phase.IDLE
        is_right = {
            "nothing": is_idle and proposed == {None},
            "prepare": proposed == set(decision.payload),
            "commit": is_drained and decision.payload == agreed,
            "abort": (refused or given_up) and decision.payload == rank.opened,
            "defer": not is_drained and agreed is not None,
            "pause": is_drained and proposed != {None},
        }
        if not is_right[decision.kind]:
            raise Violation(f"{decision} on these votes: {votes}")

    def _proposed(self, votes: list[Said]) -> set[int | None]:
        """What those have proposed whose proposals count."""
        is_led = self.case.mode == "leader" and self.case.axis != "attention_data"
        return {said.proposal for said in (votes[:1] if is_led else votes)}

    def _agreed(self, rank: Rank, votes: list[Said]) -> Payload | None:
        """What may be done if all are ready; None if one refuses, or has not been asked."""
        if self.case.axis == "attention_data":
            return ()
        answers = [said.answer for said in votes if said.answer is not None and said.answer.ready]
        if len(answers) < self.case.size:
            return None
        offers = [answer.offer for answer in answers if answer.offer is not None]
        return min(offers, default=rank.opened)

    def _differ(self, votes: list[Said]) -> bool:
        """Whether what must be equal is not."""
        if len({said.facts for said in votes}) > 1:
            return True
        proposals = self._proposed([said for said in votes if said.answer is None])
        return self.case.axis != "attention_data" and len(proposals) > 1

    def _require_cause(self, world: World, tick: int, error: RanksError) -> None:
        """A rank that stops at a ballot must have found a difference that there is."""
        votes = [said for (_, at), said in world.said.items() if at == tick]
        if not (isinstance(error, DivergenceError) and self._differ(votes)):
            raise Violation(f"a rank stopped without a cause: {error!r} on {votes}")

    def _require_ended(self, world: World) -> None:
        """Nothing can happen any more: nobody may still be waiting."""
        for rank in world.ranks:
            if rank.is_running and not self._is_done(rank):
                raise Violation(f"rank {rank.member.rank} waits for ever at {rank.member.tick}")
        done = {rank.applied for rank in world.ranks if rank.is_running}
        if len(done) > 1:
            raise Violation(f"at the end ranks have applied {done}")


class _only_ranks_errors:
    """Any other error that comes out of a member is a violation."""

    def __init__(self, verb: str) -> None:
        self._verb = verb

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and not isinstance(error, RanksError):
            raise Violation(f"{self._verb} raised {error!r}") from error


def _told(trace: object) -> str:
    steps: list[str] = []
    while isinstance(trace, tuple):
        label, trace = trace
        steps.append(f"  {label}")
    return "after\n" + "\n".join(reversed(steps))
