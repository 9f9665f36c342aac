"""A comparison as one HTML page that needs nothing else: no network, no script. Pure.

The page is well-formed XML too, so that anything can read it.
"""

from __future__ import annotations

import json
from html import escape
from typing import TYPE_CHECKING, cast

import numpy as np

from kvtide.cli import charts
from kvtide.cli.charts import GIVEN, OURS, PLAIN, Row, Segment
from kvtide.cli.html import frame, table
from kvtide.cli.replay import curves
from kvtide.cli.replay.carpark import draw_park, park_legend
from kvtide.cli.replay.curves import Frame, Line
from kvtide.cli.replay.metrics import (
    best,
    cost,
    hindsight,
    metrics_of,
    milliseconds,
    seconds,
    share,
)
from kvtide.cli.replay.text import head
from kvtide.cli.units import show, show_bytes
from kvtide.sim.result import PERCENTILES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvtide.cli.replay.metrics import Comparison
    from kvtide.sim.result import Floats, Run

HEIGHT = 150
WINDOW = 10
"""The hit rate is shown over the last tenth of all prompt tokens."""

_STYLE = (
    ".compared td.best { font-weight: 700; color: var(--ours); }\n.park { margin-top: 1.2rem; }\n"
)


def draw_page(comparison: Comparison) -> str:
    """The page as text."""
    parts = [part for section in _sections(comparison) for part in section]
    title = f"{comparison.model}: {', '.join(comparison.policies)} on {comparison.trace}"
    return frame(title, parts, styles=_STYLE + curves.styles())


def strict_json(data: object) -> object:
    """The same with None where a float is no number: JSON has no word for those."""
    if isinstance(data, float):
        return data if np.isfinite(data) else None
    if isinstance(data, dict):
        named = cast("dict[str, object]", data)
        return {name: strict_json(value) for name, value in named.items()}
    if isinstance(data, list | tuple):
        return [strict_json(value) for value in cast("list[object]", data)]
    return data


def _sections(comparison: Comparison) -> Iterator[Iterator[str]]:
    yield _head(comparison)
    yield _compared(comparison.runs)
    yield _parks(comparison.runs)
    yield _over_time(comparison.runs)
    yield _latencies(comparison.runs)
    yield _by_pool(comparison.runs)
    yield _configuration(comparison)


def _head(comparison: Comparison) -> Iterator[str]:
    yield charts.hatch()
    yield f"<h1>{escape(comparison.model)}</h1>"
    yield f'<p class="faint">{escape(head(comparison))}. Time is virtual; GB = 1e9 bytes.</p>'
    yield f"<p>{escape(cost(comparison.runs))}</p>"
    split = hindsight(comparison.runs)
    if split is not None:
        yield f"<p>{escape(split)}</p>"


def _compared(runs: Sequence[Run]) -> Iterator[str]:
    yield "<h2>Policies side by side</h2>"
    titles = "".join(f"<th>{escape(run.policy)}</th>" for run in runs)
    lines: list[str] = []
    for metric in metrics_of(runs):
        marked = best(metric, runs)
        cells = [
            f"<td{' class=' + chr(34) + 'best' + chr(34) if number in marked else ''}>"
            f"{escape(metric.show(metric.value(run)))}</td>"
            for number, run in enumerate(runs)
        ]
        lines.append(f"<tr><td>{escape(metric.name)}</td>{''.join(cells)}</tr>")
    yield (
        '<div class="wide"><table class="numbers compared">'
        f"<thead><tr><th></th>{titles}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
    )
    yield '<p class="faint">Bold: the best of the policies that one can run.</p>'


def _parks(runs: Sequence[Run]) -> Iterator[str]:
    yield "<h2>The car park over time: who holds which bays</h2>"
    shown: tuple[str, ...] | None = None
    for run in runs:
        moved = show(run.totals.granules_moved)
        yield (
            f'<p class="park"><b>{escape(run.policy)}</b>, {show_bytes(run.budget_bytes)}: '
            f"{share(run.totals.stranded_share)} stranded and {share(run.totals.dead_share)} dead "
            f"on average, {moved} granules moved</p>"
        )
        yield draw_park(run, _span(runs))
        if run.pools != shown:
            yield park_legend(run)
            shown = run.pools


def _over_time(runs: Sequence[Run]) -> Iterator[str]:
    names = [run.policy for run in runs]
    hits = [_line(run, recent_hits(run)) for run in runs]
    yield "<h2>Hit rate over time</h2>"
    yield f'<p class="faint">Of the prompt tokens of the last {100 // WINDOW} % of all.</p>'
    most = max((float(np.nanmax(line.values)) for line in hits if _is_known(line)), default=0.0)
    yield _plane(hits, min(1.0, curves.nice(most)), share, "hit rate over time")
    yield curves.line_legend(names)
    for title, values in (
        ("Requests waiting", [run.timeline.waiting for run in runs]),
        ("Requests running", [run.timeline.running for run in runs]),
    ):
        lines = [
            _line(run, counts.astype(np.float64)) for run, counts in zip(runs, values, strict=True)
        ]
        most = max((float(line.values.max()) for line in lines if len(line.values)), default=0.0)
        yield f"<h2>{title}</h2>"
        yield _plane(lines, curves.nice(most), show, title.lower())
        yield curves.line_legend(names)


def recent_hits(run: Run) -> Floats:
    """Hits of the last tenth of all prompt tokens, at every sample; nan before the first."""
    hits, prompts = run.timeline.hit_tokens, run.timeline.prompt_tokens
    if not len(prompts):
        return np.zeros(0)
    since = np.searchsorted(prompts, prompts - max(1, int(prompts[-1]) // WINDOW), side="right") - 1
    before = np.maximum(since, 0)
    base_hits = np.where(since < 0, 0, hits[before])
    base_prompts = np.where(since < 0, 0, prompts[before])
    asked = prompts - base_prompts
    return np.where(asked > 0, (hits - base_hits) / np.maximum(1, asked), np.nan)


def _span(runs: Sequence[Run]) -> float:
    """Seconds of the longest run: all pictures share one scale."""
    return max(
        (float(run.timeline.time[-1]) for run in runs if len(run.timeline.time)), default=0.0
    )


def _is_known(line: Line) -> bool:
    return bool(np.any(~np.isnan(line.values)))


def _line(run: Run, values: Floats) -> Line:
    return Line(name=run.policy, time=run.timeline.time, values=values)


def _plane(lines: Sequence[Line], top: float, shown: Callable[[float], str], label: str) -> str:
    span = max((float(line.time[-1]) for line in lines if len(line.time)), default=0.0)
    plane = Frame(span=span, top=top, height=HEIGHT, show=shown, label=label)
    return curves.draw_lines(lines, plane)


def _latencies(runs: Sequence[Run]) -> Iterator[str]:
    yield "<h2>Latency</h2>"
    for name, values, shown in (
        ("arrival to first token", [run.latency.ttft for run in runs], seconds),
        ("between tokens of an answer", [run.latency.itl for run in runs], milliseconds),
        ("arrival to last token", [run.latency.end_to_end for run in runs], seconds),
    ):
        rows = [
            _latency_row(run.policy, percent, latency, shown)
            for run, latencies in zip(runs, values, strict=True)
            for percent, latency in zip(PERCENTILES, latencies, strict=True)
        ]
        yield f"<p>{name.capitalize()}</p>"
        yield charts.bars(rows, f"{name}, by policy and percentile")


def _latency_row(policy: str, percent: int, value: float, shown: Callable[[float], str]) -> Row:
    kind = {"elastic": OURS, "static": GIVEN}.get(policy, PLAIN)
    known = 0.0 if np.isnan(value) else value
    segment = Segment(value=known, kind=kind, title=f"{policy} p{percent}: {shown(value)}")
    return Row(label=f"{policy} p{percent}", segments=(segment,), note=shown(value))


def _by_pool(runs: Sequence[Run]) -> Iterator[str]:
    yield "<h2>By pool</h2>"
    rows = [
        (
            run.policy,
            pool,
            show(run.totals.refusals.get(pool, 0)),
            show(run.totals.evicted_pages.get(pool, 0)),
            show(run.totals.evicted_for_others.get(pool, 0)),
        )
        for run in runs
        for pool in dict.fromkeys((*run.pools, *run.totals.refusals))
    ]
    yield table(rows, ("policy", "pool", "refusals", "evicted pages", "of these for other pools"))


def _configuration(comparison: Comparison) -> Iterator[str]:
    yield "<h2>Configuration</h2>"
    common = [("model", comparison.model), ("trace", comparison.trace)]
    yield table([*common, *comparison.settings.items()], (), kind="words")
    runs = [run.to_json() for run in comparison.runs]
    for run in runs:
        del run["timeline"]  # drawn above; as numbers it would outweigh the page
    numbers = escape(json.dumps(strict_json(runs), indent=1), quote=False)
    yield f"<details><summary>All numbers, as JSON</summary><pre>{numbers}</pre></details>"
