"""Mode leader: managers keep their split; what the leader's would have moved, all move together."""

from __future__ import annotations

import pytest
from tests.tiny import GRANULE, full, window

from kvtide import KVManager, Layout, MemfdMemory, Options, Sequence
from kvtide.ranks import Agreement, LocalHub, Terms
from kvtide.testing.engine import FakeEngine

RANKS, MAX_TOKENS, LONG = 2, 64, 60


def manager(full_share: float) -> KVManager:
    layout = Layout.from_layers({0: full(96), 1: window(8, dim=96)}, block_tokens=4)
    ratio = {"full": full_share, "window_8": 1 - full_share}
    return KVManager(
        layout,
        MemfdMemory(64 * GRANULE, GRANULE),
        max_sequences=8,
        max_tokens=MAX_TOKENS,
        options=Options(mode="dry_run", pool_ratio=ratio),
    )


def compute(kv: KVManager, engine: FakeEngine, seqs: list[Sequence]) -> int:
    """A chunk of each that fits; how many did not."""
    refused = 0
    for seq in seqs:
        if seq.row < 0 and not kv.admit([seq], 8):
            refused += 1
        elif seq.computed < LONG:
            batch, counts = kv.batch([seq]), engine.chunks([seq], 8)
            if kv.extend(batch, counts):
                engine.step(batch, counts)
            else:
                refused += 1
    kv.check()
    return refused


@pytest.mark.parametrize("axis", ["tensor", "pipeline"])
def test_live_demand_that_a_split_refuses_moves_ground_on_all_ranks(axis: str) -> None:
    """Four long requests do not fit the start's split; the leader wants it changed, and it is."""
    kvs = [manager(0.3) for _ in range(RANKS)]
    engines = [FakeEngine(kv, vocabulary=3) for kv in kvs]
    for kv in kvs if axis == "pipeline" else ():
        kv.resize({name: pool.num_usable for name, pool in kv.pools.items()})
    terms = Terms(axis=axis, mode="leader", every=1, deadline=5)  # type: ignore[arg-type]
    groups = [Agreement(kv, t, terms) for kv, t in zip(kvs, LocalHub(RANKS).ranks(), strict=True)]
    work = [[kv.open([i] * LONG) for i in range(4)] for kv in kvs]
    refused = 0
    for _ in range(120):
        for kv, engine, group, seqs in zip(kvs, engines, groups, work, strict=True):
            if not group.boundary().drain:
                refused += compute(kv, engine, seqs)
    assert refused > 0
    assert all(seq.computed >= LONG for seqs in work for seq in seqs)
    assert groups[0].facts().commits > 0
    assert kvs[0].peer.digest() == kvs[1].peer.digest()
    for engine, seqs in zip(engines, work, strict=True):
        engine.verify(seqs)


def test_a_lone_follower_can_not_move_anything() -> None:
    kvs = [manager(0.3) for _ in range(RANKS)]
    terms = Terms(mode="leader", every=1, deadline=5)
    groups = [Agreement(kv, t, terms) for kv, t in zip(kvs, LocalHub(RANKS).ranks(), strict=True)]
    assert [group.is_leader for group in groups] == [True, False]
    plan = kvs[1].peer.wishes()
    assert plan == ()
    for _ in range(5):
        assert not any(group.boundary().changed for group in groups)
