"""The shipped constants against a measured run of vLLM: a cache that is full for most of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from benchmarks.replay_calibration.measured import errors, load
from tests.sim.costs.published import LLAMA_8B

from kvtide.layout import Layout
from kvtide.sim.costs import Clock, ModelCost, hardware
from kvtide.sim.lab import Setup, replay

RUN = Path("llmservingsim") / "vllm_measured" / "RTX4090_Llama-3.1-8B"


def test_a_measured_run_is_reproduced() -> None:
    root = os.environ.get("KVTIDE_TRACES")
    if root is None:
        pytest.skip("KVTIDE_TRACES is not set: the measured run of LLMServingSim is not here")
    measured = load(Path(root) / RUN)
    layout = Layout.from_config(dict(LLAMA_8B), block_tokens=16)
    setup = Setup(
        layout=layout,
        clock=Clock(ModelCost.from_config(dict(LLAMA_8B), layout), hardware("rtx4090")),
        memory_bytes=41408 * int(layout.bytes_per_token),
        max_tokens=8192,
        max_running=256,
        chunk_tokens=2048,
    )
    found = errors(measured, replay(measured, setup, "static"))
    theirs, ours = found["total_seconds"]
    assert ours == pytest.approx(theirs, rel=0.02)
    assert found["occupancy_mean_error"] < 3
    assert found["waiting_mean_error"] < 5
    assert found["end_to_end_mean_error_percent"] < 3
    for theirs, ours in zip(*found["ttft_p50_p90_p99"], strict=True):
        assert ours == pytest.approx(theirs, rel=0.03)
