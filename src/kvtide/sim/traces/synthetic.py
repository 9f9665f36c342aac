"""Requests made by a seeded generator with documented parameters: needs no file."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from kvtide.errors import ConfigError
from kvtide.sim.traces.idspace import IdSpace
from kvtide.sim.traces.request import TraceRequest
from kvtide.types import ceil_div

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
NAME = "synthetic"


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """How requests are drawn for `seconds` of the trace. The defaults resemble an hour of chat
    with long documents.

    Arrivals: gaps are gamma distributed with mean 1 / `rate` seconds and coefficient of variation
    `cv` (1: Poisson; more: bursts).

    Sharing: a conversation begins with one of `prefixes` shared prefixes (0: none), the k-th of
    them with probability in proportion to k ** -`popularity`; a prefix has `prefix_tokens` tokens,
    lognormal with `prefix_cv`. Phases of the same `topic` draw from the same prefixes.

    Turns: after each turn a conversation goes on with probability 1 - 1 / `turns`, not before
    `think` seconds (exponential) have passed: the next arrival after that is its. It ends before a
    prompt and its answer exceed `longest` tokens.

    Lengths: a turn adds `input` tokens (the first one `first_input`) to prompt and answers so far
    and asks for `output` tokens: means, lognormal with `input_cv` and `output_cv`.
    """

    seconds: float = math.inf
    rate: float = 3.4
    cv: float = 3.0
    prefixes: int = 1
    popularity: float = 1.0
    prefix_tokens: float = 512.0
    prefix_cv: float = 0.0
    topic: int = 0
    turns: float = 1.57
    think: float = 60.0
    first_input: float = 10900.0
    input: float = 1200.0
    input_cv: float = 1.5
    output: float = 345.0
    output_cv: float = 0.73
    longest: int = 131072

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if not value >= least or (math.isinf(value) and name != "seconds"):
                raise ConfigError(
                    f"synthetic: {name} must be a number of at least {least}, got {value}"
                )
        if self.rate <= 0 or self.cv <= 0 or self.seconds <= 0:
            raise ConfigError(
                f"synthetic: rate={self.rate}, cv={self.cv} and seconds={self.seconds} must be > 0"
            )


_LEAST = {
    "seconds": 0,
    "rate": 0,
    "cv": 0,
    "prefixes": 0,
    "popularity": 0,
    "prefix_tokens": 1,
    "prefix_cv": 0,
    "topic": 0,
    "turns": 1,
    "think": 0,
    "first_input": 1,
    "input": 1,
    "input_cv": 0,
    "output": 1,
    "output_cv": 0,
    "longest": 2,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticOptions:
    """`requests` of the whole trace (it ends earlier if all phases do), tokens in a block, seed."""

    requests: int = 2000
    block: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        if self.requests < 1 or self.block < 1 or self.seed < 0:
            raise ConfigError(
                f"synthetic: requests={self.requests}, block={self.block}, seed={self.seed}; give "
                "requests >= 1, block >= 1, seed >= 0"
            )


def synthetic(
    phases: Sequence[Phase] = (Phase(),), options: SyntheticOptions = SyntheticOptions()
) -> Iterator[TraceRequest]:
    """Draw the requests, phase after phase; conversations go on across phases."""
    maker = _Maker(options)
    begins = accumulate((phase.seconds for phase in phases), initial=0.0)
    left = options.requests
    for phase, begin in zip(phases, begins, strict=False):
        for arrival in maker.arrivals(phase, begin):
            if not left:
                return
            left -= 1
            yield maker.request(phase, arrival)


@dataclass(slots=True)
class _Conversation:
    """Its content so far, as `runs` of ids that cover `tokens` tokens, the last id in part."""

    phase: Phase
    runs: list[tuple[int, int]]
    tokens: int

    def extend(self, tokens: int, block: int, space: IdSpace) -> None:
        """Append `tokens` tokens that nobody else has."""
        count = ceil_div(self.tokens + tokens, block) - ceil_div(self.tokens, block)
        self.tokens += tokens
        if not count:
            return
        first = space.fresh(count, block, NAME)
        if self.runs and sum(self.runs[-1]) == first:
            first, count = self.runs[-1][0], self.runs.pop()[1] + count
        self.runs.append((first, count))


class _Maker:
    """The state of one iteration: randomness, ids, shared prefixes, conversations that go on."""

    def __init__(self, options: SyntheticOptions) -> None:
        self._options = options
        self._rng = np.random.default_rng(options.seed)
        self._space = IdSpace()
        self._prefixes: dict[tuple[int, int], tuple[int, int]] = {}
        self._waiting: list[tuple[float, int, _Conversation]] = []
        self._number = 0

    def arrivals(self, phase: Phase, begin: float) -> Iterator[float]:
        """Times from `begin` on, until the phase ends."""
        shape, now = phase.cv**-2, begin
        while now < begin + phase.seconds:
            yield now
            now += float(self._rng.gamma(shape, 1 / (phase.rate * shape)))

    def request(self, phase: Phase, arrival: float) -> TraceRequest:
        """The next turn of the conversation that is due, or the first of a new one."""
        block = self._options.block
        if self._waiting and self._waiting[0][0] <= arrival:
            talk = heappop(self._waiting)[2]
            added = _length(self._rng, talk.phase.input, talk.phase.input_cv)
        else:
            talk = self._begin(phase)
            added = _length(self._rng, phase.first_input, phase.input_cv)
        talk.extend(min(added, talk.phase.longest - talk.tokens - 1), block, self._space)
        output = _length(self._rng, talk.phase.output, talk.phase.output_cv)
        request = TraceRequest(
            arrival=arrival,
            input_tokens=talk.tokens,
            output_tokens=min(output, talk.phase.longest - talk.tokens),
            runs=np.array(talk.runs, np.int64),
            block=block,
        )
        self._go_on(talk, request)
        return request

    def _begin(self, phase: Phase) -> _Conversation:
        if not phase.prefixes:
            return _Conversation(phase, [], 0)
        weights = [rank**-phase.popularity for rank in range(1, phase.prefixes + 1)]
        ends = list(accumulate(weights))
        chosen = bisect_right(ends, float(self._rng.random()) * ends[-1])
        first, count = self._prefix(phase, chosen)
        return _Conversation(phase, [(first, count)] if count else [], count * self._options.block)

    def _prefix(self, phase: Phase, number: int) -> tuple[int, int]:
        """The ids of a shared prefix, made when it is first used: whole blocks."""
        key = (phase.topic, number)
        if key not in self._prefixes:
            # A generator of its own: prefixes do not depend on who comes first.
            rng = np.random.default_rng([self._options.seed, *key])
            tokens = min(_length(rng, phase.prefix_tokens, phase.prefix_cv), phase.longest - 2)
            count = tokens // self._options.block
            self._prefixes[key] = self._space.fresh(count, self._options.block, NAME), count
        return self._prefixes[key]

    def _go_on(self, talk: _Conversation, request: TraceRequest) -> None:
        """Let the conversation wait for its next turn, unless it ends here."""
        ends = self._rng.random() * talk.phase.turns < 1
        if ends or talk.tokens + request.output_tokens + 2 > talk.phase.longest:
            return
        talk.extend(request.output_tokens, request.block, self._space)
        due = request.arrival + float(self._rng.exponential(talk.phase.think))
        self._number += 1
        heappush(self._waiting, (due, self._number, talk))


def _length(rng: np.random.Generator, mean: float, cv: float) -> int:
    """A lognormal draw, at least 1."""
    variance = math.log1p(cv * cv)
    return max(1, round(float(rng.lognormal(math.log(mean) - variance / 2, math.sqrt(variance)))))
