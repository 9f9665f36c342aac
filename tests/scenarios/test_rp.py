"""Rebalance policy: whom it learns from, and that nobody starves under a wrong split."""

from __future__ import annotations

from typing import Any

from tests.tiny import Rig, full, state, window

from kvtide import Origin
from kvtide.events import GroundMoved
from kvtide.sizing import least_pages


def traffic(rig: Rig, start: int) -> None:
    """20 sequences of 16 tokens."""
    for i in range(20):
        rig.cache(range(start + 20 * i, start + 20 * i + 16))


def test_rp_1_the_tuner_learns_from_warm_up_dummies() -> None:
    """3 dummies of full length first: what moves for the traffic, and what it hits, is the same."""

    def serve(dummies: int) -> tuple[list[Any], int, int]:
        events: list[Any] = []
        rig = Rig(
            full(), state(interval=8), pages=[40, 12], max_tokens=64, mode="elastic",
            events=events.append, pool_ratio={"full": 0.8, "state": 0.2},
        )  # fmt: skip
        for i in range(dummies):
            rig.kv.close([rig.start([i] * 64, origin=Origin.WARMUP)])
        rig.kv.check()
        granules = {name: pool.granules for name, pool in rig.kv.snapshot().pools.items()}
        assert granules == {"full": 44, "state": 10}
        traffic(rig, 1000)
        traffic(rig, 1000)
        moved = [(e.donor, e.receiver, e.granules) for e in events if isinstance(e, GroundMoved)]
        facts = rig.kv.snapshot()
        return moved, facts.hit_tokens, facts.prompt_tokens

    assert serve(dummies=3) == serve(dummies=0)
    assert serve(dummies=0)[2] == 2 * 20 * 16


def test_rp_2_sampling_at_close_only() -> None:
    """A long sequence has the ground it needs long before it closes; empty ones change nothing."""
    rig = Rig(full(), window(4), pages=[12, 8], max_tokens=64, mode="elastic",
              pool_ratio={"full": 0.85, "window_4": 0.15})  # fmt: skip
    for i in range(50):
        rig.kv.close([rig.kv.open([i] * 4)])
    long = rig.start(range(8), sample=True)
    for _ in range(40):
        rig.engine.step([long], 1)
    rig.kv.trim(long, 1)
    rig.engine.verify([long])
    assert rig.facts("full").used == 12
    assert all(pool.granules >= 2 for pool in rig.kv.snapshot().pools.values())
    rig.kv.check()


def test_rp_3_ratio_from_one_snapshot_misses_the_page_a_window_straddles() -> None:
    """Blocks of 4, window 4, 8 sequences: sized for the peak, 2 pages each, nobody is refused."""
    layout = Rig(full(), window(4), pages=[8, 8], max_tokens=16).kv.layout
    peak = 8 * least_pages(layout.groups[1], 16)
    assert peak == 16

    def decode(window_pages: int) -> bool:
        rig = Rig(full(), window(4), pages=[48, window_pages], max_tokens=24)
        seqs = [rig.kv.open([i] * 11) for i in range(8)]
        for seq in seqs:  # one by one, in small chunks: prefill needs more for a moment
            if not rig.kv.admit([seq], 4):
                return False
            rig.engine.prefill([seq], limit=4, sample=True)
        for _ in range(8):
            if not rig.kv.extend(seqs, 1):
                return False
            rig.engine.step(seqs, 1)
        rig.engine.verify(seqs)
        return True

    assert decode(peak)
    assert not decode(peak - 1)


def test_rp_4_floor_for_a_windowed_pool_collapses_to_one_slot() -> None:
    """The split of a long-history profile (a window pool at its least) serves six all the same."""
    rig = Rig(full(), window(3), pages=[20, 20], max_tokens=24, block_tokens=8, mode="elastic",
              pool_ratio={"full": 0.9, "window_3": 0.1})  # fmt: skip
    assert rig.facts("window_3").granules == 4
    seqs = [rig.start([i], sample=True) for i in range(6)]
    for _ in range(19):
        rig.engine.step(seqs, 1)
    assert all(seq.computed == 20 for seq in seqs)
    assert rig.facts("window_3").pages - 1 >= 6
    rig.engine.verify(seqs)


def test_rp_5_growth_headroom_demanded_from_a_pool_that_cannot_grow() -> None:
    """A state pool that is full to the last page but one admits whoever needs just that."""
    rig = Rig(full(), state(interval=64), pages=[20, 4], max_tokens=16, mode="static")
    s = rig.start(range(900, 908))
    rig.kv.suspend([s])
    rig.kv.reset()
    live = [rig.start([i] * 4) for i in range(3)]
    assert rig.books()["state"][1] >= 3
    assert rig.kv.resume([s])
    rig.engine.prefill([s])
    rig.engine.verify([*live, s])

    small = Rig(full(), state(interval=64), pages=[8, 2], max_tokens=16, mode="static")
    a = small.start(range(16))
    small.kv.suspend([a])
    b = small.start(range(50, 66))
    small.kv.suspend([b])
    assert small.kv.resume([a])  # b's pages are dropped if need be, to be computed again
    small.engine.prefill([a])
    small.kv.close([a])
    assert small.kv.resume([b])


def test_rp_6_floor_equal_to_the_need_while_resume_wants_headroom() -> None:
    """19 pages are needed and 19 are there: everybody is suspended and comes back."""
    rig = Rig(full(), pages=[19], max_tokens=16, mode="static")
    seqs = [rig.start([100 + i] * 16) for i in range(4)] + [rig.start([200] * 12)]
    assert rig.books()["full"][1] == 19
    rig.kv.suspend(seqs)
    assert rig.kv.resume(seqs)
    rig.engine.prefill([seq for seq in seqs if seq.computed < seq.length])
    rig.engine.verify(seqs)
    assert rig.books()["full"][0] == 0


def test_rp_7_initial_split_from_an_assumed_length_starves_a_pool() -> None:
    """A split for long prompts gives states almost nothing; short ones get theirs all the same."""
    rig = Rig(full(), state(interval=64), pages=[90, 10], max_tokens=256, max_sequences=64,
              mode="elastic", pool_ratio={"full": 0.96, "state": 0.04})  # fmt: skip
    assert rig.facts("state").pages == 4
    seqs = [rig.kv.open([i] * 4) for i in range(40)]
    for seq in seqs:
        assert rig.kv.admit([seq])
        rig.engine.prefill([seq])
    assert rig.facts("state").pages >= 40
    rig.engine.verify(seqs)
    rig.kv.check()
