"""Deterministic search for a few constants of the clock, and the distance it makes smaller."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from kvtide.sim.costs import Clock
from kvtide.sim.lab import Setup, replay

if TYPE_CHECKING:
    from collections.abc import Mapping

    from measured import Measured

    from kvtide.sim.result import Run

FIRST_FACTOR, LAST_FACTOR = 1.2, 1.005


def run_with(measured: Measured, setup: Setup, values: Mapping[str, float]) -> Run:
    """Replay a measured run with some constants of the hardware changed."""
    hardware = replace(setup.clock.hardware, **values)
    clock = Clock(setup.clock.model, hardware)
    return replay(measured, replace(setup, clock=clock), "static")


def distance(measured: Measured, run: Run) -> float:
    """Mean error of first and last tokens' times, as a share of the run's length."""
    lives, span = run.requests, measured.last_token.max()
    first = np.abs(lives.first_token - measured.first_token).mean()
    last = np.abs(lives.finished - measured.last_token).mean()
    return float((first + last) / 2 / span)


def fit(
    measured: Measured, setup: Setup, start: Mapping[str, float]
) -> tuple[dict[str, float], Run, int]:
    """Pattern search: one constant at a time up or down by a factor, whose root is taken when
    nothing is better. Returns the constants, the run they give, and how many replays that took.
    """
    values, factor = dict(start), FIRST_FACTOR
    best = run_with(measured, setup, values)
    tried = 1
    while factor > LAST_FACTOR:
        improved = False
        for name, by in [(name, by) for name in start for by in (factor, 1 / factor)]:
            run = run_with(measured, setup, values | {name: _scaled(name, values[name], by)})
            tried += 1
            if distance(measured, run) < distance(measured, best):
                values[name], best, improved = _scaled(name, values[name], by), run, True
        factor = factor if improved else factor**0.5
    return values, best, tried


def _scaled(name: str, value: float, by: float) -> float:
    return min(1.0, value * by) if name.endswith("efficiency") else value * by
