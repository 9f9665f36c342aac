"""State snapshots while capacity moves: what is taken for one pool is named before another asks."""

from __future__ import annotations

import random

import pytest
from tests.tiny import GRANULE, full, state

from kvtide import KVManager, Layout, MemfdMemory
from kvtide.testing.engine import FakeEngine


@pytest.mark.parametrize("granules", [9, 10, 12, 13])
def test_states_of_two_pools_are_kept_while_they_trade_ground(granules: int) -> None:
    """A page taken for the snapshot in one pool is not moved away when the other needs ground."""
    layers = {0: full(40), 1: state(500), 2: state(300, interval=16)}
    layout = Layout.from_layers(layers, block_tokens=4)
    rng = random.Random(granules)
    memory = MemfdMemory(granules * GRANULE, GRANULE)
    with KVManager(layout, memory, max_sequences=5, max_tokens=40) as kv:
        engine = FakeEngine(kv, vocabulary=3)
        live = []
        for _ in range(60):
            prompt = [rng.randrange(3)] * rng.randint(1, 30) + [rng.randrange(3)] * 3
            seq = kv.open(prompt)
            if kv.admit([seq], min(4, seq.length)):
                live.append(seq)
            for _ in range(rng.randint(1, 12)):
                going = [s for s in live if s.computed < s.length]
                counts = engine.chunks(going, rng.choice([1, 4]))
                if not going or not kv.extend(kv.batch(going), counts):
                    break
                engine.step(going, counts)
            kv.close(live[: rng.randint(0, 2)])
            live = [s for s in live if s.row >= 0]
            kv.check()
        assert kv.snapshot().pages_relocated > 0
        assert kv.snapshot().hit_tokens > 0
