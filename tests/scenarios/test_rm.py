"""Rebalance mechanics: shrinking under load, restoring, and what must not move now.

The numbers of pages are the reports' own; every pool has one granule more, for its sink.
"""

from __future__ import annotations

import numpy as np
import pytest
from tests.tiny import GRANULE, Rig, full, window

from kvtide import KVManager, Layout, MemfdMemory, Move, Options
from kvtide.testing.engine import FakeEngine
from kvtide.types import SINK


def test_rm_3_shrinking_the_last_tier() -> None:
    """Held pages step into low free slots, cached ones are dropped; if too many are held: not now.

    The report shrinks 6 slots to 3 and then to 1, where 2 are held.
    """
    rig = Rig(full(), pages=[6], max_tokens=4)
    a, b = rig.start([1, 2, 3, 4]), rig.kv.open([9, 9, 9, 9])
    for i in range(3):
        rig.cache([50 + i] * 4)
    assert rig.kv.admit([b])
    rig.engine.prefill([b])
    assert rig.kv.set_budget((3 + 1) * GRANULE).done
    facts = rig.facts("full")
    assert (facts.pages, facts.used) == (4, 2)
    assert facts.cached <= 1
    rig.engine.verify([a, b])
    pages = rig.kv.tables["full"].rows[[a.row, b.row]].copy()
    progress = rig.kv.set_budget((1 + 1) * GRANULE)
    assert (progress.moved, progress.pending) == (1, 1)  # down to what is held
    assert {h.sequence for h in progress.blocked_by} == {a, b}
    assert {h.num_bytes for h in progress.blocked_by} == {GRANULE}
    rig.engine.verify([a, b])
    assert rig.kv.tables["full"].rows[[a.row, b.row]].shape == pages.shape
    rig.kv.check()


@pytest.mark.parametrize("mode", ["elastic", "static"])
def test_rm_4_precondition_checked_before_the_step_that_establishes_it(mode: str) -> None:
    """8 slots, 3 used and 2 granted ahead; a shrink to 4 is pending and ends by itself."""
    rig = Rig(full(), pages=[8], max_tokens=16, mode=mode)
    a, b = rig.start(range(8), sample=True), rig.start(range(50, 54), sample=True)
    assert rig.kv.extend([a, b], 1)  # a third page for a, a second one for b
    assert rig.facts("full").used == 5
    progress = rig.kv.set_budget((4 + 1) * GRANULE)
    assert (progress.pending, progress.done) == (1, False)
    assert progress.blocked_by[0].sequence is a
    assert rig.kv.snapshot().budget_bytes == 5 * GRANULE
    rig.kv.close([b])
    rig.engine.step([a], 1)
    assert rig.kv.snapshot().granules_pending == 0
    assert rig.facts("full").granules == 5
    rig.engine.verify([a])
    rig.kv.check()


@pytest.mark.parametrize("mode", ["elastic", "static"])
def test_rm_5_restoring_the_original_limit_is_ignored(mode: str) -> None:
    """12, 4, 12 slots, three times; 10 pages fit whenever it is 12, once while it still shrinks."""
    rig = Rig(full(), pages=[12], max_tokens=16, mode=mode)
    for cycle in range(3):
        seqs = [rig.start([100 * cycle + i] * 4) for i in range(10)]
        rig.engine.verify(seqs)
        if cycle != 1:
            rig.kv.close(seqs)
        progress = rig.kv.set_budget((4 + 1) * GRANULE)
        assert progress.done == (cycle != 1)
        assert rig.kv.set_budget((12 + 1) * GRANULE).done
        assert rig.kv.snapshot().granules_pending == 0
        rig.engine.verify(seqs if cycle == 1 else [])
        rig.kv.close(seqs)
        rig.kv.check()
    assert rig.kv.admit([rig.kv.open([900 + i] * 4) for i in range(10)])


def test_rm_6_a_lazy_shrink_never_ends_because_empty_units_are_counted_as_used() -> None:
    """Pages of 1.6 granules: granules between them hold no whole page and go all the same."""
    spec = full(205)  # 4 tokens are 6,560 bytes, a granule has 4,096
    layout = Layout.from_layers({0: spec}, block_tokens=4)
    page = layout.groups[0].page_bytes
    assert GRANULE < page < 2 * GRANULE
    granules = -(-7 * page // GRANULE)
    kv = KVManager(
        layout, MemfdMemory(granules * GRANULE, GRANULE), max_tokens=4,
        options=Options(mode="static"),
    )  # fmt: skip
    engine = FakeEngine(kv)
    seqs = [kv.open([i] * 4) for i in range(6)]
    assert kv.admit(seqs)
    engine.prefill(seqs)
    kv.close(seqs[::2])
    kv.reset()
    target = -(-4 * page // GRANULE)
    assert kv.set_budget(target * GRANULE).done
    assert kv.snapshot().pools["full"].granules == target
    engine.verify(seqs[1::2])
    kv.check()


def test_rm_8_capacity_memo_not_refreshed_when_a_transfer_blocks_compaction() -> None:
    """What could move is asked of the books each time: a page in flight pins, its fence unpins."""
    rig = Rig(full(), window(), pages=[8, 4], max_tokens=16, mode="static")
    plan = (Move(donor="full", receiver="window_8", granules=8, reason="ask"),)

    def could() -> int:
        return rig.kv.rebalance(plan, dry_run=True).moved

    seq = rig.start(range(15), sample=True)
    rig.engine.step([seq], 1, in_flight=True)
    rig.kv.reset()  # so that its pages will be nobody's, but still read by the step
    rig.kv.close([seq])
    pinned = could()
    rig.engine.complete()
    free = could()
    seq = rig.start(range(15), sample=True)
    rig.engine.step([seq], 1, in_flight=True)
    rig.kv.close([seq])
    assert pinned < free
    rig.engine.complete()
    rig.kv.check()


def test_rm_9_newly_grown_memory_is_cleared_after_it_was_handed_out() -> None:
    """A page exists only when its granules are clear: nobody can write before."""
    rig = Rig(full(), window(), pages=[8, 4], max_tokens=16, mode="static")
    pool = rig.kv.pools["window_8"]
    zero, early = pool.arena.zero, []

    def watched(at: np.ndarray, num_bytes: int) -> None:
        pages = pool.space.touching(np.asarray(at) // GRANULE)
        early.append(bool(pool.books.exists[pages].any()))
        zero(at, num_bytes)

    pool.arena.zero = watched  # type: ignore[method-assign]
    assert rig.kv.rebalance((Move(donor="full", receiver="window_8", granules=2, reason=""),)).done
    assert early == [False]
    b = rig.start(range(16))
    rig.engine.verify([b])
    assert SINK not in rig.kv.tables["window_8"].rows[b.row]
