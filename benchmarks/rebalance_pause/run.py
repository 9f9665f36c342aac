"""Pauses while capacity moves under live sequences, piece by piece and with the world stopped.

    python benchmarks/rebalance_pause/run.py            # five repetitions; writes results.json
    python benchmarks/rebalance_pause/run.py --quick    # one repetition, nothing written

Real bytes on the memfd arena, 1.5 GiB in granules of 2 MiB; every step checks the stamps of all
pages its sequences use. Only the manager's calls are timed: extend, step entry (where ground moves)
and exit, commit.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from cases import BUDGET, GRANULE, Limits, Texts, build, limits, settle_in, steps, warm
from fleet import Clock, Fleet, Times

import kvtide

if TYPE_CHECKING:
    from collections.abc import Callable

PLAN = 256
"""Granules of one plan: 512 MiB, a third of the budget."""

PLAIN = 200
"""Steps without moves, to compare with."""

limit = argparse.Namespace(move_bytes=kvtide.Options().move_bytes_per_step)
"""What may move at a step: the default, or what the command line says."""

LAYOUTS = ("full + window", "full + state")
STATES = ("empty", "cached", "live")


@dataclass(frozen=True, slots=True)
class Row:
    """One case, one repetition; times in microseconds.

    `plain` are steps without moves, `moving` those in which ground moved, `all` both; `cpu` is the
    processor time of the thread, which other processes do not lengthen. `stop` is the longest pause
    with the world stopped, without the `recomputed_tokens` that follow.
    """

    case: str
    layout: str
    granules: int
    relocated: int
    moving_steps: int
    plain_p50: float
    plain_p99: float
    moving_p50: float
    moving_p99: float
    moving_max: float
    cpu_p50: float
    cpu_p99: float
    cpu_max: float
    gib_per_s: float
    stop: float
    stop_cpu: float
    times_shorter: float
    times_shorter_cpu: float
    recomputed_tokens: int
    pages_checked: int


class Trial:
    """A fleet that moves step by step, and one whose world is stopped for the same moves."""

    def __init__(self, case: str, name: str, state: str, *, stops: bool = True) -> None:
        self.case, self.name, self.state = case, name, state
        self.fleet = build(name, state, limit.move_bytes)
        self.stopped = build(name, state, limit.move_bytes) if stops else None
        self.plain, self.times = Times(), Times()
        self.pauses: list[tuple[float, float, int]] = []
        if stops:
            for _ in steps(self.fleet, self.plain, most=PLAIN):
                pass
        self._before = self.fleet.kv.moved

    def move(self, act: Callable[[kvtide.KVManager], object]) -> None:
        """Ask for moves and run on until nothing is left to do or nothing can go; then the same
        with the world stopped.
        """
        kv, clock, epoch = self.fleet.kv, Clock(), self.fleet.kv.epoch
        clock.time(lambda: act(kv))
        self.note(clock, epoch)
        for _ in steps(self.fleet, self.times, most=2 * PLAN):
            if not any(self.times.moved[-3:]):
                break
        if self.stopped is not None:
            self.pauses.append(stop_the_world(self.stopped, act))

    def note(self, clock: Clock, epoch: int) -> None:
        """What was timed between two steps counts as a step of its own."""
        self.times.wall.append(clock.wall * 1e6)
        self.times.processor.append(clock.processor * 1e6)
        self.times.moved.append(self.fleet.kv.epoch != epoch)

    def row(self, granules: int | None = None) -> Row:
        """Percentiles; all books balance, and the memory is given back."""
        moving = np.array(self.times.wall)[self.times.moved]
        cpu = np.array(self.times.processor)[self.times.moved]
        still = [w for w, moved in zip(self.times.wall, self.times.moved, strict=True) if not moved]
        plain = self.plain.wall + still
        moved, relocated = self.fleet.kv.moved
        moved = moved - self._before[0] if granules is None else granules
        spent = float((moving - statistics.median(plain)).sum()) / 1e6
        pauses = self.pauses or [(float("nan"), float("nan"), 0)]
        stop, stop_cpu = (max(p[i] for p in pauses) for i in (0, 1))
        row = Row(
            self.case,
            self.name,
            moved,
            relocated - self._before[1],
            len(moving),
            statistics.median(plain),
            float(np.percentile(plain, 99)),
            *(float(np.percentile(moving, q)) for q in (50, 99, 100)),
            *(float(np.percentile(cpu, q)) for q in (50, 99, 100)),
            moved * GRANULE / 2**30 / spent,
            stop,
            stop_cpu,
            stop / float(moving.max()),
            stop_cpu / float(cpu.max()),
            sum(p[2] for p in pauses),
            self.fleet.pages_checked,
        )
        for fleet in filter(None, (self.fleet, self.stopped)):
            fleet.kv.check()
            fleet.kv.shut_down()
        show(row)
        return row


def stop_the_world(
    fleet: Fleet, act: Callable[[kvtide.KVManager], object]
) -> tuple[float, float, int]:
    """Suspend all, act, settle, resume all: microseconds, those of the processor, and tokens that
    have to be computed again, which is not in the times.
    """
    kv, clock = fleet.kv, Clock()
    clock.time(lambda: kv.suspend(fleet.live))
    clock.time(lambda: act(kv))
    clock.time(kv.settle)
    if not clock.time(lambda: kv.resume(fleet.live)):
        raise RuntimeError("the sequences do not fit again: the case is too tight")
    return clock.wall * 1e6, clock.processor * 1e6, fleet.catch_up()


def by_plan(name: str, state: str) -> Row:
    """One plan there and one back."""
    trial = Trial(f"plan, {state}", name, state)
    names = list(trial.fleet.kv.pools)
    for donor, receiver in (names, names[::-1]):
        move = kvtide.Move(donor=donor, receiver=receiver, granules=PLAN, reason="benchmark")
        trial.move(lambda kv, move=move: kv.rebalance((move,)))
    return trial.row()


def by_budget(name: str) -> Row:
    """The budget shrinks by a third, twice; in between it grows again, and prefixes fill it."""
    trial, went = Trial("budget", name, "cached"), 0
    for seed in (11, 12):
        before = mapped(trial.fleet)
        trial.move(lambda kv: kv.set_budget(BUDGET * 2 // 3))
        went += before - mapped(trial.fleet)
        trial.move(lambda kv: kv.set_budget(BUDGET))
        for fleet in filter(None, (trial.fleet, trial.stopped)):
            settle_in(fleet, "cached", Texts(np.random.default_rng(seed)))
            warm(fleet)
    return trial.row(went)


def mapped(fleet: Fleet) -> int:
    """Granules under all pools."""
    return sum(pool.granules for pool in fleet.kv.snapshot().pools.values())


def by_demand(name: str) -> Row:
    """Elastic, traffic that changes: a few long sequences, then many short ones, and again."""
    trial, texts = Trial("demand", name, "cached", stops=False), Texts(np.random.default_rng(9))
    fleet = trial.fleet
    for turn in range(6):
        length, limit = ((7000, 12), (1100, 60))[turn % 2]
        for _ in range(150):
            fleet.end(fleet.finished())
            if len(fleet.live) < limit:
                clock, epoch = Clock(), fleet.kv.epoch
                if fleet.start(texts.make(length + 100), length, clock):
                    fleet.catch_up()
                trial.note(clock, epoch)
            if fleet.live:
                for _ in steps(fleet, trial.times, most=1):
                    pass
        fleet.end(fleet.live)
    return trial.row()


def show(row: Row) -> None:
    print(
        f"{row.case:14} {row.layout:14} {row.granules:5} granules {row.relocated:6} relocated "
        f"plain {row.plain_p50:5.0f}/{row.plain_p99:5.0f} moving {row.moving_p50:5.0f}/"
        f"{row.moving_p99:5.0f}/{row.moving_max:6.0f} cpu {row.cpu_p50:4.0f}/{row.cpu_p99:5.0f}/"
        f"{row.cpu_max:5.0f} us {row.gib_per_s:5.1f} GiB/s stop {row.stop / 1e3:6.1f} "
        f"({row.stop_cpu / 1e3:5.1f}) ms, {row.recomputed_tokens} again",
        flush=True,
    )


def table(rows: list[Row]) -> str:
    """Markdown."""
    lines = [
        "| case | layout | granules | copied | plain step p50 / p99 | moving step p50 / p99 / max "
        "| the same, processor | GiB/s | world stopped, ms | times shorter | recomputed |",
        "|" + "---|" * 11,
    ]
    for r in rows:
        stopped = f"{r.stop / 1e3:.1f} ({r.stop_cpu / 1e3:.1f})" if r.stop == r.stop else ""
        shorter = f"{r.times_shorter:.0f} ({r.times_shorter_cpu:.0f})" if r.stop == r.stop else ""
        lines.append(
            f"| {r.case} | {r.layout} | {r.granules:.0f} | {r.relocated:,.0f} "
            f"| {r.plain_p50:.0f} / {r.plain_p99:.0f} "
            f"| {r.moving_p50:.0f} / {r.moving_p99:.0f} / {r.moving_max:.0f} "
            f"| {r.cpu_p50:.0f} / {r.cpu_p99:.0f} / {r.cpu_max:.0f} | {r.gib_per_s:.1f} "
            f"| {stopped} | {shorter} | {r.recomputed_tokens:,.0f} |"
        )
    return "\n".join(lines)


def repetition() -> list[Row]:
    """All cases once."""
    rows = [by_plan(name, state) for name in LAYOUTS for state in STATES]
    return rows + [case(name) for name in LAYOUTS for case in (by_budget, by_demand)]


def medians(rows: list[list[Row]]) -> list[Row]:
    """Each case, each number by its median over the repetitions."""
    found: list[Row] = []
    for same in zip(*rows, strict=True):
        dicts = [asdict(row) for row in same]
        texts = {key: dicts[0][key] for key in ("case", "layout")}
        numbers = {k: statistics.median(d[k] for d in dicts) for k in dicts[0] if k not in texts}
        found.append(Row(**{**numbers, **texts}))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one repetition, write nothing")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--move-bytes", type=int, default=limit.move_bytes, help="limit of a step")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results.json"))
    args = parser.parse_args(namespace=limit)
    measured: list[Limits] = []
    rows: list[list[Row]] = []
    began = time.perf_counter()
    for _ in range(1 if args.quick else args.repeats):
        measured.append(limits())
        print(measured[-1], f"load {os.getloadavg()[0]:.1f}")
        rows.append(repetition())
    result = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, "
        f"Python {platform.python_version()}, Linux {platform.release()}",
        "numpy": np.__version__,
        "move_bytes_per_step": args.move_bytes,
        "seconds": round(time.perf_counter() - began, 1),
        "limits_gib_per_s": [asdict(each) for each in measured],
        "medians": [asdict(row) for row in medians(rows)],
        "repetitions": [[asdict(row) for row in each] for each in rows],
    }
    print(table(medians(rows)))
    if not args.quick:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
