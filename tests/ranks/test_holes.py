"""Plans first, pages afterwards: ground that a plan took from the middle of a pool is missed."""

from __future__ import annotations

import pytest
from tests.tiny import Rig, full, window

from kvtide import Move, UsageError
from kvtide.ranks import Agreement, Change, LocalHub, Terms, Turn

PLAN = (Move(donor="full", receiver="window_4", granules=2, reason="test"),)


def rig_with_holes() -> Rig:
    """Eight pages of full attention less two in the middle, of which the highest four are live."""
    rig = Rig(full(), window(4), pages=[8, 8], max_tokens=16)
    seqs = [rig.start(range(100 * i, 100 * i + 8)) for i in range(4)]
    rig.kv.close(seqs[:2])
    rig.kv.reset()
    assert rig.kv.rebalance(PLAN).done
    return rig


def test_cached_pages_make_way_for_the_lowest_ones() -> None:
    rig = rig_with_holes()
    rig.cache(range(900, 908))
    assert rig.kv.resize({"full": 6}) == {"full": 6}
    assert rig.kv.pools["full"].books.exists[:7].all()
    rig.kv.check()
    rig.engine.verify(list(rig.kv._parts.ledger.holdings.live.values()))


def test_live_pages_without_room_below_are_found_before_anything_changes() -> None:
    rig = rig_with_holes()
    rig.start(range(900, 908))
    before = rig.books()
    for dry_run in (True, False):
        with pytest.raises(UsageError, match="holes"):
            rig.kv.resize({"full": 6}, dry_run=dry_run)
    assert rig.books() == before
    rig.kv.check()


def test_ranks_give_up_what_a_plan_has_left_no_room_for_and_go_on() -> None:
    """Found when they prepare: after the vote it would have stopped the group."""
    rigs = [rig_with_holes() for _ in range(2)]
    for rig in rigs:
        rig.start(range(900, 908))
    transports = LocalHub(2).ranks()
    groups = [Agreement(r.kv, t, Terms(every=1)) for r, t in zip(rigs, transports, strict=True)]
    for group in groups:
        group.propose(Change(pages={"full": 6}))
    turns = [Turn()]
    while turns[0].refused is None:
        turns = [group.boundary() for group in groups]
        assert not any(turn.changed for turn in turns)
    for group, rig in zip(groups, rigs, strict=True):
        group.boundary()
        rig.kv.check()
