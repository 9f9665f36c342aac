"""Columns, pages and positions of one forward, against a loop over rows and tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvtide import UsageError
from kvtide.torch.forward import Forward
from kvtide.types import ABSENT, SINK

spans = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 12)), min_size=1, max_size=5)
windows = st.one_of(st.none(), st.integers(1, 20))


def forward_of(rows: list[tuple[int, int]]) -> Forward:
    starts, num_new = np.array(rows, np.int64).T
    return Forward(starts, num_new)


def tables_of(rows: list[tuple[int, int]], block_tokens: int) -> np.ndarray:
    """Page r * 100 + b for block b of row r."""
    blocks = max(-(-(start + new) // block_tokens) for start, new in rows)
    return (np.arange(1, len(rows) + 1)[:, None] * 100 + np.arange(blocks)).astype(np.int32)


@given(rows=spans, window=windows, block_tokens=st.integers(1, 7))
def test_every_row_ends_in_the_last_column(
    rows: list[tuple[int, int]], window: int | None, block_tokens: int
) -> None:
    forward = forward_of(rows)
    width = forward.width(window)
    pages, offsets = forward.pages(tables_of(rows, block_tokens), width, block_tokens)
    for r, (start, new) in enumerate(rows):
        for column in range(width):
            token = start + new - width + column
            if token < 0:
                assert pages[r, column] == SINK
            else:
                assert pages[r, column] == (r + 1) * 100 + token // block_tokens
                assert offsets[r, column] == token % block_tokens


@given(rows=spans, window=windows)
def test_a_query_sees_its_whole_window(rows: list[tuple[int, int]], window: int | None) -> None:
    forward = forward_of(rows)
    width = forward.width(window)
    for start, new in rows:
        first = max(0, start - window + 1) if window is not None else 0
        assert start + new - width <= first


@given(rows=spans)
def test_mask_positions_and_new_tokens(rows: list[tuple[int, int]]) -> None:
    forward = forward_of(rows)
    mask, positions, new = forward.mask(), forward.positions(), forward.is_new()
    for r, (start, count) in enumerate(rows):
        assert mask[r].sum() == start + count
        assert mask[r, forward.length - start - count :].all()
        assert positions[r, -count:].tolist() == list(range(start, start + count))
        assert new[r].sum() == count
        assert new[r, -count:].all()
    assert forward.is_padded == (not mask.all())
    assert forward.is_even == new.all()
    assert forward.is_uniform == (len(set(rows)) == 1)
    assert forward.is_mixed == (len({start > 0 for start, _ in rows}) == 2)


@given(rows=spans)
def test_past_positions_are_those_of_the_past_columns(rows: list[tuple[int, int]]) -> None:
    forward = forward_of(rows)
    past = forward.past_positions()
    assert past.shape == (len(rows), forward.past)
    for r, (start, count) in enumerate(rows):
        padding = forward.length - start - count
        assert past[r].tolist() == [max(0, column - padding) for column in range(forward.past)]


@given(start=st.integers(0, 60), new=st.integers(1, 20), ratio=st.integers(2, 9))
def test_folded_forwards_count_whole_entries(start: int, new: int, ratio: int) -> None:
    folded = forward_of([(start, new)] * 2).folded(ratio)
    entries = [(e + 1) * ratio for e in range((start + new) // ratio)]
    assert (folded.length, folded.batch_size) == (len(entries), 2)
    assert folded.num_queries == sum(end > start for end in entries)


@given(start=st.integers(0, 60), new=st.integers(1, 20), window=st.integers(1, 30))
def test_sizes_are_those_of_transformers_layers(start: int, new: int, window: int) -> None:
    forward = forward_of([(start, new)])
    sliding = DynamicSlidingWindowLayer(sliding_window=window)
    sliding.cumulative_length = start
    width = forward.width(window)
    assert (width, forward.length - width) == sliding.get_mask_sizes(new)
    full = DynamicLayer()
    if start == 0:
        assert (forward.width(None), 0) == full.get_mask_sizes(new)


def test_pages_a_window_has_left_read_the_sink() -> None:
    forward = forward_of([(10, 1), (10, 4)])
    table = np.array([[ABSENT, 1, 2, ABSENT], [ABSENT, 3, 4, 5]], np.int32)
    pages, _ = forward.pages(table, forward.width(4), 4)
    # The second row's four queries read tokens 7..13; the first has only one and reads 4..10.
    assert pages[1].tolist() == [3, 4, 4, 4, 4, 5, 5]
    assert pages[0].tolist() == [1, 1, 1, 1, 2, 2, 2]
    wide, _ = forward.pages(table, 10, 4)
    assert wide[0, :3].tolist() == [SINK, SINK, SINK]


@pytest.mark.parametrize("rows", [[(0, 0)], [(-1, 2)], [(4, 1), (2, 0)]])
def test_impossible_forwards_are_refused(rows: list[tuple[int, int]]) -> None:
    with pytest.raises(UsageError, match="starts >= 0 and num_new >= 1"):
        forward_of(rows)


def test_no_rows_are_refused() -> None:
    empty = np.zeros(0, np.int64)
    with pytest.raises(UsageError, match="needs sequences"):
        Forward(empty, empty)
