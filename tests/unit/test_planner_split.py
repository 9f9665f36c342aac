"""Splits: the arithmetic by hand, and what must hold for any pools and any traffic."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.tiny import draft, full, indexer, state, window

import kvtide
from kvtide import ConfigError, Layout
from kvtide.layout import Spec, StateSpec
from kvtide.planner import Memory, Options, Request, Workload, plan_layouts
from kvtide.planner.demand import loads_of
from kvtide.planner.fit import Ramp, cached_ramps, most_in_budget, most_in_pools, running_ramps
from kvtide.planner.split import judge, recommend, recommend_for_needs
from kvtide.types import ceil_div

GRANULE = 1024


def layout_of(*specs: Spec, block_tokens: int = 4) -> Layout:
    return Layout.from_layers(dict(enumerate(specs)), block_tokens=block_tokens)


def memory_of(granules: int) -> Memory:
    return Memory(num_bytes=granules * GRANULE, granule_bytes=GRANULE)


def one(prompt: int, answer: int = 0) -> tuple[Request, ...]:
    return (Request(input_tokens=prompt, output_tokens=answer),)


# Pages of 256 bytes (4 tokens x 64) in "full", of 256 in "window_8", of 256 a state.
TWO = layout_of(full(), window(8))


def test_the_split_by_hand() -> None:
    loads = loads_of(TWO, Workload(requests=one(36, 4)))
    # 40 tokens: 10 blocks; token 39 reads 32 to 39, blocks 8 and 9.
    assert [load.running for load in loads] == [10, 2]
    split = recommend(loads, memory_of(31), None)
    # 10 sequences: 101 pages of full are 26 granules of 4, 21 of the window are 6: 32. 9: 23 + 5.
    assert split.sequences == split.most_sequences == 9
    assert (split.limit, split.prefixes) == ("memory", None)
    assert [pool.live_bytes for pool in split.pools] == [91 * 256, 19 * 256]
    # 3 granules are over; 10 of 12 parts of them are 2.5, 2 of 12 are 0.5: the larger share first.
    assert [pool.granules for pool in split.pools] == [23 + 3, 5 + 0]
    assert split.ratio == {"full": 26 / 31, "window_8": 5 / 31}


def test_what_running_sequences_leave_caches_prefixes() -> None:
    loads = loads_of(TWO, Workload(requests=one(36, 4)))
    split = recommend(loads, memory_of(31), 4)
    # Live: 41 and 9 pages. A prefix of 40 tokens: 10 pages, and blocks 8 and 9. 5 prefixes: 91
    # pages are 23 granules, 19 are 5; 6 would be 26 + 6.
    assert (split.limit, split.sequences, split.prefixes) == ("concurrency", 4, 5)
    assert [pool.live_bytes for pool in split.pools] == [41 * 256, 9 * 256]
    assert [pool.prefix_bytes for pool in split.pools] == [2560, 512]
    assert sum(pool.granules for pool in split.pools) == 31


def test_as_many_as_just_fit_leave_no_prefixes_but_are_what_was_asked_for() -> None:
    loads = loads_of(TWO, Workload(requests=one(36, 4)))
    split = recommend(loads, memory_of(28), 9)  # 23 and 5 granules: see above
    assert (split.limit, split.sequences, split.prefixes) == ("concurrency", 9, 0)


def test_floors_that_do_not_fit_are_left_out() -> None:
    workload = Workload(requests=one(8))
    split = recommend(loads_of(TWO, workload, max_tokens=4000), memory_of(10), None)
    plain = recommend(loads_of(TWO, workload), memory_of(10), None)
    assert split.sequences == plain.sequences == 9
    assert split.ratio == plain.ratio


def test_needs_are_met_and_the_rest_goes_to_the_others() -> None:
    loads = loads_of(layout_of(full(), indexer(), window(8)), Workload(requests=one(40)))
    split = recommend_for_needs(loads, {"indexer": 3000}, memory_of(30))
    # 3 granules for the indexer; 27 for full and window, 10 : 2 by the pages of a prefix.
    assert [pool.granules for pool in split.pools] == [23, 3, 4]
    with pytest.raises(ConfigError, match="needs are 31,000 bytes together, but memory is 30,720"):
        recommend_for_needs(loads, {"indexer": 30_000, "full": 1000}, memory_of(30))


def test_needs_of_all_pools_share_what_is_left_as_they_need() -> None:
    loads = loads_of(TWO, Workload(requests=one(40)))
    split = recommend_for_needs(loads, {"full": 3000, "window_8": 1000}, memory_of(12))
    assert [pool.granules for pool in split.pools] == [3 + 6, 1 + 2]


def test_a_split_is_judged_by_the_pool_that_runs_out_first() -> None:
    loads = loads_of(TWO, Workload(requests=one(36, 4)))
    verdict = judge(TWO.groups, loads, {"full": 0.5, "window_8": 0.5}, memory_of(32), None)
    # 16 granules each: 64 pages. Full: (64 - 1) // 10 = 6 sequences; the window could hold 31 and
    # uses 1 + 12 pages for 6, so 51 pages of 256 bytes are left.
    assert verdict.sequences == 6
    assert [pool.is_short for pool in verdict.pools] == [True, False]
    assert verdict.stranded_bytes == 51 * 256
    assert verdict.bytes_per_token == 64
    assert verdict.stranded_tokens == 51 * 4
    assert verdict.stranded_prefixes == 0


def test_a_split_that_serves_the_traffic_is_judged_by_the_prefixes_it_keeps() -> None:
    loads = loads_of(TWO, Workload(requests=one(36, 4)))
    verdict = judge(TWO.groups, loads, {"full": 0.5, "window_8": 0.5}, memory_of(32), 2)
    # Beside 2 sequences full has 64 - 21 pages, room for 4 prefixes; the window uses 5 + 8.
    assert (verdict.sequences, verdict.prefixes) == (2, 4)
    assert verdict.stranded_bytes == (64 - 13) * 256


def test_pools_that_run_out_together_strand_nothing() -> None:
    layout = layout_of(full(), indexer())
    loads = loads_of(layout, Workload(requests=one(63)))
    # 16 pages a sequence in both; 4 granules hold 16 pages of either.
    verdict = judge(layout.groups, loads, {"full": 0.5, "indexer": 0.5}, memory_of(34), None)
    assert [pool.is_short for pool in verdict.pools] == [True, True]
    assert verdict.stranded_bytes == 0


def test_where_a_state_runs_out_a_prefix_costs_one_snapshot() -> None:
    layout = layout_of(full(), state())
    loads = loads_of(layout, Workload(requests=one(8)))
    verdict = judge(layout.groups, loads, {"full": 0.9, "state": 0.1}, memory_of(100), None)
    # 40 pages of states: (40 - 1) // 2 sequences; 1 + 38 of 360 pages are used in full.
    assert verdict.sequences == 19
    assert verdict.stranded_bytes == (360 - 39) * 256
    assert verdict.bytes_per_token == 256 / 2000
    assert verdict.stranded_prefixes == 360 - 39


def test_memory_that_holds_nothing_is_split_by_need() -> None:
    loads = loads_of(TWO, Workload(requests=one(4000)))
    split = recommend(loads, memory_of(20), None)
    assert (split.sequences, split.most_sequences) == (0, 0)
    assert sum(pool.granules for pool in split.pools) == 20
    tiny = recommend(loads_of(TWO, Workload(requests=one(400), shared_prefix=399)), memory_of(3), 1)
    assert tiny.sequences == 0
    assert sum(pool.granules for pool in tiny.pools) == 3


SPECS = st.one_of(
    st.builds(full, st.integers(1, 20)),
    st.builds(window, st.integers(1, 40), st.integers(0, 9), st.integers(1, 20)),
    st.builds(draft, st.integers(0, 5), st.integers(1, 20)),
    st.builds(state, st.integers(1, 900)),
    st.builds(indexer, st.integers(1, 40)),
)
LAYOUTS = st.lists(SPECS, min_size=1, max_size=4).map(lambda specs: layout_of(*specs))
REQUESTS = st.builds(
    Request,
    input_tokens=st.integers(1, 300),
    output_tokens=st.integers(0, 100),
    weight=st.integers(1, 5).map(float),
)


def is_aligned(spec: Spec) -> bool:
    """A manager's state may be kept only where a block ends."""
    return not isinstance(spec, StateSpec) or spec.interval_tokens % 4 == 0


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    requests = tuple(draw(st.lists(REQUESTS, min_size=1, max_size=3)))
    longest = max(request.input_tokens for request in requests)
    return Workload(
        requests=requests,
        concurrency=draw(st.one_of(st.none(), st.integers(1, 40))),
        shared_prefix=draw(st.integers(0, longest - 1)),
        snapshots=draw(st.integers(0, 3)),
    )


@given(LAYOUTS, workloads(), st.integers(1, 400), st.integers(0, 200))
def test_more_memory_never_fits_fewer(
    layout: Layout, workload: Workload, granules: int, more: int
) -> None:
    loads = loads_of(layout, workload)
    less = recommend(loads, memory_of(granules), workload.concurrency)
    much = recommend(loads, memory_of(granules + more), workload.concurrency)
    assert (less.sequences or 0, less.prefixes or 0) <= (much.sequences or 0, much.prefixes or 0)


@given(LAYOUTS, workloads(), st.integers(1, 400))
def test_shares_make_one_and_use_every_granule(
    layout: Layout, workload: Workload, granules: int
) -> None:
    split = recommend(loads_of(layout, workload), memory_of(granules), workload.concurrency)
    assert sum(pool.granules for pool in split.pools) == granules
    assert sum(split.ratio.values()) == pytest.approx(1)
    assert sum(pool.live_share for pool in split.pools) == pytest.approx(1)
    assert all(pool.granules >= 0 for pool in split.pools)


@given(LAYOUTS, workloads(), st.integers(1, 300), st.data())
def test_no_other_split_holds_more(
    layout: Layout, workload: Workload, granules: int, data: st.DataObject
) -> None:
    loads = loads_of(layout, workload)
    split = recommend(loads, memory_of(granules), workload.concurrency)
    best = held_by(loads, [pool.granules for pool in split.pools], workload.concurrency)
    cuts = sorted(data.draw(st.integers(0, granules), label="cut") for _ in range(len(loads) - 1))
    other = [stop - start for start, stop in itertools.pairwise([0, *cuts, granules])]
    assert held_by(loads, other, workload.concurrency) <= best
    assert best == (split.sequences, split.prefixes or 0)


@given(
    st.lists(SPECS.filter(is_aligned), min_size=1, max_size=3).map(lambda some: layout_of(*some)),
    workloads(),
    st.integers(8, 300),
    st.data(),
)
def test_a_manager_takes_the_split_and_none_that_it_takes_holds_more(
    layout: Layout, workload: Workload, granules: int, data: st.DataObject
) -> None:
    loads = loads_of(layout, workload, workload.longest)
    memory = memory_of(granules)
    floors = [ceil_div(load.floor * load.page_bytes, GRANULE) for load in loads]
    assume(sum(floors) <= granules)
    split = recommend(loads, memory, workload.concurrency)
    options = kvtide.Options(mode="static", pool_ratio=split.ratio)
    arenas = kvtide.NullMemory(memory.num_bytes, GRANULE)
    kv = kvtide.KVManager(layout, arenas, max_tokens=workload.longest, options=options)
    granted = [pool.granules for pool in split.pools]
    assert [pool.num_mapped for pool in kv.pools.values()] == granted
    rest = granules - sum(floors)
    cuts = sorted(data.draw(st.integers(0, rest), label="cut") for _ in range(len(loads) - 1))
    extra = [stop - start for start, stop in itertools.pairwise([0, *cuts, rest])]
    other = [least + more for least, more in zip(floors, extra, strict=True)]
    best = held_by(loads, granted, workload.concurrency)
    assert held_by(loads, other, workload.concurrency) <= best
    assert best == (split.sequences, split.prefixes or 0)


def test_a_pool_that_needs_little_keeps_its_floor() -> None:
    loads = loads_of(TWO, Workload(requests=one(8)), max_tokens=80)
    # 80 tokens: 20 pages and the sink are 6 granules of 4; a window of 8 is 3 and the sink: 1.
    # 8 tokens are 2 pages of either: 10 granules hold 21 pages of full, 10 sequences, but leave the
    # window 4 granules, 15 pages, 7 sequences; without the floor 9 and 19 pages in 5 granules each.
    split = recommend(loads, memory_of(10), None)
    assert [pool.granules for pool in split.pools] == [6, 4]
    assert (split.sequences, split.most_sequences) == (7, 9)


def held_by(loads: list, granules: list[int], concurrency: int | None) -> tuple[int, int]:
    """(running sequences, cached prefixes beside them) that pools of these sizes hold."""
    most = most_in_pools(running_ramps(loads), granules, GRANULE)
    assert most is not None
    if concurrency is None or most < concurrency:
        return most, 0
    return concurrency, most_in_pools(cached_ramps(loads, concurrency), granules, GRANULE) or 0


@given(LAYOUTS, workloads(), st.integers(1, 300), st.lists(st.integers(1, 9), min_size=4))
def test_what_is_stranded_is_never_negative_and_never_all(
    layout: Layout, workload: Workload, granules: int, weights: list[int]
) -> None:
    names = [group.name for group in layout.groups]
    total = sum(weights[: len(names)])
    ratio = {name: weights[i] / total for i, name in enumerate(names)}
    memory = memory_of(granules)
    verdict = judge(layout.groups, loads_of(layout, workload), ratio, memory, workload.concurrency)
    assert all(0 <= pool.stranded_bytes <= pool.bytes for pool in verdict.pools)
    assert all(pool.stranded_bytes == 0 for pool in verdict.pools if pool.is_short)
    assert verdict.stranded_bytes == sum(pool.stranded_bytes for pool in verdict.pools)


@given(LAYOUTS, workloads(), st.integers(30, 300))
def test_the_ratio_of_the_recommended_split_gives_back_what_it_promised(
    layout: Layout, workload: Workload, granules: int
) -> None:
    loads = loads_of(layout, workload)
    memory = memory_of(granules)
    split = recommend(loads, memory, workload.concurrency)
    assume(all(pool.granules for pool in split.pools))
    verdict = judge(layout.groups, loads, split.ratio, memory, workload.concurrency)
    assert (verdict.sequences, verdict.prefixes or 0) == (split.sequences, split.prefixes or 0)


@given(
    st.lists(
        st.builds(
            Ramp,
            st.integers(1, 5000),
            st.integers(0, 5),
            st.fractions(min_value=0, max_value=9, max_denominator=7),
        ),
        min_size=1,
        max_size=4,
    ),
    st.integers(0, 500),
)
def test_the_most_is_the_last_that_fits(ramps: list[Ramp], granules: int) -> None:
    most = most_in_budget(ramps, granules, GRANULE)

    def fits(count: int) -> bool:
        return sum(ramp.granules(count, GRANULE) for ramp in ramps) <= granules

    if most is None:
        assert not any(ramp.each for ramp in ramps)
    elif fits(0):
        assert fits(most)
        assert not fits(most + 1)
    else:
        assert most == 0


def test_a_pool_holds_what_its_pages_allow() -> None:
    ramp = Ramp(page_bytes=256, fixed=1, each=Fraction(5, 2))
    assert ramp.most(4, GRANULE) == 6  # 15 pages at 2.5 each
    assert ramp.pages(6) == 16
    assert Ramp(256, 5, Fraction(1)).most(1, GRANULE) == 0
    assert Ramp(256, 5, Fraction(0)).most(9, GRANULE) is None


def test_where_nothing_can_be_cached_nothing_is_short() -> None:
    # All of the prompt is shared, and the answer fills no block of its own.
    workload = Workload(requests=one(9, 2), concurrency=1, shared_prefix=8)
    layout = layout_of(full())
    loads = loads_of(layout, workload)
    assert loads[0].cached == 0
    assert recommend(loads, memory_of(20), 1).prefixes == 0
    verdict = judge(layout.groups, loads, {"full": 1.0}, memory_of(20), 1)
    assert (verdict.stranded_bytes, verdict.stranded_tokens) == (0, None)


def test_options_that_contradict_are_refused() -> None:
    workload = Workload(requests=one(5))
    with pytest.raises(ConfigError, match="needs and workload both say"):
        Options(memory=1 << 30, workload=workload, needs={"full": 5})
    with pytest.raises(ConfigError, match="pool_ratio is given without memory"):
        Options(pool_ratio=(1.0,))
    with pytest.raises(ConfigError, match="needs is given without memory"):
        Options(needs={"full": 4})
    with pytest.raises(ConfigError, match=r"memory is 5 bytes, less than one granule of 2,097,152"):
        Options(memory=5)
    with pytest.raises(ConfigError, match=r"needs\['full'\] is 0; use 1 or more"):
        Options(memory=1 << 30, needs={"full": 0})
    with pytest.raises(ConfigError, match="draft_tokens is -1"):
        Options(draft_tokens=-1)
    with pytest.raises(ConfigError, match="longest sequence has 500 tokens, but max_tokens is 64"):
        plan_layouts("m", [TWO], 64, Options(workload=Workload(requests=one(500))))
