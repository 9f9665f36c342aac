"""Horizontal bars as inline SVG: rows of segments on one scale. Pure: numbers in, text out."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from kvtide.cli.demo.picture import COLOURS

if TYPE_CHECKING:
    from collections.abc import Sequence

PALETTE = (*COLOURS, "#0891b2", "#ca8a04", "#db2777")
"""Fill of the n-th pool; a light and a dark page both carry them."""

STRANDED = "stranded"
OURS, GIVEN, PLAIN = "ours", "given", "plain"
LABEL, BARS, NOTE = 200, 460, 260
ROW, HEIGHT = 30, 20
LETTERS = 27
"""What of a label has room left of a bar."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A part of a bar. `kind` is the class it is drawn in: `pool(n)`, or one of those above."""

    value: float
    kind: str
    title: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One bar: what stands left of it, its segments, and what stands right of it."""

    label: str
    segments: tuple[Segment, ...]
    note: str


def pool(number: int) -> str:
    """The class of the n-th pool."""
    return f"p{number % len(PALETTE)}"


def styles() -> str:
    """The rules of CSS that bars and legends need."""
    fills = [f".p{i} {{ fill: {c}; background: {c}; }}" for i, c in enumerate(PALETTE)]
    plain = [f".{kind} {{ fill: var(--{kind}); }}" for kind in (OURS, GIVEN, PLAIN)]
    return "\n".join([*fills, *plain])


def hatch() -> str:
    """The pattern of stranded bytes; once in a page."""
    return (
        '<svg width="0" height="0" aria-hidden="true"><defs>'
        f'<pattern id="{STRANDED}" width="7" height="7" patternUnits="userSpaceOnUse" '
        'patternTransform="rotate(45)"><line x1="0" y1="0" x2="0" y2="7" class="hatch"/></pattern>'
        "</defs></svg>"
    )


def bars(rows: Sequence[Row], label: str) -> str:
    """An SVG with one bar below the other, the longest as wide as there is room."""
    longest = max((sum(s.value for s in row.segments) for row in rows), default=0) or 1
    height = ROW * len(rows)
    parts = [
        f'<svg viewBox="0 0 {LABEL + BARS + NOTE} {height}" role="img" '
        f'aria-label="{escape(label)}">'
    ]
    for number, row in enumerate(rows):
        parts += _row(row, number * ROW, BARS / longest)
    return "\n".join([*parts, "</svg>"])


def legend(names: Sequence[str], *, has_stranded: bool) -> str:
    """Which colour is which pool."""
    items = [f'<span><i class="{pool(i)}"></i>{escape(n)}</span>' for i, n in enumerate(names)]
    if has_stranded:
        items.append('<span><i class="striped"></i>stranded</span>')
    return f'<p class="legend">{" ".join(items)}</p>'


def _row(row: Row, top: int, scale: float) -> list[str]:
    base = top + HEIGHT - 5
    parts = [
        f'<text x="{LABEL - 10}" y="{base}" text-anchor="end">{escape(_clipped(row.label))}</text>'
    ]
    x = float(LABEL)
    for segment in row.segments:
        width = segment.value * scale
        kind = segment.kind
        shape = f'x="{x:.2f}" y="{top}" width="{width:.2f}" height="{HEIGHT}"'
        title = f"<title>{escape(segment.title)}</title>"
        if kind == STRANDED:
            parts.append(f'<rect {shape} class="outline" fill="url(#{STRANDED})">{title}</rect>')
        else:
            parts.append(f'<rect {shape} class="{kind}">{title}</rect>')
        x += width
    parts.append(f'<text x="{x + 8:.2f}" y="{base}">{escape(row.note)}</text>')
    return parts


def _clipped(label: str) -> str:
    """The end of a label that is too long: names differ there."""
    return label if len(label) <= LETTERS else f"…{label[1 - LETTERS :]}"
