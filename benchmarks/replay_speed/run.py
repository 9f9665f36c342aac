"""How fast and how large is a replay? One policy, one core, in a process of its own each time.

    KVTIDE_TRACES=DIR KVTIDE_CONFIGS=DIR python benchmarks/replay_speed/run.py [--profile]

`KVTIDE_TRACES` has mooncake/conversation_trace.jsonl (12,031 requests) and
weka_agentic/all_710_sessions_rle.jsonl.gz (49,334); docs/traces.md says where they come from.
`KVTIDE_CONFIGS` has gpt-oss-20b's config.json as gpt-oss-20b.json or <owner>--gpt-oss-20b.json, at
any depth. Results go to results.json; `--profile` writes profile.txt instead: where the time of
2,000 requests of the first goes.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import json
import multiprocessing
import os
import pstats
import resource
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtide.layout import Layout, Parallel
from kvtide.sim.costs import Clock, ModelCost, hardware
from kvtide.sim.lab import Setup, replay
from kvtide.sim.traces import cut, open_trace

if TYPE_CHECKING:
    from kvtide.sim.result import Run

HERE = Path(__file__).parent
GB = 10**9


@dataclass(frozen=True, slots=True)
class Case:
    """gpt-oss-20b (12 full layers, 12 with a window of 128) on `ranks` H100s, `memory` each."""

    name: str
    spec: str
    requests: int | None
    ranks: int
    memory: int
    policy: str = "elastic"
    max_tokens: int = 1 << 18


def run(case: Case, config: str) -> dict[str, Any]:
    """One replay, timed from opening the trace to the result."""
    started = time.perf_counter()
    found = _replay(case, config)
    seconds = time.perf_counter() - started
    totals = found.totals
    return {
        **asdict(case),
        "spec": Path(case.spec.partition(":")[2]).name,
        "seconds": round(seconds, 2),
        "peak_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "replayed": totals.requests,
        "failed": totals.failed,
        "prompt_tokens": totals.prompt_tokens,
        "output_tokens": totals.output_tokens,
        "steps": totals.steps,
        "hit_rate": round(totals.hit_rate, 4),
        "virtual_seconds": round(totals.seconds, 1),
    }


def _replay(case: Case, config: str) -> Run:
    layout = Layout.from_config(
        config, block_tokens=64, kv_dtype="bfloat16", parallel=Parallel(tensor=case.ranks)
    )
    clock = Clock(ModelCost.from_config(config, layout, ranks=case.ranks), hardware("h100"))
    setup = Setup(layout=layout, clock=clock, memory_bytes=case.memory, max_tokens=case.max_tokens)
    return replay(cut(open_trace(case.spec), first=case.requests), setup, case.policy)


def profile(case: Case, config: str) -> str:
    """Where the time goes, by function."""
    profiler = cProfile.Profile()
    profiler.runcall(_replay, case, config)
    text = io.StringIO()
    pstats.Stats(profiler, stream=text).strip_dirs().sort_stats("tottime").print_stats(40)
    return text.getvalue()


def main() -> None:
    """All cases, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--only", default="", help="cases whose name has this")
    args = parser.parse_args()
    traces, configs = os.environ.get("KVTIDE_TRACES"), os.environ.get("KVTIDE_CONFIGS")
    if traces is None or configs is None:
        print("left out: set KVTIDE_TRACES and KVTIDE_CONFIGS to folders (see the README here)")
        return
    config = str(min(Path(configs).rglob("*gpt-oss-20b.json")))
    chat = f"mooncake:{traces}/mooncake/conversation_trace.jsonl"
    agents = f"agent:{traces}/weka_agentic/all_710_sessions_rle.jsonl.gz"
    if args.profile:
        text = profile(Case("profile", chat, 2000, 1, 60 * GB), config)
        (HERE / "profile.txt").write_text(text)
        print(text)
        return
    cases = [
        Case(f"conversation, {count:,}", chat, count, 1, 60 * GB) for count in (3000, 6000, 12031)
    ]
    cases.append(Case("conversation, 12,031, static", chat, 12031, 1, 60 * GB, "static"))
    cases.append(Case("agents, 49,334", agents, None, 8, 60 * GB, "elastic", 1 << 20))
    results: list[dict[str, Any]] = []
    for case in cases:
        if args.only not in case.name:
            continue
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            results.append(pool.apply(run, (case, config)))
        print(json.dumps(results[-1]), flush=True)
    if not args.only:
        (HERE / "results.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
