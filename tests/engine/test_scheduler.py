"""Who runs when, over the real manager (books only) and a fake model."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtide.engine.request import FinishReason
from kvtide.engine.scheduler import SchedulerConfig
from kvtide.errors import ConfigError, UsageError

from .harness import Engine, expected_output, make_request

ROOMY = 400


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(1, 900, length).tolist()


def test_importing_the_scheduler_needs_no_torch() -> None:
    code = (
        "import sys, kvtide.engine.scheduler, kvtide.engine;"
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_request_gets_its_own_answer() -> None:
    engine = Engine(num_pages=ROOMY)
    requests = [make_request(i, prompt(i, 5 + i), max_tokens=1 + i) for i in range(6)]
    for request in requests:
        engine.scheduler.add(request)
    engine.drain()
    for request in requests:
        assert request.output == expected_output(request)
        assert request.finish is FinishReason.LENGTH


def test_a_step_computes_at_most_chunk_tokens_of_prompts() -> None:
    engine = Engine(num_pages=ROOMY, chunk_tokens=10)
    for i in range(3):
        engine.scheduler.add(make_request(i, prompt(i, 23)))
    engine.drain()
    chunks = [[row.num_new for row in plan.rows if row.num_new > 1] for plan in engine.plans]
    assert max(map(sum, chunks)) == 10
    assert sum(map(sum, chunks)) == 3 * 23


def test_running_requests_keep_generating_while_a_long_prompt_is_computed() -> None:
    engine = Engine(num_pages=ROOMY, chunk_tokens=8)
    first = make_request(0, prompt(0, 4), max_tokens=8)
    engine.scheduler.add(first)
    engine.step()
    engine.scheduler.add(make_request(1, prompt(1, 40)))
    for number in range(2, 6):
        engine.step()
        assert len(first.output) == number


def test_first_come_first_served_within_a_priority() -> None:
    engine = Engine(num_pages=ROOMY, max_running=1)
    for number, priority in ((0, 0), (1, 0), (2, 5), (3, 0), (4, 5)):
        engine.scheduler.add(make_request(number, prompt(number, 6), priority=priority))
    assert [request.id for request in engine.drain()] == [2, 4, 0, 1, 3]


def test_nobody_overtakes_a_request_that_does_not_fit_now() -> None:
    engine = Engine(num_pages=40, chunk_tokens=64)
    engine.scheduler.add(make_request(0, prompt(0, 56), max_tokens=6))
    engine.step()
    engine.scheduler.add(make_request(1, prompt(1, 56), max_tokens=4))
    engine.scheduler.add(make_request(2, prompt(2, 4), max_tokens=1))
    engine.step()
    assert [row.request.id for row in engine.plans[-1].rows] == [0]
    assert [request.id for request in engine.drain()] == [0, 2, 1]


def test_a_shared_prefix_is_computed_once() -> None:
    engine = Engine(num_pages=ROOMY)
    shared = prompt(9, 12)
    first = make_request(0, [*shared, 1, 2])
    second = make_request(1, [*shared, 3, 4])
    for request in (first, second):
        engine.scheduler.add(request)
        engine.drain()
    assert (first.hit_tokens, second.hit_tokens) == (0, 12)
    assert sum(plan.hit_tokens for plan in engine.plans) == 12
    assert second.output == expected_output(second)


def test_the_youngest_is_preempted_and_all_finish_with_the_right_answer() -> None:
    engine = Engine(num_pages=48, chunk_tokens=64)
    requests = [make_request(i, prompt(i, 16), max_tokens=40) for i in range(4)]
    for request in requests:
        engine.scheduler.add(request)
    finished = engine.drain()
    assert finished[0] is requests[0]
    assert requests[0].num_preempted == 0
    assert sum(request.num_preempted for request in requests) > 0
    assert sum(plan.num_preempted for plan in engine.plans) > 0
    for request in requests:
        assert request.output == expected_output(request)


def test_nobody_is_admitted_between_a_preemption_and_the_next_end() -> None:
    engine = Engine(num_pages=48, chunk_tokens=64)
    for i in range(4):
        engine.scheduler.add(make_request(i, prompt(i, 16), max_tokens=40))
    closed = False
    while engine.scheduler.has_work:
        ended = len(engine.finished)
        plan = engine.step()
        assert plan is not None
        if closed:
            assert plan.num_admitted == 0
        closed = (closed or plan.num_preempted > 0) and len(engine.finished) == ended


def test_recomputed_tokens_are_those_the_cache_lost_after_a_preemption() -> None:
    engine = Engine(num_pages=48, chunk_tokens=64)
    requests = [make_request(i, prompt(i, 16), max_tokens=40) for i in range(4)]
    for request in requests:
        engine.scheduler.add(request)
    engine.drain()
    computed = sum(int(plan.num_new.sum()) for plan in engine.plans)
    needed = sum(16 + 40 - 1 for _ in requests)
    recomputed = sum(request.recomputed_tokens for request in requests)
    assert recomputed == sum(plan.recomputed_tokens for plan in engine.plans)
    assert computed == needed + recomputed


def test_a_prompt_longer_than_any_sequence_ends_with_the_numbers() -> None:
    engine = Engine(num_pages=ROOMY, max_tokens=32)
    good, bad = make_request(0, prompt(0, 8)), make_request(1, prompt(1, 32))
    engine.scheduler.add(bad)
    engine.scheduler.add(good)
    assert [request.id for request in engine.drain()] == [1, 0]
    assert bad.finish is FinishReason.ERROR
    assert "32 tokens" in (bad.error or "")
    assert good.output == expected_output(good)


def test_a_chunk_larger_than_the_window_pool_is_cut() -> None:
    engine = Engine(num_pages=28, chunk_tokens=64)
    request = make_request(0, prompt(0, 60))
    engine.scheduler.add(request)
    engine.drain()
    assert request.output == expected_output(request)
    assert len([plan for plan in engine.plans if plan.num_new[0] > 1]) > 1


def test_the_longest_sequence_ends_by_length() -> None:
    engine = Engine(num_pages=ROOMY, max_tokens=16)
    request = make_request(0, prompt(0, 10), max_tokens=50)
    engine.scheduler.add(request)
    engine.drain()
    assert request.finish is FinishReason.LENGTH
    assert request.length == 16


def test_abort_wherever_the_request_is() -> None:
    engine = Engine(num_pages=ROOMY, max_running=1)
    for i in range(3):
        engine.scheduler.add(make_request(i, prompt(i, 6), max_tokens=20))
    engine.step()
    assert engine.scheduler.abort(engine.scheduler.waiting[0].id)
    assert engine.scheduler.abort(engine.scheduler.running[0].id)
    assert not engine.scheduler.abort(engine.plans[0].rows[0].request.id)
    reasons = {request.id: request.finish for request in engine.drain()}
    assert reasons == {
        0: FinishReason.ABORT,
        1: FinishReason.ABORT,
        2: FinishReason.LENGTH,
    }


def test_an_empty_prompt_is_misuse() -> None:
    with pytest.raises(UsageError, match="no tokens"):
        Engine(num_pages=ROOMY).scheduler.add(make_request(0, []))


@pytest.mark.parametrize("field", ["max_running", "chunk_tokens", "max_length"])
def test_impossible_limits_are_refused_by_name(field: str) -> None:
    limits = {"max_running": 1, "chunk_tokens": 1, "max_length": 1}
    with pytest.raises(ConfigError, match=field):
        SchedulerConfig(**{**limits, field: 0})


arrivals = st.lists(
    st.tuples(
        st.integers(1, 50),  # prompt tokens
        st.integers(1, 12),  # answer tokens
        st.integers(0, 2),  # which of three prompt texts it begins
        st.integers(0, 1),  # priority
        st.integers(0, 3),  # steps until the next arrival
        st.sampled_from([None, None, None, 2, 9]),  # steps until it is aborted
    ),
    min_size=1,
    max_size=12,
)


@given(arrivals=arrivals, num_pages=st.integers(28, 90), chunk=st.integers(1, 40))
def test_whatever_comes_everything_ends_and_answers_are_right(
    arrivals: list[tuple[int, int, int, int, int, int | None]], num_pages: int, chunk: int
) -> None:
    engine = Engine(num_pages=num_pages, max_running=5, chunk_tokens=chunk)
    requests, doomed = [], []
    for number, (length, max_tokens, text, priority, pause, abort) in enumerate(arrivals):
        request = make_request(
            number, prompt(text, 50)[:length], max_tokens=max_tokens, priority=priority
        )
        requests.append(request)
        engine.scheduler.add(request)
        if abort is not None:
            doomed.append((len(engine.plans) + abort, request))
        for _ in range(pause):
            engine.step()
            for when, victim in doomed:
                if len(engine.plans) >= when:
                    engine.scheduler.abort(victim.id)
    engine.drain()
    assert sorted(r.id for r in engine.finished) == list(range(len(requests)))
    for request in requests:
        if request.finish is not FinishReason.ABORT:
            assert request.finish is FinishReason.LENGTH
            assert request.output == expected_output(request)
        assert request.sequence is None
