"""What a member refuses, and how it stops, message by message."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvtide.errors import DivergenceError, RankFailedError, RankLostError, RanksError, UsageError
from kvtide.ranks.ballot import Reason
from kvtide.ranks.member import Answer, Decision, Member, Observed, Phase, Rules

if TYPE_CHECKING:
    from kvtide.ranks.member import Axis, Mode
    from kvtide.types import IntArray

QUIET = Observed(facts=(0,))
READY = Answer(ready=True)


def members(
    size: int = 2, axis: Axis = "tensor", mode: Mode = "leader", drain_ticks: int = 3
) -> list[Member]:
    rules = Rules(
        size=size, axis=axis, mode=mode, names=("pages",), payload=1, drain_ticks=drain_ticks
    )
    return [Member(rank, rules) for rank in range(size)]


def tick(group: list[Member], *seen: Observed) -> Decision:
    """All ranks cast and hear all; the one decision they come to."""
    at = group[0].tick
    ballots = [member.cast(what) for member, what in zip(group, seen, strict=True)]
    found: set[Decision] = set()
    for member in group:
        for rank, ballot in enumerate(ballots):
            if decision := member.receive(rank, at, ballot):
                found.add(decision)
    (decision,) = found
    return decision


def proposing(payload: int = 5, **rest: int) -> Observed:
    return Observed(facts=(0,), wants=True, proposal=(payload,), **rest)


def opened(**rules: object) -> list[Member]:
    """A group in which a change is open."""
    group = members(**rules)  # type: ignore[arg-type]
    assert tick(group, proposing(), *[proposing()] * (len(group) - 1)).kind == "prepare"
    return group


# -- the right way ---------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["leader", "replicated"])
def test_a_change_is_proposed_answered_and_made_at_one_tick(mode: Mode) -> None:
    group = opened(mode=mode)
    for member in group:
        member.answer(READY)
    decision = tick(group, QUIET, QUIET)
    assert (decision.kind, decision.payload, decision.epoch) == ("commit", (5,), 1)
    assert {member.phase for member in group} == {Phase.IDLE}
    assert tick(group, QUIET, QUIET).kind == "nothing"


def test_the_largest_need_and_the_smallest_stock_are_reported() -> None:
    group = opened(size=3)
    group[0].answer(READY)
    group[1].answer(Answer(ready=False, reason=Reason.PINNED, needed=7, available=2))
    group[2].answer(Answer(ready=False, reason=Reason.FLOOR, needed=5, available=1))
    decision = tick(group, QUIET, QUIET, QUIET)
    assert (decision.kind, decision.payload, decision.epoch) == ("abort", (5,), 0)
    assert (decision.reason, decision.needed, decision.available) == (Reason.PINNED, 7, 1)


@pytest.mark.parametrize("axis", ["tensor", "pipeline"])
def test_the_least_that_any_rank_offers_is_made(axis: Axis) -> None:
    group = opened(axis=axis)
    group[0].answer(Answer(ready=True, offer=(5,)))
    group[1].answer(Answer(ready=True, offer=(3,)))
    assert tick(group, QUIET, QUIET).payload == (3,)


@pytest.mark.parametrize(("axis", "offer"), [("pipeline", None), ("tensor", (5,))])
def test_a_pipeline_and_whoever_makes_offers_waits_until_nothing_is_in_flight_anywhere(
    axis: Axis, offer: tuple[int, ...] | None
) -> None:
    group = opened(axis=axis)
    for member in group:
        member.answer(Answer(ready=True, offer=offer))
    for flying in ((1, 1), (0, 1)):
        seen = [Observed(facts=(0,), in_flight=n) for n in flying]
        assert tick(group, *seen).kind == "defer"
    assert tick(group, QUIET, QUIET).kind == "commit"


def test_other_axes_wait_until_all_ranks_or_none_have_something_in_flight() -> None:
    group = opened()
    for member in group:
        member.answer(READY)
    assert tick(group, QUIET, Observed(facts=(0,), in_flight=1)).kind == "defer"
    seen = [Observed(facts=(0,), in_flight=n) for n in (2, 1)]
    assert tick(group, *seen).kind == "commit"


def test_a_change_that_is_never_drained_is_given_up() -> None:
    group = opened(drain_ticks=3)
    for member in group:
        member.answer(READY)
    seen = (QUIET, Observed(facts=(0,), in_flight=4))
    kinds = [tick(group, *seen) for _ in range(3)]
    assert [decision.kind for decision in kinds] == ["defer", "defer", "abort"]
    assert (kinds[-1].reason, kinds[-1].available) == (Reason.BUSY, 4)


def test_independent_ranks_pause_together_when_one_wants_to() -> None:
    group = members(axis="attention_data")
    assert tick(group, QUIET, QUIET).kind == "nothing"
    wants = Observed(facts=(0,), wants=True)
    assert tick(group, wants, QUIET).kind == "pause"


def test_steps_count_as_over_when_they_are_on_all_ranks() -> None:
    group = members()
    seen = [Observed(facts=(0,), completed=n) for n in (9, 7)]
    assert tick(group, *seen).completed == 7


# -- misuse ----------------------------------------------------------------------------------------


def test_a_second_ballot_before_the_first_is_concluded_is_misuse() -> None:
    (member, _) = members()
    member.cast(QUIET)
    with pytest.raises(UsageError, match="tick 0 is not concluded"):
        member.cast(QUIET)


def test_an_open_proposal_must_be_answered_before_the_next_ballot() -> None:
    group = opened()
    with pytest.raises(UsageError, match="answer it"):
        group[0].cast(QUIET)


def test_an_answer_without_a_proposal_is_misuse() -> None:
    (member, _) = members()
    with pytest.raises(UsageError, match="no proposal is open"):
        member.answer(READY)


def test_who_has_not_voted_cannot_conclude() -> None:
    first, second = members()
    ballot = second.cast(QUIET)
    with pytest.raises(UsageError, match="cast it first"):
        first.conclude(None)  # type: ignore[arg-type]
    assert first.receive(1, 0, ballot) is None
    assert first.receive(0, 0, first.cast(QUIET)) is not None


# -- what the network does -------------------------------------------------------------------------


def test_a_ballot_that_comes_twice_counts_once() -> None:
    first, second = members()
    mine, theirs = first.cast(QUIET), second.cast(QUIET)
    assert first.receive(1, 0, theirs) is None
    assert first.receive(1, 0, theirs) is None
    assert first.receive(0, 0, mine) is not None
    assert first.receive(1, 0, theirs) is None  # later still


def test_two_different_ballots_of_one_rank_at_one_tick_stop_the_group() -> None:
    first, second = members()
    theirs = second.cast(QUIET)
    first.receive(1, 0, theirs)
    with pytest.raises(RankFailedError, match="rank 1 sent a ballot of tick 0 out of turn"):
        first.receive(1, 0, theirs - 1)
    assert first.phase is Phase.STOPPED


def test_a_rank_may_be_one_tick_ahead_and_no_more() -> None:
    first, second = members()
    mine, theirs = first.cast(QUIET), second.cast(QUIET)
    second.receive(0, 0, mine)
    second.receive(1, 0, theirs)
    ahead = second.cast(QUIET)
    first.receive(1, 1, ahead)  # overtakes that of tick 0
    first.receive(0, 0, mine)
    decision = first.receive(1, 0, theirs)
    assert decision is not None
    assert decision.tick == 0
    assert first.receive(0, 1, first.cast(QUIET)) is not None
    with pytest.raises(RankFailedError, match="tick 4 out of turn"):
        first.receive(1, 4, ahead)


def test_a_deadline_names_the_ranks_that_said_nothing() -> None:
    group = members(size=4)
    group[0].receive(2, 0, group[2].cast(QUIET))
    group[0].receive(0, 0, group[0].cast(QUIET))
    error = group[0].expire()
    assert isinstance(error, RankLostError)
    assert "ranks 1, 3 were not heard at tick 0" in str(error)
    assert "rank 2 was not heard" in str(group[1].expire([2]))


# -- stopping --------------------------------------------------------------------------------------


def stop_all(group: list[Member], *seen: Observed) -> set[str]:
    """All cast and hear all, and all raise; what they say."""
    at = group[0].tick
    ballots: list[IntArray] = [m.cast(what) for m, what in zip(group, seen, strict=True)]
    said: set[str] = set()
    for member in group:
        for rank, ballot in enumerate(ballots[:-1]):
            member.receive(rank, at, ballot)
        with pytest.raises(RanksError) as raised:
            member.receive(len(group) - 1, at, ballots[-1])
        said.add(f"{type(raised.value).__name__}: {raised.value}")
    return said


def test_ranks_that_differ_all_stop_and_are_told_in_what() -> None:
    (told,) = stop_all(members(), Observed(facts=(3,)), Observed(facts=(4,)))
    assert told == "DivergenceError: at tick 0 ranks differ: pages from 3 to 4"


def test_replicated_plans_that_differ_stop_all() -> None:
    (told,) = stop_all(members(mode="replicated"), proposing(5), proposing(6))
    assert "some ranks propose different plans" in told
    (told,) = stop_all(members(mode="replicated"), proposing(5), QUIET)
    assert "some ranks propose a plan, others none" in told


def test_a_rank_in_trouble_stops_all() -> None:
    (told,) = stop_all(members(), QUIET, Observed(facts=(0,), trouble=Reason.ENGINE))
    assert told.startswith("RankFailedError: at tick 0 a rank reported")
    assert "engine" in told


def test_after_the_end_every_verb_raises_the_first_error() -> None:
    first, second = members()
    ballot = second.cast(QUIET)
    error = first.fail(RanksError("memory is gone"))
    assert first.halt(1, "later") is error
    assert first.expire() is error
    for verb in (
        lambda: first.cast(QUIET),
        lambda: first.receive(1, 0, ballot),
        lambda: first.conclude(None),  # type: ignore[arg-type]
    ):
        with pytest.raises(RanksError, match="memory is gone"):
            verb()
    with pytest.raises(UsageError, match="no proposal is open"):
        first.answer(READY)


def test_a_halt_says_who_has_stopped_and_why() -> None:
    (first, _) = members()
    error = first.halt(1, "out of memory")
    assert isinstance(error, RankFailedError)
    assert str(error) == "rank 1 has stopped: out of memory"
    assert isinstance(first.error, RankFailedError)
    assert not isinstance(first.error, DivergenceError)
