"""Prefix matches: a hit is never longer than what is there, and never someone else's."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from tests.tiny import Rig, draft, full, state, window

from kvtide import KVManager, MemfdMemory, Options
from kvtide.layout import Layout
from kvtide.prefix import WindowRule, longest_hit
from kvtide.testing.engine import FakeEngine
from kvtide.types import ABSENT

LAYOUTS = {"state": (), "full and state": (full(),)}


def test_pm_1_partial_reuse_writes_into_a_shared_full_page() -> None:
    """Whoever diverges inside a cached page copies it first; equal pages become one page."""
    rig = Rig(full(), pages=[8], max_tokens=16)
    a, d = rig.kv.open([1, 2, 3, 4]), rig.kv.open([1, 2, 3, 4])
    assert rig.kv.admit([a, d])  # both before either has computed anything: no hit
    rig.engine.prefill([a])
    b = rig.start([1, 2, 9, 9, 9])
    assert b.hit == 2
    rows = rig.kv.tables["full"].rows
    assert rows[a.row, 0] != rows[b.row, 0]
    rig.engine.prefill([d])
    assert rows[d.row, 0] == rows[a.row, 0]
    assert rig.facts("full").used == 3  # a's and d's one, b's two
    c = rig.start([1, 2, 3, 4, 5])
    assert c.hit == 4
    assert rows[c.row, 0] == rows[a.row, 0]
    assert rig.lookup([1, 2, 9, 9, 5]) == 4
    rig.engine.verify([a, b, c, d])


def test_pm_2_pages_of_a_chunk_that_has_not_run_are_published() -> None:
    """Only committed chunks can be matched, in mid-prefill as well as after an abort."""
    rig = Rig(full(), pages=[8], max_tokens=16)
    a = rig.kv.open(range(12))
    assert rig.kv.admit([a])
    rig.engine.step([a], 4)
    assert rig.lookup(range(13)) == 4
    batch = rig.kv.batch([a])
    rig.engine.run(batch, 4, in_flight=True)
    rig.kv.close([a])
    assert rig.lookup(range(13)) == 4
    rig.engine.complete()
    rig.kv.commit(batch)
    assert rig.lookup(range(13)) == 4
    assert rig.idle()


@pytest.mark.parametrize("others", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize(("num_tokens", "grid"), [(16, 3), (400, 7)])
def test_pm_3_committing_evicts_the_ground_under_the_committer(
    others: tuple, num_tokens: int, grid: int
) -> None:
    """Snapshots of one sequence evict its own older ones, and its path stays whole meanwhile."""
    pages = [num_tokens // 2 + 2] * len(others) + [3]
    rig = Rig(*others, state(interval=2), pages=pages, max_tokens=num_tokens + 2, block_tokens=2)
    prompt = [i % 97 for i in range(num_tokens + 1)]
    a = rig.kv.open(prompt)
    assert rig.kv.admit([a])
    while a.computed < num_tokens:
        rig.engine.step([a], 2)
        rig.kv.check()
    assert rig.facts("state").evicted >= grid - 2
    rig.kv.close([a])
    again = rig.start(prompt)
    assert again.hit == num_tokens
    rig.kv.close([again])
    assert rig.idle()


def test_pm_4_clearing_the_prefix_cache_under_a_live_sequence() -> None:
    """After a reset a live sequence keeps its pages, publishes nothing, and frees them once."""
    rig = Rig(full(), pages=[8], max_tokens=16)
    a = rig.kv.open(range(12))
    assert rig.kv.admit([a])
    rig.engine.step([a], 8)
    rig.kv.reset()
    rig.engine.step([a], 4)
    rig.kv.check()
    assert rig.lookup(range(13)) == 0
    rig.engine.verify([a])
    rig.kv.close([a])
    assert rig.lookup(range(13)) == 0
    assert rig.books() == {"full": (8, 0, 0)}
    rig.cache(range(12))  # a new path may be published again
    assert rig.lookup(range(13)) == 12


def test_pm_5_copy_source_of_a_partial_match_is_evicted_before_the_copy() -> None:
    """Short of pages, a partly matched page is kept for the copy or not used at all."""
    rig = Rig(full(), pages=[4], max_tokens=16)
    rig.cache([1, 2, 3, 4])
    s = rig.start([8, 8])
    b = rig.kv.open([1, 2, 7, *range(20, 27)])
    assert b.hit == 2
    if rig.kv.admit([b]):
        assert b.computed == 0
        assert rig.facts("full").cached == 0
        rig.engine.prefill([b])
        rig.engine.verify([s, b])
    else:
        assert rig.books()["full"] == (2, 1, 1)
    rig.kv.check()


def test_pm_5_a_partial_match_never_keeps_out_a_request_that_fits_alone() -> None:
    """With nobody else there, a partly matched page must not stand in its own request's way."""
    rig = Rig(full(), pages=[3], max_tokens=12)
    rig.cache([1, 2, 3, 4])
    b = rig.kv.open([1, 2, 7, *range(20, 29)])
    assert rig.kv.admit([b])
    rig.engine.prefill([b])
    rig.kv.check()


def test_pm_6_hits_on_pages_that_were_evicted_long_ago() -> None:
    """Churn beyond the pool's size: what was pushed out is not found, bytes are the reader's."""
    rig = Rig(full(), pages=[6], max_tokens=24)
    x = list(range(16))
    for turn in range(20):
        rig.cache(x)
        rig.cache([30 + turn] * 24)
        assert rig.lookup([*x, 99]) == 0
        seq = rig.start([*x, 99])
        rig.engine.verify([seq])
        rig.kv.close([seq])


def test_pm_7_attention_hit_kept_although_the_state_pool_missed() -> None:
    """A hit ends where every pool can serve it: at the snapshot, or nowhere."""
    rig = Rig(full(), state(), pages=[12, 4], max_tokens=24)
    prompt = list(range(16))
    rig.cache(prompt[:12])  # tokens to 12, a snapshot after 8
    assert rig.lookup(prompt) == 8
    seq = rig.start(prompt)
    rig.engine.verify([seq])
    rig.kv.close([seq])

    rig.kv.reset()
    rig.cache(prompt[:12])
    crowd = [rig.start([50 + i] * 2) for i in range(4)]  # four live states: no room for a snapshot
    assert rig.facts("state").cached == 0
    assert rig.facts("full").cached == 3
    rig.kv.close(crowd)
    reused = rig.kv.snapshot().hit_tokens
    seq = rig.start(prompt)
    assert seq.hit == 0
    assert rig.kv.snapshot().hit_tokens == reused


@pytest.mark.parametrize("look_ahead", [1, 4])
def test_pm_9_drop_the_last_matched_page_applied_to_a_state_that_cannot_rewind(
    look_ahead: int,
) -> None:
    """A hit shortened for the drafter is agreed again with the state pool."""
    prompt = list(range(16))
    for ends, hit in (((8, 12), 8), ((12,), 0)):
        rig = Rig(full(), state(interval=4), draft(look_ahead), pages=[8, 6, 8], max_tokens=32)
        a = rig.kv.open(prompt)
        assert rig.kv.admit([a])
        for end in ends:  # a snapshot is taken only where a chunk ends
            rig.engine.step([a], end - a.computed)
        rig.kv.close([a])
        b = rig.start([*prompt[:12], 70, 71, 72, 73])
        assert b.hit == hit
        rig.engine.verify([b])


def test_pm_10_snapshot_labelled_with_a_position_it_does_not_represent() -> None:
    """Chunks end on each sequence's own grid, and a snapshot holds just the tokens up to there.

    A's grid is 24 and 16, its limit 12. Besides the grid the last block boundary of a prompt is
    kept: 4 for the 5 tokens of B, 12 for the 16 of C.
    """
    rig = Rig(full(), state(), pages=[24, 12], max_tokens=32)
    a = rig.kv.open(range(28))
    assert rig.kv.admit([a])
    ends: list[int] = []
    while a.computed < 28:
        rig.engine.step([a], rig.engine.chunks([a], 12))
        ends.append(a.computed)
    assert ends == [12, 16, 24, 28]
    b, c = rig.kv.open(range(40, 45)), rig.kv.open(range(60, 76))
    assert rig.kv.admit([b, c])
    rig.engine.prefill([b, c], limit=24)
    rig.kv.close([a, b, c])
    for prompt, hit in ((range(20), 16), (range(28), 24), (range(40, 46), 4), (range(60, 77), 12)):
        seq = rig.start([*prompt, 99])
        assert seq.hit == hit
        rig.engine.verify([seq])
        rig.kv.close([seq])


def test_pm_10_a_state_off_the_grid_is_not_published() -> None:
    """A chunk may end at 12, against the advice: nothing is kept there, nothing matches there."""
    rig = Rig(full(), state(), pages=[8, 4], max_tokens=32)
    a = rig.kv.open(range(20))
    assert rig.kv.admit([a])
    rig.engine.step([a], 12)
    assert rig.lookup(range(20)) == 0
    rig.kv.close([a])
    assert rig.lookup(range(20)) == 0


def test_pm_11_window_match_accepts_a_hole() -> None:
    """Window pages 0, 1, 3 are there, 2 is not: 8 tokens match, since 12 and 16 read the hole."""
    rule = WindowRule(8, 0, 4)
    present = [True, True, False, True]
    assert longest_hit(4, [(rule, _mask(present))]) * 4 == 8
    assert longest_hit(4, [(rule, _mask([True] * 4))]) * 4 == 16
    assert longest_hit(4, [(rule, _mask([False, False, True, True]))]) * 4 == 16


def _mask(values: list[bool]) -> npt.NDArray[np.bool_]:
    return np.array(values, np.bool_)


def test_pm_14_a_page_counts_once_and_forks_pay_only_for_what_they_write() -> None:
    """Six cached tokens are one whole page; two forks of 8 tokens share two pages and own one each.

    Pages are never handed in from outside, so the list that names a page twice cannot be built.
    """
    rig = Rig(full(), pages=[6], max_tokens=24)
    rig.cache(range(6))
    assert rig.lookup([*range(6), 50]) == 4
    rig.kv.reset()

    parent = rig.start(range(8), sample=True)
    child = rig.kv.fork(parent)
    assert child is not None
    for _ in range(2):
        rig.engine.step([parent, child], 1)
        rig.kv.check()
    assert (parent.computed, child.computed) == (10, 10)
    assert rig.facts("full").used == 4
    rows = rig.kv.tables["full"].rows
    assert rows[parent.row, :2].tolist() == rows[child.row, :2].tolist()
    assert rows[parent.row, 2] != rows[child.row, 2]
    held = rows[parent.row][rows[parent.row] != ABSENT].tolist()
    assert len(held) == len(set(held)) == 3
    rig.engine.verify([parent, child])


@pytest.mark.parametrize(("partial_reuse", "inside"), [(False, 0), (True, 4)])
def test_pm_13_the_unit_under_context_parallelism(*, partial_reuse: bool, inside: int) -> None:
    """A block's tokens are shared among ranks; ids, matches and pages still count whole blocks."""
    layout = Layout.from_layers({0: full(64)}, block_tokens=8, context=2)
    assert layout.group("full").page_bytes == 4 * 2 * 64 * 4  # 4 of its 8 tokens
    memory = MemfdMemory(8 * layout.group("full").page_bytes, 4096)
    kv = KVManager(layout, memory, max_tokens=32, options=Options(partial_reuse=partial_reuse))
    engine = FakeEngine(kv)
    a = kv.open(range(16))
    assert kv.admit([a])
    engine.prefill([a])
    assert kv.snapshot().pools["full"].used == 2
    assert kv.open([0, 1, 2, 3, *[9] * 12]).hit == inside
    assert kv.open([*range(8), *[9] * 12]).hit == 8
    assert kv.open(range(17)).hit == 16
    engine.verify([a])
    kv.check()
    kv.shut_down()


def test_pm_14_forks_of_a_state_go_their_own_ways() -> None:
    """The live state is shared until the first of them writes; both end with their own tokens'."""
    rig = Rig(full(), state(), window(), pages=[8, 4, 8], max_tokens=24)
    parent = rig.start(range(6), sample=True)
    child = rig.kv.fork(parent)
    assert child is not None
    rig.engine.step([parent], 1)
    rig.kv.trim(parent, 0)
    for _ in range(6):
        rig.engine.step([parent], 1)
        rig.engine.step([child], 1)
        rig.kv.check()
    assert child.tokens[:12].tolist() == parent.tokens[:12].tolist()


def test_pm_layouts_are_what_the_scenarios_say() -> None:
    """Guard of this file: draft, window and state pools get the lifetimes they are named for."""
    layout = Layout.from_layers({0: full(), 1: window(8), 2: state(), 3: draft()}, block_tokens=4)
    assert [g.name for g in layout.groups] == ["full", "window_8", "state", "mirror"]
