"""Statistics against numbers worked out by hand, and sharing against a naive tree."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.sim.traces.samples import request, trace, traces

from kvtide.sim.traces.blocks import compress
from kvtide.sim.traces.prefixes import Prefixes

if TYPE_CHECKING:
    from kvtide.sim.traces import Trace, TraceRequest


def test_numbers_by_hand() -> None:
    found = trace(
        request(1.0, [0, 1, 2], output=10),
        request(2.0, [0, 1, 3], tokens=11, output=20),  # 2 blocks seen
        request(5.0, [0, 1, 2], output=30),  # all 3 seen, but the last token is computed
        request(5.0, [3], output=40),
    ).describe()
    assert (found.requests, found.span) == (4, 4.0)
    assert (found.input.total, found.input.mean, found.input.longest) == (39, 9.75, 12)
    assert (found.output.p50, found.output.total) == (25.0, 100)
    assert found.arrival_cv == pytest.approx(np.std([1, 3, 0]) / np.mean([1, 3, 0]))
    assert found.shared == 16 / 39
    assert found.shared_blocks == 4 / 10
    assert json.loads(json.dumps(found.to_json()))["tenants"][0]["shared_tokens"] == 16


def test_tenants_share_nothing_with_each_other() -> None:
    found = trace(
        request(0.0, [0, 1]), request(0.0, [0, 1], tenant=1), tenants=("a", "b")
    ).describe()
    assert [(s.tenant, s.requests, s.shared) for s in found.tenants] == [("a", 1, 0), ("b", 1, 0)]


def test_a_trace_without_requests() -> None:
    found = trace().describe()
    assert (found.requests, found.span, found.shared, found.arrival_cv) == (0, 0.0, 0.0, 0.0)
    assert found.input.mean == 0.0


def test_one_request_has_no_gaps() -> None:
    found = trace(request(3.0)).describe()
    assert (found.span, found.arrival_cv) == (0.0, 0.0)


@given(st.lists(st.lists(st.integers(0, 6), max_size=8), max_size=12), st.integers(0, 8))
def test_prefixes_against_a_set_of_all_prefixes(prompts: list[list[int]], most: int) -> None:
    tree, known = Prefixes(), {()}
    for ids in prompts:
        clipped = ids[:most]
        begins = [tuple(clipped[:n]) for n in range(len(clipped) + 1)]
        longest = max(n for n, begin in enumerate(begins) if begin in known)
        assert tree.add(compress(np.array(ids, np.int64)), most) == longest
        known.update(begins)


def test_what_follows_a_run_is_kept_when_the_run_is_split() -> None:
    tree = Prefixes()
    prompts = ([0, 1, 2], [0, 1, 2, 5], [0, 9], [0, 1, 2, 5, 6], [0, 9, 10])
    known = [tree.add(compress(np.array(ids, np.int64)), 9) for ids in prompts]
    assert known == [0, 3, 1, 4, 2]


@given(traces(blocks=(3,)))
def test_sharing_against_tokens(given: Trace) -> None:
    assert given.describe().tenants[0].shared_tokens == _naive(list(given))


def _naive(requests: list[TraceRequest]) -> int:
    seen: set[bytes] = set()
    shared = 0
    for one in requests:
        prompt = one.prompt()
        wholes = range(one.block, one.input_tokens + 1, one.block)
        hits = [n for n in wholes if prompt[:n].tobytes() in seen and n < one.input_tokens]
        shared += max(hits, default=0)
        seen.update(prompt[:n].tobytes() for n in wholes)
    return shared
