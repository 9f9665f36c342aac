"""Token ids at the door: no copy where none is needed, and nothing but ids."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
from tests.tiny import Rig, full

from kvtide.errors import UsageError
from kvtide.tokens import as_tokens


class Tensor:
    """As a CPU tensor: it shows its memory as a numpy array."""

    def __init__(self, ids: np.ndarray) -> None:
        self.ids = ids

    def numpy(self) -> np.ndarray:
        return self.ids


def test_int32_is_taken_without_a_copy() -> None:
    ids = np.array([3, 1, 2], np.int32)
    for source in (ids, memoryview(ids), Tensor(ids), ids[:2]):
        assert np.shares_memory(as_tokens(source), ids)


def test_an_array_of_the_standard_library_is_taken_without_a_copy() -> None:
    ids = array("i", [3, 1, 2])
    taken = as_tokens(ids)
    ids[0] = 7
    assert taken.tolist() == [7, 1, 2]


@pytest.mark.parametrize("dtype", [np.int64, np.uint8, np.uint32, np.int16])
def test_other_integers_are_converted_once(dtype: type) -> None:
    taken = as_tokens(np.array([3, 1, 200], dtype))
    assert taken.dtype == np.int32
    assert taken.tolist() == [3, 1, 200]


@pytest.mark.parametrize("source", [[3, 1, 2], (3, 1, 2), range(1, 4)])
def test_lists_and_ranges(source: object) -> None:
    assert as_tokens(source).tolist() == list(source)  # type: ignore[call-overload]


def test_what_has_gaps_becomes_contiguous() -> None:
    ids = np.arange(10, dtype=np.int32)
    taken = as_tokens(ids[::2])
    assert taken.flags.c_contiguous
    assert taken.tolist() == [0, 2, 4, 6, 8]


def test_the_ends_of_the_range() -> None:
    assert as_tokens([0, 2**31 - 1]).tolist() == [0, 2**31 - 1]


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ([], r"shape \[0\]; give one flat sequence of at least one id"),
        ([[1, 2], [3, 4]], r"shape \[2, 2\]"),
        (np.int32(5), r"shape \[\]"),
        ([1.0, 2.0], "dtype float64; give integers"),
        ([True, False], "dtype bool; give integers"),
        ("text", "give one flat sequence|not a flat list|dtype"),
        ([[1], [2, 3]], "type list are not a flat list of integers"),
        ([1, -1], "token id -1 is outside .* media"),
        ([1, 2**31], "token id 2147483648 is outside"),
    ],
)
def test_anything_else_is_refused(source: object, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        as_tokens(source)


def test_the_prompt_an_engine_passes_is_the_prompt_the_sequence_holds() -> None:
    rig = Rig(full(), pages=[8], max_tokens=16)
    ids = np.arange(12, dtype=np.int32)
    seq = rig.kv.open(ids)
    assert np.shares_memory(seq.tokens, ids)
    assert rig.kv.admit([seq])
    ids[:] = 99
    assert seq.tokens.tolist() == list(range(12)), "an admitted sequence keeps its own tokens"
