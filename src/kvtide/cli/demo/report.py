"""What the trials and the reference say: numbers as plain data, a table and pictures for people."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from rich.table import Table
from rich.text import Text

from kvtide.cli.demo.picture import TERMINAL_COLOURS, Panel, draw_cells

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtide.cli.demo.oracle import Reference
    from kvtide.cli.demo.traffic import Phase
    from kvtide.cli.demo.trial import Trial

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything the demo found out. `fixed` and `elastic` served the same requests."""

    model: str
    terms: str | None
    phases: tuple[Phase, ...]
    ratio: dict[str, float]
    memory_bytes: int
    granule_bytes: int
    fixed: Trial
    elastic: Trial
    reference: Reference
    oracle_seconds: float

    @property
    def num_wrong(self) -> int:
        """Output tokens, of both trials, that differ from transformers' (missing ones included)."""
        return sum(
            count_different(output.token_ids, answer)
            for trial in (self.fixed, self.elastic)
            for output, answer in zip(trial.outputs, self.reference.answers, strict=True)
        )

    @property
    def num_requests(self) -> int:
        """Requests in the traffic."""
        return sum(len(phase.jobs) for phase in self.phases)

    @property
    def outputs_identical(self) -> bool:
        """Whether every output token of both trials is the one transformers gives."""
        return self.num_wrong == 0


def count_different(got: Sequence[int], right: Sequence[int]) -> int:
    """Tokens of an answer that are not those of the right one, missing ones included."""
    same = sum(a == b for a, b in zip(got, right, strict=False))
    return max(len(got), len(right)) - same


def pause_ms(trial: Trial) -> dict[str, float]:
    """Time the memory manager added to a step, in milliseconds."""
    values = np.array([step.pause_ms for step in trial.steps])
    p50, p99 = np.percentile(values, [50, 99])
    found = {"p50": p50, "p99": p99, "max": values.max()}
    return {name: round(float(value), 3) for name, value in found.items()}


def waiting(trial: Trial) -> dict[str, float]:
    """Requests waiting, over the steps."""
    values = [step.waiting for step in trial.steps]
    return {"mean": round(float(np.mean(values)), 2), "max": max(values)}


def stranded(trial: Trial) -> dict[str, int]:
    """Bytes idle in one pool while another one was short, over the steps."""
    return {"mean": int(np.mean(trial.stranded_bytes)), "max": max(trial.stranded_bytes)}


def as_data(report: Report) -> dict[str, object]:
    """The report for programs: JSON types only."""
    both = {"fixed": report.fixed, "elastic": report.elastic}
    return {
        "outputs_identical": report.outputs_identical,
        "requests": report.num_requests,
        "granules_moved": report.elastic.end.granules_moved,
        "hit_tokens": {name: trial.hit_tokens for name, trial in both.items()},
        "pause_ms": pause_ms(report.elastic),
        "pause_ms_fixed": pause_ms(report.fixed),
        "recomputed_tokens": {name: trial.recomputed_tokens for name, trial in both.items()},
        "waiting": {name: waiting(trial) for name, trial in both.items()},
        "stranded_bytes": {name: stranded(trial) for name, trial in both.items()},
        "steps": {name: len(trial.steps) for name, trial in both.items()},
        "seconds": {
            **{name: round(trial.seconds, 2) for name, trial in both.items()},
            "transformers": round(report.oracle_seconds, 2),
        },
        "different_tokens": report.num_wrong,
        "output_tokens": sum(map(len, report.reference.answers)),
        "smallest_logit_gap": report.reference.smallest_gap,
        "memory_bytes": report.memory_bytes,
        "granule_bytes": report.granule_bytes,
        "split": report.ratio,
        "model": report.model,
        "terms": report.terms,
    }


def as_table(report: Report) -> Table:
    """The report for people."""
    fixed, elastic = report.fixed, report.elastic
    table = Table(
        title=f"{report.model}: {report.num_requests} requests, {_mib(report.memory_bytes)}"
    )
    table.add_column("")
    table.add_column("fixed split", justify="right")
    table.add_column("elastic", justify="right")
    for (name, before), (_, after) in zip(_rows(fixed), _rows(elastic), strict=True):
        table.add_row(name, before, after)
    return table


def _rows(trial: Trial) -> list[tuple[str, str]]:
    """Names and values of the table, one column."""
    wait = waiting(trial)
    return [
        ("hit tokens", f"{trial.hit_tokens:,}"),
        ("recomputed tokens", f"{trial.recomputed_tokens:,}"),
        ("requests waiting, mean / max", f"{wait['mean']:.1f} / {wait['max']}"),
        ("stranded memory, mean / max", _show_stranded(trial)),
        ("granules moved", f"{trial.end.granules_moved:,}"),
        ("pause per step, p50 / p99 / max", _show_pause(trial)),
        ("steps", f"{len(trial.steps):,}"),
        ("seconds", f"{trial.seconds:.1f}"),
    ]


def _show_stranded(trial: Trial) -> str:
    found = stranded(trial)
    return f"{_mib(found['mean'])} / {_mib(found['max'])}"


def _show_pause(trial: Trial) -> str:
    found = pause_ms(trial)
    return " / ".join(f"{found[name]:.2f}" for name in ("p50", "p99", "max")) + " ms"


def verdict(report: Report) -> str:
    """One sentence on whether the answers are right."""
    total = sum(map(len, report.reference.answers))
    if report.outputs_identical:
        return (
            f"All {total:,} output tokens of both runs equal those of transformers' own cache "
            f"(smallest gap between the two best logits: {report.reference.smallest_gap:.1e})."
        )
    return (
        f"{report.num_wrong:,} of 2 x {total:,} output tokens differ from those of transformers' "
        f"own cache (smallest gap between the two best logits: {report.reference.smallest_gap:.1e};"
        f" below about 1e-4 rounding alone can turn a token over)."
    )


def panels(report: Report) -> tuple[Panel, Panel]:
    """Pool boundaries over the steps of both trials."""
    shares = ", ".join(f"{name} {share:.0%}" for name, share in report.ratio.items())
    titles = f"fixed split ({shares})", "elastic"
    first, second = (
        Panel(
            title=title,
            samples=trial.samples,
            budget_bytes=report.memory_bytes,
            marks=tuple(zip(trial.phase_starts, [p.title for p in report.phases], strict=True)),
        )
        for title, trial in zip(titles, (report.fixed, report.elastic), strict=True)
    )
    return first, second


def as_text(panel: Panel, *, width: int, height: int = 12) -> Text:
    """A panel for the terminal, with a line of phases below and a legend."""
    text = Text(panel.title + "\n", style="bold")
    for row in draw_cells(panel, width=width, height=height):
        for character, pool in row:
            text.append(character, style=_colour(pool))
        text.append("\n")
    columns = min(width, panel.num_steps)
    line = " " * columns
    for step, name in panel.marks:
        at = step * columns // panel.num_steps
        line = (line[:at] + "|" + name)[:columns].ljust(columns)
    text.append(line + "\n")
    for index, pool in enumerate(panel.pools):
        text.append(f"██ {pool}  ", style=_colour(index))
    return text.append("█ in use  ▓ cached  ░ free\n")


def _colour(pool: int | None) -> str:
    return "" if pool is None else TERMINAL_COLOURS[pool % len(TERMINAL_COLOURS)]


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:.1f} MiB"
