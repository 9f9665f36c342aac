"""Media content as token ids: equal ids if and only if equal content at an equal place."""

from __future__ import annotations

import numpy as np
import pytest

from kvtide.errors import CapacityError, ConfigError, UsageError
from kvtide.media import Media, MediaIds

CAT, DOG = b"c" * 16, b"d" * 32
PROMPT = np.array([5, 6, 1000, 1000, 1000, 7], np.int32)


def test_text_stays_and_content_gets_negative_ids() -> None:
    marked = MediaIds().mark(PROMPT, [Media(2, 3, CAT)])
    assert marked[[0, 1, 5]].tolist() == [5, 6, 7]
    span = marked[2:5].tolist()
    assert all(token < 0 for token in span)
    assert len(set(span)) == 3, "each position of the content is told apart"
    assert PROMPT[2:5].tolist() == [1000] * 3, "the engine's array is left alone"


def test_equal_content_gets_equal_ids_wherever_it_stands() -> None:
    ids = MediaIds()
    first = ids.mark(PROMPT, [Media(2, 3, CAT)])
    again = ids.mark(PROMPT, [Media(1, 3, CAT)])
    assert first[2:5].tolist() == again[1:4].tolist()


@pytest.mark.parametrize("other", [Media(2, 3, DOG), Media(2, 2, CAT), Media(2, 3, CAT + b"c")])
def test_other_content_gets_other_ids(other: Media) -> None:
    ids = MediaIds()
    first = set(ids.mark(PROMPT, [Media(2, 3, CAT)]).tolist())
    second = set(ids.mark(PROMPT, [other]).tolist())
    assert all(token >= 0 for token in first & second)


def test_two_items_in_one_prompt() -> None:
    marked = MediaIds().mark(PROMPT, [Media(0, 2, CAT), Media(3, 2, DOG)])
    assert len({token for token in marked.tolist() if token < 0}) == 4
    assert marked[2] == 1000


def test_cleared_content_does_not_give_its_ids_to_others() -> None:
    ids = MediaIds()
    before = set(ids.mark(PROMPT, [Media(2, 3, CAT)])[2:5].tolist())
    ids.clear()
    after = set(ids.mark(PROMPT, [Media(2, 3, CAT)])[2:5].tolist())
    assert not before & after


def test_ids_run_out_in_the_end() -> None:
    ids = MediaIds()
    long = np.zeros(4, np.int32)
    ids._next = np.iinfo(np.int32).min + 2
    with pytest.raises(CapacityError, match=r"call reset\(\) to start over"):
        ids.mark(long, [Media(0, 4, CAT)])
    assert ids.mark(long, [Media(0, 2, CAT)])[0] < 0


@pytest.mark.parametrize(("start", "length"), [(-1, 3), (0, 0), (2, -1)])
def test_spans_are_not_empty(start: int, length: int) -> None:
    with pytest.raises(ConfigError, match=rf"starts at {start} with {length} tokens; give"):
        Media(start, length, CAT)


def test_short_digests_are_refused() -> None:
    with pytest.raises(ConfigError, match="digest has 120 bits; give at least 128"):
        Media(0, 1, b"x" * 15)


def test_spans_lie_inside_the_prompt() -> None:
    with pytest.raises(UsageError, match=r"\[4, 7\) is outside the 6 tokens"):
        MediaIds().mark(PROMPT, [Media(4, 3, CAT)])


def test_spans_do_not_overlap() -> None:
    with pytest.raises(UsageError, match=r"\[3, 5\) overlaps another"):
        MediaIds().mark(PROMPT, [Media(2, 3, CAT), Media(3, 2, DOG)])
