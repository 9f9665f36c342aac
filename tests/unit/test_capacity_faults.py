"""Memory refuses at every call of a move in turn: the layout is whole and nobody loses a byte."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.tiny import GRANULE, full, window

from kvtide import DeviceError, KVManager, Layout, MemfdMemory, Move, Options
from kvtide.testing.engine import FakeEngine
from kvtide.testing.faults import FaultyMemory

if TYPE_CHECKING:
    from collections.abc import Callable

PLAN = (Move(donor="full", receiver="window_8", granules=5, reason="test"),)


class Served:
    """Pools of 16 pages a granule, every other sequence closed, so that moves must relocate."""

    def __init__(self, mode: str) -> None:
        layout = Layout.from_layers({0: full(), 1: window(8)}, block_tokens=4)
        self.memory = FaultyMemory(MemfdMemory(16 * GRANULE, GRANULE))
        options = Options(mode=mode, pool_ratio={"full": 0.6, "window_8": 0.4})  # type: ignore[arg-type]
        self.kv = KVManager(layout, self.memory, max_tokens=64, options=options)
        self.engine = FakeEngine(self.kv)
        seqs = [self.kv.open(range(100 * i, 100 * i + 32)) for i in range(10)]
        assert self.kv.admit(seqs)
        self.engine.prefill(seqs, sample=True)
        self.kv.close(seqs[::2])
        self.live = seqs[1::2]

    def granules(self) -> dict[str, int]:
        return {name: pool.granules for name, pool in self.kv.snapshot().pools.items()}


def rebalance(served: Served) -> object:
    return served.kv.rebalance(PLAN)


def shrink(served: Served) -> object:
    """Down to what the system has back, too."""
    served.kv.set_budget(12 * GRANULE)
    return served.kv.settle()


def demand(served: Served) -> object:
    """Prompts nobody has seen, until both pools must give and take."""
    seqs = [served.kv.open(range(5000 + 70 * i, 5000 + 70 * i + 60)) for i in range(9)]
    return [served.kv.admit([seq]) for seq in seqs]


@pytest.mark.parametrize("mode", ["elastic", "static"])
@pytest.mark.parametrize("act", [rebalance, shrink, demand])
def test_each_refused_call_leaves_a_whole_layout(
    mode: str, act: Callable[[Served], object]
) -> None:
    counted = Served(mode)
    counted.memory.fail_at = 0
    act(counted)
    calls = counted.memory.calls
    assert calls >= (0 if (act, mode) == (demand, "static") else 2)  # else there is nothing to test
    refused = 0
    for number in range(1, calls + 1):
        served = Served(mode)
        before = served.granules()
        served.memory.fail_at = number
        try:
            act(served)
        except DeviceError:
            refused += 1
        served.memory.fail_at = 0
        served.kv.check()
        served.engine.verify(served.live)
        if act is rebalance:
            after = served.granules()
            assert sum(after.values()) == sum(before.values())
            assert served.kv.snapshot().granules_pending == 0  # given up, not tried for ever
            assert served.kv.rebalance(PLAN).done or mode == "elastic"
        for seq in served.live:
            served.engine.step([seq], 1)
        served.engine.verify(served.live)
        served.kv.check()
        served.kv.shut_down()
    assert refused == calls


def test_a_step_goes_on_when_memory_refuses_what_was_pending() -> None:
    layout = Layout.from_layers({0: full(), 1: window(8)}, block_tokens=4)
    memory = FaultyMemory(MemfdMemory(16 * GRANULE, GRANULE))
    options = Options(
        mode="static", pool_ratio={"full": 0.6, "window_8": 0.4}, move_bytes_per_step=GRANULE
    )
    kv = KVManager(layout, memory, max_tokens=64, options=options)
    engine = FakeEngine(kv)
    seq = kv.open(range(8))
    assert kv.admit([seq])
    engine.prefill([seq], sample=True)
    assert kv.rebalance(PLAN).pending == 4
    memory.fail_at = 1
    for _ in range(3):
        engine.step([seq], 1)
    memory.fail_at = 0
    assert kv.snapshot().granules_pending == 0
    assert {n: p.granules for n, p in kv.snapshot().pools.items()} == {"full": 9, "window_8": 7}
    engine.verify([seq])
    kv.check()
