"""The protocol keeps its promises in every state that two or three ranks can come to; and an
explorer of broken members says what they break.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from tests.ranks.explorer import Explorer, Found, Violation
from tests.ranks.world import Case

from kvtide.ranks.ballot import Reason, Tally, Vote, fold
from kvtide.ranks.member import Answer, Decision, Member, Observed, Phase

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvtide.errors import RanksError
    from kvtide.types import IntArray

    Record = Callable[[str, object], None]

FAULTS = {"losses": 1, "crashes": 1, "failures": 1, "early_deadlines": 1}
THREE = {"size": 3, "ticks": 3, "proposals": (5,), "proposal_ticks": 1, "mode": "replicated"}


def named(cases: dict[str, tuple[Case, int]]) -> pytest.MarkDecorator:
    """Each case with the number of states that it must have at least."""
    return pytest.mark.parametrize(("case", "least"), cases.values(), ids=cases)


def explore(case: Case, least: int, record: Record) -> Found:
    found = Explorer(case).run()
    record("states", found.states)
    print(f"{found.states:,} states, {found.transitions:,} transitions, {found.ends:,} ends")
    print(f"decisions {dict(found.kinds)}, stops {dict(found.errors)}")
    assert found.states >= least
    return found


@named(
    {
        "tensor-leader": (Case(in_flight=(0, 1)), 3_000),
        "context-replicated": (Case(axis="context", mode="replicated", in_flight=(0, 1)), 3_000),
        "tensor-sizes": (Case(in_flight=(0, 1), offers=(5,)), 3_000),
        "pipeline-leader": (Case(axis="pipeline", in_flight=(0, 1), offers=(5, 3)), 9_000),
        "pipeline-replicated": (
            Case(axis="pipeline", mode="replicated", in_flight=(0, 1), offers=(5, 3)),
            9_000,
        ),
        "three-tensor-leader": (Case(size=3, ticks=3, proposal_ticks=1), 10_000),
    }
)
def test_whatever_the_order_of_messages_ranks_change_together_or_not_at_all(
    case: Case, least: int, record_property: Record
) -> None:
    found = explore(case, least, record_property)
    assert found.kinds["commit"] > 0
    assert found.reasons[Reason.PINNED] > 0
    if case.in_flight != (0,):
        assert found.kinds["defer"] > 0
        assert found.reasons[Reason.BUSY] > 0
    # Nobody stops, unless ranks that must decide the same did not.
    assert set(found.errors) == ({"DivergenceError"} if case.mode == "replicated" else set())


def test_whatever_the_order_of_messages_independent_ranks_pause_together(
    record_property: Record,
) -> None:
    found = explore(Case(axis="attention_data", in_flight=(0, 1)), 4_000, record_property)
    assert found.kinds["pause"] > 0
    assert found.kinds["defer"] > 0
    assert not found.errors


@named(
    {
        "tensor-leader": (Case(**FAULTS), 7_000),
        "tensor-replicated-copies": (
            Case(mode="replicated", proposal_ticks=1, copies=1, **FAULTS),
            50_000,
        ),
        "tensor-two-of-each": (Case(losses=2, crashes=2, early_deadlines=2), 7_000),
        "pipeline-replicated": (
            Case(
                axis="pipeline", mode="replicated", proposals=(5,), proposal_ticks=1,
                in_flight=(0, 1), offers=(5, 3), **FAULTS,
            ),
            28_000,
        ),
        "attention": (
            Case(axis="attention_data", proposal_ticks=1, in_flight=(0, 1), **FAULTS),
            12_000,
        ),
        "three-tensor-losses": (Case(**THREE, losses=1), 33_000),
        "three-tensor-crashes": (Case(**THREE, crashes=1), 29_000),
        "three-tensor-failures": (Case(**THREE, failures=1), 5_000),
        "three-tensor-deadlines": (Case(**THREE, early_deadlines=1), 25_000),
        "three-pipeline-crashes": (
            Case(**THREE, axis="pipeline", offers=(5, 3), may_refuse=False, crashes=1),
            29_000,
        ),
        "three-attention-losses": (Case(**THREE, axis="attention_data", losses=1), 6_000),
        "three-attention-crashes": (Case(**THREE, axis="attention_data", crashes=1), 6_000),
        "three-attention-deadlines": (
            Case(**THREE, axis="attention_data", early_deadlines=1),
            5_000,
        ),
    }
)  # fmt: skip
def test_whatever_goes_wrong_no_rank_waits_for_ever_or_goes_on_half_applied(
    case: Case, least: int, record_property: Record
) -> None:
    found = explore(case, least, record_property)
    assert found.kinds["pause" if case.axis == "attention_data" else "commit"] > 0
    assert found.errors["RankLostError"] > 0
    assert found.errors["RankFailedError"] > 0
    assert ("DivergenceError" in found.errors) == (None in case.proposals and case.mode != "leader")
    assert found.errors["RanksError"] > 0 or not case.failures


@named(
    {
        "tensor-leader": (Case(ticks=3, lies=1, losses=1, crashes=1), 7_000),
        "three-replicated": (Case(**THREE, may_refuse=False, lies=1), 2_000),
    }
)
def test_a_rank_whose_facts_differ_stops_all_who_conclude_that_tick(
    case: Case, least: int, record_property: Record
) -> None:
    assert explore(case, least, record_property).errors["DivergenceError"] > 0


# -- broken members --------------------------------------------------------------------------------


class Hasty(Member):
    """Counts the votes that have come, without waiting for the rest."""

    def receive(self, rank: int, tick: int, ballot: IntArray) -> Decision | None:
        found = super().receive(rank, tick, ballot)
        if found is None and self.is_cast and self.phase is Phase.VOTING and self._came:
            return self.conclude(Tally(fold(list(self._came.values())), self.rules.shape))
        return found


class Deaf(Member):
    """Goes ahead although a rank refuses."""

    def _count(self, tally: Tally) -> Decision:
        return self._go(tally) if tally.vote.low == Vote.REFUSED else super()._count(tally)

    def _go(self, tally: Tally) -> Decision:
        payload = self._open
        self._close()
        self.epoch += 1
        return self._say(tally, "commit", payload=payload)


class Rushing(Deaf):
    """Changes pages although a step is still in flight, somewhere."""

    def _count(self, tally: Tally) -> Decision:
        return self._go(tally) if tally.vote.low == Vote.READY else super()._count(tally)


class Stubborn(Member):
    """Takes the votes it has for all of them when its deadline passes, and goes on."""

    def expire(self, missing: Sequence[int] | None = None) -> RanksError:
        if not self._came:
            return super().expire(missing)
        came = Tally(fold(list(self._came.values())), self.rules.shape)
        return self.conclude(came)  # type: ignore[return-value]


class Careless(Member):
    """Goes on although it could not apply what all had agreed on."""

    def fail(self, error: RanksError) -> RanksError:
        return error


class Blind(Member):
    """Does not look whether ranks differ."""

    def _require_alike(self, tally: Tally) -> None:
        pass


class Presumptuous(Member):
    """Proposes, though it is not the leader."""

    def cast(self, seen: Observed) -> IntArray:
        rules = self.rules
        self.rules = replace(rules, mode="replicated")
        try:
            return super().cast(seen)
        finally:
            self.rules = rules


class Sleeper(Member):
    """Hears all, and never concludes."""

    def receive(self, rank: int, tick: int, ballot: IntArray) -> Decision | None:
        del rank, tick, ballot


class Crude(Member):
    """Lets an error of its own out."""

    def answer(self, answer: Answer) -> None:
        raise ValueError("no answer")


class Undead(Member):
    """Votes on after it has stopped."""

    def _require_alive(self) -> None:
        pass


class Prophet(Member):
    """Reports steps as over that are so only here."""

    def _say(self, tally: Tally, *args: object, **rest: object) -> Decision:
        said = super()._say(tally, *args, **rest)  # type: ignore[arg-type]
        return replace(said, completed=tally.completed.high)


class Moody(Member):
    """Understands a tick a little differently than others do."""

    def _say(self, tally: Tally, *args: object, **rest: object) -> Decision:
        said = super()._say(tally, *args, **rest)  # type: ignore[arg-type]
        return replace(said, needed=said.needed + self.rank)


class Generous(Member):
    """Takes its own proposal where a stage can offer only less."""

    def _count(self, tally: Tally) -> Decision:
        opened, said = self._open, super()._count(tally)
        return replace(said, payload=opened)


BROKEN = {
    "hasty": (Hasty, Case(), "have not voted"),
    "deaf": (Deaf, Case(), "ready=False.* on these votes|on these votes.*ready=False"),
    "rushing": (Rushing, Case(in_flight=(0, 1)), "on these votes"),
    "stubborn": (Stubborn, Case(early_deadlines=1), "have not voted|one rank decides"),
    "careless": (Careless, Case(failures=1), "have applied"),
    "blind": (Blind, Case(lies=1), "though ranks differ"),
    "presumptuous": (Presumptuous, Case(), "prepare.*on these votes"),
    "sleeper": (Sleeper, Case(), "waits for ever"),
    "crude": (Crude, Case(), "raised ValueError"),
    "undead": (Undead, Case(crashes=1), "a stopped rank's cast|still votes"),
    "moody": (Moody, Case(), "one rank decides"),
    "prophet": (Prophet, Case(), "not over everywhere"),
    "generous": (Generous, Case(axis="pipeline", offers=(5, 3)), "on these votes"),
}


@pytest.mark.parametrize(("member", "case", "says"), BROKEN.values(), ids=BROKEN)
def test_a_member_that_breaks_a_promise_is_found_out(
    member: type[Member], case: Case, says: str
) -> None:
    """Alone among sound ones, and where all are broken alike. The way there is told."""
    for members in ((Member, member), (member, member)):
        with pytest.raises(Violation, match=says) as raised:
            Explorer(case, *members).run()
        assert "after\n" in str(raised.value)
