"""Which blocks are needed at length n: worked by hand, and against a per-token model."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtide.errors import ConfigError
from kvtide.layout import Full, Lifetime, Mirror, Span, State, Window, needed_blocks


def test_full_needs_every_block_up_to_the_length() -> None:
    assert needed_blocks(Full(), 0, 4) == ()
    assert needed_blocks(Full(), 8, 4) == (Span(0, 2),)
    assert needed_blocks(Full(), 9, 4) == (Span(0, 3),)
    assert needed_blocks(Mirror(3), 9, 4) == (Span(0, 3),)


def test_window_reads_from_length_minus_window_plus_one() -> None:
    # 12 computed, W = 5: the next token (index 12) reads 8..12, so block 2 is enough.
    assert needed_blocks(Window(5), 12, 4) == (Span(2, 3),)
    # W = 6 reads 7..12: block 1 is needed for its last token.
    assert needed_blocks(Window(6), 12, 4) == (Span(1, 3),)


def test_page_leaves_window_when_its_last_index_is_below_it() -> None:
    # Block 0 holds indices 0..3; W = 4 still reads index 3 at length 6, no longer at 7.
    assert needed_blocks(Window(4), 6, 4) == (Span(0, 2),)
    assert needed_blocks(Window(4), 7, 4) == (Span(1, 2),)


def test_window_of_one_token_needs_no_past() -> None:
    assert needed_blocks(Window(1), 7, 4) == ()


def test_sinks_stay_and_join_the_window_while_they_touch() -> None:
    assert needed_blocks(Window(4, 2), 6, 4) == (Span(0, 2),)
    assert needed_blocks(Window(4, 2), 11, 4) == (Span(0, 1), Span(2, 3))
    assert needed_blocks(Window(4, 9), 20, 4) == (Span(0, 3), Span(4, 5))


def test_sinks_beyond_the_length_are_not_needed_yet() -> None:
    assert needed_blocks(Window(2, 12), 3, 4) == (Span(0, 1),)


def test_state_needs_no_block() -> None:
    assert needed_blocks(State(64), 100, 4) == ()


@pytest.mark.parametrize(
    ("build", "field"),
    [
        (lambda: Window(0), "window"),
        (lambda: Window(4, -1), "sinks"),
        (lambda: State(0), "interval_tokens"),
        (lambda: Mirror(-1), "look_ahead"),
    ],
)
def test_impossible_lifetimes_are_refused(build: object, field: str) -> None:
    assert callable(build)
    with pytest.raises(ConfigError, match=field):
        build()


def readable(lifetime: Lifetime, index: int, length: int) -> bool:
    """Whether the token at `length` may read the one at `index`."""
    match lifetime:
        case Window(tokens, sinks):
            return index < sinks or index > length - tokens
        case State():
            return False
        case _:
            return True


lifetimes = st.one_of(
    st.just(Full()),
    st.builds(Mirror, st.integers(0, 4)),
    st.builds(State, st.integers(1, 64)),
    st.builds(Window, st.integers(1, 40), st.integers(0, 12)),
)


@given(lifetime=lifetimes, length=st.integers(0, 120), block_tokens=st.integers(1, 9))
def test_blocks_are_those_of_the_readable_tokens(
    lifetime: Lifetime, length: int, block_tokens: int
) -> None:
    wanted = {i // block_tokens for i in range(length) if readable(lifetime, i, length)}
    spans = needed_blocks(lifetime, length, block_tokens)
    assert [b for span in spans for b in range(*span)] == sorted(wanted)


@given(lifetime=lifetimes, length=st.integers(0, 120), block_tokens=st.integers(1, 9))
def test_spans_are_ascending_and_apart(lifetime: Lifetime, length: int, block_tokens: int) -> None:
    spans = needed_blocks(lifetime, length, block_tokens)
    assert all(span.start < span.stop for span in spans)
    assert all(a.stop < b.start for a, b in pairwise(spans))


@given(
    lifetime=lifetimes,
    length=st.integers(0, 120),
    more=st.integers(0, 40),
    block_tokens=st.integers(1, 9),
)
def test_a_block_once_stale_stays_stale(
    lifetime: Lifetime, length: int, more: int, block_tokens: int
) -> None:
    def blocks(n: int) -> set[int]:
        return {b for span in needed_blocks(lifetime, n, block_tokens) for b in range(*span)}

    written = range(-(-length // block_tokens))
    stale = set(written) - blocks(length)
    assert not stale & blocks(length + more)
