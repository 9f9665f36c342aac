"""How much does a wrong split cost, and how much of it does each policy win back?

    KVTIDE_TRACES=DIR KVTIDE_CONFIGS=DIR python benchmarks/replay/run.py [--only NAME ...]
    python benchmarks/replay/run.py --table      # what result.json says, as markdown; or --summary

`KVTIDE_CONFIGS` has the models' config.json files as <name>.json or <owner>--<name>.json, at any
depth; `KVTIDE_TRACES` has mooncake/conversation_trace.jsonl (docs/traces.md says where it is from).
Every (model, policy, start) is one run; results go to result.json as they come, and what is there
already is not run again.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtide.errors import ConfigError
from kvtide.layout import Layout, Parallel
from kvtide.sim.costs import Clock, ModelCost, hardware
from kvtide.sim.lab import Setup, oracle_static, replay
from kvtide.sim.traces.blocks import mooncake

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvtide.sim.traces import TraceRequest

HERE = Path(__file__).parent
GB = 10**9
STARTS = (0.15, 0.5, 0.85)
POLICIES = ("static", "periodic", "elastic")
BOUNDS = ("padded", "lcm", "oracle-static", "infinite")


@dataclass(frozen=True, slots=True)
class Case:
    """A model on so many H100s, the bytes each has for caches, and how fast the trace comes."""

    config: str
    ranks: int
    memory: int
    kv_dtype: str = "bfloat16"
    rate: float = 1.0


CASES = {
    "gpt-oss-20b": Case("gpt-oss-20b", 1, 60 * GB),
    "Gemma-3-27B": Case("gemma-3-27b-it", 8, 30 * GB),
    "Qwen3-Next-80B": Case("Qwen3-Next-80B-A3B-Instruct", 2, 40 * GB),
    "Nemotron-3-Nano": Case("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", 2, 20 * GB),
    "DeepSeek-V3.2": Case("DeepSeek-V3.2", 8, 40 * GB, "fp8_ds_mla", rate=0.25),
    "Kimi-Linear-48B": Case("Kimi-Linear-48B-A3B-Instruct", 2, 20 * GB),
}
BLOCK_TOKENS = 64
MAIN = ("full", "latent")
"""Pools that grow with every token: a start is their share."""


class Trace:
    """The first requests of the trace; can be read again."""

    def __init__(self, path: Path, count: int, rate: float) -> None:
        self._path, self._count, self._rate = path, count, rate

    def __iter__(self) -> Iterator[TraceRequest]:
        for request in islice(mooncake(self._path), self._count):
            yield replace(request, arrival=request.arrival / self._rate)


def setup(case: Case, config: Path, trace: Trace, first_share: float | None) -> Setup:
    """The lab of a case; `first_share` goes to the pool that grows with every token."""
    parallel = Parallel(tensor=case.ranks)
    layout = Layout.from_config(
        config, block_tokens=BLOCK_TOKENS, kv_dtype=case.kv_dtype, parallel=parallel
    )
    ratio = None
    if first_share is not None:
        names = [group.name for group in layout.groups]
        main = next(name for name in MAIN if name in names)
        rest = [name for name in names if name != main]
        ratio = {main: first_share, **{name: (1 - first_share) / len(rest) for name in rest}}
    clock = Clock(ModelCost.from_config(config, layout, ranks=case.ranks), hardware("h100"))
    return Setup(
        layout=layout,
        clock=clock,
        memory_bytes=case.memory,
        max_tokens=1 + max(r.input_tokens + r.output_tokens for r in trace),
        pool_ratio=ratio,
    )


def jobs(only: list[str]) -> list[tuple[str, str, float | None]]:
    """(model, policy, share) of every run."""
    found: list[tuple[str, str, float | None]] = []
    for model in CASES:
        if only and model not in only:
            continue
        found += [(model, policy, share) for policy in POLICIES for share in STARTS]
        found += [(model, policy, None) for policy in BOUNDS]
    return found


def run(job: tuple[str, str, float | None, Path, Path, int]) -> dict[str, Any]:
    """One run, as JSON without its timeline."""
    model, policy, share, configs, trace_file, count = job
    case = CASES[model]
    config = next(path for path in sorted(configs.rglob("*.json")) if _names(path, case.config))
    trace = Trace(trace_file, count, case.rate)
    lab = setup(case, config, trace, share)
    started = time.perf_counter()
    name = {"oracle-static": None}.get(policy, policy)
    try:
        found = oracle_static(trace, lab, rounds=2) if name is None else replay(trace, lab, name)
        result = found.to_json()
        del result["timeline"]
    except ConfigError as error:  # a run that cannot be is a result: say why
        result = {"error": f"{type(error).__name__}: {error}"}
    seconds = time.perf_counter() - started
    key = {"model": model, "policy": policy, "share": share, "requests": count}
    return {**key, "wall_seconds": round(seconds, 1), **result}


def _names(path: Path, config: str) -> bool:
    """Whether a file is that model's, as `<name>.json` or `<owner>--<name>.json`."""
    return path.stem.rpartition("--")[2].partition("__")[0] == config


def read(path: Path) -> list[dict[str, Any]]:
    """The runs there are."""
    return json.loads(path.read_text()) if path.exists() else []


def table(done: list[dict[str, Any]]) -> str:
    """A table per model: every policy from every start."""
    lines: list[str] = []
    for model, case in CASES.items():
        rows = [row for row in done if row["model"] == model]
        if not rows:
            continue
        lines += [
            f"### {model}",
            "",
            _about(case),
            "",
            HEADER,
            "|---" * HEADER.count(" | ") + "|---|",
        ]
        lines += [_line(row) for row in rows]
        lines.append("")
    return "\n".join(lines)


HEADER = (
    "| policy | start | hit tokens | computed again, M tokens | TTFT p50 / p90 / p99, s "
    "| ITL p50, ms | goodput, requests/s | preempted | stranded | dead | granules moved "
    "| paused, s |"
)


def summary(done: list[dict[str, Any]]) -> str:
    """Two tables over all models: prompt tokens hit, and seconds to the first token (p99)."""
    parts = [
        _summary(done, "hit tokens", lambda row: f"{row['totals']['hit_rate']:.1%}"),
        _summary(done, "TTFT p99, s", lambda row: f"{row['latency']['ttft'][2]:.1f}"),
    ]
    return "\n\n".join(parts)


def _summary(done: list[dict[str, Any]], what: str, show: Callable[[dict[str, Any]], str]) -> str:
    columns = ("static", "elastic", "padded", "lcm", "oracle-static", "infinite")
    lines = [f"| {what} | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for model in CASES:
        cells: list[str] = []
        for policy in columns:
            rows = [row for row in done if (row["model"], row["policy"]) == (model, policy)]
            cells.append(" / ".join("-" if "error" in row else show(row) for row in rows))
        lines.append(f"| {model} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _about(case: Case) -> str:
    cards = "an H100" if case.ranks == 1 else f"{case.ranks} H100s"
    rate = "" if case.rate == 1 else f", the trace at {case.rate:g} times its rate"
    return f"On {cards}, {case.memory / GB:g} GB for caches on each, KV in {case.kv_dtype}{rate}."


def _line(row: dict[str, Any]) -> str:
    start = "" if row["share"] is None else f"{row['share']:.0%}"
    if "error" in row:
        return f"| {row['policy']} | {start} | cannot run: {row['error']}" + " |" * 10
    totals, latency = row["totals"], row["latency"]
    if row["policy"] == "oracle-static":
        ratio = row["settings"]["pool_ratio"]
        start = f"{max((ratio[name], name) for name in MAIN if name in ratio)[0]:.0%}"
    cells = (
        row["policy"],
        start,
        f"{totals['hit_rate']:.2%}",
        f"{totals['recomputed_tokens'] / 1e6:.2f}",
        " / ".join(f"{value:.2f}" for value in latency["ttft"]),
        f"{latency['itl'][0] * 1000:.0f}",
        f"{latency['goodput']:.2f}",
        f"{totals['preemptions']}",
        f"{totals['stranded_share']:.1%}",
        f"{totals['dead_share']:.1%}",
        f"{totals['granules_moved']:,}",
        f"{totals['pause_seconds']:.1f}",
    )
    return f"| {' | '.join(cells)} |"


def _default_trace() -> Path | None:
    folder = os.environ.get("KVTIDE_TRACES")
    return None if folder is None else Path(folder) / "mooncake" / "conversation_trace.jsonl"


def main() -> None:
    """Run what is missing, two at a time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--configs", type=Path, default=os.environ.get("KVTIDE_CONFIGS"))
    parser.add_argument("--trace", type=Path, default=_default_trace())
    parser.add_argument("--table", action="store_true", help="print every run, per model")
    parser.add_argument("--summary", action="store_true", help="print two tables over all models")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, default=HERE / "result.json")
    args = parser.parse_args()
    done = read(args.out)
    if args.table or args.summary:
        print(table(done) if args.table else summary(done))
        return
    if args.configs is None or args.trace is None:
        print("left out: set KVTIDE_TRACES and KVTIDE_CONFIGS to folders (see the README here)")
        return
    had = {(r["model"], r["policy"], r["share"], r["requests"]) for r in done}
    todo = [
        (*job, args.configs, args.trace, args.requests)
        for job in jobs(args.only)
        if (*job, args.requests) not in had
    ]
    with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
        for result in pool.imap_unordered(run, todo):
            done.append(result)
            args.out.write_text(json.dumps(done, indent=1) + "\n")
            totals = result.get("totals", {})
            print(
                result["model"],
                result["policy"],
                result["share"],
                f"{result['wall_seconds']} s",
                f"hit {totals.get('hit_rate', 0):.4f}",
                result.get("error", ""),
                file=sys.stderr,
                flush=True,
            )


if __name__ == "__main__":
    main()
