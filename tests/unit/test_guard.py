"""The graph guard's five calls: what they promise, and what they refuse."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from tests.graphs import BLOCK, Captured
from tests.tiny import GRANULE, Rig, full, state, window

from kvtide import (
    CapacityError,
    GraphGuard,
    KVManager,
    Layout,
    NullMemory,
    Options,
    StaleGraphError,
    UsageError,
)
from kvtide.sequence import Status
from kvtide.testing.engine import ManualFence
from kvtide.types import SINK

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtide.guard import Padding


@pytest.fixture
def rig() -> Captured:
    return Captured(padding=3)


# -- padding ---------------------------------------------------------------------------------------

VERBS: dict[str, Callable[[Captured, Padding], object]] = {
    "close": lambda rig, padding: rig.kv.close([padding.seq]),
    "suspend": lambda rig, padding: rig.kv.suspend([padding.seq]),
    "trim": lambda rig, padding: rig.kv.trim(padding.seq, 1),
    "batch": lambda rig, padding: rig.kv.batch([padding.seq]),
    "step": lambda rig, padding: rig.guard.begin_step([padding.seq], 1),
    "fork": lambda rig, padding: rig.kv.fork(padding.seq),
}


@pytest.mark.parametrize("verb", VERBS.values(), ids=VERBS)
def test_registered_padding_cannot_be_taken_away_or_run(
    rig: Captured, verb: Callable[[Captured, Padding], object]
) -> None:
    assert rig.padding is not None
    before = rig.kv.snapshot()
    with pytest.raises(UsageError, match=f"row {rig.padding.row} is padding.*unregister"):
        verb(rig, rig.padding)
    assert rig.padding.seq.status is Status.ADMITTED
    assert rig.kv.snapshot() == before
    assert rig.guard.num_in_flight == 0


def test_a_close_that_names_padding_closes_nobody(rig: Captured) -> None:
    assert rig.padding is not None
    (seq,) = rig.start()
    with pytest.raises(UsageError, match="padding"):
        rig.kv.close([seq, rig.padding.seq])
    assert seq.status is Status.ADMITTED


def test_padding_outlives_reset_and_moves_in_its_row(rig: Captured) -> None:
    padding = rig.padding
    assert padding is not None
    row = padding.row
    seqs = rig.scatter()
    held = {n: int((t.rows[row] != -1).sum()) for n, t in rig.kv.tables.items()}
    assert held == {"full": 1, "window_8": 1, "state": 1}
    rig.kv.reset()
    rig.move_live_pages()
    rig.decode(seqs, 2)
    assert (padding.row, padding.num_tokens, padding.seq.status) == (row, 3, Status.ADMITTED)
    assert held == {n: int((t.rows[row] != -1).sum()) for n, t in rig.kv.tables.items()}
    rig.kv.check()


def test_unregistered_padding_is_closed_and_its_graphs_are_refused(rig: Captured) -> None:
    padding = rig.padding
    assert padding is not None
    (seq,) = rig.start()
    used = rig.kv.snapshot().pools["full"].used
    padding.unregister()
    padding.unregister()
    assert padding.row == -1
    assert padding.seq.status is Status.CLOSED
    assert rig.kv.snapshot().pools["full"].used == used - 1
    with pytest.raises(StaleGraphError, match=r"unregistered after epoch \d+ \(now \d+\)"):
        rig.guard.begin_step([seq], 1, graph=rig.twin.handle)
    with pytest.raises(StaleGraphError, match="register padding"):
        rig.guard.capture(4, padding=padding)
    assert rig.guard.num_in_flight == 0


def test_padding_shares_no_page_and_publishes_none() -> None:
    """Its tokens are zeros, as somebody's prompt may be; graphs write into its pages."""
    rig = Rig(full(), state(), pages=[16, 8], max_tokens=16)
    guard = GraphGuard(rig.kv)
    rig.cache([0] * 9, sample=True)
    assert rig.lookup([0] * 9) > 0
    paddings = [guard.register_padding(9) for _ in range(2)]
    hits = rig.kv.snapshot().hit_tokens
    for name, table in rig.kv.tables.items():
        pages = np.concatenate([table.rows[p.row] for p in paddings if p is not None])
        books = rig.kv.pools[name].books
        assert (books.lease[pages[pages > SINK]] == 1).all()
        assert (books.owner[pages[pages > SINK]] <= 0).all()
    for padding in paddings:
        assert padding is not None
        padding.unregister()
    assert rig.lookup([0] * 9) == 8
    assert rig.kv.snapshot().hit_tokens == hits
    rig.kv.check()


def test_a_shortage_of_rows_or_pages_is_an_answer() -> None:
    rig = Rig(full(), pages=[7], max_tokens=16, max_sequences=3)
    guard = GraphGuard(rig.kv)
    seq = rig.start(range(16))
    rig.start([99])
    assert guard.register_padding(12) is None  # pages
    first = guard.register_padding(1)
    assert first is not None
    assert guard.register_padding(1) is None  # rows
    rig.kv.close([seq])
    assert guard.register_padding(1) is not None
    rig.kv.check()


def test_padding_that_leaves_no_room_for_a_longest_sequence_is_refused() -> None:
    for mode in ("static", "elastic"):
        rig = Rig(full(), window(8), pages=[6, 6], max_tokens=20, mode=mode)
        guard = GraphGuard(rig.kv)
        assert guard.register_padding(4) is not None
        before = rig.books()
        with pytest.raises(CapacityError, match=r"padding of 16 tokens.*max_tokens = 20.*'full'"):
            guard.register_padding(16)
        assert rig.books() == before


def test_what_padding_keeps_is_not_promised_to_requests() -> None:
    """A prompt that only fits where padding stands is refused for good, not for now."""
    rig = Rig(window(8), pages=[6], max_tokens=64)
    seq = rig.kv.open(range(24))
    assert rig.kv.admit([seq])
    rig.kv.close([seq])
    assert GraphGuard(rig.kv).register_padding(4) is not None
    with pytest.raises(CapacityError, match="hold 6 pages for one request but can hold 5"):
        rig.kv.admit([rig.kv.open(range(100, 124))])
    assert rig.kv.admit([rig.kv.open(range(100, 120))])


def test_a_manager_shuts_down_with_its_padding(rig: Captured) -> None:
    assert rig.padding is not None
    rig.kv.shut_down()
    rig.kv.shut_down()
    assert rig.padding.seq.status is Status.CLOSED
    rig.padding.unregister()


# -- steps -----------------------------------------------------------------------------------------


def test_steps_begin_and_end_in_turn(rig: Captured) -> None:
    (seq,) = rig.start()
    with pytest.raises(UsageError, match="no step has begun"):
        rig.guard.end_step()
    replay = rig.guard.begin_step([seq], 1)
    with pytest.raises(UsageError, match=f"step {replay.step.number} has not ended"):
        rig.guard.begin_step([seq], 1)
    fence = ManualFence()
    rig.guard.end_step(fence)
    assert rig.guard.num_in_flight == 1
    fence.passed = True
    assert rig.guard.num_in_flight == 0


def test_a_step_that_is_refused_is_not_in_flight(rig: Captured) -> None:
    seqs = rig.start(6)
    with pytest.raises(UsageError, match="4 rows and the batch 6 sequences"):
        rig.guard.begin_step(seqs, 1, graph=rig.twin.handle)
    with pytest.raises(CapacityError):
        rig.guard.begin_step(seqs, 1000, graph=rig.twin.handle)
    assert rig.guard.num_in_flight == 0
    rig.guard.begin_step(seqs, 1)
    rig.guard.end_step()


def test_a_graph_is_for_one_row_or_more(rig: Captured) -> None:
    with pytest.raises(UsageError, match="num_rows is 0"):
        rig.guard.capture(0)


def test_a_batch_of_padding_alone_can_be_replayed(rig: Captured) -> None:
    """Warm-up, and ranks without work in a step."""
    assert rig.padding is not None
    replay = rig.guard.begin_step([], graph=rig.twin.handle)
    assert replay.rows.tolist() == [rig.padding.row] * 4
    page = rig.kv.tables["full"].rows[rig.padding.row, 0]
    assert replay.tables["full"][:, 0].tolist() == [page] * 4
    assert not replay.tables["full"][:, 1:].any()
    rig.guard.end_step()
    assert rig.kv.snapshot().recomputed_tokens == 0


def test_a_step_names_the_pages_of_its_rows_and_the_sink_elsewhere(rig: Captured) -> None:
    seqs = rig.start(3)
    rig.decode(seqs, 14)  # the window has passed the first block
    for graph in (rig.twin.handle, rig.guard.capture(4)):
        replay = rig.guard.begin_step(seqs, 1, graph=graph)
        assert replay.rows[:3].tolist() == [s.row for s in seqs]
        for name, table in rig.kv.tables.items():
            staged = replay.tables[name]
            assert len(staged) == len(replay.rows) == 4
            assert (staged[:3] == table.padded(replay.rows[:3])).all()
            assert rig.kv.pools[name].books.exists[staged].all()
            if graph.padding is None:
                assert not staged[3].any()
                assert replay.rows[3] == -1
        rig.guard.end_step()
    assert rig.kv.tables["window_8"].rows[seqs[0].row, 0] < 0
    eager = rig.guard.begin_step(seqs, 1)
    assert (eager.rows.tolist(), eager.tables) == ([s.row for s in seqs], {})
    rig.guard.end_step()


def test_tables_forget_the_longer_batch_before(rig: Captured) -> None:
    """A buffer is used again, and no column names a page that a former batch had there."""
    seqs = rig.start(4)
    rig.decode(seqs, 30)
    replay = rig.guard.begin_step(seqs, 1, graph=rig.twin.handle)
    buffer = replay.tables["full"]
    assert (buffer[:, : 30 // BLOCK] > SINK).all()
    rig.guard.end_step()
    rig.kv.close(seqs)
    (short,) = rig.start()
    again = rig.guard.begin_step([short], 1, graph=rig.twin.handle)
    assert again.tables["full"] is buffer
    assert not buffer[:, 1:].any()
    rig.guard.end_step()


def test_there_is_a_set_of_buffers_for_each_step_in_flight() -> None:
    made: list[tuple[int, int]] = []

    def allocate(shape: tuple[int, int]) -> np.ndarray:
        made.append(shape)
        return np.full(shape, 77, np.int32)  # whatever was there

    rig = Captured()
    guard = GraphGuard(rig.kv, allocate=allocate)
    graph = guard.capture(2)
    fences = [ManualFence() for _ in range(10)]
    buffers: list[int] = []
    for i, fence in enumerate(fences):
        if i >= 3:
            fences[i - 3].passed = True
        replay = guard.begin_step([], graph=graph)
        assert not any(table.any() for table in replay.tables.values())
        buffers.append(replay.tables["full"].ctypes.data)
        assert len(set(buffers[-3:])) == min(3, i + 1)
        guard.end_step(fence)
    assert len(set(buffers)) == 3
    assert made == [(2, 16), (2, 16), (2, 1)] * 3


# -- what graphs rely on ---------------------------------------------------------------------------


def test_a_page_table_at_another_address_is_refused(rig: Captured) -> None:
    table = rig.kv.tables["window_8"]
    table.rows = table.rows.copy()
    with pytest.raises(StaleGraphError, match=r"page table 'window_8'.*epoch \d+.*epoch \d+.*new"):
        rig.guard.begin_step([], graph=rig.twin.handle)
    assert rig.guard.num_in_flight == 0


def test_a_pool_at_another_base_is_refused(rig: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    arena = rig.kv.pools["state"].arena
    monkeypatch.setattr(arena, "_base", arena.base + GRANULE)
    with pytest.raises(StaleGraphError, match=r"base of pool 'state'.*epoch \d+.*epoch \d+"):
        rig.guard.begin_step([], graph=rig.twin.handle)
    with pytest.raises(StaleGraphError, match="base of pool 'state'"):
        rig.guard.capture(1)


# -- quiesce ---------------------------------------------------------------------------------------


def test_quiesce_finishes_what_is_pending_once_nothing_is_in_flight(rig: Captured) -> None:
    seqs = rig.scatter()
    rig.twin.step(seqs)
    assert rig.move("full", "state", 14).pending
    assert not rig.guard.quiesce()
    rig.twin.device.run()
    assert rig.guard.quiesce()
    assert rig.kv.settle().moved == 0
    epoch = rig.kv.epoch
    graph = rig.guard.capture(4, bakes_pages=True)
    rig.guard.begin_step([], graph=graph)
    rig.guard.end_step()
    assert rig.kv.epoch == epoch


def test_it_guards_a_manager_without_bytes() -> None:
    layout = Layout.from_layers({0: full(), 1: state()}, block_tokens=4)
    memory = NullMemory(64 * GRANULE, GRANULE)
    kv = KVManager(layout, memory, max_tokens=32, options=Options())
    guard = GraphGuard(kv)
    padding = guard.register_padding()
    graph = guard.capture(2, padding=padding)
    replay = guard.begin_step([], graph=graph)
    assert replay.rows.tolist() == [0, 0]
    guard.end_step()
