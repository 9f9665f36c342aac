"""What one run of the lab found, as plain numbers."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from kvtide.types import IntArray

Floats = npt.NDArray[np.float64]

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests:
    """Every request of a run, in the order of arrival; times in virtual seconds, nan if never.

    `first_token` and `finished` are when the step that made them ended. `hit_tokens` were found in
    the cache at the first admission; `recomputed_tokens` had been computed before a preemption.
    `failed`: ended without its answer because it can never fit.
    """

    arrival: Floats
    admitted: Floats
    first_token: Floats
    finished: Floats
    input_tokens: IntArray
    output_tokens: IntArray
    hit_tokens: IntArray
    recomputed_tokens: IntArray
    preemptions: IntArray
    failed: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Samples over virtual time, at most some hundreds: arrays [samples], or [pools, samples].

    Bytes of a pool: `mapped` = used + cached + free (dead ones are among the cached) + sink and
    slack. `stranded` are its free and dead bytes while another pool had to evict or refuse.
    `hit_tokens` and `prompt_tokens` count from the start.
    """

    time: Floats
    running: IntArray
    waiting: IntArray
    hit_tokens: IntArray
    prompt_tokens: IntArray
    mapped: IntArray
    used: IntArray
    cached: IntArray
    dead: IntArray
    stranded: IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Sums over a run. Seconds are virtual; `pause_seconds` are those spent moving granules."""

    requests: int
    failed: int
    prompt_tokens: int
    output_tokens: int
    hit_tokens: int
    recomputed_tokens: int
    computed_flops: float
    recomputed_flops: float
    seconds: float
    steps: int
    preemptions: int
    granules_moved: int
    pause_seconds: float
    longest_pause_seconds: float
    stranded_share: float
    """Of the budget, averaged over time."""
    dead_share: float
    evicted_pages: dict[str, int]
    refusals: dict[str, int]
    """Admissions and growth refused, by the pool that refused."""
    evicted_for_others: dict[str, int] = field(default_factory=dict[str, int])
    """Of the evicted pages, those dropped so that another pool could have the ground."""

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens found in the cache."""
        return self.hit_tokens / max(1, self.prompt_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Percentiles (50, 90, 99) in seconds, and what they allow.

    `ttft`: arrival to first token. `itl`: between tokens of one answer, its mean. `goodput` is
    requests a second that kept both limits of the objective, `throughput` output tokens a second.
    """

    ttft: tuple[float, float, float]
    itl: tuple[float, float, float]
    end_to_end: tuple[float, float, float]
    throughput: float
    goodput: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """Service-level objective: seconds to the first token, and between tokens."""

    ttft: float = 5.0
    itl: float = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One policy on one trace: `settings` are what it was run with, by name."""

    policy: str
    settings: dict[str, Any]
    pools: tuple[str, ...]
    budget_bytes: int
    totals: Totals
    latency: Latency
    timeline: Timeline
    requests: Requests

    def to_json(self) -> dict[str, Any]:
        """Everything but the single requests, in types that `json` knows."""
        return {
            "policy": self.policy,
            "settings": self.settings,
            "pools": list(self.pools),
            "budget_bytes": self.budget_bytes,
            "totals": {**asdict(self.totals), "hit_rate": self.totals.hit_rate},
            "latency": asdict(self.latency),
            "timeline": {name: values.tolist() for name, values in asdict(self.timeline).items()},
        }


def latency_of(requests: Requests, objective: Objective, seconds: float) -> Latency:
    """Percentiles over the requests that were answered."""
    done = ~np.isnan(requests.finished) & ~requests.failed
    first, last = requests.first_token[done], requests.finished[done]
    arrival, outputs = requests.arrival[done], requests.output_tokens[done]
    ttft = first - arrival
    itl = (last - first) / np.maximum(1, outputs - 1)
    kept = (ttft <= objective.ttft) & (itl <= objective.itl)
    return Latency(
        ttft=_percentiles(ttft),
        itl=_percentiles(itl[outputs > 1]),
        end_to_end=_percentiles(last - arrival),
        throughput=float(outputs.sum()) / seconds if seconds else 0.0,
        goodput=float(kept.sum()) / seconds if seconds else 0.0,
    )


def _percentiles(values: Floats) -> tuple[float, float, float]:
    if not len(values):
        return math.nan, math.nan, math.nan
    p50, p90, p99 = np.percentile(values, PERCENTILES).tolist()
    return p50, p90, p99
