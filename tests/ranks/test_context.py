"""Context parallelism: every rank has its share of each block's tokens, and the same books.

transformers has no context-parallel forward to run; the stand-in for the model that checks every
byte has, with layouts made for a share of a block.
"""

from __future__ import annotations

import random

import pytest
from tests.tiny import GRANULE, full, window

from kvtide import KVManager, Layout, MemfdMemory, Options
from kvtide.errors import DivergenceError
from kvtide.ranks import Agreement, Change, LocalHub, Terms
from kvtide.rebalance import Move
from kvtide.testing.engine import FakeEngine

RANKS = 2


def managers() -> list[KVManager]:
    layers = {0: full(96), 1: window(10, dim=100)}
    layout = Layout.from_layers(layers, block_tokens=4, context=RANKS)
    return [
        KVManager(
            layout,
            MemfdMemory(40 * GRANULE, GRANULE),
            max_sequences=6,
            max_tokens=64,
            options=Options(mode="elastic"),
        )
        for _ in range(RANKS)
    ]


def test_ranks_with_shares_of_a_block_serve_and_move_ground_alike() -> None:
    kvs = managers()
    engines = [FakeEngine(kv, vocabulary=3) for kv in kvs]
    terms = Terms(axis="context", every=1, deadline=5)
    hub = LocalHub(RANKS)
    groups = [Agreement(kv, t, terms) for kv, t in zip(kvs, hub.ranks(), strict=True)]
    rng, changed, hits = random.Random(5), 0, 0
    for step in range(200):
        prompt = [rng.randrange(2)] * rng.randrange(8, 40) + [step % 3]
        pools = rng.sample(list(kvs[0].pools), 2)
        told: list[list[int]] = []
        for kv, engine, group in zip(kvs, engines, groups, strict=True):
            if step % 5 == 0:
                plan = (Move(donor=pools[0], receiver=pools[1], granules=2, reason="test"),)
                group.propose(Change(plan=plan))
            changed += group.boundary().changed
            seq = kv.open(prompt)
            assert kv.admit([seq], min(8, seq.length))
            hits += seq.hit
            engine.prefill([seq], limit=8, sample=True)
            told.append([int(engine.step([seq])[0]) for _ in range(3)])
            kv.close([seq])
            kv.check()
        assert told[0] == told[1]
        assert kvs[0].peer.digest(step) == kvs[1].peer.digest(step)
    assert changed >= 2 * 30
    assert hits > 0
    assert all(kv.moved[0] for kv in kvs)


def test_a_rank_that_lost_its_share_of_a_page_stops_the_group() -> None:
    """A hit needs every share: a rank that has evicted its own must not go on as if it had it."""
    kvs = managers()
    terms = Terms(axis="context", every=1, deadline=0.2)
    groups = [Agreement(kv, t, terms) for kv, t in zip(kvs, LocalHub(2).ranks(), strict=True)]
    for kv in kvs:
        engine = FakeEngine(kv)
        seq = kv.open([1] * 20)
        kv.admit([seq])
        engine.prefill([seq])
        kv.close([seq])
    kvs[1].reset()
    for group in groups:
        group.boundary()
    for group in groups:
        with pytest.raises(DivergenceError, match="cached pages of pool 'full' from 0 to 5"):
            group.boundary()
