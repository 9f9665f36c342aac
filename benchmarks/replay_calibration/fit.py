"""Deterministic search for a few constants of the clock, and the distance it makes smaller."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING

import numpy as np

from kvtide.sim.costs import Clock
from kvtide.sim.lab import Setup, replay

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from measured import Measured

    from kvtide.sim.result import Run

FIRST_FACTOR, LAST_FACTOR, MAX_MORE = 1.04, 1.006, 40


def run_with(measured: Measured, setup: Setup, values: Mapping[str, float]) -> Run:
    """Replay a measured run with some constants of the hardware changed."""
    hardware = replace(setup.clock.hardware, **values)
    clock = Clock(setup.clock.model, hardware)
    return replay(measured, replace(setup, clock=clock), "static")


def distance(measured: Measured, run: Run) -> float:
    """Mean error of first and last tokens' times as a share of the run's length, and a tenth of the
    mean logarithmic error of TTFT.

    Times alone leave a valley: where the cache is full, slow prompts and fast memory look like fast
    prompts and slow memory. Early requests, which do not wait, tell them apart; the logarithm makes
    them count.
    """
    lives, span = run.requests, measured.last_token.max()
    first = np.abs(lives.first_token - measured.first_token).mean()
    last = np.abs(lives.finished - measured.last_token).mean()
    ttft = measured.first_token - measured.queued
    ratio = np.abs(np.log((lives.first_token - lives.arrival) / ttft)).mean()
    return float((first + last) / 2 / span + ratio / 10)


def fit(
    measured: Measured, setup: Setup, grid: Mapping[str, Sequence[float]]
) -> tuple[dict[str, float], Run, int]:
    """The best point of a grid, then one constant at a time up or down by a factor, whose root is
    taken when nothing is better. Returns the constants, their run, and how many replays it took.
    """
    points = [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]
    runs = [run_with(measured, setup, point) for point in points]
    nearest = min(range(len(runs)), key=lambda i: distance(measured, runs[i]))
    values, best, tried, factor = points[nearest], runs[nearest], len(runs), FIRST_FACTOR
    while grid and factor > LAST_FACTOR and tried < len(points) + MAX_MORE:
        improved = False
        for name, by in [(name, by) for name in grid for by in (factor, 1 / factor)]:
            other = values | {name: _scaled(name, values[name], by)}
            run = run_with(measured, setup, other)
            tried += 1
            if distance(measured, run) < distance(measured, best):
                values, best, improved = other, run, True
        factor = factor if improved else factor**0.5
    return values, best, tried


def _scaled(name: str, value: float, by: float) -> float:
    return min(1.0, value * by) if name.endswith("efficiency") else value * by
