"""Window and state lifetimes: released means gone, fresh means clean, pools have own grids."""

from __future__ import annotations

import numpy as np
import pytest
from tests.tiny import GRANULE, Rig, full, state, window

from kvtide import Move
from kvtide.types import ABSENT, SINK


def page(rig: Rig, pool: str, number: int) -> np.ndarray:
    """Bytes of one page, a view."""
    size = rig.kv.pools[pool].page_bytes
    whole = np.frombuffer(rig.kv.pools[pool].arena.buffer(), np.uint8)
    return whole[number * size : (number + 1) * size]


def test_wl_1_exported_row_still_names_pages_the_window_has_released() -> None:
    """What the window passed is struck from the row before anyone else can get the page."""
    rig = Rig(full(), window(4), pages=[8, 3], max_tokens=16)
    a = rig.start(range(12))
    table = rig.kv.tables["window_4"]
    row = table.rows[a.row]
    assert (row[[0, 1, 3]] == ABSENT).all()
    assert row[2] > SINK
    b = rig.start(range(50, 58))  # takes the two pages that a no longer needs
    rig.kv.check()
    assert row[2] not in table.rows[b.row]
    padded = table.padded(np.array([a.row]))[0]
    assert padded.tolist() == [SINK, SINK, row[2], SINK]
    assert rig.kv.extend([b], 1)
    assert table.rows[b.row][2] > SINK
    rig.kv.trim(b, 1)
    assert (table.rows[b.row][2:] == ABSENT).all()
    rig.engine.verify([a, b])
    rig.kv.check()


@pytest.mark.parametrize("to_full", [True, False], ids=["state to full", "full to state"])
def test_wl_3_bytes_of_a_former_tenant_poison_the_next_one(to_full: bool) -> None:
    """Ground that changes pools is cleared: what was not written reads as zero."""
    rig = Rig(full(), state(), pages=[6, 6], max_tokens=16, mode="elastic")
    giver, taker = ("state", "full") if to_full else ("full", "state")
    crowd = [rig.start([40 + i] * 2) for i in range(4)]
    for seq in crowd:
        for number in rig.kv.tables[giver].rows[seq.row]:
            if number != ABSENT:
                page(rig, giver, number)[:] = 0xFF
    rig.kv.close(crowd)
    pool = rig.kv.pools[taker]
    before = pool.mapped.copy()
    assert (
        rig.kv.rebalance((Move(donor=giver, receiver=taker, granules=3, reason="test"),)).moved == 3
    )
    fresh = np.flatnonzero(pool.mapped & ~before)
    assert len(fresh) == 3
    ground = np.frombuffer(pool.arena.buffer(), np.uint8).reshape(-1, GRANULE)
    assert not ground[fresh].any()
    seqs = [rig.start([60 + i, 1, 2, 3, 4]) for i in range(3)]
    rig.engine.verify(seqs)


def test_wl_3_a_fresh_state_is_zero_whatever_its_page_held() -> None:
    """A new sequence starts from nothing although it gets the page of a state full of ones."""
    rig = Rig(full(), state(), pages=[6, 2], max_tokens=16)
    for _ in range(3):
        seq = rig.kv.open(range(5))
        assert rig.kv.admit([seq])
        with rig.kv.step([seq], 1):
            live = rig.kv.tables["state"].rows[seq.row, 0]
            assert not page(rig, "state", live).any()
            page(rig, "state", live)[:] = 0xFF
        rig.kv.close([seq])
        rig.kv.check()


def test_wl_4_state_index_on_resume_computed_with_the_wrong_pools_page_size() -> None:
    """Blocks of 2, a state grid of 8: hits of 16 and 24 restore the very states of 16 and 24."""
    rig = Rig(full(), state(), pages=[40, 8], max_tokens=40, block_tokens=2)
    prompt = list(range(30))
    rig.cache(prompt, limit=8)
    for shared, hit in ((9, 0), (17, 16), (25, 24), (23, 16)):
        seq = rig.start([*prompt[:shared], *range(60, 66)])
        assert seq.hit == hit
        rig.engine.verify([seq])
        rig.kv.close([seq])


def test_wl_4_suspended_sequences_resume_from_the_snapshot_they_left() -> None:
    """A sequence that was suspended in mid-decode goes on from its last kept state."""
    rig = Rig(full(), state(), pages=[20, 8], max_tokens=40, block_tokens=2)
    seq = rig.start(range(10), sample=True)
    for _ in range(9):
        rig.engine.step([seq], 1)
    told = seq.tokens.tolist()
    rig.kv.suspend([seq])
    assert rig.kv.resume([seq])
    assert 8 <= seq.computed < seq.length
    assert seq.tokens.tolist() == told
    rig.engine.prefill([seq])
    rig.engine.verify([seq])
    rig.kv.check()


def test_wl_5_one_evicted_page_inside_the_trailing_window_makes_a_branch_useless() -> None:
    """The page to go is one that no match would end at: both branches keep their whole hits."""
    rig = Rig(full(), window(4), pages=[10, 6], max_tokens=16)
    one, two = list(range(12)), list(range(20, 32))
    rig.cache(one)
    rig.cache(two)
    assert rig.facts("window_4").cached == 6
    third = rig.start([90, 91])
    assert rig.facts("window_4").evicted >= 1
    assert rig.lookup([*one, 99]) == 12
    assert rig.lookup([*two, 99]) == 12
    rig.kv.close([third])
    assert rig.kv.snapshot().pools["full"].dead == 0


def test_wl_5_tokens_behind_a_lost_window_are_the_first_to_go() -> None:
    """Where a branch lost its last window its full pages serve nobody: they count as dead."""
    rig = Rig(full(), window(4), pages=[10, 3], max_tokens=12)
    rig.cache(range(12))
    crowd = [rig.start([50 + i] * 2) for i in range(3)]  # all three window pages
    assert rig.lookup([*range(12), 99][:12]) == 0
    assert rig.facts("full").dead == 3
    rig.kv.close(crowd)
    rig.kv.check()


def test_wl_6_transient_batch_state_survives_suspend() -> None:
    """After suspend and resume the sequence counts from what is there, not from its old step."""
    rig = Rig(full(), pages=[8], max_tokens=16)
    other = rig.start([9], sample=True)
    a = rig.start(range(7), sample=True)
    old = rig.kv.batch([other, a])
    rig.engine.step(old, 1)
    assert (a.computed, a.length) == (8, 9)
    rig.kv.suspend([a])
    assert (a.row, a.computed, a.capacity) == (-1, 0, 0)
    in_its_row = rig.start([5] * 3, sample=True)
    rig.engine.step([other, in_its_row], 1)
    assert rig.kv.resume([a])
    assert a.row not in (other.row, in_its_row.row)
    assert (a.computed, a.length) == (8, 9)
    assert rig.facts("full").used == 1 + 1 + 3
    rig.engine.step([other, in_its_row, a], 1)
    assert a.computed == 9
    rig.kv.check()
