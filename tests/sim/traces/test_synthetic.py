"""The generator: each parameter does what its documentation says, and a seed repeats."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from tests.sim.traces.samples import all_of

from kvtide import ConfigError
from kvtide.sim.traces import open_trace

# As published for the conversation trace (kvcache-ai/Mooncake, FAST25-release): 12,031 requests in
# 3,537 s at blocks of 512 tokens. `test_published.py` holds these against the file itself.
CONVERSATION = {
    "requests": 12031,
    "span": 3537.0,
    "arrival_cv": 3.03,
    "input": 12035.0,
    "p50": 6909.0,
    "p90": 27367.0,
    "output": 342.6,
    "shared": 0.373,
    "shared_blocks": 0.366,
}


@pytest.mark.parametrize("seed", [0, 1])
def test_the_defaults_resemble_the_conversation_trace(seed: int) -> None:
    found = open_trace(f"synthetic:requests=12031,block=512,seed={seed}").describe()
    near = {
        "requests": (found.requests, 0.0),
        "span": (found.span, 0.08),
        "arrival_cv": (found.arrival_cv, 0.1),
        "input": (found.input.mean, 0.06),
        "p50": (found.input.p50, 0.12),
        "p90": (found.input.p90, 0.12),
        "output": (found.output.mean, 0.04),
        "shared": (found.shared, 0.06),
        "shared_blocks": (found.shared_blocks, 0.06),
    }
    for name, (value, tolerance) in near.items():
        assert value == pytest.approx(CONVERSATION[name], rel=tolerance), name


def test_a_seed_repeats_and_another_differs() -> None:
    spec = "synthetic:requests=300,prefixes=5,turns=3,think=5"
    assert all_of(open_trace(spec)) == all_of(open_trace(spec))
    assert all_of(open_trace(spec)) != all_of(open_trace(f"{spec},seed=1"))


def test_fewer_requests_are_the_first_of_more() -> None:
    few, many = (all_of(open_trace(f"synthetic:requests={n}")) for n in (100, 200))
    assert few == many[:100]


@pytest.mark.parametrize("cv", [0.3, 1.0, 4.0])
def test_gaps_have_the_rate_and_the_variation(cv: float) -> None:
    found = open_trace(f"synthetic:requests=8000,rate=5,cv={cv}").describe()
    assert found.arrival_cv == pytest.approx(cv, rel=0.1)
    assert found.requests / found.span == pytest.approx(5, rel=0.15)


def test_lengths_are_lognormal_with_mean_and_variation() -> None:
    options = "requests=6000,prefixes=0,turns=1,first_input=900,input_cv=0.5,output=70,output_cv=1"
    requests = list(open_trace(f"synthetic:{options}"))
    for values, mean, cv in (
        (np.array([r.input_tokens for r in requests]), 900, 0.5),
        (np.array([r.output_tokens for r in requests]), 70, 1.0),
    ):
        assert values.mean() == pytest.approx(mean, rel=0.05)
        assert values.std() / values.mean() == pytest.approx(cv, rel=0.1)
        logs = np.log(values)
        skew = ((logs - logs.mean()) ** 3).mean() / logs.std() ** 3
        assert abs(skew) < 0.15


def test_without_prefixes_and_turns_nothing_is_shared() -> None:
    assert open_trace("synthetic:requests=500,prefixes=0,turns=1").describe().shared == 0.0


def test_prefixes_are_shared_by_popularity() -> None:
    spec = "synthetic:requests=6000,turns=1,prefixes=4,popularity=1,prefix_tokens=640"
    begins = Counter(int(one.runs[0, 0]) for one in open_trace(spec))
    counts = [count for _, count in begins.most_common()]
    assert len(counts) == 4
    # 1 : 1/2 : 1/3 : 1/4, together 25/12
    expected = [6000 * 12 / 25 / k for k in range(1, 5)]
    assert counts == pytest.approx(expected, rel=0.12)


def test_the_share_of_prefixes_follows_from_their_length() -> None:
    """100 prefix tokens of 500: the last 36 of them fill no block of 64."""
    spec = "synthetic:requests=3000,turns=1,prefixes=1,prefix_tokens=100,first_input=436,input_cv=0"
    found = open_trace(spec).describe()
    assert found.input.mean == 500
    assert found.shared == pytest.approx(64 / 500, rel=0.001)


def test_prefix_lengths_vary_if_asked() -> None:
    spec = "synthetic:requests=500,turns=1,prefixes=60,popularity=0,input_cv=0,first_input=64"
    fixed = {one.input_tokens for one in open_trace(spec)}
    varied = {one.input_tokens for one in open_trace(f"{spec},prefix_cv=1")}
    assert len(fixed) == 1
    assert len(varied) > 5


def test_conversations_have_that_many_turns_and_grow() -> None:
    spec = "synthetic:requests=6000,prefixes=0,turns=4,think=2,input=100,first_input=300"
    firsts = 0
    grown: dict[int, list[int]] = {}
    for one in open_trace(spec):
        conversation = int(one.runs[0, 0])
        firsts += conversation not in grown
        grown.setdefault(conversation, []).append(one.input_tokens)
    assert 6000 / firsts == pytest.approx(4, rel=0.1)
    assert all(a < b for sizes in grown.values() for a, b in pairwise(sizes))


def test_a_turn_begins_with_the_whole_turn_before() -> None:
    spec = "synthetic:requests=200,prefixes=2,turns=5,think=2,block=7,first_input=50,input=20"
    last: dict[bytes, bytes] = {}
    again = 0
    for one in open_trace(spec):
        prompt = one.prompt().tobytes()
        before = [p for p in last.values() if prompt.startswith(p)]
        again += bool(before)
        last[prompt] = prompt
    assert again > 100


def test_a_turn_waits_until_its_user_has_thought() -> None:
    spec = "synthetic:requests=4000,prefixes=0,turns=3,think=100,rate=5"
    seen: dict[int, float] = {}
    waits: list[float] = []
    for one in open_trace(spec):
        conversation = int(one.runs[0, 0])
        if conversation in seen:
            waits.append(one.arrival - seen[conversation])
        seen[conversation] = one.arrival
    # Exponential, and then until the next arrival; the trace's end cuts long ones off.
    assert 85 < np.mean(waits) < 125


def test_prompt_and_answer_stay_below_the_longest() -> None:
    spec = (
        "synthetic:requests=2000,longest=3000,first_input=2500,turns=8,think=1,prefix_tokens=9000"
    )
    sums = [one.input_tokens + one.output_tokens for one in open_trace(spec)]
    assert max(sums) == 3000
    assert min(one.output_tokens for one in open_trace(spec)) >= 1


def test_phases_follow_each_other_with_parameters_of_their_own() -> None:
    spec = (
        "synthetic:requests=100000,seconds=200,rate=2,cv=0.5,turns=1,prefixes=1,input_cv=0,"
        "first_input=100,prefix_tokens=64;rate=8,first_input=1000,topic=1"
    )
    found = list(open_trace(spec))
    early = [one for one in found if one.arrival < 200]
    late = [one for one in found if one.arrival >= 200]
    assert len(early) == pytest.approx(400, rel=0.1)
    assert len(late) == pytest.approx(1600, rel=0.1)
    assert late[-1].arrival < 400
    assert {one.input_tokens for one in early} == {164}
    assert {one.input_tokens for one in late} == {1064}
    # Another topic, other prefixes.
    assert not {int(r.runs[0, 0]) for r in early} & {int(r.runs[0, 0]) for r in late}


def test_phases_of_one_topic_share_their_prefixes() -> None:
    found = list(open_trace("synthetic:seconds=20,turns=1,prefix_tokens=640;rate=1"))
    begins = {int(one.runs[0, 0]) for one in found}
    assert len(found) > 40
    assert len(begins) == 1


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("rate=0", "rate=0.0, .* must be > 0"),
        ("cv=0", "cv=0.0 .* must be > 0"),
        ("seconds=0", "seconds=0.0 must be > 0"),
        ("rate=inf", "rate must be a number of at least 0, got inf"),
        ("turns=0.5", "turns must be a number of at least 1, got 0.5"),
        ("prefixes=-1", "prefixes must be a number of at least 0"),
        ("longest=1", "longest must be a number of at least 2"),
        ("requests=0", "give requests >= 1"),
        ("block=0", "give .* block >= 1"),
        ("seed=-1", "give .* seed >= 0"),
    ],
)
def test_parameters_out_of_range(option: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_trace(f"synthetic:{option}")
