"""Where states are kept: the thinning grid, what may be dropped for them, and both in a manager."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from tests.tiny import Rig, full, state

from kvtide.sequence.retention import WORTH, may_drop_priced, next_boundary

INTERVALS = st.sampled_from([1, 4, 64, 250, 1024])
ENDS = st.integers(0, 1 << 17)


def grid(end: int, interval: int) -> list[int]:
    """All boundaries of a prompt that ends at `end`, ascending."""
    found: list[int] = []
    while boundary := next_boundary(found[-1] if found else 0, end, interval):
        found.append(boundary)
    return found


def test_a_grid_by_hand() -> None:
    assert grid(12_000, 1024) == [8192, 10_240, 11_264]
    assert grid(8192, 1024) == [4096, 6144, 8192]
    assert grid(1023, 1024) == []


@given(ENDS, INTERVALS, st.data())
def test_what_a_match_loses_is_in_proportion_to_its_distance_from_the_end(
    end: int, interval: int, data: st.DataObject
) -> None:
    parted = data.draw(st.integers(0, end))
    found = max((b for b in grid(end, interval) if b <= parted), default=0)
    assert parted - found < 2 * (end - parted + interval)


@given(ENDS, INTERVALS)
def test_a_grid_has_few_boundaries_all_on_multiples(end: int, interval: int) -> None:
    boundaries = grid(end, interval)
    assert len(boundaries) <= (end // interval).bit_length()
    assert all(boundary % interval == 0 and 0 < boundary <= end for boundary in boundaries)
    gaps = [b - a for a, b in pairwise([0, *boundaries])]
    assert gaps == sorted(gaps, reverse=True)


@given(ENDS, INTERVALS, st.data())
def test_a_grid_is_the_same_from_wherever_it_is_asked(
    end: int, interval: int, data: st.DataObject
) -> None:
    computed = data.draw(st.integers(0, end))
    later = [b for b in grid(end, interval) if b > computed]
    assert next_boundary(computed, end, interval) == (later[0] if later else 0)


def test_only_ends_that_save_enough_may_drop_what_has_a_price() -> None:
    assert may_drop_priced(WORTH, 1024, is_grid=False)
    assert not may_drop_priced(WORTH - 1, 1024, is_grid=False)
    assert not may_drop_priced(1 << 20, 1024, is_grid=True)
    assert may_drop_priced(8, 16, is_grid=False)  # a fine interval wants little computed again
    assert may_drop_priced(WORTH, 1 << 30, is_grid=False)


def filled(num_states: int) -> Rig:
    """A rig whose pool of states is full of the ends of `num_states` short prompts."""
    rig = Rig(full(), state(interval=8), pages=[200, num_states + 2], max_tokens=100)
    for i in range(num_states + 2):
        rig.cache([1000 + 10 * i + j for j in range(6)])
    return rig


def ends_left(rig: Rig, num_states: int) -> int:
    """How many of the short prompts can still be matched."""
    prompts = ([1000 + 10 * i + j for j in range(6)] for i in range(num_states + 2))
    return sum(rig.lookup(prompt) == 4 for prompt in prompts)


def test_the_grid_drops_no_end_of_another_prompt() -> None:
    """In a full pool a prompt with a grid of 32, 48 and 56 and its end at 60 costs one other end:
    that for its own. Were the grid worth a price, it would cost two.
    """
    rig = filled(5)
    seq = rig.kv.open(range(62))
    assert rig.kv.admit([seq])
    before = ends_left(rig, 5)
    rig.engine.prefill([seq])
    assert rig.lookup(range(62)) == 60
    assert before - ends_left(rig, 5) == 1
    rig.kv.close([seq])
    assert rig.idle()


def test_a_grid_is_kept_where_there_is_room() -> None:
    rig = Rig(full(), state(interval=8), pages=[40, 12], max_tokens=100)
    rig.cache(range(62))
    hits = [rig.lookup([*range(n), 99, 98]) for n in (62, 59, 55, 47, 31)]
    assert hits == [60, 56, 48, 32, 0]


def test_a_short_gain_drops_nothing_that_has_a_price() -> None:
    """With a grid of 64 an end must save 32 tokens: 8 more after a hit of 36 do not."""
    prompts = [[1000 * i + j for j in range(38)] for i in range(1, 5)]
    rig = Rig(full(), state(interval=64), pages=[100, 5], max_tokens=100)
    for prompt in prompts:
        rig.cache(prompt)
    for longer, dropped in ((8, 0), (36, 1)):
        ends = sum(rig.lookup(prompt) == 36 for prompt in prompts)
        seq = rig.start([*prompts[-1], *range(longer)])
        assert seq.hit == 36
        rig.engine.verify([seq])
        rig.kv.close([seq])
        assert ends - sum(rig.lookup(prompt) == 36 for prompt in prompts) == dropped
    assert rig.idle()
