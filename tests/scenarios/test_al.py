"""Allocation accounting: what is taken is given back, whatever way a request ends."""

from __future__ import annotations

import random

import numpy as np
import pytest
from tests.tiny import Rig, full, indexer, state, window

from kvtide import CapacityError, UsageError
from kvtide.memory import Budget, NullMemory


def test_al_1_half_done_allocation_is_not_undone() -> None:
    """A request that one pool refuses takes nothing from the other, however often it asks.

    The indexer pool must hold one longest sequence (construction proves it), so it has 4 pages and
    another sequence holds one of them, where the report gives it 3.
    """
    rig = Rig(full(), indexer(), pages=[7, 4], max_tokens=16)
    rig.start([9] * 4)
    a = rig.kv.open(range(16))
    before = rig.books()
    assert before == {"full": (6, 1, 0), "indexer": (3, 1, 0)}
    for _ in range(100):
        answer = rig.kv.admit([a])
        assert (bool(answer), answer.pool) == (False, "indexer")
        assert (answer.needed, answer.available) == (4, 3)
        assert rig.books() == before
    rig.kv.check()
    assert rig.kv.admit([a], 12)
    assert rig.books() == {"full": (3, 4, 0), "indexer": (0, 4, 0)}


def test_al_1_two_users_of_one_budget() -> None:
    """Looking and taking are one act: who looked first has no claim, a refusal takes nothing."""
    budget = Budget(NullMemory(2, 1))
    assert budget.num_free >= 2  # X looks
    assert budget.take(1) is not None  # Y takes
    assert budget.take(2) is None  # X comes too late
    assert budget.num_free == 1
    budget.check()


def test_al_1_a_mistake_is_an_error_and_never_not_now() -> None:
    """Negative counts are refused loudly even where there is no room anyway."""
    rig = Rig(full(), pages=[4], max_tokens=16)
    seq = rig.start(range(16))
    other = rig.kv.open(range(4))
    before = rig.books()
    with pytest.raises(UsageError, match="-1"):
        rig.kv.admit([other], -1)
    with pytest.raises(UsageError, match="-1"):
        rig.kv.extend([seq], -1)
    with pytest.raises(UsageError, match="-1"):
        Budget(NullMemory(2, 1)).take(-1)
    assert rig.books() == before


def test_al_2_a_side_pool_is_left_out_of_admission() -> None:
    """The pool with the fewest pages decides, and a refusal claims nothing in any pool.

    Here every group shares prefixes, so the side pool is a window: B and C both reuse its two
    cached pages of X and need one fresh page each, and only one is left.
    """
    rig = Rig(full(), window(8), pages=[16, 3], max_tokens=24)
    prefix = list(range(16))
    rig.cache(prefix, limit=4)
    b, c = rig.kv.open([*prefix, 90, 91, 92, 93]), rig.kv.open([*prefix, 80, 81, 82, 83])
    assert (b.hit, c.hit) == (16, 16)
    assert rig.kv.admit([b])
    rig.engine.prefill([b])
    before = rig.books()
    answer = rig.kv.admit([c])
    assert (bool(answer), answer.pool) == (False, "window_8")
    assert rig.books() == before
    assert (c.row, c.computed) == (-1, 0)
    rig.kv.close([b])
    assert rig.kv.admit([c])
    rig.engine.prefill([c])
    rig.kv.check()


def test_al_3_a_refused_request_keeps_its_prefix_claims() -> None:
    """What has run nothing holds nothing: a running sequence gets the pages a refused one matched.

    Short cached runs go as a whole here, so more than the one page that is needed may be dropped.
    """
    rig = Rig(full(), pages=[8], max_tokens=32)
    prefix = list(range(16))
    rig.cache(prefix)
    r = rig.start([50] * 12)
    w = rig.kv.open([*prefix, *range(60, 68)])
    assert w.hit == 16
    assert rig.books() == {"full": (1, 3, 4)}
    answer = rig.kv.admit([w])
    assert (bool(answer), answer.pool) == (False, "full")
    assert (w.row, w.computed, w.capacity) == (-1, 0, 0)
    assert rig.books() == {"full": (1, 3, 4)}
    assert rig.kv.extend([r], 8)
    assert r.capacity == 20
    rig.kv.check()
    rig.kv.close([r])
    assert rig.kv.admit([w])
    rig.engine.prefill([w])


def test_al_4_state_copy_made_during_match_is_lost_when_the_request_dies_early() -> None:
    """Matching makes no copy of a state, so refusal, abort and waiting have nothing to lose."""
    rig = Rig(full(), state(), pages=[6, 4], max_tokens=24)
    prompt = list(range(9))
    rig.cache(prompt)
    hog = rig.start([70] * 16)
    before = rig.books()
    assert before["state"][2] >= 1  # the snapshot after 8 tokens is cached
    for turn in range(10):
        seq = rig.kv.open([*prompt, *range(20, 31)])
        assert seq.hit == 8
        if turn % 3 == 0:
            assert not rig.kv.admit([seq])
        elif turn % 3 == 1:
            rig.kv.close([seq])
        rig.kv.check()
        assert rig.books() == before
    rig.kv.close([hog])
    assert rig.idle()


def test_al_5_close_releases_tokens_but_not_constant_size_state() -> None:
    """Closing walks every pool: five sessions in a row find all state pages back."""
    rig = Rig(full(), state(), pages=[12, 4], max_tokens=12)
    for session in range(5):
        seq = rig.start([session] * 8)
        assert rig.facts("state").used >= 1
        rig.kv.close([seq])
        assert rig.idle()
        assert rig.facts("state").free + rig.facts("state").cached == 4


@pytest.mark.parametrize("late", [False, True], ids=["at once", "behind a step in flight"])
def test_al_6_a_stale_cross_pool_map_frees_someone_elses_slot(late: bool) -> None:
    """A cached block that lost only its window page is healed without touching the new tenant."""
    rig = Rig(full(), window(8), pages=[8, 4], max_tokens=20)
    rig.cache([1, 2, 3, 4])
    b = rig.start(range(10, 26), sample=True)  # four window pages: X's must go, its full page stays
    assert rig.facts("window_8").evicted == 1
    assert rig.facts("full").cached == 1
    rig.engine.step([b], in_flight=late)
    healer = rig.kv.open([1, 2, 3, 4])
    assert healer.hit == 0
    assert rig.kv.admit([healer])
    rig.engine.prefill([healer])  # computes X again and publishes it
    rig.kv.check()
    assert rig.lookup([1, 2, 3, 4, 5, 6]) == 4
    rig.engine.complete()
    rig.engine.verify([b, healer])
    rig.kv.close([b, healer])
    assert rig.idle()


def test_al_7_speculative_tail_stranded_when_growth_is_not_page_aligned() -> None:
    """After every partly accepted draft the pages held are those of the tokens that count."""
    rig = Rig(full(), pages=[4], max_tokens=16)
    seq = rig.kv.open(range(12))
    assert rig.kv.admit([seq], 6)
    rig.engine.step([seq], 6)
    rng = random.Random(7)
    for _ in range(10):
        rig.engine.step([seq], 3, accepted=[min(rng.randint(0, 3), 12 - seq.computed)])
        assert rig.facts("full").used == -(-seq.computed // 4)
        rig.kv.check()
    assert seq.computed > 6
    rig.kv.close([seq])
    assert rig.idle()


def test_al_8_planned_growth_of_a_step_that_never_ran_adds_up() -> None:
    """A step that was granted and skipped is reverted exactly; even unreverted ones do not add."""
    rig = Rig(full(), pages=[4], max_tokens=16)
    seq = rig.kv.open(range(9))
    assert rig.kv.admit([seq], 8)
    rig.engine.step([seq], 8)
    assert seq.capacity == 8
    for _ in range(20):
        batch = rig.kv.batch([seq])
        assert rig.kv.extend(batch, 1)
        rig.kv.commit(batch, accepted=0)
        assert (seq.computed, seq.capacity) == (8, 8)
    for _ in range(20):
        assert rig.kv.extend([seq], 1)
        assert seq.capacity == 12
    rig.engine.step([seq], 1)
    assert (seq.computed, seq.capacity, rig.facts("full").used) == (9, 12, 3)
    rig.kv.check()


def test_al_10_use_counter_grows_for_ever_when_cached_before_released() -> None:
    """Caching and releasing in any order leave one state a page: fifty rounds fill nothing up."""
    rig = Rig(full(), pages=[4], max_tokens=16)
    for i in range(50):
        rig.cache(range(8 * i, 8 * i + 8))
        free, used, cached = rig.books()["full"]
        assert (used, free + cached) == (0, 4)


def test_al_11_late_commit_after_close_orphans_pages_or_frees_them_twice() -> None:
    """A commit for a closed sequence publishes nothing; one before the close publishes once.

    The manager belongs to one thread, so the orders are tried and no threads are raced.
    """
    rig = Rig(full(), pages=[4], max_tokens=16)
    for commit_first in (True, False):
        seq = rig.kv.open(range(8))
        assert rig.kv.admit([seq])
        batch = rig.kv.batch([seq])
        rig.engine.run(batch, 8)
        verbs = [lambda: rig.kv.commit(batch), lambda: rig.kv.close([seq])]  # noqa: B023
        for verb in verbs if commit_first else reversed(verbs):
            verb()
        assert rig.idle()
        assert rig.facts("full").cached == (2 if commit_first else 0)
        assert rig.lookup(range(9)) == (8 if commit_first else 0)
        rig.kv.reset()


def test_al_11_late_commit_does_not_reach_the_next_tenant_of_the_row() -> None:
    """The row may belong to someone else by then, or to the same sequence, admitted anew."""
    rig = Rig(full(), pages=[8], max_tokens=16)
    a = rig.kv.open(range(8))
    assert rig.kv.admit([a])
    late = rig.kv.batch([a])
    rig.engine.run(late, 8)
    rig.kv.close([a])
    b = rig.kv.open(range(20, 28))
    assert rig.kv.admit([b])
    rig.kv.commit(late)
    assert b.computed == 0

    late = rig.kv.batch([b])
    rig.engine.run(late, 8)
    rig.kv.suspend([b])
    assert rig.kv.resume([b])
    rig.kv.commit(late)
    assert b.computed == 0, "what the step computed is in pages that b no longer holds"
    rig.kv.check()
    rig.engine.prefill([b])
    rig.engine.verify([b])


def test_al_12_recycled_page_keeps_links_and_labels_of_its_old_life() -> None:
    """Pages that held X hold Y: X is not found, Y is, and a reset forgets both."""
    rig = Rig(full(), pages=[2], max_tokens=8)
    x, y = list(range(8)), list(range(10, 18))
    for _ in range(3):
        rig.cache(x)
        rig.cache(y)
        assert rig.lookup(x) == 0
        assert rig.lookup(y) == 7  # all but the token that must be computed
        assert np.array_equal(rig.kv.tables["full"].rows, np.full((16, 2), -1))
        rig.kv.reset()
        assert (rig.lookup(x), rig.lookup(y)) == (0, 0)
        assert rig.facts("full").free == 2


def test_al_12_a_request_that_never_fits_is_refused_once_and_for_all() -> None:
    """Shortage is an answer, impossibility an error: the row can never hold 17 tokens."""
    rig = Rig(full(), pages=[4], max_tokens=16)
    seq = rig.start(range(16))
    with pytest.raises(CapacityError, match="17"):
        rig.kv.extend([seq], 1)
    with pytest.raises(CapacityError, match="17"):
        rig.kv.open(range(17))
    rig.kv.check()
