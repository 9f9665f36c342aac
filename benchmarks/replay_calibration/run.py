"""How far the replay lab's clock is from measured runs of vLLM.

    KVTIDE_TRACES=/path/to/traces python benchmarks/replay_calibration/run.py

The folder holds `llmservingsim/vllm_measured/*`: the measured runs of casys-kaist/LLMServingSim
(MIT). Writes results.json beside this file, and prints the table of the README.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from dataclasses import replace
from pathlib import Path
from timeit import repeat
from typing import Any

import numpy as np
from fit import distance, fit
from measured import Measured, curves, errors, load

from kvtide.layout import Layout, Parallel
from kvtide.sim.costs import Clock, Experts, ModelCost, hardware
from kvtide.sim.lab import Setup
from kvtide.types import align_up

HERE = Path(__file__).parent
GRANULE = 2 << 20
STEP_SECONDS = 0.002
"""Kept fixed: a longer step and higher efficiencies fit as well (README)."""

CHIP = {
    "compute_efficiency": (0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9),
    "memory_efficiency": (0.75, 0.8, 0.85, 0.9, 0.95),
}
LINK = {
    "link_efficiency": (0.15, 0.2, 0.25, 0.3, 0.4),
    "link_seconds": (20e-6, 40e-6, 60e-6, 80e-6, 100e-6),
}
NOTHING: dict[str, tuple[float, ...]] = {}

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
GPT_OSS = {
    "model_type": "gpt_oss",
    "head_dim": 64,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "sliding_window": 128,
    "torch_dtype": "bfloat16",
}
QWEN_32B = {
    "model_type": "qwen3",
    "head_dim": 128,
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_attention_heads": 64,
    "num_hidden_layers": 64,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
}
QWEN_30B_A3B = {
    "model_type": "qwen3_moe",
    "head_dim": 128,
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
}


def setup_of(
    config: dict[str, Any], machine: str, *, ranks: int = 1, running: int, tokens: int | None
) -> Setup:
    """vLLM's settings of a run. `tokens` of cache, None: what 90 % of the memory leave."""
    layout = Layout.from_config(config, block_tokens=16, parallel=Parallel(tensor=ranks))
    model = ModelCost.from_config(config, layout, ranks=ranks)
    chip = replace(hardware(machine), step_seconds=STEP_SECONDS)
    if tokens is None:
        num_bytes = int(0.9 * chip.memory_bytes - 2 * model.total_params / ranks - 2e9)
    else:
        num_bytes = tokens * int(layout.bytes_per_token)
    return Setup(
        layout=layout,
        clock=Clock(model, chip),
        memory_bytes=align_up(num_bytes, GRANULE),
        max_tokens=8192,
        max_running=running,
        chunk_tokens=2048,
    )


def share_experts(setup: Setup) -> Setup:
    """Two ranks that each serve half of the requests and hold half of the experts.

    A rank computes its experts for the tokens of both, so a token of its own stands for two: as
    many of half the experts. It gathers hidden states before and scatters sums after every layer.
    """
    model = setup.clock.model
    experts, layers = model.weights.experts, int(QWEN_30B_A3B["num_hidden_layers"])
    if experts is None:
        raise SystemExit("expert parallel needs a model with experts")
    half = Experts(num=experts.num // 2, active=experts.active, params=experts.params)
    shared = replace(
        model,
        weights=replace(model.weights, experts=half),
        exchanges=2 * layers,
        link_bytes=2.0 * layers * int(QWEN_30B_A3B["hidden_size"]) * 2,
    )
    return replace(setup, clock=Clock(shared, setup.clock.hardware))


def row(
    case: str,
    measured: Measured,
    setup: Setup,
    grid: dict[str, tuple[float, ...]],
    given: dict[str, float],
) -> dict[str, Any]:
    """One measured run: fit what `grid` names, take the rest from `given`."""
    chip = replace(setup.clock.hardware, **given)
    setup = replace(setup, clock=Clock(setup.clock.model, chip))
    fitted, run, tried = fit(measured, setup, grid)
    print(f"{case}: fitted {fitted}, given {given}, {tried} replays", file=sys.stderr)
    return {
        "case": case,
        "fitted": fitted,
        "given": {"step_seconds": STEP_SECONDS, **given},
        "replays": tried,
        "distance": distance(measured, run),
        **errors(measured, run),
        "curves": {
            name: {"measured": theirs.tolist(), "replayed": np.round(ours, 1).tolist()}
            for name, (theirs, ours) in curves(measured, run).items()
        },
    }


def as_json(rows: list[dict[str, Any]], speed: dict[str, float]) -> str:
    """One field a line, so that curves do not take a line a second."""
    blocks = [
        "{\n" + ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in row.items()) + "\n }"
        for row in rows
    ]
    head = f' "python": {json.dumps(platform.python_version())},\n'
    head += f' "microseconds": {json.dumps(speed)},\n'
    return "{\n" + head + ' "rows": [\n ' + ",\n ".join(blocks) + "\n ]\n}\n"


def all_rows(folder: Path) -> list[dict[str, Any]]:
    """The measured runs. Each is fitted with what the ones before it have settled."""
    rtx = load(folder / "RTX4090_Llama-3.1-8B")
    pro = load(folder / "RTXPRO6000_Llama-3.1-8B")
    two = load(folder / "RTXPRO6000_Qwen3-32B")
    sparse = load(folder / "RTXPRO6000_Qwen3-30B-A3B-Instruct-2507").every_second()
    tokens = rtx.meta["kv_cache"]["num_kv_tokens"]
    one = setup_of(LLAMA, "rtx4090", running=256, tokens=tokens)
    rows = [row("RTX 4090, Llama-3.1-8B", rtx, one, CHIP, {})]
    big = setup_of(LLAMA, "rtx-pro-6000", running=128, tokens=None)
    rows.append(row("RTX PRO 6000, Llama-3.1-8B", pro, big, CHIP, {}))
    known = rows[-1]["fitted"]
    pair = setup_of(QWEN_32B, "rtx-pro-6000", ranks=2, running=128, tokens=None)
    rows.append(row("2 x RTX PRO 6000, Qwen3-32B, tensor 2", two, pair, LINK, known))
    known = known | rows[-1]["fitted"]
    half = share_experts(setup_of(QWEN_30B_A3B, "rtx-pro-6000", running=128, tokens=None))
    case = "2 x RTX PRO 6000, Qwen3-30B-A3B, data 2, experts 2"
    rows.append(row(f"{case}: predicted", sparse, half, NOTHING, known))
    return rows


def by_step(folder: Path) -> list[dict[str, Any]]:
    """The first run fitted for several values of what is kept fixed."""
    measured = load(folder / "RTX4090_Llama-3.1-8B")
    tokens = measured.meta["kv_cache"]["num_kv_tokens"]
    setup = setup_of(LLAMA, "rtx4090", running=256, tokens=tokens)
    steps = (0.0, 0.001, 0.002, 0.003, 0.004, 0.006)
    return [
        row(f"step {1e3 * step:g} ms", measured, setup, CHIP, {"step_seconds": step})
        for step in steps
    ]


HEAD = (
    "run",
    "total s",
    "TTFT p50",
    "p90",
    "p99",
    "end to end p50",
    "p90",
    "p99",
    "error of end to end",
    "running",
    "waiting",
    "occupancy",
)


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: measured / replayed, in seconds; mean errors."""
    lines = [f"| {' | '.join(HEAD)} |", "|---" * len(HEAD) + "|"]
    for r in rows:
        pairs = [r["total_seconds"], *zip(*r["ttft_p50_p90_p99"], strict=True)]
        pairs += zip(*r["end_to_end_p50_p90_p99"], strict=True)
        cells = [r["case"], *(f"{a:.1f} / {b:.1f}" for a, b in pairs)]
        cells.append(f"{r['end_to_end_mean_error_percent']:.1f} %")
        cells += [f"{r[name]:.1f}" for name in ("running_mean_error", "waiting_mean_error")]
        points = r.get("occupancy_mean_error")
        cells.append("not recorded" if points is None else f"{points:.1f} points")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def microseconds() -> dict[str, float]:
    """Of one call for 256 rows, the least of five rounds: layers with full and window attention."""
    layout = Layout.from_config(GPT_OSS, block_tokens=64)
    model = ModelCost.from_config(GPT_OSS, layout, params=20.9e9, active_params=3.6e9)
    clock = Clock(model, hardware("h100"))
    starts, ones = np.arange(256) * 50, np.ones(256, np.int64)
    mixed = ones.copy()
    mixed[0] = 2048
    calls = {
        "seconds, all rows decode": lambda: clock.seconds(starts, ones),
        "seconds, one row a chunk": lambda: clock.seconds(starts, mixed),
        "decode_seconds, 1000 steps": lambda: clock.decode_seconds(starts, 1000),
    }
    return {name: 1e3 * min(repeat(call, number=1000, repeat=5)) for name, call in calls.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", default=os.environ.get("KVTIDE_TRACES"))
    parser.add_argument("--steps", action="store_true", help="vary step_seconds; writes nothing")
    given = parser.parse_args()
    root = given.traces
    if root is None:
        print("left out: set KVTIDE_TRACES to the folder of traces, or pass --traces")
        return
    folder = Path(root) / "llmservingsim" / "vllm_measured"
    if given.steps:
        print(table(by_step(folder)))
        return
    rows = all_rows(folder)
    speed = microseconds()
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in speed.items()]
    print(table(rows), *lines, sep="\n")
    (HERE / "results.json").write_text(as_json(rows, speed))


if __name__ == "__main__":
    main()
