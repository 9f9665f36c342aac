"""What policies are compared by: numbers of a run, how they read, and which way is better. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtide.cli.units import show, show_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvtide.sim.result import Run

BOUNDS = ("oracle-static", "infinite")
"""Policies nobody can run: the best fixed split in hindsight, and memory without end. They are
never marked as best."""

_P50, _P99 = 0, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One number of a run. `better` is 1 where more is better, -1 where less is, else 0."""

    name: str
    value: Callable[[Run], float]
    show: Callable[[float], str]
    better: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Policies side by side: the same requests, model and memory.

    `trace` names the traffic, `settings` are what every run had in common, by option.
    """

    model: str
    trace: str
    settings: dict[str, str]
    runs: tuple[Run, ...]

    @property
    def policies(self) -> tuple[str, ...]:
        """Names of the policies, in the order they were asked for."""
        return tuple(run.policy for run in self.runs)


def share(value: float) -> str:
    """A share as percent: "36.6 %"."""
    return _or_dash(value, f"{100 * value:.1f} %")


def seconds(value: float) -> str:
    """Seconds to the millisecond; "-" where there are none."""
    return _or_dash(value, f"{value:,.3f} s")


def milliseconds(value: float) -> str:
    """Seconds, in milliseconds."""
    return _or_dash(value, f"{1e3 * value:,.1f} ms")


def rate(value: float) -> str:
    """A rate to two figures after the point."""
    return _or_dash(value, f"{value:,.2f}")


def metrics_of(runs: Sequence[Run]) -> list[Metric]:
    """What is worth a line: refusals by pool, and failures if there are any."""
    refusing = dict.fromkeys(pool for run in runs for pool in run.totals.refusals)
    has_failed = any(run.totals.failed for run in runs)
    return [
        *_COMMON,
        *(_refusals_of(pool) for pool in refusing),
        *([_FAILED] if has_failed else []),
        *_MEMORY,
    ]


def best(metric: Metric, runs: Sequence[Run]) -> set[int]:
    """Which runs are the best of those that can be run at all; none if they all read the same."""
    shown = {
        number: metric.show(metric.value(run))
        for number, run in enumerate(runs)
        if run.policy not in BOUNDS and not math.isnan(metric.value(run))
    }
    if not metric.better or len(set(shown.values())) < 2:
        return set()
    top = max(shown, key=lambda number: metric.better * metric.value(runs[number]))
    return {number for number, text in shown.items() if text == shown[top]}


def cost(runs: Sequence[Run]) -> str:
    """What the fixed split costs, in one sentence of numbers; else what the first policy leaves."""
    by_name = {run.policy: run for run in runs}
    fixed = by_name.get("static", runs[0])
    loss = f"{_what(fixed)} leaves {_stranded(fixed)} stranded on average"
    rival = _rival(fixed, runs)
    if rival is None:
        again = fixed.totals.recomputed_tokens
        return (
            f"{loss}, finds {share(fixed.totals.hit_rate)} of all prompt tokens in the cache and "
            f"computes {again:,} tokens that had been computed before."
        )
    missed = rival.totals.hit_tokens - fixed.totals.hit_tokens
    return (
        f"{loss}, {rival.policy} {_stranded(rival)}, and computes {abs(missed):,} prompt tokens "
        f"{'more' if missed >= 0 else 'less'} than {rival.policy}: hit rate "
        f"{share(fixed.totals.hit_rate)} instead of {share(rival.totals.hit_rate)}, TTFT p99 "
        f"{seconds(fixed.latency.ttft[_P99])} instead of {seconds(rival.latency.ttft[_P99])}, "
        f"goodput {rate(fixed.latency.goodput)} instead of {rate(rival.latency.goodput)} "
        "requests a second."
    )


def hindsight(runs: Sequence[Run]) -> str | None:
    """The best fixed split as one gives it back, if it was searched for."""
    found = next((run for run in runs if run.policy == "oracle-static"), None)
    ratio: dict[str, float] = (found.settings.get("pool_ratio") if found else None) or {}
    shares = ",".join(f"{name}={part:.4f}" for name, part in ratio.items())
    return f"Best fixed split in hindsight: --pool-ratio {shares}" if shares else None


def split_of(run: Run) -> str:
    """Shares of the pools at the start: "full 85.0 % / indexer 15.0 %"."""
    sizes: list[int] = run.timeline.mapped[:, :1].ravel().tolist()
    total = sum(sizes) or 1
    pairs = zip(run.pools, sizes, strict=False)  # no sizes where there are no samples
    return " / ".join(f"{name} {share(size / total)}" for name, size in pairs)


def _rival(fixed: Run, runs: Sequence[Run]) -> Run | None:
    """What the fixed split is held against: elastic, else the most hits of those one can run."""
    others = [run for run in runs if run is not fixed and run.policy not in BOUNDS]
    if fixed.policy != "static" or not others:
        return None
    elastic = [run for run in others if run.policy == "elastic"]
    return (elastic or sorted(others, key=lambda run: -run.totals.hit_tokens))[0]


def _what(run: Run) -> str:
    split = split_of(run)
    if run.policy == "static":
        return f"The fixed split{f' ({split})' if split else ''}"
    return f"Policy {run.policy}"


def _stranded(run: Run) -> str:
    lost = run.totals.stranded_share
    return f"{show_bytes(lost * run.budget_bytes)} ({share(lost)})"


def _or_dash(value: float, text: str) -> str:
    return "-" if math.isnan(value) else text


def _refusals_of(pool: str) -> Metric:
    return Metric(
        name=f"refusals by {pool}",
        value=lambda run: run.totals.refusals.get(pool, 0),
        show=show,
        better=-1,
    )


_COMMON = (
    Metric(name="hit rate", value=lambda run: run.totals.hit_rate, show=share, better=1),
    Metric(
        name="recomputed tokens",
        value=lambda run: run.totals.recomputed_tokens,
        show=show,
        better=-1,
    ),
    Metric(
        name="recomputed TFLOP",
        value=lambda run: run.totals.recomputed_flops / 1e12,
        show=rate,
        better=-1,
    ),
    Metric(name="TTFT p50", value=lambda run: run.latency.ttft[_P50], show=seconds, better=-1),
    Metric(name="TTFT p99", value=lambda run: run.latency.ttft[_P99], show=seconds, better=-1),
    Metric(name="ITL p50", value=lambda run: run.latency.itl[_P50], show=milliseconds, better=-1),
    Metric(name="ITL p99", value=lambda run: run.latency.itl[_P99], show=milliseconds, better=-1),
    Metric(
        name="throughput, tokens/s", value=lambda run: run.latency.throughput, show=rate, better=1
    ),
    Metric(name="goodput, requests/s", value=lambda run: run.latency.goodput, show=rate, better=1),
    Metric(name="preemptions", value=lambda run: run.totals.preemptions, show=show, better=-1),
)
_FAILED = Metric(name="failed requests", value=lambda run: run.totals.failed, show=show, better=-1)
_MEMORY = (
    Metric(name="stranded", value=lambda run: run.totals.stranded_share, show=share, better=-1),
    Metric(name="granules moved", value=lambda run: run.totals.granules_moved, show=show),
    Metric(
        name="longest pause",
        value=lambda run: run.totals.longest_pause_seconds,
        show=milliseconds,
    ),
)
