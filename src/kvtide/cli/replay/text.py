"""A comparison in words and one table, line by line. Pure: runs in, lines out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtide.cli.replay.metrics import BOUNDS, best, cost, hindsight, metrics_of
from kvtide.cli.table import table
from kvtide.cli.units import show_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvtide.cli.replay.metrics import Comparison
    from kvtide.sim.result import Run

BEST, PLAIN = " *", "  "


def report(comparison: Comparison) -> Iterator[str]:
    """All lines, top to bottom."""
    runs = comparison.runs
    yield head(comparison)
    yield ", ".join(f"{name} {value}" for name, value in comparison.settings.items())
    yield ""
    yield from compared(runs)
    yield ""
    yield cost(runs)
    split = hindsight(runs)
    if split is not None:
        yield split


def head(comparison: Comparison) -> str:
    """Model, traffic and memory in one line."""
    totals = comparison.runs[0].totals
    kept = next((r for r in comparison.runs if r.policy != "infinite"), comparison.runs[0])
    return (
        f"{comparison.model} on {comparison.trace}: {totals.requests:,} requests, "
        f"{totals.prompt_tokens:,} prompt and {totals.output_tokens:,} answer tokens, "
        f"{show_bytes(kept.budget_bytes)} of caches"
    )


def compared(runs: Sequence[Run]) -> Iterator[str]:
    """The table: a line a metric, a column a policy, and what the marks mean."""
    rows: list[list[str]] = []
    is_marked = False
    for metric in metrics_of(runs):
        marked = best(metric, runs)
        is_marked |= bool(marked)
        cells = [
            metric.show(metric.value(run)) + (BEST if number in marked else PLAIN)
            for number, run in enumerate(runs)
        ]
        rows.append([metric.name, *cells])
    yield from table(("", *(run.policy + PLAIN for run in runs)), rows)
    bounds = [run.policy for run in runs if run.policy in BOUNDS]
    notes = ["* best"] if is_marked else []
    notes += (
        [f"{' and '.join(bounds)}: cannot be run, so not marked"] if is_marked and bounds else []
    )
    if notes:
        yield f"  {'; '.join(notes)}"
