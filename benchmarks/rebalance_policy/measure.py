"""What a run did, phase by phase: hits, times, and what the pools held once it had settled."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from kvtide.sim.policies import POLICIES

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtide.facts import Snapshot
    from kvtide.rebalance import Plan
    from kvtide.sim.lab import Run
    from kvtide.sim.policies import Decider, Ground

BIN = 100
"""Requests that are summed up in the course of a phase."""


class Watched:
    """A policy's own decider, and every virtual second what the pools hold."""

    def __init__(self, inner: Decider) -> None:
        self._inner = inner
        self.stops_the_world = inner.stops_the_world
        self.times: list[float] = []
        self.moved: list[int] = []
        self.pools: list[list[tuple[int, int, int, int, int]]] = []

    def plan(self, now: float, facts: Callable[[], Snapshot]) -> Plan:
        """What the inner one says; looking changes nothing."""
        if not self.times or now >= self.times[-1] + 1.0:
            seen = facts()
            self.times.append(now)
            self.moved.append(seen.granules_moved)
            self.pools.append(
                [
                    (
                        pool.mapped_bytes,
                        pool.used * pool.page_bytes,
                        pool.cached * pool.page_bytes,
                        pool.dead * pool.page_bytes,
                        pool.stranded_bytes,
                    )
                    for pool in seen.pools.values()
                ]
            )
        return self._inner.plan(now, facts)

    def ended(self, input_tokens: int, output_tokens: int) -> None:
        """For the inner one."""
        self._inner.ended(input_tokens, output_tokens)


def watch(name: str) -> list[Watched]:
    """Have the policy of that name watched; the list gets the watcher when a run begins."""
    found: list[Watched] = []
    chosen = POLICIES[name]

    def decide(ground: Ground) -> Decider:
        found[:] = [Watched(chosen.decide(ground))]
        return found[0]

    POLICIES[name] = replace(chosen, decide=decide)
    return found


def phases(
    run: Run, watched: Watched, bounds: list[tuple[int, int]], settled: int
) -> list[dict[str, Any]]:
    """Numbers of each phase; `settled` requests after its begin the steady part begins."""
    return [_phase(run, watched, first, end, first + settled) for first, end in bounds]


def _phase(run: Run, watched: Watched, first: int, end: int, steady: int) -> dict[str, Any]:
    requests = run.requests
    ttft = requests.first_token - requests.arrival
    hits, prompts = requests.hit_tokens, requests.input_tokens
    begins = range(first, end, BIN)
    return {
        "requests": end - first,
        "prompt_tokens": int(prompts[first:end].sum()),
        "hit_tokens": int(hits[first:end].sum()),
        "steady_prompt_tokens": int(prompts[steady:end].sum()),
        "steady_hit_tokens": int(hits[steady:end].sum()),
        "recomputed_tokens": int(requests.recomputed_tokens[first:end].sum()),
        "steady_recomputed_tokens": int(requests.recomputed_tokens[steady:end].sum()),
        "ttft": _percentiles(ttft[first:end]),
        "steady_ttft": _percentiles(ttft[steady:end]),
        "hits_by_bin": [int(hits[i : min(end, i + BIN)].sum()) for i in begins],
        "steady": _steady(run, watched, steady, end),
    }


def _percentiles(seconds: np.ndarray[Any, Any]) -> list[float]:
    given = seconds[~np.isnan(seconds)]
    if not len(given):
        return []
    return [round(float(value), 4) for value in np.percentile(given, (50, 90, 99))]


def _steady(run: Run, watched: Watched, steady: int, end: int) -> dict[str, Any]:
    """Pools between the arrivals of two requests, as shares of the budget."""
    times = np.array(watched.times)
    since, until = run.requests.arrival[steady], run.requests.arrival[end - 1]
    inside = np.flatnonzero((times >= since) & (times <= until))
    if len(inside) < 2:
        return {}
    pools = np.array(watched.pools)[inside] / run.budget_bytes
    mapped, used, cached, dead, stranded = pools.mean(axis=0).T
    moved = watched.moved[inside[-1]] - watched.moved[inside[0]]
    seconds = float(times[inside[-1]] - times[inside[0]])
    served = end - steady
    return {
        "seconds": round(seconds, 1),
        "moved_per_1000": round(1000 * moved / served),
        "stranded": round(float(stranded.sum()), 5),
        "mapped": _by_pool(run, mapped),
        "used": _by_pool(run, used),
        "cached": _by_pool(run, cached),
        "dead": _by_pool(run, dead),
    }


def _by_pool(run: Run, shares: np.ndarray[Any, Any]) -> dict[str, float]:
    return {name: round(float(share), 4) for name, share in zip(run.pools, shares, strict=True)}
