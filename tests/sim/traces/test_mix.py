"""Traces out of traces: sorted, nothing lost, tenants apart."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.sim.traces.samples import all_of, request, trace, traces

from kvtide import ConfigError
from kvtide.sim.traces import (
    Stream,
    Trace,
    TraceRequest,
    concatenate,
    cut,
    overlay,
    scaled,
    shifted,
)
from kvtide.sim.traces.idspace import SLAB_TOKENS, IdSpace
from kvtide.sim.traces.request import PROMPT_TOKENS

if TYPE_CHECKING:
    from collections.abc import Iterator

SOME = st.lists(traces(tenants=2), min_size=1, max_size=3)


def shape(one: TraceRequest) -> tuple[float, int, int]:
    return one.arrival, one.input_tokens, one.output_tokens


@given(SOME)
def test_an_overlay_is_sorted_and_loses_nothing(parts: list[Trace]) -> None:
    mixed = overlay(parts)
    found = list(mixed)
    assert all(a.arrival <= b.arrival for a, b in pairwise(found))
    assert sorted(map(shape, found)) == sorted(shape(one) for part in parts for one in part)
    assert all_of(mixed) == all_of(mixed)
    assert len(set(mixed.tenants)) == len(mixed.tenants) == 2 * len(parts)


@given(SOME)
def test_a_concatenation_is_sorted_and_loses_nothing(parts: list[Trace]) -> None:
    found = list(concatenate(parts, gap=1.5))
    assert all(a.arrival <= b.arrival for a, b in pairwise(found))
    expected = [shape(one)[1:] for part in parts for one in part]
    assert [shape(one)[1:] for one in found] == expected


@given(SOME, st.sampled_from([overlay, concatenate]))
def test_parts_share_no_token_and_keep_what_they_share(parts: list[Trace], join: object) -> None:
    assert callable(join)
    tokens: list[set[int]] = [set() for _ in parts]
    lists: list[list[TraceRequest]] = [[] for _ in parts]
    for one in join(parts):
        tokens[one.tenant // 2].update(one.prompt().tolist())
        lists[one.tenant // 2].append(one)
    assert sum(map(len, tokens)) == len(set().union(*tokens))
    for part, moved in zip(parts, lists, strict=True):
        _same_sharing(list(part), moved)


def _same_sharing(before: list[TraceRequest], after: list[TraceRequest]) -> None:
    """Blocks that were equal are equal, and no others: by (block size, id) before, tokens after."""
    assert [shape(one)[1:] for one in before] == [shape(one)[1:] for one in after]
    renamed: dict[tuple[int, int], bytes] = {}
    for old, new in zip(before, after, strict=True):
        whole = replace(new, input_tokens=int(new.runs[:, 1].sum()) * new.block).prompt()
        blocks = [chunk.tobytes() for chunk in np.split(whole, len(whole) // new.block)]
        for (number, _), block in zip(old.runs.tolist(), blocks, strict=True):
            assert renamed.setdefault((old.block, number), block) == block
    tokens = np.frombuffer(b"".join(renamed.values()), np.int32)
    assert len(np.unique(tokens)) == len(tokens)


def test_an_overlay_by_hand() -> None:
    chat = trace(request(0.0, [0, 1]), request(2.0, [0, 1]), name="chat", tenants=("chat",))
    code = trace(request(1.0, [0, 1]), request(2.0, [0]), name="code", tenants=("code",))
    mixed = overlay([chat, code])
    assert mixed.name == "chat + code"
    assert mixed.tenants == ("chat", "code")
    assert [(one.arrival, one.tenant) for one in mixed] == [(0, 0), (1, 1), (2, 0), (2, 1)]
    assert mixed.describe().tenants[0].shared_tokens == 4
    assert mixed.describe().tenants[1].shared_tokens == 0


def test_a_concatenation_by_hand() -> None:
    chat = trace(request(0.0), request(2.0))
    code = trace(request(1.0), request(3.0))
    mixed = concatenate([chat, code, chat], gap=10)
    assert [one.arrival for one in mixed] == [0, 2, 13, 15, 25, 27]
    assert mixed.tenants == ("t", "t#2", "t#3")


def test_mixes_of_mixes_keep_all_tenants_apart() -> None:
    def one(name: str) -> Trace:
        return trace(request(0.0, [0, 1]), name=name, tenants=(name,))

    mixed = concatenate([overlay([one("a"), one("b")]), overlay([one("c"), one("d")])])
    assert mixed.tenants == ("a", "b", "c", "d")
    found = list(mixed)
    assert [one.tenant for one in found] == [0, 1, 2, 3]
    assert len(np.unique(np.concatenate([one.prompt() for one in found]))) == 4 * 8


@given(traces(), st.integers(0, 40).map(lambda n: n / 4), st.integers(1, 20))
def test_a_cut_keeps_a_span_and_a_number(given: Trace, since: float, first: int) -> None:
    found = [one.arrival for one in cut(given, first=first, since=since, until=since + 3)]
    inside = [one.arrival - since for one in given if since <= one.arrival < since + 3]
    assert found == inside[:first]


def test_scaled_and_shifted() -> None:
    given = trace(request(1.0, [4]), request(3.0, [5]))
    assert [one.arrival for one in scaled(given, 2)] == [0.5, 1.5]
    assert [one.arrival for one in shifted(given, 2)] == [3.0, 5.0]
    assert [one[1:] for one in all_of(scaled(given, 2))] == [one[1:] for one in all_of(given)]


def test_a_cut_does_not_read_on() -> None:
    def endless() -> Iterator[TraceRequest]:
        yield request(0.0)
        raise AssertionError("read on")

    assert len(all_of(cut(Stream(name="e", start=endless), first=1))) == 1


@pytest.mark.parametrize(
    "wrong", [{"first": 0}, {"since": -1.0}, {"since": 2.0, "until": 2.0}, {"until": math.nan}]
)
def test_cuts_that_leave_nothing(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="leaves nothing"):
        cut(trace(), **wrong)  # type: ignore[arg-type]


def test_numbers_out_of_range() -> None:
    for rate in (0, -1, math.inf, math.nan):
        with pytest.raises(ConfigError, match="scale of t must be a positive number"):
            scaled(trace(), rate)
    for seconds in (-1, math.inf, math.nan):
        with pytest.raises(ConfigError, match="shift of t must be at least 0 s"):
            shifted(trace(), seconds)
        with pytest.raises(ConfigError, match="gap between traces"):
            concatenate([trace()], gap=seconds)
    for join in (overlay, concatenate):
        with pytest.raises(ConfigError, match="at least one trace"):
            join([])


def test_contents_beyond_int32_name_the_trace() -> None:
    """Each part fits, both together do not."""
    half = replace(request(0.0), runs=np.array([[0, 600]], np.int64), block=2**21)
    part = trace(replace(half, input_tokens=600 * 2**21), name="large")
    assert len(all_of(overlay([part]))) == 1
    with pytest.raises(ConfigError, match="trace large: content ids need token ids up to"):
        all_of(overlay([part, part]))


def test_sparse_ids_are_laid_out_densely() -> None:
    far = trace(request(0.0, [0, 2**50, 2**50 + 1]))
    (found,) = overlay([far])
    assert found.runs.tolist() == [[0, 1], [SLAB_TOKENS // 4, 2]]


@pytest.mark.parametrize("block", [1, 3, 512, SLAB_TOKENS, SLAB_TOKENS + 1])
def test_a_run_over_slabs_stays_whole(block: int) -> None:
    space = IdSpace()
    other = space.fresh(1, 7, "x")
    size = max(1, SLAB_TOKENS // block)
    placed = space.place("a", np.array([[0, 2 * size + 1]], np.int64), block, "x")
    assert placed[:, 1].sum() == 2 * size + 1
    assert len(placed) == 1
    assert placed[0, 0] * block >= 7 > other
    # Taken by another in between, the run goes on elsewhere.
    space.fresh(1, 5, "x")
    more = space.place("a", np.array([[0, 4 * size]], np.int64), block, "x")
    assert more[0].tolist() == [placed[0, 0], 3 * size]
    assert len(more) == 2


def test_fresh_ids_end_where_tokens_do() -> None:
    space = IdSpace()
    assert space.fresh(PROMPT_TOKENS // 64, 64, "x") == 0
    with pytest.raises(ConfigError, match="here: content ids need token ids"):
        space.fresh(1, 64, "here")
