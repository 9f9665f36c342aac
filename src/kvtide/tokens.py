"""Token ids at the door: without a copy where the buffer protocol allows it, checked once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from kvtide.errors import UsageError

if TYPE_CHECKING:
    from kvtide.types import TokenArray


class TensorLike(Protocol):
    """A CPU tensor: gives a numpy view of its memory."""

    def numpy(self) -> object:
        """The same memory as a numpy array."""
        ...


TokenSource: TypeAlias = TensorLike | Iterable[int] | Any
"""Anything `as_tokens` takes; typing cannot name the buffer protocol before Python 3.12."""


def as_tokens(source: object) -> TokenArray:
    """`source` as int32 [n]: a view if it is int32 already, else one conversion.

    Takes numpy arrays, memoryviews, `array.array`, CPU tensors and lists. Raises UsageError if it
    is empty, not one-dimensional, not integers, or has an id outside [0, 2**31): negative ids name
    media.
    """
    to_numpy = getattr(source, "numpy", None)
    if to_numpy is not None:
        source = to_numpy()
    try:
        ids = np.asarray(source)
    except (TypeError, ValueError) as cause:
        raise UsageError(
            f"tokens of type {type(source).__name__} are not a flat list of integers"
        ) from cause
    if ids.ndim != 1 or not len(ids):
        raise UsageError(
            f"tokens have shape {list(ids.shape)}; give one flat sequence of at least one id"
        )
    if ids.dtype.kind not in "iu":
        raise UsageError(f"tokens have dtype {ids.dtype}; give integers")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high > np.iinfo(np.int32).max:
        raise UsageError(
            f"token id {low if low < 0 else high} is outside [0, 2**31); negative ids are kept "
            "for media content "
            "(pass media=... instead)"
        )
    return np.ascontiguousarray(ids, np.int32)
