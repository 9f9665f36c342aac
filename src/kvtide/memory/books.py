"""Books every arena keeps, with bytes or without: which handle shows where, and what is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvtide.errors import ConfigError, InvariantError, UsageError
from kvtide.types import ABSENT

if TYPE_CHECKING:
    import numpy.typing as npt

    from kvtide.types import IntArray


DEFAULT_GRANULE_BYTES = 2 << 20
"""What CUDA maps at least; the twin uses the same, so that counts of granules agree."""


def check_sizes(num_bytes: int, granule_bytes: int, *, unit: int) -> int:
    """Number of granules in `num_bytes`; a rest smaller than a granule stays unused.

    ConfigError unless `granule_bytes` is a positive multiple of `unit` and one granule fits.
    """
    if granule_bytes <= 0 or granule_bytes % unit:
        raise ConfigError(
            f"granule_bytes must be a positive multiple of {unit}, got {granule_bytes}; "
            f"use {max(unit, granule_bytes // unit * unit)}"
        )
    if num_bytes < granule_bytes:
        raise ConfigError(
            f"num_bytes must hold at least one granule of {granule_bytes} bytes, got {num_bytes}; "
            f"raise num_bytes or lower granule_bytes"
        )
    return num_bytes // granule_bytes


def check_reservation(num_granules: int) -> None:
    """ConfigError unless an arena of this size makes sense."""
    if num_granules < 1:
        raise ConfigError(
            f"num_granules must be >= 1 to reserve an arena, got {num_granules}; use 1 or more"
        )


def as_indices(what: str, values: IntArray, limit: int) -> IntArray:
    """`values` as int64 [n]; UsageError if one lies outside [0, limit) or comes twice."""
    array = np.asarray(values, dtype=np.int64)
    if array.ndim != 1:
        raise UsageError(
            f"{what}s must be one-dimensional, got shape {array.shape}; pass an int64 array [n]"
        )
    outside = array[(array < 0) | (array >= limit)]
    if outside.size:
        raise UsageError(
            f"{what} {outside[0]} is out of range; there are {limit}, so use 0..{limit - 1}"
        )
    ordered = np.sort(array)
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    if twice.size:
        raise UsageError(f"{what} {twice[0]} is named twice in one call; name each once")
    return array


def check_idle(handles: IntArray, bound: npt.NDArray[np.bool_]) -> IntArray:
    """`handles` as int64 [n], ascending; UsageError if one is mapped in some arena."""
    handles = np.sort(as_indices("handle", handles, len(bound)))
    shown = handles[bound[handles]]
    if shown.size:
        raise UsageError(f"handle {shown[0]} is mapped; unmap it before its bytes are discarded")
    return handles


class ArenaBooks:
    """granule -> handle of one arena, beside the `bound` flags that all arenas of a memory share.

    `plan_*` methods validate and change nothing; `set_*` methods change and cannot fail, so that
    the bytes may be remapped between the two.
    """

    def __init__(self, num_granules: int, granule_bytes: int, bound: npt.NDArray[np.bool_]) -> None:
        """Start with nothing mapped. `bound[handle]` says whether any arena shows that handle."""
        self.num_granules = num_granules
        self.granule_bytes = granule_bytes
        self.num_mapped = 0
        self._bound = bound
        self._handles = np.full(num_granules, ABSENT, dtype=np.int64)
        self._mapped_before: IntArray | None = None
        self._closed = False

    def require_open(self) -> None:
        """UsageError after `close`."""
        if self._closed:
            raise UsageError(
                f"this arena of {self.num_granules} granules is closed; reserve a new one"
            )

    def plan_map(self, granules: IntArray, handles: IntArray) -> tuple[IntArray, IntArray]:
        """Validate a map; the same pairs, sorted by granule."""
        self.require_open()
        granules = as_indices("granule", granules, self.num_granules)
        handles = as_indices("handle", handles, len(self._bound))
        if len(granules) != len(handles):
            raise UsageError(
                f"{len(granules)} granules but {len(handles)} handles; pass one handle per granule"
            )
        taken = granules[self._handles[granules] != ABSENT]
        if taken.size:
            raise UsageError(
                f"granule {taken[0]} already shows handle {self._handles[taken[0]]}; unmap it first"
            )
        shown = handles[self._bound[handles]]
        if shown.size:
            raise UsageError(
                f"handle {shown[0]} is mapped already, here or in another arena; unmap it first"
            )
        order = np.argsort(granules)
        return granules[order], handles[order]

    def plan_unmap(self, granules: IntArray) -> tuple[IntArray, IntArray]:
        """Validate an unmap; the granules in order, and the handles they show."""
        granules = np.sort(self._mapped_granules(granules))
        return granules, self._handles[granules]

    def handles_at(self, granules: IntArray) -> IntArray:
        """Handles these mapped granules show, in the caller's order."""
        return self._handles[self._mapped_granules(granules)]

    def set_mapped(self, granules: IntArray, handles: IntArray) -> None:
        """Record that `granules` show `handles`."""
        self._handles[granules] = handles
        self._bound[handles] = True
        self.num_mapped += len(granules)
        self._mapped_before = None

    def set_unmapped(self, granules: IntArray, handles: IntArray) -> None:
        """Record that `granules` show nothing and `handles` are free to be mapped."""
        self._handles[granules] = ABSENT
        self._bound[handles] = False
        self.num_mapped -= len(granules)
        self._mapped_before = None

    def plan_zero(self, at: IntArray, num_bytes: int) -> IntArray:
        """Validate ranges to be cleared; their offsets."""
        return self._ranges("at", at, num_bytes)

    def plan_copy(self, src: IntArray, dst: IntArray, num_bytes: int) -> tuple[IntArray, IntArray]:
        """Validate copies; their offsets. No destination overlaps a source or a destination."""
        src = self._ranges("src", src, num_bytes)
        dst = self._ranges("dst", dst, num_bytes)
        if len(src) != len(dst):
            raise UsageError(
                f"{len(src)} sources but {len(dst)} destinations; pass one source per destination"
            )
        _check_disjoint(src, dst, num_bytes)
        return src, dst

    def close(self) -> bool:
        """Forget all mappings; whether this call was the one that closed."""
        if self._closed:
            return False
        mapped = np.flatnonzero(self._handles != ABSENT)
        self.set_unmapped(mapped, self._handles[mapped])
        self._closed = True
        return True

    def check(self) -> None:
        """InvariantError if the counts, the map and the shared flags disagree."""
        shown = self._handles[self._handles != ABSENT]
        if len(shown) != self.num_mapped:
            raise InvariantError(
                f"num_mapped is {self.num_mapped}, but {len(shown)} granules show a handle"
            )
        if len(np.unique(shown)) != len(shown) or not self._bound[shown].all():
            raise InvariantError(
                f"a handle among {shown.tolist()} is shown twice or not flagged as bound"
            )

    def _mapped_granules(self, granules: IntArray) -> IntArray:
        self.require_open()
        granules = as_indices("granule", granules, self.num_granules)
        absent = granules[self._handles[granules] == ABSENT]
        if absent.size:
            raise UsageError(
                f"granule {absent[0]} is not mapped; {self.num_mapped} of {self.num_granules} are"
            )
        return granules

    def _ranges(self, what: str, offsets: IntArray, num_bytes: int) -> IntArray:
        self.require_open()
        offsets = np.asarray(offsets, dtype=np.int64)
        limit = self.num_granules * self.granule_bytes
        if offsets.shape == (1,) and self._is_plain(int(offsets[0]), num_bytes, limit):
            return offsets
        if offsets.ndim != 1:
            raise UsageError(
                f"{what} must be one-dimensional, got shape {offsets.shape}; pass int64 [n]"
            )
        if num_bytes < 1:
            raise UsageError(
                f"num_bytes must be >= 1, got {num_bytes}; drop the call if there is nothing to do"
            )
        outside = offsets[(offsets < 0) | (offsets > limit - num_bytes)]
        if outside.size:
            raise UsageError(
                f"{what} {outside[0]} + {num_bytes} bytes leaves the arena of {limit} bytes"
            )
        hollow = offsets[~self._is_backed(offsets, num_bytes)]
        if hollow.size:
            raise UsageError(
                f"{what} {hollow[0]} + {num_bytes} bytes touches an unmapped granule; map it first"
            )
        return offsets

    def _is_plain(self, offset: int, num_bytes: int, limit: int) -> bool:
        """One range that is surely fine: the step path's usual case, without building arrays."""
        if num_bytes < 1 or not 0 <= offset <= limit - num_bytes:
            return False
        first = offset // self.granule_bytes
        stop = (offset + num_bytes - 1) // self.granule_bytes + 1
        return ABSENT not in self._handles[first:stop]

    def _is_backed(self, offsets: IntArray, num_bytes: int) -> npt.NDArray[np.bool_]:
        # A range may cross many granules: counting the mapped ones before each granule makes the
        # test two look-ups a range. The counts are rebuilt only after a map or unmap.
        if self._mapped_before is None:
            self._mapped_before = np.concatenate(([0], np.cumsum(self._handles != ABSENT)))
        first = offsets // self.granule_bytes
        stop = (offsets + num_bytes - 1) // self.granule_bytes + 1
        return self._mapped_before[stop] - self._mapped_before[first] == stop - first


def _check_disjoint(src: IntArray, dst: IntArray, num_bytes: int) -> None:
    if len(src) == 1:  # the common case on the step path, without a sort
        if abs(int(src[0]) - int(dst[0])) < num_bytes:
            raise UsageError(
                f"source {src[0]} + {num_bytes} bytes overlaps a destination; copy in two calls"
            )
        return
    ordered = np.sort(dst)
    close = np.flatnonzero(np.diff(ordered) < num_bytes)
    if close.size:
        a, b = ordered[close[0]], ordered[close[0] + 1]
        raise UsageError(
            f"destinations {a} and {b} overlap, {num_bytes} bytes each; write each byte once"
        )
    # Only the nearest destination at or below, and the nearest above, can overlap a source.
    above = np.searchsorted(ordered, src, side="right")
    for neighbour in (above - 1, above):
        inside = (neighbour >= 0) & (neighbour < len(ordered))
        gap = np.abs(ordered[neighbour[inside]] - src[inside])
        if (gap < num_bytes).any():
            at = src[inside][gap < num_bytes][0]
            raise UsageError(
                f"source {at} + {num_bytes} bytes overlaps a destination; copy in two calls"
            )
