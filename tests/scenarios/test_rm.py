"""Capacity on the move: what lives in the pools goes with it, known to the engine or not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from tests.tiny import GRANULE, full, state

from kvtide import GraphGuard, KVManager, Layout, MemfdMemory, Move, Options
from kvtide.sequence import Status
from kvtide.testing.engine import FakeEngine

if TYPE_CHECKING:
    from kvtide import Sequence


def page_bytes(kv: KVManager, pool: str, row: int) -> np.ndarray:
    """Bytes of the first page that a row names."""
    page, size = int(kv.tables[pool].rows[row, 0]), kv.pools[pool].page_bytes
    whole = np.frombuffer(kv.pools[pool].arena.buffer(), np.uint8)
    return whole[page * size : (page + 1) * size]


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
