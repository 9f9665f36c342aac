"""Rebalance mechanics: shrinking under load, restoring, and what must not move now.

The numbers of pages are the reports' own; every pool has one granule more, for its sink.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from tests.tiny import GRANULE, Rig, full, state, window

from kvtide import GraphGuard, KVManager, Layout, MemfdMemory, Move, Options
from kvtide.sequence import Status
from kvtide.testing.engine import FakeEngine
from kvtide.types import SINK

if TYPE_CHECKING:
    from kvtide import Sequence


def page_bytes(kv: KVManager, pool: str, row: int) -> np.ndarray:
    """Bytes of the first page that a row names."""
    page, size = int(kv.tables[pool].rows[row, 0]), kv.pools[pool].page_bytes
    whole = np.frombuffer(kv.pools[pool].arena.buffer(), np.uint8)
    return whole[page * size : (page + 1) * size]


def two_pages_a_granule() -> KVManager:
    layers = {0: full(64), 1: state(512, interval=64)}
    kv = KVManager(
        Layout.from_layers(layers, block_tokens=4),
        MemfdMemory(8 * GRANULE, GRANULE),
        max_sequences=8,
        max_tokens=8,
        options=Options(mode="static", pool_ratio={"full": 0.5, "state": 0.5}),
    )
    assert [pool.page_bytes * 2 for pool in kv.pools.values()] == [GRANULE] * 2
    return kv


def start(kv: KVManager, engine: FakeEngine, first: int, num: int) -> Sequence:
    """Compute `num` tokens of their own."""
    seq = kv.open(range(first, first + num))
    assert kv.admit([seq])
    engine.prefill([seq])
    return seq


def test_rm_1_hidden_live_caches_block_the_rebalance() -> None:
    """Padding is in no batch and in no list of the engine, and goes on living in its row.

    Two pages a granule, pool full taken to the last page: the sink and F, A and A, B and the
    padding, C and D. Once F, B, C and D are cached only, two of four granules leave: nobody is
    suspended, closed or re-created, and the padding stands elsewhere.
    """
    kv = two_pages_a_granule()
    engine, guard = FakeEngine(kv), GraphGuard(kv)
    f, a, b = (start(kv, engine, first, num) for first, num in ((100, 4), (0, 8), (200, 4)))
    padding = guard.register_padding(4)
    assert padding is not None
    c, d = (start(kv, engine, first, 4) for first in (300, 400))
    seq, row, full_table = padding.seq, padding.row, kv.tables["full"].rows
    assert full_table[[s.row for s in (f, a, b, seq, c, d)], 0].tolist() == [1, 2, 4, 5, 6, 7]
    assert kv.snapshot().pools["full"].free == 0
    kv.close([f, b, c, d])

    bases = [pool.arena.base for pool in kv.pools.values()]
    page_bytes(kv, "full", row)[:] = 0x5A
    page_bytes(kv, "state", row)[:] = 0xA5
    kv.rebalance((Move(donor="full", receiver="state", granules=2, reason="RM-1"),))
    assert guard.quiesce()
    assert [pool.num_mapped for pool in kv.pools.values()] == [2, 6]
    assert (padding.seq, padding.row, seq.status) == (seq, row, Status.ADMITTED)
    assert 0 < full_table[row, 0] < 4
    assert (page_bytes(kv, "full", row) == 0x5A).all()
    assert (page_bytes(kv, "state", row) == 0xA5).all()
    engine.verify([a])
    assert [pool.arena.base for pool in kv.pools.values()] == bases
    kv.check()


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


def test_rm_11_slot_ids_with_an_offset_compared_with_local_capacity() -> None:
    """Two memory domains are two managers: each shrinks by its own ids, and nobody has to move."""
    domains = [Rig(full(), pages=[4], max_tokens=4) for _ in range(2)]
    live = [rig.start([9] * 4) for rig in domains]
    rows = [
        rig.kv.tables["full"].rows[seq.row].copy() for rig, seq in zip(domains, live, strict=True)
    ]
    for rig, seq, row in zip(domains, live, rows, strict=True):
        assert rig.kv.set_budget((3 + 1) * GRANULE).done
        assert rig.facts("full").pages == 3 + 1
        assert rig.kv.snapshot().pages_relocated == 0
        assert (rig.kv.tables["full"].rows[seq.row] == row).all()
        rig.engine.verify([seq])
        rig.kv.check()


def test_rm_13_rows_and_indices_after_pages_moved_not_everyone_fits_again() -> None:
    """Full 8 to 4, state 2 to 4: who cannot stay is named; suspended, it comes back later.

    Without a lower tier its pages are dropped and computed again. A state group keeps two pages a
    sequence for a moment, so it has 4 where the report has 2, and ends with 8.
    """
    rig = Rig(full(), state(interval=64), pages=[8, 4], max_tokens=12, mode="static")
    a, b = rig.start(range(12)), rig.start(range(50, 62))
    assert rig.facts("full").used == 6
    progress = rig.kv.rebalance((Move(donor="full", receiver="state", granules=4, reason="RM-13"),))
    assert progress.pending > 0
    assert {h.sequence for h in progress.blocked_by} == {a, b}
    rig.kv.suspend([b])
    assert rig.kv.settle().done
    assert rig.facts("full").pages == 4 + 1
    assert rig.facts("state").pages == 4 + 4 + 1
    held = rig.kv.tables["full"].rows[a.row]
    assert held.max() <= 4
    rig.engine.verify([a])
    assert not rig.kv.resume([b])
    rig.kv.close([a])
    assert rig.kv.resume([b])
    rig.engine.prefill([b])
    rig.engine.verify([b])
    rig.kv.check()
