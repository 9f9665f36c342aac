"""Ranks whose devices are not equally fast: what a step gives back comes free at the same call."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.tiny import Rig, full, window

from kvtide import Move
from kvtide.ranks import Agreement, Change, LocalHub, Terms, Turn

if TYPE_CHECKING:
    from kvtide.ranks import Axis


def group(axis: Axis, every: int = 1, size: int = 2) -> tuple[list[Rig], list[Agreement]]:
    rigs = [Rig(full(), window(4), pages=[8, 8], max_tokens=16) for _ in range(size)]
    terms = Terms(axis=axis, every=every)
    transports = LocalHub(size).ranks()
    return rigs, [Agreement(r.kv, t, terms) for r, t in zip(rigs, transports, strict=True)]


def boundary(groups: list[Agreement], rigs: list[Rig]) -> list[bool]:
    """Whether each rank must drain or has changed something."""
    turns = [g.boundary(r.engine.num_in_flight) for g, r in zip(groups, rigs, strict=True)]
    return [turn.changed for turn in turns]


def fly(rig: Rig, first: int = 0) -> None:
    """A new prompt in one step that stays in flight; then it is closed."""
    seq = rig.kv.open(range(first, first + 16))
    assert rig.kv.admit([seq])
    rig.engine.step([seq], 16, in_flight=True)
    rig.kv.close([seq])


def test_the_first_step_counts_as_over_on_no_rank_before_it_is_on_all() -> None:
    """Before any tick was concluded, too: else a fast rank has more free pages."""
    rigs, groups = group("tensor", every=8)
    boundary(groups, rigs)
    for rig in rigs:
        fly(rig)
    rigs[0].engine.complete()
    assert [rig.kv.num_in_flight for rig in rigs] == [1, 1]
    rigs[1].engine.complete()
    for _ in range(10):
        boundary(groups, rigs)
    assert [rig.kv.num_in_flight for rig in rigs] == [0, 0]


def test_a_rank_without_work_does_not_hold_up_the_pages_of_others_under_attention_data() -> None:
    """Their steps are their own: one rank's fifth has nothing to do with another's."""
    rigs, groups = group("attention_data")
    for turn in range(5):
        boundary(groups, rigs)
        fly(rigs[1], 100 * turn)
        rigs[1].engine.complete()
        assert rigs[1].kv.num_in_flight == 0
    assert rigs[1].idle()


def test_a_pipeline_can_change_as_soon_as_all_have_heard_that_it_is_drained() -> None:
    rigs, groups = group("pipeline")
    boundary(groups, rigs)
    for rig, agreement in zip(rigs, groups, strict=True):
        fly(rig)
        agreement.propose(Change(pages={"full": 6, "window_4": 6}))
    for _ in range(2):
        boundary(groups, rigs)  # cast the proposal, then prepare: no new step from here on
    rigs[0].engine.complete()
    assert boundary(groups, rigs) == [False, False]
    rigs[1].engine.complete()
    changed = [boundary(groups, rigs) for _ in range(2)]
    assert changed == [[False, False], [True, True]]
    assert [[p.num_usable for p in rig.kv.pools.values()] for rig in rigs] == [[6, 6], [6, 6]]
    assert all(rig.idle() for rig in rigs)


@pytest.mark.parametrize("axis", ["tensor", "context"])
def test_pages_that_became_live_since_all_agreed_make_the_change_smaller(axis: Axis) -> None:
    """The step between vote and commit took them on all ranks: no reason to stop the group."""
    rigs, groups = group(axis)
    boundary(groups, rigs)
    for agreement in groups:
        agreement.propose(Change(pages={"full": 4, "window_4": 6}))
    for _ in range(2):
        boundary(groups, rigs)
    for rig in rigs:
        for start in (0, 100):
            rig.start(range(start, start + 12))
    assert boundary(groups, rigs) == [True, True]
    assert [[p.num_usable for p in rig.kv.pools.values()] for rig in rigs] == [[6, 6], [6, 6]]
    for rig in rigs:
        rig.kv.check()


def test_steps_in_flight_make_all_ranks_give_up_a_change_of_pages_together() -> None:
    """Where steps overlap pages cannot be set between two of them; the group goes on."""
    rigs, groups = group("tensor")
    boundary(groups, rigs)
    for agreement in groups:
        agreement.propose(Change(pages={"full": 6, "window_4": 6}))
    for _ in range(2):
        boundary(groups, rigs)
    for rig in rigs:
        fly(rig)
    turns = [agreement.boundary() for agreement in groups]
    assert [turn.changed for turn in turns] == [False, False]
    assert all("1 steps are in flight" in (turn.refused or "") for turn in turns)
    for rig in rigs:
        rig.engine.complete()
    assert boundary(groups, rigs) == [False, False]
    assert [[p.num_usable for p in rig.kv.pools.values()] for rig in rigs] == [[8, 8], [8, 8]]


def test_ground_that_a_plan_has_left_in_pieces_makes_all_give_up_a_change_of_pages() -> None:
    rigs, groups = group("tensor")
    for rig in rigs:
        seqs = [rig.start(range(100 * i, 100 * i + 8)) for i in range(4)]
        rig.kv.close(seqs[:2])
        rig.kv.reset()  # the lowest pages are free, the highest are not
    move = Move(donor="full", receiver="window_4", granules=2, reason="test")
    assert agree(groups, Change(plan=(move,))) == [None, None]
    for rig in rigs:
        rig.start(range(900, 908))
    refusals = agree(groups, Change(pages={"full": 6}))
    assert all("holes" in (refusal or "") for refusal in refusals)
    for rig in rigs:
        rig.kv.check()
        rig.engine.verify(list(rig.kv._parts.ledger.holdings.live.values()))


def agree(groups: list[Agreement], change: Change) -> list[str | None]:
    """Propose a change on all ranks and go on until it is made, or why not."""
    for agreement in groups:
        agreement.propose(change)
    turns = [Turn()]
    while not turns[0].changed and turns[0].refused is None:
        turns = [agreement.boundary() for agreement in groups]
    return [turn.refused for turn in turns]
