"""Runs made by hand, a policy's numbers without a lab; and a small model for the lab itself."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvtide.cli.replay.metrics import Comparison
from kvtide.sim.result import Latency, Objective, Requests, Run, Timeline, Totals, latency_of

GB = 10**9
POOLS = ("full", "indexer")
SAMPLES = 300
FIELDS = {
    "model_type": "gemma3_text",
    "num_hidden_layers": 6,
    "hidden_size": 64,
    "intermediate_size": 96,
    "vocab_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 64,
    "sliding_window_pattern": 6,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}
"""config.json of a model small enough for a lab of some megabytes."""


def requests(count: int, *, slow: float = 1.0) -> Requests:
    """One request a second; a third of each prompt is found in the cache."""
    arrival = np.arange(count, dtype=float)
    first = arrival + slow * (1 + np.arange(count) % 7)
    lengths = 900 + 10 * np.arange(count)
    return Requests(
        arrival=arrival,
        admitted=first - 0.5,
        first_token=first,
        finished=first + slow * 5.0,
        input_tokens=lengths,
        output_tokens=np.full(count, 101),
        hit_tokens=lengths // 3,
        recomputed_tokens=np.zeros(count, np.int64),
        preemptions=np.zeros(count, np.int64),
        failed=np.zeros(count, bool),
    )


def timeline(shares: tuple[float, float], budget: int, *, hits: float, moves: bool) -> Timeline:
    """Two pools that fill up; the second holds what nobody wants after half of the time."""
    time = np.linspace(0.0, 600.0, SAMPLES)
    drift = (0.1 * time / time[-1]) if moves else np.zeros(SAMPLES)
    mapped = np.stack([(shares[0] + drift), (shares[1] - drift)]) * budget
    fill = np.minimum(1.0, time / 200)
    used = mapped * 0.3 * fill
    cached = np.stack([mapped[0] * 0.65 * fill, mapped[1] * 0.1 * fill])
    dead = np.stack([np.zeros(SAMPLES), cached[1] * 0.2])
    stranded = np.zeros_like(mapped)
    if not moves:
        stranded[1] = np.where(time > 300, mapped[1] - used[1] - cached[1] + dead[1], 0)
    prompts = np.linspace(0, 1_000_000, SAMPLES)
    ints: dict[str, Any] = {
        "mapped": mapped,
        "used": used,
        "cached": cached,
        "dead": dead,
        "stranded": stranded,
        "prompt_tokens": prompts,
        "hit_tokens": prompts * hits,
        "running": 40 * fill,
        "waiting": 10 + 10 * np.sin(time / 40),
    }
    return Timeline(time=time, **{name: value.astype(np.int64) for name, value in ints.items()})


def run(policy: str, *, hits: float = 0.3, slow: float = 1.0, **totals: Any) -> Run:
    """A run of 50 requests and 1,000,000 prompt tokens over 600 s."""
    asked = requests(50, slow=slow)
    budget = 60 * GB
    numbers: dict[str, Any] = {
        "requests": 50,
        "failed": 0,
        "prompt_tokens": 1_000_000,
        "output_tokens": 5050,
        "hit_tokens": int(hits * 1_000_000),
        "recomputed_tokens": 0,
        "computed_flops": 1e15,
        "recomputed_flops": 2e10 * totals.get("recomputed_tokens", 0),
        "seconds": 600.0,
        "steps": 9000,
        "preemptions": 0,
        "granules_moved": 0,
        "pause_seconds": 0.0,
        "longest_pause_seconds": 0.0,
        "stranded_share": 0.0,
        "dead_share": 0.01,
        "evicted_pages": {"full": 321, "indexer": 0},
        "refusals": {},
        "evicted_for_others": {"full": 45},
    }
    return Run(
        policy=policy,
        settings={"memory_bytes": budget, "pool_ratio": None},
        pools=POOLS,
        budget_bytes=budget,
        totals=Totals(**(numbers | totals)),
        latency=latency_of(asked, Objective(), 600.0),
        timeline=timeline((0.85, 0.15), budget, hits=hits, moves=policy == "elastic"),
        requests=asked,
    )


def silent(policy: str) -> Run:
    """A run in which no request was ever answered."""
    made = run(policy, failed=50)
    nothing = (float("nan"),) * 3
    latency = Latency(ttft=nothing, itl=nothing, end_to_end=nothing, throughput=0.0, goodput=0.0)
    return Run(**{name: getattr(made, name) for name in made.__slots__} | {"latency": latency})


def comparison(*runs: Run) -> Comparison:
    return Comparison(
        model="gqa-indexer",
        trace="conversation & code",
        settings={"hardware": "h100", "chunk tokens": "8,192"},
        runs=runs,
    )


def worked_example() -> Comparison:
    """A fixed split that strands 5 of 60 GB, and what moving it gives."""
    fixed = run(
        "static",
        hits=0.312,
        slow=2.0,
        stranded_share=5 / 60,
        recomputed_tokens=12_345,
        preemptions=17,
        refusals={"full": 120},
    )
    moved = run(
        "elastic",
        hits=0.36,
        preemptions=3,
        granules_moved=2410,
        longest_pause_seconds=0.0042,
        refusals={"full": 20, "indexer": 2},
    )
    return comparison(fixed, moved, run("infinite", hits=0.366, slow=0.5))
