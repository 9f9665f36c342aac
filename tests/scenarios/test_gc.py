"""Padding and captured addresses: the sink page takes what nobody wants, and it never moves. An
engine's own padding stays, and what a step was given is its own.
"""

from __future__ import annotations

import numpy as np
import pytest
from tests.graphs import Captured
from tests.tiny import Rig, full, state, window

from kvtide import GraphGuard, Move
from kvtide.testing.graphs import TwinDevice
from kvtide.types import SINK


def scribble_on_sinks(rig: Rig) -> None:
    """What a padded step does: writes into page 0 of every pool."""
    for pool in rig.kv.pools.values():
        np.frombuffer(pool.arena.buffer(), np.uint8)[: pool.page_bytes] = 0xA5


def test_gc_1_padding_sequence_allocated_lazily_when_the_pool_is_already_full() -> None:
    """Padding needs no page: with every page taken a padded batch is still there for the asking.

    All padding shapes share the one sink page, so four pages of ground advertise three.
    """
    rig = Rig(full(), pages=[3], max_tokens=12)
    rig.start(range(12))
    assert rig.facts("full").pages == 4
    assert rig.facts("full").free == 0
    padding = np.array([9, 10, 11])  # rows that no sequence has
    table = rig.kv.tables["full"]
    assert (table.padded(padding) == SINK).all()
    csr = table.csr(padding, np.zeros(3, np.int64))
    assert csr.indptr.tolist() == [0, 0, 0, 0]
    rig.kv.check()


def test_gc_1_one_padding_sequence_for_each_shape_is_there_from_the_start() -> None:
    """Two shapes keep 1 + 2 of nine pages; a full pool has them, and the other six are for sale."""
    rig = Rig(full(), pages=[9], max_tokens=12)
    guard = GraphGuard(rig.kv)
    shapes = [guard.register_padding(n) for n in (1, 5)]  # plain decode, and four drafts
    assert all(shapes)
    graphs = [guard.capture(4, padding=shape) for shape in shapes]
    live = [rig.start(range(i, i + 12)) for i in (0, 100)]
    assert rig.facts("full").free == 0
    for graph, pages in zip(graphs, (1, 2), strict=True):
        replay = guard.begin_step(live, 0, graph=graph)
        tables = replay.tables["full"][2:, :pages]
        assert (tables > SINK).all()
        assert (tables[0] == tables[1]).all()
        guard.end_step()
    rig.kv.close(live)
    rig.kv.reset()
    assert rig.facts("full").free == 6
    rig.kv.check()


def test_gc_2_padding_rows_alias_a_parked_live_sequence() -> None:
    """Entries beyond the batch name the sink, so what a padded step writes reaches nobody."""
    rig = Rig(full(), window(4), state(), pages=[6, 4, 4], max_tokens=12, max_sequences=3)
    a, b = rig.start(range(6), sample=True), rig.start(range(20, 27), sample=True)
    free_row = ({0, 1, 2} - {a.row, b.row}).pop()
    for running in ([a], [a, b], [a]):
        rows = np.array([s.row for s in running] + [free_row] * (2 - len(running)))
        for table in rig.kv.tables.values():
            padded = table.padded(rows)
            for entries in padded[len(running) :]:
                assert (entries == SINK).all()
        scribble_on_sinks(rig)
        rig.engine.step(running, 1)
        rig.engine.verify([a, b])
    rig.kv.check()


@pytest.mark.parametrize("registered", [False, True])
def test_gc_2_what_a_replay_writes_into_its_padding_reaches_nobody(registered: bool) -> None:
    """The padded row of a captured batch names the sink, or padding that is nobody else's."""
    rig = Rig(full(), window(4), state(), pages=[8, 6, 6], max_tokens=12, max_sequences=3)
    guard = GraphGuard(rig.kv)
    graph = guard.capture(2, padding=guard.register_padding() if registered else None)
    a, b = rig.start(range(6), sample=True), rig.start(range(20, 27), sample=True)
    for running in ([a], [a, b], [a]):
        replay = guard.begin_step(running, 0, graph=graph)
        for name, pool in rig.kv.pools.items():
            whole = np.frombuffer(pool.arena.buffer(), np.uint8)
            for page in replay.tables[name][len(running) :].ravel().tolist():
                whole[page * pool.page_bytes : (page + 1) * pool.page_bytes] = 0xA5
        guard.end_step()
        rig.engine.verify([a, b])
        rig.engine.step(running, 1)
    rig.kv.check()


def test_gc_3_id_0_is_nobody_to_kernels_but_is_handed_to_a_request() -> None:
    """The sink is never anybody's: when all is taken, after a reset, after capacity moved."""
    rig = Rig(full(), state(), pages=[6, 6], max_tokens=16, mode="elastic")
    plan = (Move(donor="full", receiver="state", granules=2, reason="test"),)
    for disturb in (lambda: None, rig.kv.reset, lambda: rig.kv.rebalance(plan)):
        disturb()
        seqs = []
        while True:
            seq = rig.kv.open([len(seqs)] * 6)
            if not rig.kv.admit([seq]):
                break
            seqs.append(seq)
        assert len(seqs) >= 3
        for table in rig.kv.tables.values():
            held = table.rows[[s.row for s in seqs]]
            assert not (held == SINK).any()
            assert (held > SINK).any()
        rig.kv.check()
        rig.kv.close(seqs)


def test_gc_5_captured_addresses_outlive_reset_and_rebalance() -> None:
    """Pool bases and table buffers are where a captured graph found them, whatever happens."""
    mine = np.zeros((16, 4), np.int32)
    rig = Rig(
        full(), window(4), pages=[10, 10], max_tokens=16, mode="elastic",
        tables={"window_4": mine}, pool_ratio={"full": 0.5, "window_4": 0.5},
    )  # fmt: skip

    def addresses() -> list[int]:
        bases = [pool.arena.base for pool in rig.kv.pools.values()]
        return bases + [table.rows.ctypes.data for table in rig.kv.tables.values()]

    before = addresses()
    assert before[3] == mine.ctypes.data
    seqs = [rig.start(range(i, i + 7), sample=True) for i in range(3)]
    rig.kv.reset()
    for names in (("full", "window_4"), ("window_4", "full")):
        move = Move(donor=names[0], receiver=names[1], granules=2, reason="test")
        assert rig.kv.rebalance((move,)).moved == 2
        rig.engine.step(seqs, 1)
    rig.kv.suspend(seqs)
    assert rig.kv.resume(seqs)
    assert rig.kv.tables["window_4"].rows is mine
    assert (mine[seqs[0].row] > SINK).any()
    rig.kv.close(seqs)
    assert addresses() == before
    assert rig.idle()


def test_gc_5_a_graph_captured_once_outlives_reset_and_rebalance() -> None:
    """Its padding too; every word it reads afterwards is checked."""
    rig = Captured(padding=2)
    before, padding = rig.addresses(), rig.padding
    assert padding is not None
    row, seqs = padding.row, rig.scatter()
    for disturb in (
        rig.kv.reset,
        lambda: rig.move("full", "state", 12),
        lambda: rig.move("state", "window_8", 12),
    ):
        disturb()
        assert rig.guard.quiesce()
        rig.decode(seqs, 2)
    rig.kv.suspend(seqs)
    assert rig.kv.resume(seqs)
    rig.decode(seqs, 2)
    rig.kv.close(seqs)
    rig.decode(rig.start(3), 6)
    assert padding.row == row
    assert rig.addresses() == before
    assert rig.kv.moved[0] >= 24


def seen_by_the_device(*, staged: bool) -> list[list[int]]:
    """What two steps see of row 0, if both are planned before the device runs the first one."""
    rig = Rig(full(), pages=[8], max_tokens=16)
    guard, device = GraphGuard(rig.kv), TwinDevice()
    graph = guard.capture(1)
    table, seen = np.zeros((1, 4), np.int32), []
    for first in (0, 100):
        seq = rig.start(range(first, first + 8))
        assert seq.row == 0
        replay = guard.begin_step([seq], 0, graph=graph)
        device.copy(table, replay.tables["full"] if staged else rig.kv.tables["full"].rows[:1])
        device.enqueue(lambda: seen.append(table[0].tolist()))
        guard.end_step(device.fence())
        if not first:
            rig.kv.close([seq])
    assert guard.num_in_flight > 0
    device.run()
    assert guard.num_in_flight == 0
    return seen


def test_gc_6_host_row_buffer_overwritten_before_its_copy_has_run() -> None:
    """A step's page tables stay as they were planned until its fence; the live ones do not.

    The live tables are written in place: what a device copies from them late is the last plan's.
    """
    one, two = seen_by_the_device(staged=True)
    assert set(one[:2]).isdisjoint(two[:2])
    assert min(one[:2] + two[:2]) > SINK
    late = [*two[:2], -1, -1]
    assert seen_by_the_device(staged=False) == [late, late]


def test_gc_8_bad_index_as_row_filler_reaches_a_kernel() -> None:
    """Padded rows hold only ids of pages that exist; what is absent can be asked apart."""
    rig = Rig(full(), window(4), pages=[8, 8], max_tokens=16)
    seqs = [rig.start(range(50 * i, 50 * i + n)) for i, n in enumerate((4, 8, 16))]
    rows = np.array([s.row for s in seqs])
    for name, table in rig.kv.tables.items():
        padded = table.padded(rows)
        assert rig.kv.pools[name].books.exists[padded].all()
        absent = table.rows[rows] < 0
        assert (padded[absent] == SINK).all()
        assert (padded[~absent] > SINK).all()
    assert (rig.kv.tables["full"].rows[rows] >= 0).sum(axis=1).tolist() == [1, 2, 4]
    assert (rig.kv.tables["window_4"].rows[rows] >= 0).sum(axis=1).tolist() == [1, 1, 1]


def test_gc_8_what_a_step_is_given_names_pages_that_exist() -> None:
    """The guard's tables of a captured batch, window nulls and padded rows included."""
    rig = Rig(full(), window(4), pages=[8, 8], max_tokens=16)
    guard = GraphGuard(rig.kv)
    graph = guard.capture(6)
    seqs = [rig.start(range(50 * i, 50 * i + n)) for i, n in enumerate((4, 8, 16))]
    replay = guard.begin_step(seqs, 0, graph=graph)
    for name, pages in replay.tables.items():
        assert pages.shape == (6, 4)
        assert rig.kv.pools[name].books.exists[pages].all()
        absent = rig.kv.tables[name].rows[replay.rows[:3]] < 0
        assert ((pages[:3] == SINK) == absent).all()  # the sink is nobody's: it marks the absent
        assert (pages[3:] == SINK).all()
    guard.end_step()
