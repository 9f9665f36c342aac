"""Runs of vLLM that others measured, and how far a replay is from them."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from kvtide.sim.traces import TraceRequest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvtide.sim.result import Run

BLOCK = 512


@dataclass(frozen=True, slots=True)
class Measured:
    """One measured run: per request, seconds since the first was queued; a series per second."""

    name: str
    queued: np.ndarray
    first_token: np.ndarray
    last_token: np.ndarray
    input_tokens: np.ndarray
    output_tokens: np.ndarray
    series: dict[str, np.ndarray]
    meta: dict[str, Any]

    def __iter__(self) -> Iterator[TraceRequest]:
        """The requests, no two of which share a token."""
        next_id = 0
        for arrival, prompt, answer in zip(
            self.queued.tolist(),
            self.input_tokens.tolist(),
            self.output_tokens.tolist(),
            strict=True,
        ):
            blocks = -(-prompt // BLOCK)
            yield TraceRequest(
                arrival=arrival,
                input_tokens=prompt,
                output_tokens=answer,
                runs=np.array([[next_id, blocks]]),
                block=BLOCK,
            )
            next_id += blocks

    def every_second(self) -> Measured:
        """What one of two ranks serves if they take turns; the series is halved."""
        halves = {
            name: getattr(self, name)[::2]
            for name in ("queued", "first_token", "last_token", "input_tokens", "output_tokens")
        }
        series = {
            name: values / 2 if name in ("running", "waiting") else values
            for name, values in self.series.items()
        }
        return replace(self, series=series, **halves)


def load(folder: Path) -> Measured:
    """Read one folder of LLMServingSim's measured runs."""
    lines = (folder / "requests.jsonl").read_text().splitlines()
    rows = sorted((json.loads(line) for line in lines), key=lambda row: row["queued_ts"])
    start = rows[0]["queued_ts"]
    column = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    with (folder / "timeseries.csv").open() as file:
        ticks = list(csv.DictReader(file))
    series = {name: np.array([float(tick[name]) for tick in ticks]) for name in ticks[0]}
    return Measured(
        name=folder.name,
        queued=column["queued_ts"] - start,
        first_token=column["first_token_ts"] - start,
        last_token=column["last_token_ts"] - start,
        input_tokens=column["input_toks"],
        output_tokens=column["output_toks"],
        series=series,
        meta=json.loads((folder / "meta.json").read_text()),
    )


def errors(measured: Measured, run: Run) -> dict[str, Any]:
    """Measured and replayed side by side, and the mean errors of what is curves or requests."""
    lives = run.requests
    ttft = measured.first_token - measured.queued, lives.first_token - lives.arrival
    end = measured.last_token - measured.queued, lives.finished - lives.arrival
    relative = np.abs(end[1] - end[0]) / end[0]
    found: dict[str, Any] = {
        "total_seconds": [float(measured.last_token.max()), run.totals.seconds],
        "ttft_p50_p90_p99": [_percentiles(values) for values in ttft],
        "end_to_end_p50_p90_p99": [_percentiles(values) for values in end],
        "end_to_end_mean_error_percent": float(100 * relative.mean()),
        "end_to_end_median_error_percent": float(100 * np.median(relative)),
        "ttft_mean_error_seconds": float(np.abs(ttft[1] - ttft[0]).mean()),
        "preemptions": run.totals.preemptions,
        "recomputed_tokens": run.totals.recomputed_tokens,
    }
    for name, (theirs, ours) in curves(measured, run).items():
        found[f"{name}_mean_error"] = float(np.abs(ours - theirs).mean())
    return found


def curves(measured: Measured, run: Run) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Measured and replayed at every second of the series. Occupancy is in percent.

    Who waits is who is here and does not run: coasting takes many steps between two samples, and
    requests arrive meanwhile.
    """
    series, lives, line = measured.series, run.requests, run.timeline
    seconds = series["t"]
    here = (lives.arrival <= seconds[:, None]) & (seconds[:, None] < lives.finished)
    running = np.interp(seconds, line.time, line.running, right=0.0)
    found = {
        "running": (series["running"], running),
        "waiting": (series["waiting"], np.maximum(0.0, here.sum(1) - running)),
    }
    if series["kv_cache_pct"].any():
        percent = line.used.sum(0) / run.budget_bytes * 100
        ours = np.interp(seconds, line.time, percent, right=0.0)
        found["occupancy"] = series["kv_cache_pct"], ours
    return found


def _percentiles(values: np.ndarray) -> list[float]:
    return [float(x) for x in np.percentile(values, (50, 90, 99))]
