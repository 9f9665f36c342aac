"""Curves and stacked areas over virtual time as inline SVG. Pure: numbers in, text out."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from itertools import chain, cycle
from typing import TYPE_CHECKING

import numpy as np

from kvtide.cli import charts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvtide.sim.result import Floats
    from kvtide.types import IntArray

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 920, 76, 28, 8, 24
COLUMNS = 240
"""Points of a curve at most: more than these a page cannot show."""

LINES = ("#0d9488", "#dc2626", "#6366f1", "#ca8a04", "#db2777", "#64748b", "#0891b2")
_DASHES = (("none", "solid"), ("7 4", "dashed"), ("2 3", "dotted"))
_TICKS = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 28800, 86400)
_MOST_TICKS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One curve: its name, and its values over seconds of virtual time."""

    name: str
    time: Floats
    values: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """An area between two curves; `kind` are the classes it is drawn in, or the hatch's name."""

    kind: str
    title: str
    low: Floats
    high: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """The plane curves are drawn on: `span` seconds wide, `top` high, `height` pixels of it."""

    span: float
    top: float
    height: int
    show: Callable[[float], str]
    label: str

    def x(self, time: Floats) -> Floats:
        """Pixels from the left."""
        return LEFT + time * ((WIDTH - LEFT - RIGHT) / (self.span or 1))

    def y(self, values: Floats) -> Floats:
        """Pixels from the top."""
        return TOP + self.height * (1 - values / (self.top or 1))


def styles() -> str:
    """The rules of CSS for curves and bands."""
    strokes = [
        f".l{i} {{ stroke: {c}; stroke-dasharray: {dash}; border-top: 3px {border} {c}; }}"
        for i, (c, (dash, border)) in enumerate(zip(LINES, cycle(_DASHES), strict=False))
    ]
    return "\n".join(
        [
            *strokes,
            ".curve { fill: none; stroke-width: 2; } .grid { stroke: var(--line); }",
            ".used { opacity: 1; } .cached { opacity: 0.5; } .free { opacity: 0.15; }",
            ".dead { fill: var(--plain); background: var(--plain); opacity: 0.9; }",
            ".legend i.key { width: 24px; height: 0; vertical-align: middle; }",
        ]
    )


def line_kind(number: int) -> str:
    """The class of the n-th curve."""
    return f"l{number % len(LINES)}"


def draw_lines(lines: Sequence[Line], frame: Frame) -> str:
    """Curves on one plane, each in the class of its place."""
    parts = [
        f'<polyline class="curve {line_kind(number)}" points="{_points(line, frame)}">'
        f"<title>{escape(line.name)}</title></polyline>"
        for number, line in enumerate(lines)
    ]
    return _svg(frame, parts)


def draw_bands(time: Floats, bands: Sequence[Band], frame: Frame) -> str:
    """Areas on one plane, the later over the earlier."""
    return _svg(frame, [_band(time, band, frame) for band in bands])


def line_legend(names: Sequence[str]) -> str:
    """Which colour is which curve."""
    keys = [
        f'<span><i class="key {line_kind(i)}"></i>{escape(name)}</span>'
        for i, name in enumerate(names)
    ]
    return f'<p class="legend">{" ".join(keys)}</p>'


def nice(value: float) -> float:
    """The least of 1, 2, 5 times a power of ten that is not below `value`; 1 for nothing."""
    if value <= 0:
        return 1.0
    power = 10.0 ** np.floor(np.log10(value))
    return float(next(step * power for step in (1, 2, 5, 10) if step * power >= value * (1 - 1e-9)))


def show_time(value: float, step: float) -> str:
    """Seconds in the unit that ticks `step` apart are counted in: "90 s", "20 min", "3 h"."""
    unit, name = next(((u, n) for u, n in ((3600, "h"), (60, "min")) if step >= u), (1, "s"))
    return f"{value / unit:g} {name}"


def _svg(frame: Frame, parts: Sequence[str]) -> str:
    height = TOP + frame.height + BOTTOM
    head = f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(frame.label)}">'
    return "\n".join(chain([head], _axes(frame), parts, ["</svg>"]))


def _axes(frame: Frame) -> Iterator[str]:
    for value in (0.0, frame.top / 2, frame.top):
        y = float(frame.y(np.array(value)))
        yield f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield (
            f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">'
            f"{escape(frame.show(value))}</text>"
        )
    step = _step(frame.span)
    for number in range(int(frame.span / step * (1 + 1e-9)) + 1):
        x = float(frame.x(np.array(step * number)))
        yield (
            f'<text x="{x:.1f}" y="{TOP + frame.height + 18}" text-anchor="middle">'
            f"{show_time(step * number, step)}</text>"
        )


def _step(span: float) -> float:
    """Seconds between two ticks, so that there are not too many."""
    fitting = (float(step) for step in _TICKS if span / step <= _MOST_TICKS)
    least = nice(span / _MOST_TICKS)
    return next(fitting, least) if span > _MOST_TICKS else least


def _points(line: Line, frame: Frame) -> str:
    known = np.flatnonzero(~np.isnan(line.values))
    chosen = known[_thin(len(known))]
    x, y = frame.x(line.time[chosen]), frame.y(line.values[chosen])
    return " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True))


def _band(time: Floats, band: Band, frame: Frame) -> str:
    chosen = _thin(len(time))
    x = frame.x(time[chosen])
    top, bottom = frame.y(band.high[chosen]), frame.y(band.low[chosen])
    corners = chain(zip(x, top, strict=True), reversed(list(zip(x, bottom, strict=True))))
    points = " ".join(f"{a:.1f},{b:.1f}" for a, b in corners)
    fill = f'fill="url(#{band.kind})"' if band.kind == charts.STRANDED else f'class="{band.kind}"'
    return f'<polygon {fill} points="{points}"><title>{escape(band.title)}</title></polygon>'


def _thin(count: int) -> IntArray:
    """At most `COLUMNS` of `count` indices, the first and the last among them."""
    evenly = np.linspace(0, max(0, count - 1), min(COLUMNS, count))
    return np.unique(evenly.round().astype(np.int64))
