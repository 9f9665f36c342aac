"""The pools as a car park over time: who holds which bays, which are stranded. Pure."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

import numpy as np

from kvtide.cli import charts
from kvtide.cli.replay.curves import Band, Frame, draw_bands
from kvtide.cli.units import show_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvtide.sim.result import Floats, Run

HEIGHT = 220
STATES = ("used", "cached", "dead", "free")


def draw_park(run: Run, span: float) -> str:
    """One policy's bays over `span` seconds, pools from the bottom up; what is white above them is
    mapped by nobody.
    """
    line = run.timeline
    frame = Frame(
        span=span,
        top=float(_top(run)),
        height=HEIGHT,
        show=show_bytes,
        label=f"bytes of the pools over time, policy {run.policy}",
    )
    bands = [band for pool in range(len(run.pools)) for band in _pool(run, pool)]
    return draw_bands(line.time, bands, frame)


def park_legend(run: Run) -> str:
    """Which colour is whose, and in which state."""
    parts = [
        f'<span><i class="{charts.pool(number)} {state}"></i>{escape(name)} {state}</span>'
        for number, name in enumerate(run.pools)
        for state in STATES
        if state != "dead"
    ]
    parts.append('<span><i class="dead"></i>dead</span>')
    parts.append('<span><i class="striped"></i>stranded</span>')
    return f'<p class="legend">{" ".join(parts)}</p>'


def _top(run: Run) -> int:
    """The budget; of a policy whose memory has no end, what it ever mapped."""
    if run.policy == "infinite" and run.timeline.mapped.size:
        return int(run.timeline.mapped.sum(axis=0).max())
    return run.budget_bytes


def _pool(run: Run, pool: int) -> Iterator[Band]:
    line = run.timeline
    base = _row(line.mapped[:pool].sum(axis=0))
    mapped = _row(line.mapped[pool])
    used, cached, dead = (_row(part[pool]) for part in (line.used, line.cached, line.dead))
    edges = [base, base + used, base + used + cached - dead, base + used + cached, base + mapped]
    name = run.pools[pool]
    for state, low, high in zip(STATES, edges, edges[1:], strict=False):
        if np.any(high > low):
            title = f"{name} {state}: {show_bytes(_mean(line.time, high - low))} on average"
            kind = f"{charts.pool(pool)} {state}" if state != "dead" else "dead"
            yield Band(kind=kind, title=title, low=low, high=high)
    stranded = _row(line.stranded[pool])
    if np.any(stranded > 0):
        title = f"{name} stranded: {show_bytes(_mean(line.time, stranded))} on average"
        top = base + mapped
        yield Band(kind=charts.STRANDED, title=title, low=top - stranded, high=top)


def _row(values: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> Floats:
    return values.astype(np.float64)


def _mean(time: Floats, values: Floats) -> float:
    """Over time: samples need not be evenly apart."""
    span = float(time[-1] - time[0])
    return float(np.trapezoid(values, time)) / span if span else float(values.mean())
