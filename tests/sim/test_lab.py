"""The lab: a trace by hand, memory that is short of nothing, the same numbers twice."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from tests.sim.plain import FULL, STATE, WINDOW, Metronome, request, setup, shared_traffic

from kvtide import ConfigError
from kvtide.sim import driver
from kvtide.sim.lab import oracle_static, replay
from kvtide.sim.result import Objective
from kvtide.sim.traces import open_trace, statistics

if TYPE_CHECKING:
    from kvtide.sim.result import Run
    from kvtide.sim.traces import Trace

LAYOUTS = {
    "full": (FULL,),
    "full + window": (FULL, WINDOW),
    "full + state": (FULL, STATE),
}
every_layout = pytest.mark.parametrize("specs", LAYOUTS.values(), ids=LAYOUTS)


def test_a_trace_by_hand() -> None:
    trace = [
        request(0.0, [0, 1], 3),  # computed in the step from 0 to 1; tokens at 1, 2, 3
        request(0.5, [0, 1, 5], 1),  # starts at 1, when the first two blocks are there: token at 2
        request(10.0, [0, 1, 5], 2),  # nobody is there; all but the last token is: tokens at 11, 12
    ]
    run = replay(trace, setup(), "elastic")
    requests = run.requests
    assert requests.arrival.tolist() == [0.0, 0.5, 10.0]
    assert requests.admitted.tolist() == [0.0, 1.0, 10.0]
    assert requests.first_token.tolist() == [1.0, 2.0, 11.0]
    assert requests.finished.tolist() == [3.0, 2.0, 12.0]
    assert requests.hit_tokens.tolist() == [0, 8, 11]
    assert requests.output_tokens.tolist() == [3, 1, 2]
    assert requests.recomputed_tokens.tolist() == [0, 0, 0]
    totals = run.totals
    assert (totals.prompt_tokens, totals.hit_tokens, totals.output_tokens) == (32, 19, 6)
    assert totals.steps == 5
    # The first step computes 8 tokens, the second 1 + 4, then 1, then 1, and 1: 16 in all.
    assert totals.computed_flops == 16.0
    assert totals.seconds == 12.0
    assert run.latency.ttft == pytest.approx((1.0, 1.4, 1.49))
    assert run.latency.itl == pytest.approx((1.0, 1.0, 1.0))
    assert run.latency.throughput == 6 / 12


def test_objectives_are_kept_or_not() -> None:
    trace = [request(0.0, [0], 2), request(0.0, [1], 2)]
    strict = replay(trace, setup(objective=Objective(ttft=0.5)), "static")
    loose = replay(trace, setup(objective=Objective(ttft=1.0, itl=1.0)), "static")
    assert strict.latency.goodput == 0.0
    assert loose.latency.goodput == 2 / loose.totals.seconds


@every_layout
def test_memory_for_everything_hits_all_that_was_there_before(specs: tuple) -> None:
    trace = shared_traffic(3, gap=100.0)  # one at a time: each finds what all before it left
    run = replay(trace, setup(*specs, granules=16), "infinite")
    if STATE in specs:  # states are kept where a block ends, not at every token
        assert run.totals.recomputed_tokens < 80 * 40
    else:
        assert run.totals.recomputed_tokens == 0
    assert run.totals.hit_tokens > 0
    assert sum(run.totals.evicted_pages.values()) == 0


@every_layout
@pytest.mark.parametrize("policy", ["static", "elastic", "periodic", "lcm", "padded"])
def test_everybody_gets_an_answer(specs: tuple, policy: str) -> None:
    trace = shared_traffic(5, gap=1.0)
    run = replay(trace, setup(*specs, granules=80, max_running=8), policy)
    assert run.totals.failed == 0
    assert run.requests.output_tokens.tolist() == [r.output_tokens for r in trace]
    assert not np.isnan(run.requests.finished).any()
    assert (run.requests.first_token >= run.requests.admitted).all()
    assert (run.requests.admitted >= run.requests.arrival).all()
    assert (run.timeline.mapped.sum(axis=0) <= run.budget_bytes).all()
    assert (run.timeline.used + run.timeline.cached <= run.timeline.mapped).all()
    assert run.totals.hit_tokens + run.totals.recomputed_tokens >= _ideal(trace)


def _ideal(trace: list) -> int:
    seen: set[int] = set()
    total = 0
    for it in trace:
        ids = it.runs[:, 0].tolist()
        known = next((n for n, i in enumerate(ids) if i not in seen), len(ids))
        total += min(known * it.block, it.input_tokens - 1)
        seen.update(ids)
    return total


@every_layout
def test_the_same_numbers_twice(specs: tuple) -> None:
    def numbers() -> str:
        run = replay(shared_traffic(7, gap=1.0), setup(*specs, granules=48), "elastic")
        return json.dumps([run.to_json(), [v.tolist() for v in asdict(run.requests).values()]])

    assert numbers() == numbers()


def test_coasting_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def numbers() -> list[list[float]]:
        run = replay(shared_traffic(9, gap=5.0), setup(FULL, granules=40), "elastic")
        return [run.totals.steps, *(v.tolist() for v in asdict(run.requests).values())]

    coasting = numbers()
    monkeypatch.setattr(driver, "MAX_COAST", 1)
    assert numbers() == coasting


def test_a_policy_is_a_function_of_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def plan(facts: object) -> tuple:
        asked.append(len(facts.pools))  # type: ignore[attr-defined]
        return ()

    monkeypatch.setattr(driver, "plan_under_test", plan, raising=False)
    run = replay(shared_traffic(1), setup(), "kvtide.sim.driver:plan_under_test")
    assert run.policy == "kvtide.sim.driver:plan_under_test"
    assert asked
    assert set(asked) == {1}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("best", "'best'.*oracle-static"),
        ("kvtide.nowhere:plan", "cannot be imported"),
        ("kvtide.sim.lab:GRANULE_BYTES", "no function"),
    ],
)
def test_policies_that_there_are_not(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        replay([], setup(), name)


def test_the_best_fixed_split_is_no_worse_than_others() -> None:
    trace = shared_traffic(11, gap=2.0)
    lab = setup(FULL, WINDOW, granules=60)
    best = oracle_static(trace, lab, rounds=2)
    assert best.policy == "oracle-static"
    for share in (0.4, 0.5, 0.6, 0.7):
        ratio = {"full": share, "window_8": 1 - share}
        other = replay(trace, replace(lab, pool_ratio=ratio), "static")
        assert best.totals.hit_tokens >= other.totals.hit_tokens


def test_requests_that_can_never_fit_fail_and_hold_nobody_up() -> None:
    trace = [request(0.0, list(range(40)), 1), request(0.0, [90], 1)]
    run = replay(trace, setup(max_tokens=64), "elastic")
    assert run.requests.failed.tolist() == [True, False]
    assert run.totals.failed == 1


def test_nothing_to_do() -> None:
    run = replay([], setup(), "elastic")
    assert run.totals.requests == run.totals.steps == 0
    json.dumps(run.to_json())


def _endless(trace: Trace) -> Run:
    """Memory without end in 512-token blocks, and steps so short that nobody overlaps."""
    lab = setup(FULL, max_tokens=2**18, max_running=2000, chunk_tokens=2**20, check_every=0)
    group = replace(lab.layout.groups[0], block_tokens=512)
    layout = replace(lab.layout, block_tokens=512, groups=(group,))
    return replay(trace, replace(lab, layout=layout, clock=Metronome(1e-9)), "infinite")


def test_infinite_memory_gives_a_traces_own_hits() -> None:
    trace = open_trace("synthetic:requests=500,block=512")
    own, found = statistics(trace).shared, _endless(trace).totals
    assert own > 0.1
    assert found.recomputed_tokens == 0
    # A prompt that is known to its end is matched up to its last token, in statistics to its last
    # whole block before that.
    assert own <= found.hit_rate < own + 0.005


def test_infinite_memory_gives_the_conversation_traces_own_hits() -> None:
    folder = os.environ.get("KVTIDE_TRACES")
    if folder is None:
        pytest.skip("KVTIDE_TRACES names no folder of public traces")
    trace = open_trace(f"mooncake:{folder}/mooncake/conversation_trace.jsonl")
    own = statistics(trace)
    assert own.shared_blocks == pytest.approx(0.366, abs=5e-4)
    assert _endless(trace).totals.hit_rate == pytest.approx(own.shared, abs=5e-4)
