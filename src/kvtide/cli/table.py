"""Plain tables and bars: columns of text, no frames."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from rich.text import Text

from kvtide.cli.demo.picture import TERMINAL_COLOURS

if TYPE_CHECKING:
    from collections.abc import Sequence

SHADES = "█▓▒░◆▪"
"""One a pool, so that bars can be told apart without colours."""

STRANDED = "·"
ASCII = str.maketrans(SHADES + STRANDED, "#=-:o*~")
"""What bars are drawn with where the output knows no more characters."""


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> list[str]:
    """Lines of a table: the first `left` columns to the left, numbers to the right."""
    lines = [head, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return [
        "  "
        + "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]


def cells_of(shares: Sequence[float], width: int) -> list[int]:
    """`width` characters divided by share, so that none is more than one off."""
    edges = [0.0]
    for share in shares:
        edges.append(edges[-1] + share)
    marks = [round(edge * width) for edge in edges]
    return [stop - start for start, stop in pairwise(marks)]


def bar(shares: Sequence[float], width: int) -> Text:
    """One bar, divided among pools."""
    text = Text()
    for pool, cells in enumerate(cells_of(shares, width)):
        text.append(shade(pool) * cells, style=colour(pool))
    return text


def shade(pool: int) -> str:
    """The character of a pool."""
    return SHADES[pool % len(SHADES)]


def colour(pool: int) -> str:
    """The colour of a pool, on terminals that have them."""
    return TERMINAL_COLOURS[pool % len(TERMINAL_COLOURS)]


def legend(names: Sequence[str]) -> Text:
    """Which character is which pool."""
    text = Text("  ")
    for pool, name in enumerate(names):
        text.append(f"{shade(pool)} ", style=colour(pool)).append(f"{name}   ")
    text.rstrip()
    return text
