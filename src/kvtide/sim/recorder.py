"""Keeps what happens to requests and pools on the virtual clock."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvtide.sim.result import Requests, Timeline

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtide.engine.request import Request
    from kvtide.facts import Snapshot
    from kvtide.types import IntArray

MAX_SAMPLES = 256
"""Samples of a timeline; when it is full every other one is dropped and time goes twice as far."""


@dataclass(slots=True)
class Life:
    """What becomes of one request. Times are virtual seconds, nan until they happen.

    `shared_tokens`: how much of its prompt earlier ones had, so that memory without end would have
    hit it.
    """

    arrival: float
    input_tokens: int
    shared_tokens: int
    admitted: float = math.nan
    first_token: float = math.nan
    finished: float = math.nan
    output_tokens: int = 0
    hit_tokens: int = 0
    recomputed_tokens: int = 0
    preemptions: int = 0
    failed: bool = False

    def end(self, request: Request, now: float) -> None:
        """It is over: keep its numbers, for the request itself holds its prompt."""
        self.finished = now
        self.output_tokens = len(request.output)
        self.hit_tokens = request.hit_tokens
        self.recomputed_tokens = request.recomputed_tokens
        self.preemptions = request.num_preempted
        self.failed = request.error is not None
        if not self.failed:
            self.recomputed_tokens += max(0, self.shared_tokens - self.hit_tokens)


@dataclass(slots=True)
class _Sample:
    time: float
    running: int
    waiting: int
    hit_tokens: int
    prompt_tokens: int
    pools: list[tuple[int, int, int, int, int]]


@dataclass(slots=True)
class Shares:
    """Bytes times seconds, to be divided by the time and the budget."""

    stranded: float = 0.0
    dead: float = 0.0


class Sampler:
    """A timeline of bounded length: every `_every` seconds a sample, thinned when it is full."""

    def __init__(self) -> None:
        self._samples: list[_Sample] = []
        self._every = 1.0
        self.due = 0.0
        """When the next sample is wanted: a snapshot is not for nothing."""
        self._last_time = 0.0
        self.shares = Shares()

    def take(self, now: float, running: int, waiting: int, facts: Snapshot) -> None:
        """Add a sample."""
        pools = [
            (
                pool.mapped_bytes,
                pool.used * pool.page_bytes,
                pool.cached * pool.page_bytes,
                pool.dead * pool.page_bytes,
                pool.stranded_bytes,
            )
            for pool in facts.pools.values()
        ]
        span = now - self._last_time
        self.shares.stranded += span * sum(pool[4] for pool in pools)
        self.shares.dead += span * sum(pool[3] for pool in pools)
        self._last_time = now
        self._samples.append(
            _Sample(now, running, waiting, facts.hit_tokens, facts.prompt_tokens, pools)
        )
        if len(self._samples) >= MAX_SAMPLES:
            del self._samples[::2]
            self._every = (now - self._samples[0].time) / len(self._samples)
        self.due = now + self._every

    def timeline(self) -> Timeline:
        """All samples as arrays."""
        samples = self._samples
        pools = np.array([sample.pools for sample in samples], np.int64).reshape(
            len(samples), -1, 5
        )
        mapped, used, cached, dead, stranded = (pools[:, :, i].T.copy() for i in range(5))
        return Timeline(
            time=np.array([sample.time for sample in samples]),
            running=_ints([sample.running for sample in samples]),
            waiting=_ints([sample.waiting for sample in samples]),
            hit_tokens=_ints([sample.hit_tokens for sample in samples]),
            prompt_tokens=_ints([sample.prompt_tokens for sample in samples]),
            mapped=mapped,
            used=used,
            cached=cached,
            dead=dead,
            stranded=stranded,
        )


def requests_of(lives: Sequence[Life]) -> Requests:
    """All lives as arrays, in their order."""
    return Requests(
        arrival=np.array([life.arrival for life in lives]),
        admitted=np.array([life.admitted for life in lives]),
        first_token=np.array([life.first_token for life in lives]),
        finished=np.array([life.finished for life in lives]),
        input_tokens=_ints([life.input_tokens for life in lives]),
        output_tokens=_ints([life.output_tokens for life in lives]),
        hit_tokens=_ints([life.hit_tokens for life in lives]),
        recomputed_tokens=_ints([life.recomputed_tokens for life in lives]),
        preemptions=_ints([life.preemptions for life in lives]),
        failed=np.array([life.failed for life in lives], np.bool_),
    )


def _ints(values: list[int]) -> IntArray:
    return np.array(values, np.int64)
