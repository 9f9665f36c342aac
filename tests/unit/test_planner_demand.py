"""Pages of running sequences and of cached prefixes: by hand, and as the manager holds them."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.tiny import draft, full, indexer, state, window

from kvtide import KVManager, Layout, NullMemory, Options
from kvtide.planner import Options as Asked
from kvtide.planner import Request, Workload, cached_pages, plan_layouts, running_pages
from kvtide.planner.demand import growth_bytes, loads_of, prefix_bytes
from kvtide.sizing import least_pages

if TYPE_CHECKING:
    from kvtide import Sequence
    from kvtide.layout import LayerGroup, Spec

GRANULE = 1024


def group(spec: Spec, block_tokens: int = 4) -> LayerGroup:
    return Layout.from_layers({0: spec}, block_tokens=block_tokens).groups[0]


@pytest.mark.parametrize(
    ("spec", "length", "pages"),
    [
        (full(), 1, 1),
        (full(), 8, 2),
        (full(), 9, 3),
        # The last of 21 tokens is token 20: it reads 13 to 20, blocks 3 to 5.
        (window(8), 21, 3),
        # Token 19 reads 12 to 19: blocks 3 and 4.
        (window(8), 20, 2),
        (window(8, sinks=5), 21, 5),
        # A window of itself alone reads nothing before; its own page is open.
        (window(1), 21, 1),
        (window(100), 21, 6),
        (state(), 1, 2),
        (state(), 1000, 2),
        (draft(3), 8, 3),
        (draft(0), 8, 2),
        (indexer(), 9, 3),
    ],
)
def test_pages_of_a_running_sequence(spec: Spec, length: int, pages: int) -> None:
    assert running_pages(group(spec), length) == pages


@pytest.mark.parametrize(
    ("spec", "length", "pages"),
    [
        (full(), 3, 0),
        (full(), 11, 2),
        # After 20 tokens the next, token 20, reads 13 to 19: blocks 3 and 4.
        (window(8), 23, 2),
        (window(8, sinks=1), 23, 3),
        (state(), 3, 0),
        (state(), 23, 1),
        (draft(3), 11, 2),
    ],
)
def test_pages_of_a_cached_prefix(spec: Spec, length: int, pages: int) -> None:
    assert cached_pages(group(spec), length) == pages


def test_a_shared_prefix_is_held_once() -> None:
    layout = Layout.from_layers({0: full(), 1: window(8), 2: state(), 3: draft(3)}, block_tokens=4)
    request = Request(input_tokens=20, output_tokens=10)
    loads = loads_of(layout, Workload(requests=(request,), shared_prefix=10))
    # 10 shared tokens are 2 whole blocks. At 30 tokens: 8 blocks, of which token 29 reads 22 to 29,
    # blocks 5 to 7. Once: sink and 2 blocks; the window that covers token 8 reads 1 to 7, blocks 0
    # and 1; one snapshot. Cached: 28 tokens, 7 blocks, of which token 28 reads blocks 5 and 6.
    assert [(load.fixed, load.running, load.cached) for load in loads] == [
        (1 + 2, 8 - 2, 7 - 2),
        (1 + 2, 3, 2),
        (1 + 1, 2, 1),
        (1 + 2, 9 - 2, 7 - 2),
    ]


def test_a_prompt_shorter_than_the_shared_prefix_shares_what_it_can() -> None:
    layout = Layout.from_layers({0: full()}, block_tokens=4)
    short = Request(input_tokens=8, output_tokens=0)
    long = Request(input_tokens=40, output_tokens=0, weight=3.0)
    (load,) = loads_of(layout, Workload(requests=(short, long), shared_prefix=20))
    # Of 8 tokens the last is computed again, so 1 block is shared; of 40 tokens 5 blocks are.
    assert load.running == Fraction(1 * (2 - 1) + 3 * (10 - 5), 4)
    assert load.fixed == 1 + 5


def test_snapshots_are_as_many_as_asked_for() -> None:
    layout = Layout.from_layers({0: state()}, block_tokens=4)
    request = Request(input_tokens=8, output_tokens=0)
    (load,) = loads_of(layout, Workload(requests=(request,), snapshots=4))
    assert load.running == 5


def test_bytes_of_a_prefix_are_not_rounded_to_pages() -> None:
    assert prefix_bytes(group(full()), 9) == 9 * 64
    assert prefix_bytes(group(window(8, sinks=1)), 100) == 8 * 64
    assert prefix_bytes(group(window(8)), 3) == 3 * 64
    assert prefix_bytes(group(state(64)), 9) == 256


def test_a_full_window_stops_adding() -> None:
    assert growth_bytes(group(window(8)), 7) == 64
    assert growth_bytes(group(window(8)), 8) == 0
    assert growth_bytes(group(window(8, sinks=2)), 9) == 64
    assert growth_bytes(group(full()), 10**6) == 64
    assert growth_bytes(group(state()), 1) == 0


SPECS = st.one_of(
    st.just(full()),
    st.builds(window, st.integers(1, 40), st.integers(0, 9)),
    st.builds(draft, st.just(0)),
    st.just(state()),
)


@given(SPECS, st.integers(1, 8), st.integers(1, 120))
def test_the_floor_is_the_most_that_a_sequence_holds_on_its_way(
    spec: Spec, block_tokens: int, max_tokens: int
) -> None:
    one = group(state(interval=block_tokens) if spec == state() else spec, block_tokens)
    most = max(running_pages(one, length) for length in range(1, max_tokens + 1))
    assert most <= least_pages(one, max_tokens)
    if max_tokens > 40 + 9 + 2 * block_tokens:  # long enough for every alignment of a window
        assert most == least_pages(one, max_tokens)


@given(SPECS, st.integers(1, 120), st.integers(0, 8))
def test_what_is_shared_and_what_is_not_make_the_whole(
    spec: Spec, length: int, shared_blocks: int
) -> None:
    one = group(spec)
    alone = running_pages(one, length, shared_blocks=shared_blocks)
    whole = running_pages(one, length)
    once = cached_pages(one, 4 * shared_blocks)
    assert alone <= whole
    if 4 * shared_blocks < length:
        assert whole <= alone + once


@pytest.mark.parametrize(
    "specs",
    [
        (full(),),
        (full(), window(8)),
        (window(12, sinks=3), full(4)),
        (full(), indexer()),
        (full(5), window(8, dim=7)),  # 160 and 224 bytes a page: pages straddle granules
    ],
    ids=["full", "window", "sinks", "indexer", "straddling"],
)
@pytest.mark.parametrize("length", [5, 16, 27])
def test_the_manager_holds_as_many_sequences_as_planned(
    specs: tuple[Spec, ...], length: int
) -> None:
    layout = Layout.from_layers(dict(enumerate(specs)), block_tokens=4)
    memory = 40 * GRANULE
    asked = Asked(memory=memory, granule_bytes=GRANULE)
    planned = plan_layouts("tiny", [layout], length, asked).lengths[-1].sequences
    assert planned is not None
    assert planned > 2
    assert can_run(planned, layout, memory, length)
    assert not can_run(planned + 1, layout, memory, length)


@pytest.mark.parametrize(
    "specs", [(full(), state()), (full(), draft(3)), (state(), full(), window(8))]
)
def test_snapshots_and_look_ahead_are_room_to_spare(specs: tuple[Spec, ...]) -> None:
    """The manager gives snapshots up before it refuses, and a drafter may not look ahead."""
    layout = Layout.from_layers(dict(enumerate(specs)), block_tokens=4)
    memory = 60 * GRANULE
    asked = Asked(memory=memory, granule_bytes=GRANULE)
    planned = plan_layouts("tiny", [layout], 27, asked).lengths[-1].sequences
    assert planned is not None
    assert planned > 2
    assert can_run(planned, layout, memory, 27)


def test_the_manager_holds_as_many_in_a_given_split() -> None:
    layout = Layout.from_layers({0: full(), 1: window(8)}, block_tokens=4)
    ratio = {"full": 0.3, "window_8": 0.7}
    memory = 40 * GRANULE
    asked = Asked(memory=memory, granule_bytes=GRANULE, pool_ratio=ratio)
    planned = plan_layouts("tiny", [layout], 27, asked).lengths[-1].ratio_sequences
    options = Options(mode="static", pool_ratio=ratio)
    # 12 granules of 4 pages, one of them the sink, and 7 pages for 27 tokens.
    assert planned == (12 * 4 - 1) // 7
    assert can_run(planned, layout, memory, 27, options)
    assert not can_run(planned + 1, layout, memory, 27, options)


def can_run(
    count: int, layout: Layout, memory: int, length: int, options: Options | None = None
) -> bool:
    """Does the manager run `count` sequences at a time, all of them to their last token?"""
    kv = KVManager(
        layout,
        NullMemory(memory, GRANULE),
        max_sequences=count,
        max_tokens=length,
        options=options or Options(),
    )
    running: list[Sequence] = []
    for number in range(count):
        seq = kv.open([1000 * number + token for token in range(length)])
        if not kv.admit([seq], 1):
            return False
        running.append(seq)
        for _ in range(length - 1):
            if not kv.extend([seq], 1):
                return False
            with kv.step([seq], 1):
                pass
            kv.commit([seq])
    return bool(kv.extend(running, 1))
