"""The engine's own scheduler on a virtual clock: requests arrive, steps take their time.

While nothing can happen but the next token of every running request, many steps are taken at once
("coasting"): nobody waits who could start, nobody ends, no pool is short. Pages, hits and times
come out as they would step by step; only windows are let go of a little later.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvtide.engine.request import Request, RequestId, SamplingParams
from kvtide.engine.scheduler import Scheduler, SchedulerConfig
from kvtide.errors import CapacityError, InvariantError
from kvtide.sim.recorder import Life, Sampler
from kvtide.sim.traces.prefixes import Prefixes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from kvtide.engine.plan import StepPlan
    from kvtide.manager import KVManager
    from kvtide.sim.costs import Clock
    from kvtide.sim.policies import Decider
    from kvtide.sim.traces import TraceRequest
    from kvtide.types import IntArray

LAST_TOKEN = 2**31 - 1
"""Answers consist of one token of their own each, counted down from here."""

MAX_COAST = 1024


@dataclass(slots=True)
class Work:
    """What was done, in all."""

    steps: int = 0
    flops: float = 0.0
    tokens: int = 0
    pause_seconds: float = 0.0
    longest_pause_seconds: float = 0.0


class Driver:
    """Serves the requests of a trace from one manager. `now` is virtual seconds."""

    def __init__(
        self,
        kv: KVManager,
        clock: Clock,
        limits: SchedulerConfig,
        decider: Decider,
        *,
        pays: bool = True,
        check_every: int = 0,
    ) -> None:
        self.now = 0.0
        self.work = Work()
        self.sampler = Sampler()
        self.lives: list[Life] = []
        self._seen: dict[int, Prefixes] = {}
        self.scheduler = Scheduler(kv, limits)
        self._kv, self._clock, self._limits, self._decider = kv, clock, limits, decider
        self._can_coast = not any(group.is_state for group in kv.layout.groups)
        self._source: Iterator[TraceRequest] = iter(())
        self._next: TraceRequest | None = None
        self._moved = kv.moved
        self._pays, self._check_every = pays, check_every

    def run(self, requests: Iterable[TraceRequest], progress: Callable[[int], None]) -> None:
        """Serve all requests; `progress` is told how many have ended."""
        self._source = iter(requests)
        self._next = next(self._source, None)
        ended = 0
        while self.scheduler.has_work or self._next is not None:
            ended += self._advance()
            progress(ended)
        self._sample()

    def _advance(self) -> int:
        """One step of the engine, or a jump to the next arrival; how many requests ended."""
        if not self.scheduler.has_work and self._next is not None:
            self.now = max(self.now, self._next.arrival)
        self._feed()
        plan = self.scheduler.schedule()
        ended = self._collect()
        if plan is None:
            if not ended and self.scheduler.has_work:
                raise InvariantError("requests are waiting and none of them was run or refused")
            return ended
        self._run(plan)
        ended += self._collect()
        self._decide()
        if not ended:
            self._coast(plan)
        if self._check_every and self.work.steps % self._check_every == 0:
            self._kv.check()
        if self.now >= self.sampler.due:
            self._feed()
            self._sample()
        return ended

    def _feed(self) -> None:
        """Hand over everything that has arrived by now."""
        while self._next is not None and self._next.arrival <= self.now:
            request = self._next
            shared = self._shared_tokens(request)
            self.lives.append(Life(request.arrival, request.input_tokens, shared))
            self.scheduler.add(
                Request(
                    id=RequestId(len(self.lives) - 1),
                    prompt=request.prompt(),
                    params=SamplingParams(
                        max_tokens=max(1, request.output_tokens), ignore_eos=True
                    ),
                )
            )
            self._next = next(self._source, None)

    def _shared_tokens(self, request: TraceRequest) -> int:
        """Leading tokens that earlier prompts had: the hits that memory without end would give."""
        seen = self._seen.setdefault(request.block, Prefixes())
        known = seen.add(request.runs, request.input_tokens // request.block)
        return min(known * request.block, request.input_tokens - 1)

    def _run(self, plan: StepPlan) -> None:
        """Take one step's time and its tokens."""
        started = self.now
        starts = np.array([row.start for row in plan.rows], np.int64)
        self._spend(starts, plan.num_new)
        with self._kv.step(plan.batch, plan.num_new):
            pass
        tokens = np.array(
            [_answer(row.request) if row.samples else -1 for row in plan.rows], np.int64
        )
        for row in plan.rows:
            life = self.lives[row.request.id]
            if life.admitted != life.admitted:  # nan
                life.admitted = started
        for request, _ in self.scheduler.commit(plan, tokens):
            if len(request.output) == 1:
                self.lives[request.id].first_token = self.now

    def _coast(self, plan: StepPlan) -> None:
        """Take the steps in which nothing can happen but a token for each row, all at once."""
        if not self._can_coast or not all(row.generates for row in plan.rows):
            return
        is_blocked = bool(self.scheduler.waiting)
        requests = [row.request for row in plan.rows]
        count = min(self._tokens_left(request) for request in requests) - 1
        count = min(count, MAX_COAST)
        if count < 2 or (is_blocked and plan.num_admitted):
            return
        starts = np.array([request.length - 1 for request in requests], np.int64)
        seconds = self._clock.decode_seconds(starts, count)
        stop = self.sampler.due
        if self._next is not None and not is_blocked:
            stop = min(stop, self._next.arrival)
        count = int(np.searchsorted(self.now + np.cumsum(seconds) - seconds, stop))
        if count < 2 or not self._has_room(plan, count):
            return
        with self._kv.step(plan.batch):
            pass
        tokens = np.array([_answer(request) for request in requests], np.int64)
        self._kv.commit(plan.batch, np.repeat(tokens[:, None], count, axis=1))
        for request, token in zip(requests, tokens.tolist(), strict=True):
            request.output.extend([token] * count)
            request.reached += count
        self.now += float(seconds[:count].sum())
        self.work.steps += count
        self.work.tokens += count * len(requests)
        self.work.flops += self._clock.decode_flops(starts, count)
        self._pay()

    def _has_room(self, plan: StepPlan, count: int) -> bool:
        """Make room for so many tokens of each row at once, if the pools can."""
        try:
            return bool(self._kv.extend(plan.batch, count))
        except CapacityError:  # a small window pool never holds so many at once
            return False

    def _tokens_left(self, request: Request) -> int:
        room = self._limits.max_length - request.length
        return min(request.params.max_tokens - len(request.output), room)

    def _spend(self, starts: IntArray, num_new: IntArray) -> None:
        self.now += self._clock.seconds(starts, num_new)
        self.work.steps += 1
        self.work.tokens += int(num_new.sum())
        self.work.flops += self._clock.flops(starts, num_new)
        self._pay()

    def _pay(self) -> None:
        """Add the time that the granules moved since the last time have cost."""
        granules, pages = self._kv.moved
        moved, copied = granules - self._moved[0], pages - self._moved[1]
        self._moved = (granules, pages)
        if not self._pays or not (moved or copied):
            return
        # Which pool the relocated pages were in is not told; the largest is the careful guess.
        largest = max(pool.page_bytes for pool in self._kv.pools.values())
        granule = self._kv.memory.granule_bytes
        pause = self._clock.move_seconds(moved * granule, copied * largest)
        self.now += pause
        self.work.pause_seconds += pause
        self.work.longest_pause_seconds = max(self.work.longest_pause_seconds, pause)

    def _decide(self) -> None:
        """Let the policy move capacity between two steps."""
        plan = self._decider.plan(self.now, self._kv.snapshot)
        if not plan:
            return
        if self._decider.stops_the_world:
            self.scheduler.suspend_all()
        self._kv.rebalance(plan)
        if self._decider.stops_the_world:
            self._kv.settle()
        self._pay()

    def _collect(self) -> int:
        finished = self.scheduler.take_finished()
        for request in finished:
            self.lives[request.id].end(request, self.now)
            self._decider.ended(len(request.prompt), len(request.output))
        return len(finished)

    def _sample(self) -> None:
        running, waiting = len(self.scheduler.running), len(self.scheduler.waiting)
        self.sampler.take(self.now, running, waiting, self._kv.snapshot())


def _answer(request: Request) -> int:
    return LAST_TOKEN - request.id
