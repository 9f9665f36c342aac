"""What moving capacity earns: from a wrong split at least as much as the best fixed one."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from tests.sim.plain import Metronome

from kvtide.layout import FullSpec, Layout, WindowSpec
from kvtide.sim.lab import Setup, oracle_static, replay
from kvtide.sim.traces.synthetic import Phase, SyntheticOptions, synthetic

if TYPE_CHECKING:
    from kvtide.sim.result import Run
    from kvtide.sim.traces import TraceRequest

CHAT = Phase(
    rate=1.0,
    cv=1.0,
    prefixes=4,
    turns=4,
    think=20,
    first_input=600,
    input=100,
    output=40,
    longest=3000,
)


@pytest.fixture(scope="module")
def trace() -> list[TraceRequest]:
    return list(synthetic((CHAT,), SyntheticOptions(requests=400, block=16, seed=1)))


@pytest.fixture(scope="module")
def setup() -> Setup:
    """Pages of 6 KiB, which do not divide the granule, and a window of four blocks."""
    full = FullSpec(kv_heads=1, head_dim=96, dtype="bfloat16")
    window = WindowSpec(window=64, kv_heads=1, head_dim=96, dtype="bfloat16")
    clock: Any = Metronome(0.02)
    return Setup(
        layout=Layout.from_layers({0: window, 1: full}, block_tokens=16),
        clock=clock,
        memory_bytes=600 * 8192,
        granule_bytes=8192,
        max_tokens=3001,
        chunk_tokens=1024,
    )


@pytest.fixture(scope="module")
def best_fixed(trace: list[TraceRequest], setup: Setup) -> Run:
    return oracle_static(trace, setup, rounds=2)


@pytest.mark.parametrize("share", [0.5, 0.85])
def test_a_wrong_start_is_won_back(
    trace: list[TraceRequest], setup: Setup, best_fixed: Run, share: float
) -> None:
    # Ground used to be given without a price as soon as a donor had a page to spare: windows that
    # make whole runs matchable went for single blocks, and this lost to the best fixed split.
    wrong = replace(setup, pool_ratio={"full": share, "window_64": 1 - share})
    static, elastic = (replay(trace, wrong, policy).totals for policy in ("static", "elastic"))
    assert elastic.hit_tokens >= best_fixed.totals.hit_tokens > static.hit_tokens
