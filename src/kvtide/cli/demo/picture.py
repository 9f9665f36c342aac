"""The pools' boundaries over time, as an SVG file and in the terminal. Pure: samples in, text out.

Pools are stacked from the bottom up, each as high as the memory it has mapped; what is on top of
all of them is mapped by nobody. Inside a pool, bottom up: pages in use, cached pages, the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

COLOURS = ("#2563eb", "#ea580c", "#16a34a", "#9333ea", "#dc2626")
TERMINAL_COLOURS = ("blue", "dark_orange", "green", "magenta", "red")
_OPACITY = (1.0, 0.55, 0.2)
_SHADES = "█▓░"
WIDTH, HEIGHT, MARGIN = 900, 220, 44


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSample:
    """One pool after one step, in bytes; `used + cached <= mapped`."""

    step: int
    pool: str
    mapped_bytes: int
    used_bytes: int
    cached_bytes: int

    @property
    def layers(self) -> tuple[int, int, int]:
        """Bytes in use, cached, and neither."""
        rest = self.mapped_bytes - self.used_bytes - self.cached_bytes
        return self.used_bytes, self.cached_bytes, max(0, rest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One picture: samples of all pools at each step, the budget, and named steps."""

    title: str
    samples: tuple[PoolSample, ...]
    budget_bytes: int
    marks: tuple[tuple[int, str], ...] = ()

    @property
    def pools(self) -> tuple[str, ...]:
        """Pool names in the order in which they are stacked."""
        return tuple(dict.fromkeys(sample.pool for sample in self.samples))

    @property
    def num_steps(self) -> int:
        """Steps shown, at least 1."""
        return max((sample.step for sample in self.samples), default=0) + 1

    def stacks(self) -> list[list[int]]:
        """Heights per step, bottom up: three per pool (used, cached, rest), in bytes."""
        stacks = [[0] * (3 * len(self.pools)) for _ in range(self.num_steps)]
        for sample in self.samples:
            at = 3 * self.pools.index(sample.pool)
            stacks[sample.step][at : at + 3] = sample.layers
        return stacks


def draw_svg(panels: Sequence[Panel]) -> str:
    """An SVG document with the panels one below the other."""
    height = len(panels) * (HEIGHT + 2 * MARGIN)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH + 2 * MARGIN}" height="{height}" '
        f'font-family="sans-serif" font-size="13">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for number, panel in enumerate(panels):
        parts.append(
            f'<g transform="translate({MARGIN},{number * (HEIGHT + 2 * MARGIN) + MARGIN})">'
        )
        parts += _svg_panel(panel)
        parts.append("</g>")
    return "\n".join([*parts, "</svg>", ""])


def _svg_panel(panel: Panel) -> list[str]:
    """Bands, marks, frame and legend of one panel, with its top left corner at (0, 0)."""
    stacks = panel.stacks()
    parts = [f'<text x="0" y="-24" font-weight="bold">{escape(panel.title)}</text>']
    for band in range(3 * len(panel.pools)):
        colour = COLOURS[band // 3 % len(COLOURS)]
        points = _outline(stacks, band, panel.budget_bytes)
        parts.append(
            f'<polygon points="{points}" fill="{colour}" fill-opacity="{_OPACITY[band % 3]}"/>'
        )
    for step, name in panel.marks:
        x = WIDTH * step / panel.num_steps
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{HEIGHT}" stroke="black"/>')
        parts.append(f'<text x="{x + 4:.1f}" y="14">{escape(name)}</text>')
    parts.append(f'<rect width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="black"/>')
    parts.append(
        f'<text x="{WIDTH}" y="-24" text-anchor="end">{panel.num_steps} steps, '
        f"{panel.budget_bytes / 2**20:.0f} MiB</text>"
    )
    return parts + _svg_legend(panel.pools)


def _svg_legend(pools: Sequence[str]) -> list[str]:
    parts: list[str] = []
    x = 0
    for index, pool in enumerate(pools):
        for opacity, what in zip(_OPACITY, ("in use", "cached", "free"), strict=True):
            label = f"{pool}: {what}"
            parts.append(
                f'<rect x="{x}" y="{HEIGHT + 8}" width="12" height="12" '
                f'fill="{COLOURS[index % len(COLOURS)]}" fill-opacity="{opacity}"/>'
            )
            parts.append(f'<text x="{x + 16}" y="{HEIGHT + 18}">{escape(label)}</text>')
            x += 30 + 7 * len(label)
    return parts


def _outline(stacks: Sequence[Sequence[int]], band: int, budget: int) -> str:
    """Corners of one band: along its top from left to right, back along its bottom."""
    scale = WIDTH / len(stacks)
    top: list[str] = []
    bottom: list[str] = []
    for step, stack in enumerate(stacks):
        low, high = sum(stack[:band]), sum(stack[: band + 1])
        for x in (step * scale, (step + 1) * scale):
            top.append(f"{x:.1f},{HEIGHT * (1 - high / budget):.1f}")
            bottom.append(f"{x:.1f},{HEIGHT * (1 - low / budget):.1f}")
    return " ".join(top + bottom[::-1])


def draw_cells(panel: Panel, *, width: int, height: int) -> list[list[tuple[str, int | None]]]:
    """The same in characters: rows from the top, each cell (character, index of its pool or None).

    A column shows the step in the middle of those it stands for.
    """
    stacks = panel.stacks()
    columns = min(width, len(stacks))
    chosen = [stacks[(2 * c + 1) * len(stacks) // (2 * columns)] for c in range(columns)]
    middles = [panel.budget_bytes * (2 * r + 1) / (2 * height) for r in reversed(range(height))]
    return [[_cell(stack, level) for stack in chosen] for level in middles]


def _cell(stack: Sequence[int], level: float) -> tuple[str, int | None]:
    """What lies at `level` bytes above the bottom of a stack."""
    reached = 0
    for band, size in enumerate(stack):
        reached += size
        if level < reached:
            return _SHADES[band % 3], band // 3
    return " ", None
