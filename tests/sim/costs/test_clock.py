"""Seconds of a step: by hand, at the roofline's ends, monotone, and the same taken many at once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtide.errors import ConfigError
from kvtide.sim.costs import Clock, Experts, Hardware, ModelCost, Reads, Weights

CHIP = Hardware(
    name="tiny",
    flops=1000.0,
    bandwidth=100.0,
    memory_bytes=1 << 30,
    compute_efficiency=0.5,
    memory_efficiency=0.5,
    step_seconds=0.25,
)
FULL = Reads(group="full", pair_flops=4.0, token_bytes=8.0)
WINDOW = Reads(group="window", pair_flops=6.0, token_bytes=2.0, limit=3)
PICKED = Reads(group="picked", pair_flops=1.0, token_bytes=1.0, limit=5, picks=True)
TINY = ModelCost(
    weights=Weights(dense=100, head=10, embedding=10, experts=Experts(num=4, active=1, params=20)),
    reads=(FULL, WINDOW, PICKED),
    state_flops=7.0,
    state_bytes=5.0,
    write_bytes=11.0,
)
CLOCK = Clock(TINY, CHIP)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def test_a_step_by_hand() -> None:
    # One row has 2 tokens and computes 4 more (it sees 3, 4, 5, 6); another has 9, computes 1.
    starts, new = ints(2, 9), ints(4, 1)
    full = 3 + 4 + 5 + 6 + 10
    window = 3 + 3 + 3 + 3 + 3
    picked = 3 + 4 + 5 + 5 + 5
    linear_flops = 2 * (5 * (100 + 20) + 2 * 10)
    attention_flops = 4 * full + 6 * window + 1 * picked + 5 * 7
    assert CLOCK.flops(starts, new) == linear_flops + attention_flops
    weight_bytes = 2 * (100 + 10 + 20 * 4 * (1 - 0.75**5))
    # A chunk of 4 in a window of 3 reads all 6; five picks each could be all 6 too.
    cache_bytes = 8 * (6 + 10) + 2 * (6 + 3) + 1 * (6 + 5) + 2 * 5 + 5 * 11
    linear = max(linear_flops / 500, weight_bytes / 50)
    attention = max(attention_flops / 500, cache_bytes / 50)
    assert CLOCK.seconds(starts, new) == pytest.approx(linear + attention + 0.25, rel=1e-12)


def test_an_empty_step_costs_its_fixed_time() -> None:
    assert CLOCK.seconds(ints(), ints()) == 0.25
    assert CLOCK.flops(ints(), ints()) == 0


def test_a_chunk_counts_as_its_tokens_one_by_one() -> None:
    whole = CLOCK.flops(ints(7), ints(40))
    single = sum(CLOCK.flops(ints(7 + i), ints(1)) for i in range(40))
    assert whole == single - 39 * 2 * 10  # one row of logits instead of 40


@given(
    st.lists(st.integers(0, 400), min_size=1, max_size=20),
    st.integers(1, 60),
    st.sampled_from(["mixed", "states", "full", "ranks"]),
)
def test_many_steps_at_once_are_the_steps_one_by_one(
    starts: list[int], count: int, kind: str
) -> None:
    reads = {"mixed": (FULL, WINDOW, PICKED), "states": (), "full": (FULL,), "ranks": (WINDOW,)}
    exchanges = 3 if kind == "ranks" else 0
    model = ModelCost(
        weights=TINY.weights,
        reads=reads[kind],
        state_flops=1.7,
        state_bytes=3.3,
        exchanges=exchanges,
        link_bytes=0.7,
    )
    chip = Hardware(
        name="x", flops=997.0, bandwidth=103.0, memory_bytes=1, link_bandwidth=7.0,
        token_seconds=0.01,
    )  # fmt: skip
    clock = Clock(model, chip)
    ones = np.ones(len(starts), np.int64)
    single = [clock.seconds(np.array(starts) + i, ones) for i in range(count)]
    assert clock.decode_seconds(np.array(starts), count).tolist() == single
    flops = sum(clock.flops(np.array(starts) + i, ones) for i in range(count))
    assert clock.decode_flops(np.array(starts), count) == pytest.approx(flops)


@given(
    st.lists(st.tuples(st.integers(0, 500), st.integers(1, 50)), min_size=1, max_size=8),
    st.integers(0, 7),
    st.integers(1, 300),
)
def test_more_tokens_longer_contexts_and_more_rows_never_take_less(
    rows: list[tuple[int, int]], which: int, more: int
) -> None:
    starts, new = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    base = CLOCK.seconds(starts, new)
    one = np.zeros(len(rows), np.int64)
    one[which % len(rows)] = more
    assert CLOCK.seconds(starts + one, new) >= base
    assert CLOCK.seconds(starts, new + one) >= base
    assert CLOCK.flops(starts, new + one) > CLOCK.flops(starts, new)
    extra = np.append(starts, more), np.append(new, 1)
    assert CLOCK.seconds(*extra) >= base


def test_the_ends_of_the_roofline() -> None:
    wide = Clock(TINY, Hardware(name="w", flops=1000.0, bandwidth=1e20, memory_bytes=1,
                                compute_efficiency=1.0, step_seconds=0.0))  # fmt: skip
    fast = Clock(TINY, Hardware(name="f", flops=1e20, bandwidth=100.0, memory_bytes=1,
                                memory_efficiency=1.0, step_seconds=0.0))  # fmt: skip
    starts, new = ints(5, 50), ints(10, 1)
    assert wide.seconds(starts, new) == pytest.approx(wide.flops(starts, new) / 1000)
    reads = 8 * (15 + 51) + 2 * (12 + 3) + (15 + 5) + 2 * 5 + 11 * 11
    assert fast.seconds(starts, new) == pytest.approx((TINY.weight_bytes(11) + reads) / 100)


def test_windows_stop_growing_and_states_never_do() -> None:
    model = ModelCost(weights=TINY.weights, reads=(WINDOW,), state_flops=1, state_bytes=1)
    seconds = Clock(model, CHIP).decode_seconds(ints(0, 1), 10)
    assert seconds[0] < seconds[1]
    assert (seconds[2:] == seconds[2]).all()


def test_moves_cost_their_calls_and_their_copies() -> None:
    granule = 2 << 20
    assert CLOCK.move_seconds(0, 0) == 0
    assert CLOCK.move_seconds(3 * granule, 0) == pytest.approx(3 * 63e-6)
    assert CLOCK.move_seconds(0, 1000) == 2 * 1000 / 50


def test_ranks_need_a_link() -> None:
    model = ModelCost(weights=TINY.weights, reads=(), ranks=2, exchanges=4, link_bytes=10.0)
    with pytest.raises(ConfigError, match=r"link_bandwidth.*2 ranks"):
        Clock(model, CHIP)
    chip = Hardware(name="x", flops=1e20, bandwidth=1e20, memory_bytes=1, link_bandwidth=10.0,
                    link_efficiency=0.5, link_seconds=0.5, step_seconds=0.0)  # fmt: skip
    assert Clock(model, chip).seconds(ints(0), ints(3)) == pytest.approx(4 * 0.5 + 3 * 10 / 5)
