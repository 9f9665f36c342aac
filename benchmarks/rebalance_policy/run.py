"""After the traffic shifts, how fast and how well does each policy adapt?

    KVTIDE_TRACES=DIR KVTIDE_CONFIGS=DIR python benchmarks/rebalance_policy/run.py
    python benchmarks/rebalance_policy/run.py --table     # result.json as markdown

`KVTIDE_CONFIGS` has the models' config.json files as <name>.json or <owner>--<name>.json, at any
depth; `KVTIDE_TRACES` the traces (mixtures.py says which). Every (mixture, model, policy, start)
is one run; results go to result.json as they come, and what is there already is not run again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import sys
import time
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from measure import BIN, phases, watch
from mixtures import MIXTURES
from tables import best_shares, tables

from kvtide.errors import ConfigError
from kvtide.layout import Layout, Parallel
from kvtide.sim.costs import Clock, ModelCost, hardware
from kvtide.sim.fingerprint import code
from kvtide.sim.lab import Setup, replay
from kvtide.sim.policies import POLICIES, Policy
from kvtide.sim.policies.periodic import Periodic

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvtide.sim.policies import Decider, Ground

HERE = Path(__file__).parent
GB = 10**9
STARTS = (0.15, 0.5, 0.85)
MIXTURE = {mixture.name: mixture for mixture in MIXTURES}
GRID = (0.05, 0.15, 0.3, 0.5, 0.7, 0.85, 0.95)
"""Fixed splits of the oracle's first round; `best_shares` gives those of the second."""
FROM_STARTS = ("elastic", "periodic-200")
ONCE = ("padded", "lcm", "infinite")
SETTLED = 300
"""Requests after a shift from which on a policy is held to the oracle."""
MAIN = ("full", "latent")
"""Pools that grow with every token: a start is their share."""


@dataclass(frozen=True, slots=True)
class Case:
    """A model on so many H100s, the bytes each has for caches, and how fast the traffic comes."""

    config: str
    ranks: int
    memory: int
    kv_dtype: str = "bfloat16"
    rate: float = 1.0


CASES = {
    "gpt-oss-20b": Case("gpt-oss-20b", 1, 24 * GB),
    "Gemma-3-27B": Case("gemma-3-27b-it", 8, 30 * GB),
    "Qwen3-Next-80B": Case("Qwen3-Next-80B-A3B-Instruct", 2, 30 * GB),
    "DeepSeek-V3.2": Case("DeepSeek-V3.2", 8, 28 * GB, "fp8_ds_mla", rate=0.25),
    "Kimi-Linear-48B": Case("Kimi-Linear-48B-A3B-Instruct", 2, 20 * GB),
}


@dataclass(frozen=True, slots=True)
class Job:
    """One run; `share` is the start of the pool that grows, `portion` that of the requests."""

    mixture: str
    model: str
    policy: str
    share: float | None
    portion: float


def periodic_200(ground: Ground) -> Decider:
    """`periodic` that decides after 200 samples and every 30 s (published: 2,000, 120 s)."""
    return Periodic(ground, min_samples=200, cool_down=30.0)


def setup(
    case: Case, config: Path, max_tokens: int, share: float | None, block_tokens: int = 64
) -> Setup:
    """The lab of a case."""
    layout = Layout.from_config(
        config,
        block_tokens=block_tokens,
        kv_dtype=case.kv_dtype,
        parallel=Parallel(tensor=case.ranks),
    )
    ratio = None
    if share is not None:
        names = [group.name for group in layout.groups]
        main = next(name for name in MAIN if name in names)
        rest = [name for name in names if name != main]
        ratio = {main: share, **{name: (1 - share) / len(rest) for name in rest}}
    return Setup(
        layout=layout,
        clock=Clock(ModelCost.from_config(config, layout, ranks=case.ranks), hardware("h100")),
        memory_bytes=case.memory,
        max_tokens=max_tokens,
        pool_ratio=ratio,
    )


@cache
def fingerprint() -> str:
    """SHA-256, shortened, over kvtide's sources and this folder's: what a result depends on."""
    found = hashlib.sha256(code().encode())
    for name in ("measure.py", "mixtures.py", "run.py"):
        found.update((HERE / name).read_bytes())
    return found.hexdigest()[:12]


def _job(row: dict[str, Any]) -> Job:
    return Job(*(row[name] for name in Job.__dataclass_fields__))


def run(given: tuple[Job, Path, Path]) -> dict[str, Any]:
    """One run, as JSON."""
    job, configs, traces = given
    case = CASES[job.model]
    mixture = MIXTURE[job.mixture]
    config = next(path for path in sorted(configs.rglob("*.json")) if _names(path, case.config))
    trace = mixture.trace(traces, case.rate, job.portion)
    longest = 1 + max(request.input_tokens + request.output_tokens for request in trace)
    POLICIES.setdefault(
        "periodic-200", Policy(name="periodic-200", mode="static", decide=periodic_200)
    )
    started = time.perf_counter()
    original, watched = POLICIES[job.policy], watch(job.policy)
    try:
        found = replay(
            trace, setup(case, config, longest, job.share, mixture.block_tokens), job.policy
        )
    except ConfigError as error:  # what the lab refuses is a result: say why
        return {**asdict(job), "code": fingerprint(), "error": str(error)}
    finally:
        POLICIES[job.policy] = original
    bounds = mixture.bounds(job.portion)
    result = found.to_json()
    return {
        **asdict(job),
        "code": fingerprint(),
        "bin": BIN,
        "wall_seconds": round(time.perf_counter() - started, 1),
        "totals": result["totals"],
        "latency": result["latency"],
        "phases": phases(found, watched[0], bounds, round(SETTLED * job.portion)),
    }


def _names(path: Path, config: str) -> bool:
    """Whether a file is that model's, as `<name>.json` or `<owner>--<name>.json`."""
    return path.stem.rpartition("--")[2].partition("__")[0] == config


def first_round(portion: float) -> Iterator[Job]:
    """Every policy, and a grid of fixed splits."""
    for mixture in MIXTURES:
        for model in CASES:
            for policy in FROM_STARTS:
                yield from (Job(mixture.name, model, policy, s, portion) for s in STARTS)
            yield from (Job(mixture.name, model, "static", s, portion) for s in GRID)
            yield Job(mixture.name, model, "periodic", 0.5, portion)
            yield from (Job(mixture.name, model, policy, None, portion) for policy in ONCE)


def second_round(done: list[dict[str, Any]], portion: float) -> Iterator[Job]:
    """Fixed splits on both sides of the best ones of each phase."""
    for mixture in MIXTURES:
        for model in CASES:
            rows = [row for row in done if (row["mixture"], row["model"]) == (mixture.name, model)]
            shares = best_shares([r for r in rows if _current(r, portion)], GRID)
            yield from (Job(mixture.name, model, "static", s, portion) for s in shares)


def _current(row: dict[str, Any], portion: float) -> bool:
    return row["portion"] == portion and row["code"] == fingerprint()


def work(jobs: list[Job], done: list[dict[str, Any]], args: argparse.Namespace) -> None:
    """Run what is missing of these."""
    had = {_job(row) for row in done if row["code"] == fingerprint()}
    todo = [
        (job, args.configs, args.traces)
        for job in dict.fromkeys(jobs)
        if job not in had
        and job.model in args.models
        and job.mixture in args.mixtures
        and (not args.policies or job.policy in args.policies)
    ]
    with multiprocessing.get_context("spawn").Pool(args.jobs) as pool:
        for result in pool.imap_unordered(run, todo):
            done[:] = [row for row in done if _job(row) != _job(result)] + [result]
            args.out.write_text(json.dumps(done) + "\n")
            told = [result[name] for name in ("mixture", "model", "policy", "share")]
            totals = result.get("totals", {})
            print(
                *told,
                f"{result.get('wall_seconds', 0)} s, hits {totals.get('hit_rate', 0):.4f}",
                f"ttft {result.get('latency', {}).get('ttft', '')}",
                result.get("error", ""),
                file=sys.stderr,
                flush=True,
            )


def main() -> None:
    """Run what is missing, or print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--configs", type=Path, default=os.environ.get("KVTIDE_CONFIGS"))
    parser.add_argument("--traces", type=Path, default=os.environ.get("KVTIDE_TRACES"))
    parser.add_argument("--table", action="store_true", help="print the tables")
    parser.add_argument("--portion", type=float, default=1.0, help="of the requests, to try")
    parser.add_argument("--models", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--mixtures", nargs="*", default=list(MIXTURE), choices=list(MIXTURE))
    parser.add_argument("--policies", nargs="*", default=[], help="only these")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--out", type=Path, default=HERE / "result.json")
    args = parser.parse_args()
    done: list[dict[str, Any]] = json.loads(args.out.read_text()) if args.out.exists() else []
    if args.table:
        print(tables([row for row in done if row["portion"] == args.portion]))
        return
    if args.configs is None or args.traces is None:
        print("left out: set KVTIDE_TRACES and KVTIDE_CONFIGS to folders (see the README here)")
        return
    work(list(first_round(args.portion)), done, args)
    work(list(second_round(done, args.portion)), done, args)


if __name__ == "__main__":
    main()
