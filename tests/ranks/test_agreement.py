"""Managers that change capacity together: in turn from one thread, and in a thread each."""

from __future__ import annotations

from time import monotonic

import pytest
from tests.ranks.groups import Group

from kvtide import ConfigError, Move
from kvtide.errors import DivergenceError, RankFailedError, RankLostError, RanksError, UsageError
from kvtide.ranks import Agreement, Change, LocalHub, Terms, Turn

PLAN = Change(plan=(Move(donor="full", receiver="window_8", granules=3, reason="test"),))
BACK = Change(plan=(Move(donor="window_8", receiver="full", granules=3, reason="test"),))
SIZES = Change(pages={"full": 100, "window_8": 140})
MODES = pytest.mark.parametrize("mode", ["leader", "replicated"])


def granules(group: Group) -> list[list[int]]:
    for kv in group.kvs:
        kv.check()
    return [[pool.num_mapped for pool in kv.pools.values()] for kv in group.kvs]


# -- together, or not at all -----------------------------------------------------------------------


@MODES
@pytest.mark.parametrize("axis", ["tensor", "context"])
def test_a_plan_is_carried_out_at_one_boundary_on_all_ranks(axis: str, mode: str) -> None:
    group = Group(Terms(axis=axis, mode=mode, every=1), size=3)  # type: ignore[arg-type]
    group.start(range(30))
    assert group.boundary() == [Turn()] * 3
    group.propose(PLAN)
    assert group.boundary() == [Turn()] * 3  # said
    assert group.boundary() == [Turn()] * 3  # heard, and answered
    assert granules(group) == [[8, 8]] * 3
    assert group.boundary() == [Turn(changed=True)] * 3
    assert granules(group) == [[5, 11]] * 3


@MODES
def test_in_threads_ranks_change_at_the_same_step(mode: str) -> None:
    group = Group(Terms(mode=mode, every=4), size=3)  # type: ignore[arg-type]
    changed: list[list[int]] = [[], [], []]

    def work(rank: int) -> None:
        for step in range(40):
            if step in (3, 20):
                group.agreements[rank].propose(PLAN if step == 3 else BACK)
            if group.agreements[rank].boundary().changed:
                changed[rank].append(step)

    assert group.in_threads(work) == [None] * 3
    assert changed[0] == changed[1] == changed[2]
    assert len(changed[0]) == 2
    assert granules(group) == [[8, 8]] * 3


@pytest.mark.parametrize("axis", ["tensor", "pipeline"])
def test_sizes_are_changed_as_far_as_all_ranks_can(axis: str) -> None:
    group = Group(Terms(axis=axis, every=1))  # type: ignore[arg-type]
    group.propose(Change(pages={"full": 100, "window_8": 200}))
    assert group.until_over() == [Turn(changed=True)] * 2
    assert group.pages() == [{"full": 100, "window_8": 143}] * 2


def test_budgets_are_changed_together() -> None:
    group = Group()
    half = 10 * group.memories[0].granule_bytes
    group.propose(Change(budget_bytes=half))
    assert group.until_over() == [Turn(changed=True)] * 2
    assert granules(group) == [[5, 5]] * 2


def test_what_one_rank_cannot_do_is_done_nowhere_and_all_are_told_why() -> None:
    group = Group(size=3)
    group.propose(Change(pages={"full": 1}))
    turns = group.until_over()
    assert turns == [Turn(refused="floor: needs 1, has 0")] * 3
    assert granules(group) == [[8, 8]] * 3
    group.propose(PLAN)  # the group goes on
    assert group.until_over() == [Turn(changed=True)] * 3


def test_the_engine_of_any_rank_may_say_no() -> None:
    asked: list[Change] = []

    def refuse(change: Change) -> bool:
        asked.append(change)
        return False

    group = Group(allow=[lambda _: True, refuse])
    group.propose(PLAN)
    assert group.until_over() == [Turn(refused="veto")] * 2
    assert granules(group) == [[8, 8]] * 2
    assert [[(m.donor, m.granules) for m in change.plan] for change in asked] == [[("full", 3)]]
    facts = [agreement.facts() for agreement in group.agreements]
    assert [(f.aborts, f.refusals, f.commits) for f in facts] == [(1, 0, 0), (1, 1, 0)]


def test_only_the_leader_proposes_and_what_others_want_is_not_done() -> None:
    group = Group(Terms(mode="leader", every=1))
    assert [agreement.is_leader for agreement in group.agreements] == [True, False]
    group.agreements[1].propose(BACK)
    assert group.boundary() == [Turn()] * 2  # the first ballots are only on their way
    for _ in range(5):
        assert group.boundary() == [Turn(wanted=True)] * 2
    assert group.agreements[1].is_open
    group.agreements[0].propose(PLAN)
    assert group.until_over() == [Turn(changed=True)] * 2
    assert granules(group) == [[5, 11]] * 2
    assert not any(agreement.is_open for agreement in group.agreements)


@MODES
def test_a_change_proposed_while_another_is_on_its_way_is_made_after_it(mode: str) -> None:
    group = Group(Terms(mode=mode, every=1))  # type: ignore[arg-type]
    group.propose(PLAN)
    group.boundary()
    group.propose(BACK)  # the first has been said, and is not open yet
    assert group.until_over() == [Turn(changed=True)] * 2
    assert granules(group) == [[5, 11]] * 2
    assert group.until_over() == [Turn(changed=True)] * 2
    assert granules(group) == [[8, 8]] * 2


def test_a_leader_proposes_what_its_manager_would_have_moved_by_itself() -> None:
    group = Group(Terms(mode="leader", every=1), mode="dry_run")
    for turn in range(60):
        for seq, kv in zip(group.start(range(64 * turn, 64 * turn + 60)), group.kvs, strict=True):
            kv.close([seq])  # leaves pages in both pools; those of the window are worth nothing
        if any(turn.changed for turn in group.boundary()):
            break
    after = granules(group)
    assert after[0] == after[1]
    assert after[0][0] > after[0][1]


# -- stopping --------------------------------------------------------------------------------------


def test_replicated_plans_that_differ_stop_all_ranks() -> None:
    group = Group()
    group.agreements[0].propose(PLAN)
    group.agreements[1].propose(BACK)

    def work(rank: int) -> None:
        for _ in range(5):
            group.agreements[rank].boundary()

    raised = group.in_threads(work)
    assert [type(error) for error in raised] == [DivergenceError] * 2
    assert "different plans" in str(raised[0])
    assert granules(group) == [[8, 8]] * 2


def test_ranks_that_differ_are_told_by_rank_in_what() -> None:
    group = Group(size=3)
    odd = group.kvs[1].open(range(9))
    assert group.kvs[1].admit([odd])

    def work(rank: int) -> None:
        for _ in range(5):
            group.agreements[rank].boundary()

    raised = group.in_threads(work)
    assert [type(error) for error in raised] == [DivergenceError] * 3
    for error in raised:
        assert "free pages of pool 'full' from 124 to 127" in str(error)
        assert "by rank free pages of pool 'full': {0: 127, 1: 124, 2: 127}" in str(error)
    for rank, agreement in enumerate(group.agreements):
        with pytest.raises(DivergenceError) as again:
            agreement.boundary()
        assert again.value is raised[rank]


def test_a_halt_wakes_the_others_long_before_their_deadline() -> None:
    group = Group(Terms(every=1, deadline=60.0), size=3)
    began = monotonic()

    def work(rank: int) -> None:
        agreement = group.agreements[rank]
        agreement.boundary()
        if rank == 1:
            agreement.halt("the model is gone")
        for _ in range(3):
            agreement.boundary()

    raised = group.in_threads(work)
    assert monotonic() - began < 30
    assert [type(error) for error in raised] == [RankFailedError, RanksError, RankFailedError]
    assert str(raised[0]) == str(raised[2]) == "rank 1 has stopped: the model is gone"
    assert str(raised[1]) == "this rank has stopped: the model is gone"


def test_a_lost_rank_is_named_and_the_error_stays() -> None:
    group = Group(Terms(every=1, deadline=0.3), size=3)
    group.boundary()
    group.boundary()
    group.hub.lose(2)
    group.boundary()  # concludes the tick begun before
    with pytest.raises(RankLostError, match=r"rank 2 was not heard at tick 2 within 0.3 s") as lost:
        group.agreements[0].boundary()
    for _ in range(2):
        with pytest.raises(RankLostError) as again:
            group.agreements[0].boundary()
        assert again.value is lost.value
    with pytest.raises(RankFailedError, match="rank 0 has stopped"):  # told so, without waiting
        group.agreements[1].boundary()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("change", [PLAN, SIZES], ids=["plan", "sizes"])
def test_memory_that_refuses_an_agreed_change_stops_all_and_leaves_books_whole(
    change: Change, rank: int
) -> None:
    """Whichever call it is; the number of calls comes from a run in which none fails."""
    whole = Group()
    whole.start(range(60))
    whole.memories[rank].fail_at = 0
    whole.propose(change)
    assert whole.until_over() == [Turn(changed=True)] * 2
    calls = whole.memories[rank].calls
    assert calls >= 2
    for number in range(1, calls + 1):
        group = Group()
        group.start(range(60))
        group.propose(change)
        group.boundary()
        group.boundary()
        group.memories[rank].fail_at = number
        raised: list[RanksError] = []
        for agreement in group.agreements * 2:  # rank 0 is told of it at the next boundary
            try:
                agreement.boundary()
            except RanksError as error:
                raised.append(error)
        group.memories[rank].fail_at = 0
        assert {type(error) for error in raised} == {RanksError, RankFailedError}
        failed = next(error for error in raised if type(error) is RanksError)
        assert f"failed on rank {rank}" in str(failed)
        assert f"rank {rank} has stopped" in str(
            next(error for error in raised if type(error) is RankFailedError)
        )
        for kv, engine in zip(group.kvs, group.engines, strict=True):
            kv.check()
            engine.verify(list(engine._users))


# -- steps in flight -------------------------------------------------------------------------------


def test_pages_come_free_at_the_same_call_though_fences_pass_apart() -> None:
    """Also in the very first steps, before any tick is concluded."""
    group = Group()
    seqs = group.start(range(8))
    books: list[list[tuple[int, int]]] = []
    for step in range(6):
        for rank, (engine, kv) in enumerate(zip(group.engines, group.kvs, strict=True)):
            if step == 0:
                engine.step([seqs[rank]], 1, in_flight=True)
                kv.close([seqs[rank]])
            if step == (0, 3)[rank]:
                engine.complete()
            other = kv.open(range(100 * step, 100 * step + 8))
            assert kv.admit([other])
            kv.close([other])
        pools = [kv.pools["full"].books for kv in group.kvs]
        for pool in pools:
            pool.drain()
        books.append([(pool.num_free, pool.num_in_flight) for pool in pools])
        group.boundary()
    assert all(mine == theirs for mine, theirs in books), books
    assert books[0][0][1] > 0  # what the step in flight may still read
    assert books[-1][0][1] == 0


def test_sizes_wait_until_nothing_is_in_flight_on_any_rank() -> None:
    group = Group()
    seqs = group.start(range(8))
    for engine, seq in zip(group.engines, seqs, strict=True):
        engine.step([seq], 1, in_flight=True)
    group.propose(SIZES)
    group.boundary()
    for _ in range(2):
        assert group.boundary() == [Turn(drain=True)] * 2
    group.engines[0].complete()
    assert group.boundary() == [Turn(drain=True)] * 2
    assert group.pages() == [{"full": 127, "window_8": 127}] * 2
    group.engines[1].complete()
    assert group.until_over() == [Turn(changed=True)] * 2
    assert group.pages() == [SIZES.pages] * 2


def test_sizes_are_given_up_if_steps_in_flight_are_never_over() -> None:
    group = Group(Terms(every=1, drain_ticks=4))
    for engine, seq in zip(group.engines, group.start(range(8)), strict=True):
        engine.step([seq], 1, in_flight=True)
    group.engines[0].complete()
    group.propose(SIZES)
    assert group.until_over() == [Turn(refused="busy")] * 2
    assert group.pages() == [{"full": 127, "window_8": 127}] * 2


def test_a_pipeline_is_drained_before_its_pages_change() -> None:
    """Stages with pages of different bytes, and micro-batches that leave one stage after another"""
    group = Group(Terms(axis="pipeline", every=1), dims=(8, 16), granules=(16, 32))
    assert group.equalise() == {"full": 127, "window_8": 127}
    group.start(range(30))
    group.propose(Change(pages={"full": 90, "window_8": 150}))
    assert group.boundary((2, 2)) == [Turn()] * 2
    assert group.boundary((2, 2)) == [Turn(drain=True)] * 2
    assert group.boundary((1, 2)) == [Turn(drain=True)] * 2
    assert group.boundary((0, 1)) == [Turn(drain=True)] * 2
    assert group.boundary((0, 0)) == [Turn(drain=True)] * 2
    assert group.pages() == [{"full": 127, "window_8": 127}] * 2
    assert group.boundary((0, 0)) == [Turn(changed=True)] * 2
    assert group.pages() == [{"full": 90, "window_8": 150}] * 2


# -- independent ranks -----------------------------------------------------------------------------


def independent(**more: object) -> Group:
    return Group(Terms(axis="attention_data", every=1, **more))  # type: ignore[arg-type]


def test_independent_ranks_pause_together_and_each_changes_what_it_likes() -> None:
    group = independent()
    group.agreements[1].propose(PLAN)
    group.boundary()
    assert group.boundary() == [Turn(), Turn(changed=True)]
    assert granules(group) == [[8, 8], [5, 11]]
    group.agreements[0].propose(Change(pages={"full": 100, "window_8": 200}))
    group.agreements[1].propose(Change(pages={"full": 1}))
    group.boundary()
    assert group.boundary() == [Turn(changed=True), Turn(refused="floor")]
    assert group.pages()[0] == {"full": 100, "window_8": 143}
    assert [agreement.facts().pauses for agreement in group.agreements] == [2, 2]


def test_an_independent_rank_with_steps_of_its_own_is_not_held_back_by_an_idle_one() -> None:
    group = independent()
    seq = group.start(range(8))[0]
    for _ in range(4):
        group.engines[0].step([seq], 1, in_flight=True)
        group.engines[0].complete()
        group.boundary()
    assert group.kvs[0].num_in_flight == 0
    group.kvs[0].close([seq])
    assert group.kvs[0].snapshot().pools["full"].in_flight == 0


def test_sizes_of_an_independent_rank_with_steps_in_flight_are_given_up() -> None:
    group = independent()
    for engine, seq in zip(group.engines, group.start(range(8)), strict=True):
        engine.step([seq], 1, in_flight=True)
    group.agreements[0].propose(SIZES)
    group.boundary()
    assert group.boundary() == [Turn(refused="busy"), Turn()]


def test_memory_that_refuses_in_a_pause_stops_all_with_an_error_of_the_group() -> None:
    """Also what `settle` still has to do after the first moves."""
    plan = Change(plan=(Move(donor="full", receiver="window_8", granules=6, reason="test"),))
    whole = Group(Terms(axis="attention_data", every=1), move_bytes_per_step=1)
    whole.memories[0].fail_at = 0
    whole.agreements[0].propose(plan)
    assert whole.until_over() == [Turn(changed=True), Turn()]
    assert granules(whole) == [[2, 14], [8, 8]]
    for number in range(1, whole.memories[0].calls + 1):
        group = Group(Terms(axis="attention_data", every=1), move_bytes_per_step=1)
        group.agreements[0].propose(plan)
        group.boundary()
        group.memories[0].fail_at = number
        with pytest.raises(RanksError, match="failed on rank 0"):
            group.agreements[0].boundary()
        group.memories[0].fail_at = 0
        group.agreements[1].boundary()
        with pytest.raises(RankFailedError, match="rank 0 has stopped"):
            group.agreements[1].boundary()
        granules(group)


# -- ticks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", ["tensor", "pipeline", "attention_data"])
@pytest.mark.parametrize("wishers", [(), (1,), (0, 1)])
def test_whatever_ranks_want_all_take_part_in_as_many_exchanges(
    axis: str, wishers: tuple[int, ...]
) -> None:
    group = Group(Terms(axis=axis, mode="leader", every=4))  # type: ignore[arg-type]
    for rank in wishers:
        group.agreements[rank].propose(SIZES)
    for _ in range(20):
        group.boundary()
    started = {transport.num_started for transport in group.transports}
    assert started == {group.hub.num_folds}
    assert len({transport.num_finished for transport in group.transports}) == 1
    opens = 0 in wishers and axis != "attention_data"
    assert group.hub.num_folds == (6 if opens else 5)  # the vote is a tick of its own


def test_facts_count_what_has_happened() -> None:
    group = Group(Terms(every=4))
    group.propose(PLAN)
    for _ in range(9):
        group.boundary()
    group.propose(Change(pages={"full": 1}))
    for _ in range(11):
        group.boundary()
    for agreement in group.agreements:
        facts = agreement.facts()
        assert (facts.steps, facts.proposals, facts.commits, facts.aborts) == (20, 2, 1, 1)
        assert (facts.refusals, facts.pauses, facts.deferrals) == (1, 0, 0)
        assert facts.ticks == 5 + 2
        assert 0 < facts.seconds_p50 <= facts.seconds_p99


def test_a_new_group_has_no_durations() -> None:
    facts = Group().agreements[0].facts()
    assert (facts.ticks, facts.seconds_p50, facts.seconds_p99) == (0, 0.0, 0.0)


# -- misuse ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("axis", "expert", "axis is 'expert'"),
        ("mode", "quorum", "mode is 'quorum'"),
        ("every", 0, "every is 0"),
        ("deadline", 0.0, "deadline is 0.0"),
        ("deadline", float("nan"), "deadline is nan"),
        ("drain_ticks", 0, "drain_ticks is 0"),
    ],
)
def test_impossible_terms_are_refused(field: str, value: object, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Terms(**{field: value})  # type: ignore[arg-type]


def test_a_change_of_the_wrong_kind_is_refused_where_it_is_proposed() -> None:
    group = Group(Terms(axis="pipeline", every=1))
    with pytest.raises(UsageError, match="give the change as pages"):
        group.agreements[0].propose(PLAN)
    assert not group.agreements[0].is_open


def test_ranks_with_different_terms_stop_at_their_first_tick() -> None:
    group = Group(Terms(every=1))
    kvs = [agreement.kv for agreement in group.agreements]
    each = zip(kvs, LocalHub(2).ranks(), (1, 2), strict=True)
    first, second = (Agreement(kv, t, Terms(every=n, deadline=0.2)) for kv, t, n in each)
    first.boundary()
    second.boundary()
    for agreement in (first, second):
        with pytest.raises(DivergenceError, match="terms from"):
            agreement.close()
