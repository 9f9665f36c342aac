"""Continuous batching: who runs in the next step, and how many tokens each.

Knows the memory manager's verbs and nothing of models, tensors or clocks, so that a simulator can
drive it as well as an engine. Per step: `schedule()`, run the plan, `commit(plan, tokens)`.

Order is first come, first served within a priority, and nobody overtakes. Rows that generate go
first, then prompts in chunks. When a pool can not grow, the youngest request is suspended: its
pages stay cached as long as they can, and it takes up again where the cache still reaches. The
oldest is never suspended for another one, so it always gets on, and after it the next.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvtide.engine.plan import Row, StepPlan, num_remaining, sequence_of
from kvtide.engine.request import FinishReason, Request, RequestId
from kvtide.engine.stats import Stopwatch
from kvtide.errors import CapacityError, ConfigError, UsageError
from kvtide.types import ceil_div

if TYPE_CHECKING:
    from collections.abc import Sequence as Rows

    from kvtide.manager import KVManager
    from kvtide.sequence import Answer
    from kvtide.types import IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits: requests running at once, prompt tokens a step, longest sequence in tokens.

    With several `lanes`, as many steps are in flight at once, each with the running requests of one
    lane: a lane is scheduled anew when its step is committed.
    """

    max_running: int
    chunk_tokens: int
    max_length: int
    lanes: int = 1

    def __post_init__(self) -> None:
        """Refuse limits under which nothing could run."""
        for name in ("max_running", "chunk_tokens", "max_length", "lanes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Refusal:
    """No room: now, or (`is_final`) ever, for so many tokens at once."""

    reason: str
    is_final: bool


@dataclass(slots=True)
class _Tally:
    """Counts of the step being planned."""

    hit_tokens: int = 0
    recomputed_tokens: int = 0
    num_admitted: int = 0
    num_preempted: int = 0


def _turn(request: Request) -> tuple[int, int]:
    """Sort key of the queue: higher priority first, then earlier arrival."""
    return -request.priority, request.arrival


class Scheduler:
    """Waiting and running requests over one `KVManager`."""

    def __init__(
        self, kv: KVManager, config: SchedulerConfig, *, watch: Stopwatch | None = None
    ) -> None:
        self._kv, self._config = kv, config
        self._watch = Stopwatch() if watch is None else watch
        self._num_arrived = 0
        self._finished: list[Request] = []
        self._tally = _Tally()
        # After a preemption nobody is admitted until a running request ends: the newcomer would
        # take the room that was just made, and lose it again a few steps later.
        self._admits = True
        self._lane = 0
        self._short: set[int] = set()
        """Lanes whose requests wait for pages of steps in flight. Nobody is admitted meanwhile."""
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.refusals: Counter[str] = Counter()
        """Answers of "not now" so far, by the pool that gave them."""

    @property
    def has_work(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self.waiting or self.running)

    @property
    def num_open(self) -> int:
        """Requests waiting or running."""
        return len(self.waiting) + len(self.running)

    def add(self, request: Request) -> None:
        """Queue a request. One that can never fit ends at once, with the reason in its `error`."""
        if not len(request.prompt):
            raise UsageError("the prompt has no tokens; give at least one")
        request.arrival, self._num_arrived = self._num_arrived, self._num_arrived + 1
        if len(request.prompt) >= self._config.max_length:
            error = (
                f"the prompt has {len(request.prompt)} tokens and a sequence may have "
                f"{self._config.max_length} with its answer; shorten it or raise max_tokens"
            )
            self._finish(request, FinishReason.ERROR, error=error)
            return
        insort(self.waiting, request, key=_turn)

    def abort(self, request_id: RequestId) -> bool:
        """End a request wherever it is; False if it is not here (any more)."""
        for request in (*self.waiting, *self.running):
            if request.id == request_id:
                self.stop(request, FinishReason.ABORT)
                return True
        return False

    def stop(self, request: Request, reason: FinishReason) -> None:
        """End a waiting or running request between two steps."""
        queue = self.running if request in self.running else self.waiting
        queue.remove(request)
        self._finish(request, reason)

    def suspend_all(self) -> None:
        """Suspend every running request between two steps; they start again in their turn."""
        for request in list(self.running):
            self._suspend(request)

    def take_finished(self) -> list[Request]:
        """Requests that ended since the last call, in the order in which they ended."""
        finished, self._finished = self._finished, []
        return finished

    def schedule(self, lane: int = 0) -> StepPlan | None:
        """Decide the next step and reserve its pages, or None if nothing can run.

        None with work left happens only when every request looked at has just ended in an error,
        or while steps are in flight: of other lanes, or not yet known to be over on all ranks.
        """
        self._lane = lane
        self._short.discard(lane)
        self._tally = _Tally()
        rows = self._secure(self._continue_running())
        rows += self._admit_waiting(self._config.chunk_tokens - _prompt_tokens(rows))
        if not rows:
            return None
        tally = self._tally
        return StepPlan(
            rows=tuple(rows),
            batch=self._kv.batch([sequence_of(row.request) for row in rows]),
            num_new=np.array([row.num_new for row in rows], dtype=np.int64),
            hit_tokens=tally.hit_tokens,
            recomputed_tokens=tally.recomputed_tokens,
            num_admitted=tally.num_admitted,
            num_preempted=tally.num_preempted,
        )

    def commit(self, plan: StepPlan, tokens: IntArray) -> list[tuple[Request, int]]:
        """The plan has run: take its tokens (-1: none) and return those that are new.

        Requests that end here are closed; their pages stay cached for later ones. Those that were
        stopped meanwhile are passed over.
        """
        with self._watch:
            self._kv.commit(plan.batch, tokens)
        new: list[tuple[Request, int]] = []
        for row, token in zip(plan.rows, tokens.tolist(), strict=True):
            request = row.request
            if request.finish is not None:
                continue
            request.reached = max(request.reached, row.start + row.num_new)
            if token >= 0:
                request.output.append(token)
                new.append((request, token))
        for request, token in new:
            reason = request.reason_to_stop(token, self._config.max_length)
            if reason is not None:
                self.stop(request, reason)
        return new

    def _continue_running(self) -> list[Row]:
        """Rows of what is running: one token for each that generates, then chunks of prompts."""
        running = [request for request in self.running if request.lane == self._lane]
        rows = [Row.of(request, 1) for request in running if num_remaining(request) == 1]
        budget = self._config.chunk_tokens
        for request in running:
            if budget > 0 and num_remaining(request) > 1:
                rows.append(self._chunk(request, budget))
                budget -= rows[-1].num_new
        return rows

    def _chunk(self, request: Request, limit: int) -> Row:
        """The next tokens of a prompt, ending where the manager wants a boundary."""
        limit = min(limit, num_remaining(request))
        with self._watch:
            return Row.of(request, self._kv.chunk(sequence_of(request), limit))

    def _secure(self, rows: list[Row], *, newcomer: Request | None = None) -> list[Row]:
        """Reserve pages for `rows`, suspending the newcomer, else the youngest, until it fits.

        Nobody else is suspended while steps are in flight: pages come back when they are over, and
        until then the rows of this lane wait.
        """
        while rows:
            refusal = self._extend(rows)
            if refusal is None:
                break
            flying = self._kv.num_in_flight > 0
            if refusal.is_final or (len(self.running) == 1 and not flying):
                rows = self._narrowed(rows, refusal.reason)
            elif flying and newcomer is None:
                self._short.add(self._lane)
                return []
            else:
                victim = newcomer or self.running[-1]
                self._preempt(victim)
                rows = [row for row in rows if row.request is not victim]
        return rows

    def _extend(self, rows: Rows[Row]) -> _Refusal | None:
        batch = [sequence_of(row.request) for row in rows]
        num_new = np.array([row.num_new for row in rows], dtype=np.int64)
        with self._watch:
            try:
                return self._refusal(self._kv.extend(batch, num_new))
            except CapacityError as error:
                return _Refusal(reason=str(error), is_final=True)

    def _narrowed(self, rows: list[Row], reason: str) -> list[Row]:
        """Halve the widest row, whose chunk is more than the pools can take at once.

        If it is one token wide already, its request can never go on: it ends, for `reason`.
        """
        widest = max(rows, key=lambda row: (row.num_new, row.start))
        if widest.num_new == 1:
            self._fail(widest.request, reason)
            return [row for row in rows if row is not widest]
        narrow = self._chunk(widest.request, widest.num_new // 2)
        return [narrow if row is widest else row for row in rows]

    def _preempt(self, victim: Request) -> None:
        self._suspend(victim)
        self._tally.num_preempted += 1
        self._admits = False

    def _suspend(self, victim: Request) -> None:
        self.running.remove(victim)
        with self._watch:
            self._kv.suspend([sequence_of(victim)])
        victim.num_preempted += 1
        insort(self.waiting, victim, key=_turn)

    def _admit_waiting(self, budget: int) -> list[Row]:
        """Start waiting requests in turn, while there are places, tokens in the budget and pages.

        A request starts only in a step that computes some of it, so at most one new prompt is in
        progress over several steps, and something that has computed nothing holds nothing.
        """
        rows: list[Row] = []
        self._admits = self._admits or not self.running
        while self._admits and not self._short and self.waiting and budget > 0:
            if not self._has_place():
                break
            row = self._start(self.waiting[0], budget)
            if row is None and self.waiting and self._has_company():
                break
            if row is not None:
                rows.append(row)
                budget -= row.num_new
        return rows

    def _has_place(self) -> bool:
        """Whether one more request may run in this lane, which has its share of the places."""
        lane = sum(request.lane == self._lane for request in self.running)
        share = ceil_div(self._config.max_running, self._config.lanes)
        return lane < share and len(self.running) < self._config.max_running

    def _has_company(self) -> bool:
        """Whether something runs, or is in flight, that will give pages back."""
        return bool(self.running) or self._kv.num_in_flight > 0

    def _start(self, request: Request, budget: int) -> Row | None:
        """Admit the first in the queue with room for its first chunk.

        None if there is no room now (it stays) or never (it ended). Smaller and smaller chunks are
        tried if the first is more than the pools can take at once, or if nothing else is running.
        """
        limit = budget
        while True:
            refusal = self._admit(request, limit)
            if refusal is None:
                return self._begin(request, limit)
            if self._has_company() and not refusal.is_final:
                return None
            if limit == 1:
                self._fail(request, refusal.reason)
                return None
            limit //= 2

    def _admit(self, request: Request, limit: int) -> _Refusal | None:
        with self._watch:
            try:
                if request.sequence is None:
                    request.sequence = self._kv.open(
                        request.prompt, scope=request.scope, priority=request.priority
                    )
                sequence = request.sequence
                num_tokens = min(sequence.length, sequence.hit + limit)
                return self._refusal(self._kv.admit([sequence], num_tokens=num_tokens))
            except CapacityError as error:
                return _Refusal(reason=str(error), is_final=True)

    def _begin(self, request: Request, limit: int) -> Row | None:
        """Move an admitted request to `running` and reserve its first chunk."""
        self.waiting.remove(request)
        request.lane = self._lane
        insort(self.running, request, key=_turn)
        computed = sequence_of(request).computed
        if request.num_preempted:
            again = max(0, request.reached - computed)
            request.recomputed_tokens += again
            self._tally.recomputed_tokens += again
        else:
            request.hit_tokens = computed
            self._tally.hit_tokens += computed
        self._tally.num_admitted += 1
        rows = self._secure([self._chunk(request, limit)], newcomer=request)
        return rows[0] if rows else None

    def _refusal(self, answer: Answer) -> _Refusal | None:
        if answer:
            return None
        self.refusals[str(answer.pool)] += 1
        reason = (
            f"pool {answer.pool!r} needs {answer.needed} more pages for this request alone and has "
            f"{answer.available}; raise memory_bytes or shorten the request"
        )
        return _Refusal(reason=reason, is_final=False)

    def _fail(self, request: Request, error: str) -> None:
        queue = self.running if request in self.running else self.waiting
        queue.remove(request)
        self._finish(request, FinishReason.ERROR, error=error)

    def _finish(self, request: Request, reason: FinishReason, *, error: str | None = None) -> None:
        """Close the sequence of a request that is in no queue any more."""
        request.finish, request.error = reason, error
        sequence, request.sequence = request.sequence, None
        if sequence is not None:
            with self._watch:
                self._kv.close([sequence])
        self._admits = True
        self._finished.append(request)


def _prompt_tokens(rows: Rows[Row]) -> int:
    return sum(row.num_new for row in rows if row.num_new > 1)
