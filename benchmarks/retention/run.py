"""Where should recurrent states be kept? Seven rules on eight kinds of traffic and three models.

    KVTIDE_TRACES=DIR KVTIDE_CONFIGS=DIR python benchmarks/retention/run.py [--only MODEL ...]
    python benchmarks/retention/run.py --table      # what result.json says, as markdown

`KVTIDE_CONFIGS` has the models' config.json files as <name>.json or <owner>--<name>.json, at any
depth; `KVTIDE_TRACES` has the traces that traffic.py names. One process, no clock but the virtual
one: the same inputs give the same file.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rules import RULES, Rule
from traffic import TRAFFIC, Traffic

from kvtide.layout import Layout, Parallel
from kvtide.sim.costs import Clock, ModelCost, hardware
from kvtide.sim.lab import Setup, replay

if TYPE_CHECKING:
    from collections.abc import Callable

HERE = Path(__file__).parent
MODELS = {
    "Nemotron-3-Nano": "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    "Qwen3-Next-80B": "Qwen3-Next-80B-A3B-Instruct",
    "Kimi-Linear-48B": "Kimi-Linear-48B-A3B-Instruct",
}
RANKS = 2
"""H100s a model runs on."""

Row = dict[str, Any]


def run(model: str, config: Path, traffic: Traffic, rule: Rule, traces: Path) -> Row:
    """One run under one rule."""
    interval = rule.interval
    if interval is not None:
        interval = max(interval, traffic.block_tokens)
    layout = Layout.from_config(
        config,
        block_tokens=traffic.block_tokens,
        kv_dtype="bfloat16",
        parallel=Parallel(tensor=RANKS),
        state_interval=interval,
    )
    trace = traffic.trace(traces)
    setup = Setup(
        layout=layout,
        clock=Clock(ModelCost.from_config(config, layout, ranks=RANKS), hardware("h100")),
        memory_bytes=traffic.gigabytes[model] * 10**9,
        max_tokens=1 + max(r.input_tokens + r.output_tokens for r in trace),
    )
    with rule.in_force():
        found = replay(trace, setup).to_json()
    kept = {name: found[name] for name in ("settings", "totals", "latency")}
    return {"model": model, "traffic": traffic.name, "rule": rule.name, **kept}


def _config(folder: Path, name: str) -> Path:
    found = (p for p in sorted(folder.rglob("*.json")) if p.stem.rpartition("--")[2] == name)
    return next(found)


def table(rows: list[Row]) -> str:
    """Per model: prompt tokens hit, then seconds to the first token, by traffic and rule."""
    parts: list[str] = []
    for model in MODELS:
        mine = [row for row in rows if row["model"] == model]
        if mine:
            parts += [f"### {model}", "", "Prompt tokens hit, %", "", _grid(mine, _hits), ""]
            parts += ["Seconds to the first token, p50 / p99", "", _grid(mine, _ttft), ""]
    return "\n".join(parts)


def _grid(rows: list[Row], show: Callable[[Row], str]) -> str:
    cells = {(row["traffic"], row["rule"]): show(row) for row in rows}
    names = [rule.name for rule in RULES]
    lines = [f"| traffic | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for traffic in TRAFFIC:
        line = [cells.get((traffic.name, name), "-") for name in names]
        lines.append(f"| {traffic.name} | {' | '.join(line)} |")
    return "\n".join(lines)


def _hits(row: Row) -> str:
    return f"{100 * row['totals']['hit_rate']:.1f}"


def _ttft(row: Row) -> str:
    return f"{row['latency']['ttft'][0]:.2f} / {row['latency']['ttft'][2]:.1f}"


def main() -> None:
    """Run everything and write result.json, or print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--configs", type=Path, default=os.environ.get("KVTIDE_CONFIGS"))
    parser.add_argument("--traces", type=Path, default=os.environ.get("KVTIDE_TRACES"))
    parser.add_argument("--only", nargs="*", default=list(MODELS), choices=MODELS)
    parser.add_argument("--table", action="store_true", help="print result.json as markdown")
    parser.add_argument("--out", type=Path, default=HERE / "result.json")
    args = parser.parse_args()
    if args.table:
        print(table(json.loads(args.out.read_text())))
        return
    if args.configs is None or args.traces is None:
        print("left out: set KVTIDE_TRACES and KVTIDE_CONFIGS to folders (see the README here)")
        return
    rows: list[Row] = []
    for model in args.only:
        config = _config(args.configs, MODELS[model])
        for traffic in TRAFFIC:
            for rule in RULES:
                rows.append(run(model, config, traffic, rule, args.traces))
                row = rows[-1]
                about = f"{model:16} {traffic.name:17} {rule.name:12}"
                print(f"{about} hit {_hits(row)} % ttft {_ttft(row)}", file=sys.stderr, flush=True)
                args.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
