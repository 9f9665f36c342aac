"""Plans and budgets while serving: what is done at once, what waits, what is in the way."""

from __future__ import annotations

import itertools
import os
import random
from typing import Any

import numpy as np
import pytest
from tests.tiny import GRANULE, Rig, full, state, window

from kvtide import ConfigError, GraphGuard, KVManager, Layout, Move, Options, Origin, UsageError
from kvtide.events import GroundMoved
from kvtide.memory import MemfdMemory
from kvtide.testing.engine import FakeEngine


def rig(**options: Any) -> Rig:
    """Two pools of full attention and window, 16 granules; a longest sequence needs 5 + 5."""
    options.setdefault("mode", "elastic")
    return Rig(full(), window(8), pages=[8, 6], max_tokens=16, **options)


def physical_bytes(memory: MemfdMemory) -> int:
    return os.fstat(memory._fd).st_blocks * 512


def move(donor: str, receiver: str, granules: int) -> tuple[Move, ...]:
    return (Move(donor=donor, receiver=receiver, granules=granules, reason="because"),)


# -- plans ---------------------------------------------------------------------------------------


def test_a_plan_goes_a_little_at_each_step() -> None:
    r = rig(mode="static", move_bytes_per_step=GRANULE)
    seq = r.start(range(4), sample=True)
    progress = r.kv.rebalance(move("full", "window_8", 3))
    # Before the next step begins nothing more may move: it is the same boundary.
    assert (progress.moved, progress.pending, progress.blocked_by) == (1, 2, ())
    seen = [r.facts("window_8").granules]
    for _ in range(4):
        r.engine.step([seq], 1)
        seen.append(r.facts("window_8").granules)
    assert seen == [8, 8, 9, 10, 10]
    assert r.kv.snapshot().granules_pending == 0
    assert r.kv.snapshot().granules_moved_by["plan"] == 3


def test_settling_does_all_at_once() -> None:
    r = rig(mode="static", move_bytes_per_step=GRANULE)
    assert r.kv.rebalance(move("full", "window_8", 3)).pending == 2
    progress = r.kv.settle()
    assert (progress.moved, progress.done) == (2, True)
    r.kv.check()


def test_a_new_plan_replaces_the_old_one() -> None:
    r = rig(mode="static", move_bytes_per_step=GRANULE)
    r.kv.rebalance(move("full", "window_8", 3))
    assert r.kv.rebalance(()).done
    assert (r.facts("full").granules, r.facts("window_8").granules) == (8, 8)


def test_a_limit_over_a_thousand_steps() -> None:
    r = rig(mode="static", move_bytes_per_step=GRANULE, move_bytes_per_1000_steps=2 * GRANULE)
    seq = r.start(range(4), sample=True)
    r.kv.rebalance(move("full", "window_8", 4))
    for _ in range(6):
        r.engine.step([seq], 1)
    assert r.facts("window_8").granules == 9
    assert r.kv.snapshot().granules_pending == 2


def test_a_dry_run_says_what_could_go_and_changes_nothing() -> None:
    r = rig(mode="static")
    r.start(range(16))
    before, epoch = r.books(), r.kv.epoch
    progress = r.kv.rebalance(move("full", "window_8", 8), dry_run=True)
    # 9 granules: the sink, 4 pages in use, and two pages that straddling could cost elsewhere.
    assert (progress.moved, progress.pending) == (2, 6)
    assert (r.books(), r.kv.epoch) == (before, epoch)
    assert r.kv.rebalance(move("full", "window_8", 2)).done


def test_live_pages_step_aside_for_a_plan() -> None:
    """Sixteen pages a granule, and live ones on each of them."""
    layout = Layout.from_layers({0: full(), 1: window(8)}, block_tokens=4)
    memory = MemfdMemory(16 * GRANULE, GRANULE)
    options = Options(mode="static", pool_ratio={"full": 0.6, "window_8": 0.4})
    kv = KVManager(layout, memory, max_tokens=64, options=options)
    engine = FakeEngine(kv)
    seqs = [kv.open(range(100 * i, 100 * i + 32)) for i in range(10)]
    assert kv.admit(seqs)
    engine.prefill(seqs)
    kv.close(seqs[::2])
    progress = kv.rebalance(move("full", "window_8", 5))
    assert progress.done
    assert kv.snapshot().pages_relocated > 0
    engine.verify(seqs[1::2])
    kv.check()


def test_a_plan_that_live_sequences_block_names_them_and_goes_on_when_they_leave() -> None:
    r = rig(mode="static")
    a, b = r.start(range(16)), r.start(range(50, 58), sample=True)
    progress = r.kv.rebalance(move("full", "window_8", 5))
    assert not progress.done
    assert [h.sequence for h in progress.blocked_by] == [a, b]
    assert progress.blocked_by[0].num_bytes == 4 * GRANULE
    r.kv.close([a])
    r.engine.step([b], 1)
    assert r.kv.snapshot().granules_pending == 0
    r.engine.verify([b])


def test_what_a_step_in_flight_may_touch_stays_and_the_rest_moves() -> None:
    r = rig(mode="static")
    seq = r.start(range(15), sample=True)
    r.engine.step([seq], 1, in_flight=True)
    pages = r.kv.tables["full"].rows[seq.row].copy()
    progress = r.kv.rebalance(move("full", "window_8", 8))
    assert progress.moved == 4
    assert (r.kv.tables["full"].rows[seq.row] == pages).all()
    r.engine.complete()
    r.engine.verify([seq])
    r.kv.check()


def test_a_ceiling_holds_for_plans_and_for_growth() -> None:
    r = rig(mode="static", ceiling_pages={"window_8": 7})
    progress = r.kv.rebalance(move("full", "window_8", 4))
    assert (progress.moved, progress.pending) == (1, 0)  # the rest is given up
    assert r.facts("window_8").granules == 8
    with pytest.raises(ConfigError, match=r"ceiling_pages\['full'\] is 3, .* needs 4"):
        rig(ceiling_pages={"full": 3})
    with pytest.raises(ConfigError, match=r"floor_pages\['full'\] is 9, above ceiling"):
        rig(floor_pages={"full": 9}, ceiling_pages={"full": 8})
    elastic = rig(ceiling_pages={"full": 5})
    elastic.start(range(16))
    assert not elastic.kv.admit([elastic.kv.open(range(50, 66))])
    assert elastic.facts("full").granules <= 6


# -- budgets -------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["elastic", "static"])
def test_a_smaller_budget_gives_memory_back_to_the_system(mode: str) -> None:
    r = rig(mode=mode)
    for start in (0, 100, 200):
        r.cache(range(start, start + 8))
    assert isinstance(r.kv.memory, MemfdMemory)
    for pool in r.kv.pools.values():  # whoever wrote to all of it before: its pages are idle now
        pool.zero(np.flatnonzero(pool.books.free_mask()).astype(np.int32))
    before = physical_bytes(r.kv.memory)
    progress = r.kv.set_budget(11 * GRANULE)
    assert progress.done
    assert r.kv.snapshot().budget_bytes == 11 * GRANULE
    seq = r.start(range(300, 304), sample=True)
    seen = [physical_bytes(r.kv.memory)]
    for _ in range(8):
        r.engine.step([seq])
        seen.append(physical_bytes(r.kv.memory))
    assert seen[-1] <= 11 * GRANULE < before
    assert max(a - b for a, b in itertools.pairwise(seen)) == GRANULE  # a little at each step
    r.kv.close([seq])
    r.kv.check()
    r.engine.verify([r.start(range(8))])


def test_a_static_split_follows_the_budget_down_and_up_again() -> None:
    r = rig(mode="static")
    split = {name: pool.granules for name, pool in r.kv.snapshot().pools.items()}
    assert split == {"full": 9, "window_8": 7}
    for _ in range(3):
        assert r.kv.set_budget(13 * GRANULE).done
        assert {n: p.granules for n, p in r.kv.snapshot().pools.items()} == {
            "full": 8,
            "window_8": 5,
        }
        assert r.kv.set_budget(16 * GRANULE).done
        assert {n: p.granules for n, p in r.kv.snapshot().pools.items()} == split
        r.kv.check()


def test_a_budget_outside_what_is_possible_is_refused() -> None:
    r = rig()
    with pytest.raises(ConfigError, match=r"needs? .*, the memory has"):
        r.kv.set_budget(8 * GRANULE)
    with pytest.raises(ConfigError, match="choose a value between them"):
        r.kv.set_budget(17 * GRANULE)
    assert r.kv.snapshot().budget_bytes == 16 * GRANULE
    static = rig(mode="static", pool_ratio={"full": 11 / 16, "window_8": 5 / 16})
    with pytest.raises(ConfigError, match="leaves pool 'window_8' 3 by its share"):
        static.kv.set_budget(11 * GRANULE)
    assert static.kv.snapshot().budget_bytes == 16 * GRANULE


def test_a_budget_leaves_room_for_a_longest_sequence_beside_registered_padding() -> None:
    r = rig()
    r.kv.set_budget(9 * GRANULE)  # 5 + 4
    r.kv.set_budget(16 * GRANULE)
    guard = GraphGuard(r.kv)
    padding = guard.register_padding(5)
    assert padding is not None
    with pytest.raises(ConfigError, match="registered padding need 53,248"):
        r.kv.set_budget(12 * GRANULE)
    r.kv.set_budget(13 * GRANULE)
    r.engine.prefill([r.start(range(8))])
    padding.unregister()
    r.kv.set_budget(9 * GRANULE)
    r.kv.check()


def test_a_manager_may_start_small_and_grow() -> None:
    r = rig(budget_bytes=10 * GRANULE)
    a = r.start(range(16))
    b = r.kv.open(range(50, 66))
    assert not r.kv.admit([b])
    r.kv.set_budget(16 * GRANULE)
    assert r.kv.admit([b])
    r.engine.prefill([b])
    r.engine.verify([a, b])
    with pytest.raises(ConfigError, match="cannot hold one sequence"):
        rig(budget_bytes=6 * GRANULE)


def test_live_demand_is_served_while_a_budget_is_overdrawn() -> None:
    """The ground that an idle pool holds pays the debt first and then serves who asks."""
    r = rig(move_bytes_per_step=0)
    for start in range(0, 400, 50):
        r.cache(range(start, start + 8))
    seq = r.start(range(900, 908), sample=True)
    r.kv.set_budget(10 * GRANULE)  # one granule at once; the rest is owed
    for _ in range(7):
        r.engine.step([seq], 1)
    r.engine.verify([seq])
    assert r.kv.settle().done
    r.kv.check()


# -- reasons -------------------------------------------------------------------------------------


def squeeze(r: Rig) -> None:
    """Traffic that leaves the full pool's prefixes cold and the window's pool short."""
    for start in range(0, 300, 20):
        r.cache(range(start, start + 16))
    for _ in range(4):
        for start in (1000, 1100, 1200, 1300, 1400):
            r.cache(range(start, start + 6))


def test_every_trade_says_why_in_numbers() -> None:
    events: list[Any] = []
    r = Rig(
        full(), state(interval=4), pages=[12, 6], max_tokens=16, mode="elastic",
        events=events.append, pool_ratio={"full": 0.7, "state": 0.3},
    )  # fmt: skip
    squeeze(r)
    trades = [e for e in events if isinstance(e, GroundMoved)]
    assert trades
    assert sum(e.granules for e in trades) == r.kv.snapshot().granules_moved
    priced = [e for e in trades if e.cause == "price"]
    assert priced
    assert all("hit tokens in" in e.reason or "nothing of worth" in e.reason for e in priced)
    assert not any(e.dry_run for e in trades)


def test_dry_run_reports_trades_and_makes_none() -> None:
    events: list[Any] = []
    r = Rig(
        full(), state(interval=4), pages=[12, 6], max_tokens=16, mode="dry_run",
        events=events.append, pool_ratio={"full": 0.7, "state": 0.3},
    )  # fmt: skip
    split = {name: pool.granules for name, pool in r.kv.snapshot().pools.items()}
    squeeze(r)
    facts = r.kv.snapshot()
    assert {name: pool.granules for name, pool in facts.pools.items()} == split
    assert facts.granules_moved == 0 < facts.granules_declined
    assert all(e.dry_run for e in events if isinstance(e, GroundMoved))


def test_warm_up_teaches_the_policy_nothing() -> None:
    """After dummies of full length, traffic is served by the same moves as without them."""

    def serve(*, warm: bool) -> list[tuple[str, str | None, int]]:
        events: list[Any] = []
        r = Rig(
            full(), state(interval=4), pages=[12, 6], max_tokens=16, mode="elastic",
            events=events.append, pool_ratio={"full": 0.7, "state": 0.3},
        )  # fmt: skip
        if warm:
            for _ in range(3):
                seq = r.start(range(5000, 5016), origin=Origin.WARMUP)
                r.kv.close([seq])
        assert r.books()["full"][2] == 0
        squeeze(r)
        return [(e.donor, e.receiver, e.granules) for e in events if isinstance(e, GroundMoved)]

    assert serve(warm=True) == serve(warm=False) != []


def test_misuse_names_numbers() -> None:
    r = rig()
    with pytest.raises(UsageError, match="moves -1 granules"):
        r.kv.rebalance(move("full", "window_8", -1))
    with pytest.raises(ConfigError, match="move_bytes_per_step is -1"):
        rig(move_bytes_per_step=-1)
    with pytest.raises(ConfigError, match="mode is 'magic'"):
        rig(mode="magic", pool_ratio={"full": 0.5, "window_8": 0.5})


def test_over_a_thousand_steps_only_live_demand_moves_beyond_the_limit() -> None:
    def moved(limit: int | None) -> int:
        r = Rig(
            full(), state(interval=4), pages=[12, 6], max_tokens=16, mode="elastic",
            pool_ratio={"full": 0.7, "state": 0.3}, move_bytes_per_1000_steps=limit,
        )  # fmt: skip
        squeeze(r)
        by_cause = r.kv.snapshot().granules_moved_by
        return by_cause["idle"] + by_cause["price"]

    assert moved(None) > 2
    assert moved(GRANULE) == 1
    assert moved(0) == 0


def test_pages_of_a_finished_step_in_another_pool_are_no_reason_to_refuse() -> None:
    """The pool that could give has pages behind a fence that has passed: they count as free."""
    r = Rig(
        full(), window(8), pages=[7, 11], max_tokens=28, mode="elastic",
        pool_ratio={"full": 8 / 20, "window_8": 12 / 20},
    )  # fmt: skip
    seq = r.start(range(15), sample=True)
    r.engine.step([seq], 1, in_flight=True)
    r.kv.reset()
    r.kv.close([seq])  # nobody's pages now, but the step may still read them
    assert r.facts("window_8").in_flight == 2
    r.engine.complete()
    seqs = [r.kv.open(range(100, 128)), r.kv.open(range(200, 216))]
    assert r.kv.admit([seqs[0]], 1)
    r.engine.prefill([seqs[0]], limit=1)
    assert r.kv.admit([seqs[1]])
    r.engine.prefill([seqs[1]])
    r.engine.verify(seqs)


def test_where_pages_straddle_granules_ground_goes_from_the_top_only() -> None:
    """A hole in the middle would cost more pages than granules, and what fits would be a guess."""
    spec = full(205)  # 4 tokens are 6,560 bytes, a granule has 4,096
    layout = Layout.from_layers({0: spec, 1: window(8)}, block_tokens=4)
    options = Options(mode="elastic", pool_ratio={"full": 0.8, "window_8": 0.2})
    kv = KVManager(layout, MemfdMemory(30 * GRANULE, GRANULE), max_tokens=16, options=options)
    engine = FakeEngine(kv)
    seqs = [kv.open([i] * 4) for i in range(10)]
    assert kv.admit(seqs)
    engine.prefill(seqs, sample=True)
    low, high = seqs[0], seqs[-1]
    kv.reset()
    kv.close(seqs[1:-1])
    engine.step([low, high], 1, in_flight=True)  # nothing of theirs may move now
    progress = kv.rebalance(move("full", "window_8", 12))
    mapped = np.flatnonzero(kv.pools["full"].mapped)
    assert (mapped == np.arange(len(mapped))).all()
    assert progress.pending > 0
    engine.complete()
    assert kv.settle().done
    mapped = np.flatnonzero(kv.pools["full"].mapped)
    assert (mapped == np.arange(len(mapped))).all()
    engine.verify([low, high])


# -- sizes in pages ------------------------------------------------------------------------------


def test_pools_are_resized_as_soon_as_the_last_step_is_over() -> None:
    r = rig(mode="static")
    seq = r.start(range(4), sample=True)
    r.engine.step([seq], 1, in_flight=True)
    pages = {name: pool.num_usable for name, pool in r.kv.pools.items()}
    wanted = {"full": pages["full"] - 1, "window_8": pages["window_8"] + 1}
    with pytest.raises(UsageError, match="1 steps are in flight"):
        r.kv.resize(wanted)
    r.engine.complete()
    assert r.kv.resize(wanted) == wanted
    assert {name: pool.num_usable for name, pool in r.kv.pools.items()} == wanted
    r.kv.check()


def test_managers_of_other_page_bytes_keep_equal_books_once_resized_alike() -> None:
    rigs = [Rig(full(), pages=[n], max_tokens=32, mode="static") for n in (20, 80)]
    for r in rigs:  # one memory holds four times the pages of the other
        assert r.kv.resize({"full": 16}) == {"full": 16}
    draw = random.Random(0)
    for _ in range(200):
        shared = [draw.randrange(3), *range(draw.randrange(20))]
        tokens = [*shared, *(draw.randrange(3) for _ in range(draw.randrange(1, 12)))]
        for r in rigs:
            r.cache(tokens)
        assert rigs[0].kv.peer.digest() == rigs[1].kv.peer.digest()
    assert rigs[0].kv.snapshot().pools["full"].evicted > 0
