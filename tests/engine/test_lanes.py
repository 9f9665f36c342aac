"""Several steps in flight, each with a lane of the running requests, over one manager."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from kvtide.engine.flights import Flight, Flights
from kvtide.engine.parallel.alone import Arrived
from kvtide.engine.request import FinishReason, Request, RequestId
from kvtide.engine.scheduler import Scheduler, SchedulerConfig
from kvtide.errors import ConfigError

from .harness import Engine, expected_output, make_request, next_token


@dataclass
class Pipeline(Engine):
    """As `Engine`, with as many steps in flight as there are lanes."""

    lanes: int = 2
    turn: int = 0
    most: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        limits = SchedulerConfig(
            max_running=self.max_running,
            chunk_tokens=self.chunk_tokens,
            max_length=self.max_tokens,
            lanes=self.lanes,
        )
        self.scheduler = Scheduler(self.kv, limits)
        self.flights = Flights(self.lanes)

    def step(self) -> None:
        plan = self.scheduler.schedule(self.turn % self.lanes)
        self.turn += 1
        self.kv.check()
        flight = None
        if plan is not None:
            self.plans.append(plan)
            flight = Flight(plan)
            with self.kv.step(plan.batch, plan.num_new) as step:
                step.fence = flight
            tokens = [next_token(row.request) if row.samples else -1 for row in plan.rows]
            flight.tokens = Arrived(np.array(tokens, np.int64))
        oldest = self.flights.push(flight)
        self.most = max(self.most, self.flights.num_begun + (oldest is not None))
        if oldest is not None:
            self.scheduler.commit(oldest.plan, oldest.land())
        self.finished += self.scheduler.take_finished()
        self.kv.check()


def requests(count: int, length: int = 9, max_tokens: int = 12) -> list[Request]:
    return [
        make_request(n, [100 * n + i for i in range(length)], max_tokens=max_tokens)
        for n in range(count)
    ]


def serve(engine: Pipeline, wanted: list[Request]) -> None:
    for request in wanted:
        engine.scheduler.add(request)
    engine.drain()
    assert not engine.kv.snapshot().sequences


@pytest.mark.parametrize("lanes", [2, 3])
def test_lanes_are_in_flight_together_and_answer_as_one(lanes: int) -> None:
    engine, wanted = Pipeline(num_pages=200, lanes=lanes), requests(6)
    serve(engine, wanted)
    assert engine.most == lanes
    assert [request.output for request in wanted] == [expected_output(r) for r in wanted]
    assert {request.lane for request in wanted} == set(range(lanes))


def test_a_request_is_in_one_step_at_a_time() -> None:
    engine, wanted = Pipeline(num_pages=200), requests(5)
    for request in wanted:
        engine.scheduler.add(request)
    before: set[int] = set()
    for _ in range(60):
        num_plans = len(engine.plans)
        engine.step()
        rows = {row.request.id for plan in engine.plans[num_plans:] for row in plan.rows}
        assert not rows & before
        before = {int(i) for i in rows}
    assert not engine.scheduler.has_work


@pytest.mark.parametrize("num_pages", range(24, 60, 4))
def test_short_of_pages_lanes_wait_for_each_other_and_nobody_fails(num_pages: int) -> None:
    engine, wanted = Pipeline(num_pages=num_pages, max_tokens=32), requests(8, max_tokens=20)
    serve(engine, wanted)
    assert [request.finish for request in wanted] == [FinishReason.LENGTH] * 8
    assert [request.output for request in wanted] == [expected_output(r) for r in wanted]


def test_lanes_preempt_where_pages_do_not_suffice() -> None:
    engine, wanted = Pipeline(num_pages=24, max_tokens=32), requests(8, max_tokens=20)
    serve(engine, wanted)
    assert sum(request.num_preempted for request in wanted) > 0


def test_a_request_aborted_in_flight_is_passed_over() -> None:
    engine, wanted = Pipeline(num_pages=200), requests(3)
    for request in wanted:
        engine.scheduler.add(request)
    for _ in range(4):
        engine.step()
    length = len(wanted[0].output)
    assert engine.scheduler.abort(RequestId(0))
    engine.drain()
    assert (wanted[0].finish, len(wanted[0].output)) == (FinishReason.ABORT, length)
    assert [r.output for r in wanted[1:]] == [expected_output(r) for r in wanted[1:]]


def test_a_scheduler_needs_a_lane() -> None:
    with pytest.raises(ConfigError, match="lanes is 0"):
        SchedulerConfig(max_running=1, chunk_tokens=1, max_length=2, lanes=0)
