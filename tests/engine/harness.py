"""A scheduler over the real manager without bytes, and a runner without a model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from kvtide.config import Options
from kvtide.engine.request import Request, RequestId, SamplingParams
from kvtide.engine.scheduler import Scheduler, SchedulerConfig
from kvtide.layout import FullSpec, Layout, WindowSpec
from kvtide.manager import KVManager
from kvtide.memory import NullMemory

if TYPE_CHECKING:
    from kvtide.engine.plan import StepPlan

BLOCK = 4
FULL_PAGE = BLOCK * 64
WINDOW = 16


def layout() -> Layout:
    """One full and one window layer of 64 bytes a token each."""
    full = FullSpec(kv_heads=1, head_dim=16, dtype="float16")
    window = WindowSpec(window=WINDOW, kv_heads=1, head_dim=16, dtype="float16")
    return Layout.from_layers({0: full, 1: window}, block_tokens=BLOCK)


def make_request(
    number: int, prompt: list[int], *, max_tokens: int = 4, priority: int = 0
) -> Request:
    """A request of `number` with token ids `prompt`."""
    return Request(
        id=RequestId(number),
        prompt=np.array(prompt, dtype=np.int32),
        params=SamplingParams(max_tokens=max_tokens),
        priority=priority,
    )


def next_token(request: Request) -> int:
    """What the fake model says: a function of all tokens so far, so that a slip is seen."""
    known = [*request.prompt.tolist(), *request.output]
    return (sum((i + 1) * token for i, token in enumerate(known)) * 31 + len(known)) % 997


@dataclass
class Engine:
    """Drives a scheduler one step at a time and keeps what happened."""

    num_pages: int
    max_running: int = 8
    chunk_tokens: int = 16
    max_tokens: int = 64
    mode: str = "elastic"
    plans: list[StepPlan] = field(default_factory=list)
    finished: list[Request] = field(default_factory=list)

    def __post_init__(self) -> None:
        memory = NullMemory(self.num_pages * FULL_PAGE, FULL_PAGE)
        options = Options(mode="static" if self.mode == "static" else "elastic")
        self.kv = KVManager(
            layout(),
            memory,
            max_sequences=self.max_running,
            max_tokens=self.max_tokens,
            options=options,
        )
        limits = SchedulerConfig(
            max_running=self.max_running,
            chunk_tokens=self.chunk_tokens,
            max_length=self.max_tokens,
        )
        self.scheduler = Scheduler(self.kv, limits)

    def step(self) -> StepPlan | None:
        """Schedule, run the fake model, commit; books are checked after each."""
        plan = self.scheduler.schedule()
        self.kv.check()
        if plan is not None:
            self.plans.append(plan)
            self._run(plan)
        self.finished += self.scheduler.take_finished()
        self.kv.check()
        return plan

    def _run(self, plan: StepPlan) -> None:
        with self.kv.step(plan.batch, plan.num_new) as step:
            assert step.starts.tolist() == [row.start for row in plan.rows]
        tokens = [next_token(row.request) if row.samples else -1 for row in plan.rows]
        self.scheduler.commit(plan, np.array(tokens, dtype=np.int64))

    def drain(self, limit: int = 2_000) -> list[Request]:
        """Step until nothing is left; the requests in the order in which they ended."""
        for _ in range(limit):
            if not self.scheduler.has_work:
                self.finished += self.scheduler.take_finished()
                return self.finished
            self.step()
        raise AssertionError(f"not done after {limit} steps: {self.scheduler.waiting}")


def expected_output(request: Request) -> list[int]:
    """What the fake model answers, computed alone."""
    alone = make_request(-1, request.prompt.tolist(), max_tokens=request.params.max_tokens)
    while len(alone.output) < alone.params.max_tokens:
        alone.output.append(next_token(alone))
    return alone.output
