"""Would shadow trades, with a perfect signal, earn more than trades by price?

    KVTIDE_TRACES=DIR KVTIDE_CONFIGS=DIR PYTHONPATH=src python benchmarks/shadow_trades/run.py
    python benchmarks/shadow_trades/run.py --table     # result.json as markdown

Traffic, models and memory are those of benchmarks/rebalance_policy, whose requirements hold here.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "rebalance_policy"))

from run import CASES, MAIN, MIXTURE, SETTLED, STARTS, _names, setup  # noqa: E402

from kvtide.errors import ConfigError  # noqa: E402
from kvtide.rebalance import Move  # noqa: E402
from kvtide.sim.lab import replay  # noqa: E402
from kvtide.sim.policies import POLICIES, Policy  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtide.facts import Snapshot
    from kvtide.rebalance import Plan
    from kvtide.sim.policies import Decider, Ground

GRID = tuple(round(0.05 + 0.1 * i, 2) for i in range(10))
"""Shares of the growing pool in the shadows: whole caches with a fixed split."""
EVERY = 50
"""Requests between two decisions."""
DECAY = 0.8
"""Of a profit, per decision."""
DELTAS = (0.05, 0.1)
"""Shares of the budget in a trade that is weighed; the larger profit per share decides."""
STEPS = {"shadow": 0.02, "shadow, bold": 0.1}
"""Share of the budget that a decision moves."""
MODELS = ("gpt-oss-20b", "Gemma-3-27B", "Qwen3-Next-80B", "Kimi-Linear-48B")
MIXTURES = ("documents-chats-512", "synthetic", "stationary", "day-512")


class ShadowTrades:
    """Moves a step towards the split whose shadow hit more, every so many requests.

    `shares` are the splits of the shadows, `hits[i]` the tokens that each request hit in the i-th.
    """

    stops_the_world = False

    def __init__(
        self,
        ground: Ground,
        shares: np.ndarray[Any, Any],
        hits: np.ndarray[Any, Any],
        step: float,
    ) -> None:
        names = [group.name for group in ground.layout.groups]
        self._main = next(name for name in MAIN if name in names)
        self._other = next(name for name in names if name != self._main)
        self._step = step
        self._granules, self._shares, self._hits = ground.num_granules, shares, hits
        self._earned = np.zeros(len(shares))
        self._ended = self._weighed = 0

    def ended(self, input_tokens: int, output_tokens: int) -> None:
        """One more request that the shadows have served as well."""
        self._ended += 1

    def plan(self, now: float, facts: Callable[[], Snapshot]) -> Plan:
        """The most profitable trade, if there is one."""
        if self._ended < self._weighed + EVERY:
            return ()
        new = self._hits[:, self._weighed : self._ended].sum(axis=1)
        self._earned = DECAY * self._earned + new
        self._weighed = self._ended
        seen = facts()
        if seen.granules_pending:
            return ()
        at = seen.pools[self._main].granules / self._granules
        profit, sign = max((self._profit(at, s * d) / d, s) for s in (-1, 1) for d in DELTAS)
        if profit <= 0:
            return ()
        pair = (self._other, self._main) if sign > 0 else (self._main, self._other)
        low, high = self._shares[0], self._shares[-1]
        share = min(max(at + sign * self._step, low), high)
        granules = round(abs(share - at) * self._granules)
        reason = f"{profit:.0f} tokens per budget"
        return (Move(donor=pair[0], receiver=pair[1], granules=granules, reason=reason),)

    def _profit(self, at: float, delta: float) -> float:
        if not self._shares[0] <= at + delta <= self._shares[-1]:
            return 0.0
        there, here = np.interp([at + delta, at], self._shares, self._earned)
        return float(there - here)


def case(given: tuple[str, str, Path, Path]) -> dict[str, Any]:
    """All runs of one mixture and model."""
    name, model, configs, traces = given
    mixture, it = MIXTURE[name], CASES[model]
    config = next(path for path in sorted(configs.rglob("*.json")) if _names(path, it.config))
    trace = mixture.trace(traces, it.rate, 1.0)
    longest = 1 + max(request.input_tokens + request.output_tokens for request in trace)
    base = partial(setup, it, config, longest, block_tokens=mixture.block_tokens)
    shadows: dict[float, Any] = {}
    for share in GRID:
        try:
            shadows[share] = replay(trace, base(share), "static").requests.hit_tokens
        except ConfigError:
            continue  # below a pool's floor
    shares, hits = np.array(list(shadows)), np.stack(list(shadows.values()))
    for policy, step in STEPS.items():
        decide: Callable[[Ground], Decider] = partial(
            ShadowTrades, shares=shares, hits=hits, step=step
        )
        POLICIES[policy] = Policy(name=policy, mode="static", decide=decide)
    rows = []
    for policy in ("elastic", *STEPS):
        for start in STARTS:
            run = replay(trace, base(start), policy)
            rows.append(
                {
                    "policy": policy,
                    "start": start,
                    "hits": _by_phase(run.requests.hit_tokens, mixture.bounds()),
                    "granules_moved": run.totals.granules_moved,
                    "ttft": list(run.latency.ttft),
                }
            )
    best = [
        max((_by_phase(h, mixture.bounds())[p], s) for s, h in shadows.items())
        for p in range(len(mixture.bounds()))
    ]
    prompts = _by_phase(run.requests.input_tokens, mixture.bounds())
    return {"mixture": name, "model": model, "prompt_tokens": prompts, "best": best, "runs": rows}


def _by_phase(tokens: np.ndarray[Any, Any], bounds: list[tuple[int, int]]) -> list[int]:
    """Sums over the steady part of each phase."""
    return [int(tokens[first + SETTLED : end].sum()) for first, end in bounds]


def table(rows: list[dict[str, Any]]) -> str:
    """Hits of each phase, of those of its best fixed split, by start."""
    lines = [
        "| mixture, model, phase | best fixed split, its hits | elastic | shadow | shadow, bold |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        for p, (tokens, share) in enumerate(row["best"]):
            cells = [
                " / ".join(
                    f"{run['hits'][p] / tokens:.1%}" for run in row["runs"] if run["policy"] == name
                )
                for name in ("elastic", *STEPS)
            ]
            lines.append(
                f"| {row['mixture']}, {row['model']}, {p + 1} "
                f"| {share:.0%}, {tokens / row['prompt_tokens'][p]:.1%} | {' | '.join(cells)} |"
            )
    return "\n".join(lines)


def main() -> None:
    """Run all cases, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--configs", type=Path, default=os.environ.get("KVTIDE_CONFIGS"))
    parser.add_argument("--traces", type=Path, default=os.environ.get("KVTIDE_TRACES"))
    parser.add_argument("--table", action="store_true", help="print the table")
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=MODELS)
    parser.add_argument("--mixtures", nargs="*", default=list(MIXTURES), choices=MIXTURES)
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--out", type=Path, default=HERE / "result.json")
    args = parser.parse_args()
    if args.table:
        print(table(json.loads(args.out.read_text())))
        return
    if args.configs is None or args.traces is None:
        print("left out: set KVTIDE_TRACES and KVTIDE_CONFIGS to folders (see the README here)")
        return
    todo = [(mix, m, args.configs, args.traces) for mix in args.mixtures for m in args.models]
    rows: list[dict[str, Any]] = []
    with multiprocessing.get_context("spawn").Pool(args.jobs) as pool:
        for row in pool.imap(case, todo):
            rows.append(row)
            args.out.write_text(json.dumps(rows) + "\n")
            print(table([row]).splitlines()[2:], file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
