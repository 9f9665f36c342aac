"""Padding and captured addresses: the sink page takes what nobody wants, and it never moves."""

from __future__ import annotations

import numpy as np
from tests.tiny import Rig, full, state, window

from kvtide import Move
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
