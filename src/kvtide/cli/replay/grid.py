"""A sweep's points as one table, and as a page. Pure: points in, text out."""

from __future__ import annotations

import json
from html import escape
from typing import TYPE_CHECKING, Any, cast

from kvtide.cli import charts
from kvtide.cli.charts import GIVEN, OURS, PLAIN, Row, Segment
from kvtide.cli.html import frame
from kvtide.cli.html import table as html_table
from kvtide.cli.replay.metrics import milliseconds, rate, seconds, share
from kvtide.cli.table import table
from kvtide.cli.units import show, show_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvtide.sim.sweep import Point

_COLUMNS: tuple[tuple[str, Callable[[Any], float | None], Callable[[float], str]], ...] = (
    ("hit rate", lambda run: run["totals"]["hit_rate"], share),
    ("TTFT p50", lambda run: run["latency"]["ttft"][0], seconds),
    ("TTFT p99", lambda run: run["latency"]["ttft"][2], seconds),
    ("ITL p99", lambda run: run["latency"]["itl"][2], milliseconds),
    ("goodput", lambda run: run["latency"]["goodput"], rate),
    ("preemptions", lambda run: run["totals"]["preemptions"], show),
    ("stranded", lambda run: run["totals"]["stranded_share"], share),
)
_NAMES = {"memory_bytes": "memory", "tensor": "tp", "pool_ratio": "pool-ratio"}


def lines_of(points: Sequence[Point], axes: Sequence[str]) -> Iterator[str]:
    """A line a point, in the order of the grid, and below it what could not be run."""
    yield from table(head_of(axes), [cells_of(point, axes) for point in points], left=len(axes))
    for point in points:
        if point.error is not None:
            yield f"  {', '.join(axis_cells(point, axes))}: {point.error}"


def draw_grid(points: Sequence[Point], axes: Sequence[str], model: str) -> str:
    """The sweep as one HTML page that needs nothing else."""
    rows = [(f"{n}", *cells_of(point, axes)) for n, point in enumerate(points, 1)]
    parts = [
        f"<h1>{escape(model)}</h1>",
        f'<p class="faint">{len(points)} points over {escape(", ".join(map(_name, axes)))}. '
        "Time is virtual; GB = 1e9 bytes.</p>",
        html_table(rows, ("", *head_of(axes))),
        "<h2>Hit rate</h2>",
        _bars(points, axes, 0),
        "<h2>Goodput, requests a second</h2>",
        _bars(points, axes, 4),
        *(
            f'<p class="warn">{escape(", ".join(axis_cells(point, axes)))}: '
            f"{escape(point.error)}</p>"
            for point in points
            if point.error is not None
        ),
    ]
    recipe = {name: value for name, value in points[0].recipe.items() if name not in axes}
    given = [(name, json.dumps(value)) for name, value in recipe.items()]
    parts += ["<h2>Configuration</h2>", html_table(given, (), kind="words")]
    return frame(f"{model}: sweep over {', '.join(map(_name, axes))}", parts)


def head_of(axes: Sequence[str]) -> list[str]:
    """Titles of the table: the axes, then what was found."""
    return [*map(_name, axes), *(name for name, _, _ in _COLUMNS)]


def cells_of(point: Point, axes: Sequence[str]) -> list[str]:
    """One line of the table; "-" where there is no run."""
    return [*axis_cells(point, axes), *(_cell(point, number) for number in range(len(_COLUMNS)))]


def axis_cells(point: Point, axes: Sequence[str]) -> list[str]:
    """What the axes are at a point, as people read it."""
    return [_shown(axis, point.recipe[axis]) for axis in axes]


def _cell(point: Point, column: int) -> str:
    _, value, shown = _COLUMNS[column]
    number = None if point.run is None else value(point.run)
    return "-" if number is None else shown(number)


def _bars(points: Sequence[Point], axes: Sequence[str], column: int) -> str:
    rows: list[Row] = []
    for place, point in enumerate(points, 1):
        number = (None if point.run is None else _COLUMNS[column][1](point.run)) or 0.0
        label, note = _label(place, point, axes), _cell(point, column)
        kind = {"elastic": OURS, "static": GIVEN}.get(point.recipe["policy"], PLAIN)
        segment = Segment(value=number, kind=kind, title=f"{label}: {note}")
        rows.append(Row(label=label, segments=(segment,), note=note))
    return charts.bars(rows, f"{_COLUMNS[column][0]} by point")


def _label(place: int, point: Point, axes: Sequence[str]) -> str:
    """The point's line in the table, and as much of its settings as there is room for."""
    whole = f"{place}: {' '.join(axis_cells(point, axes))}"
    return whole if len(whole) <= charts.LETTERS else f"{place}: {point.recipe['policy']}"


def _shown(axis: str, value: object) -> str:
    if axis in ("memory_bytes", "granule_bytes"):
        return show_bytes(cast("int", value))
    if isinstance(value, dict):
        named = cast("dict[str, float]", value)
        return "/".join(f"{name}={part}" for name, part in named.items())
    if isinstance(value, list):
        return "/".join(map(str, cast("list[float]", value)))
    return str(value)


def _name(axis: str) -> str:
    return _NAMES.get(axis, axis.replace("_", "-").removesuffix("-bytes"))
