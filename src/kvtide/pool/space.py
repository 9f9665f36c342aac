"""Which granules stand under which pages of one pool: pure interval arithmetic on arrays.

Page p occupies bytes [p * page_bytes, (p + 1) * page_bytes) of the pool's arena, granule g the
bytes [g * granule_bytes, (g + 1) * granule_bytes). Page p exists iff every granule it touches is
mapped, so pages may straddle granules and no page is padded.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvtide.types import IntArray, PageArray, ceil_div

BoolArray = npt.NDArray[np.bool_]


class PageSpace:
    """Arithmetic of one pool: `page_bytes` against `granule_bytes`, up to `num_granules`
    granules.
    """

    __slots__ = (
        "_first", "_stop", "granule_bytes", "is_even", "num_granules", "num_pages", "page_bytes",
    )  # fmt: skip

    def __init__(self, page_bytes: int, granule_bytes: int, num_granules: int) -> None:
        self.page_bytes = page_bytes
        self.granule_bytes = granule_bytes
        self.num_granules = num_granules
        self.num_pages = num_granules * granule_bytes // page_bytes
        self.is_even = granule_bytes % page_bytes == 0
        """Whether every granule holds whole pages only."""
        self._first, self._stop = self._page_range(np.arange(num_granules))

    def granules_for(self, num_pages: int) -> int:
        """Fewest granules that can hold `num_pages` pages (packed from address 0)."""
        return ceil_div(num_pages * self.page_bytes, self.granule_bytes)

    def pages_in(self, num_granules: int) -> int:
        """Most pages that `num_granules` granules can hold (mapped from address 0)."""
        return min(num_granules * self.granule_bytes // self.page_bytes, self.num_pages)

    def first_granule(self, pages: PageArray | IntArray) -> IntArray:
        """First granule under each page."""
        return pages.astype(np.int64) * self.page_bytes // self.granule_bytes

    def last_granule(self, pages: PageArray | IntArray) -> IntArray:
        """Last granule under each page."""
        return ((pages.astype(np.int64) + 1) * self.page_bytes - 1) // self.granule_bytes

    def load(self, pages: PageArray | IntArray) -> IntArray:
        """How many of `pages` (all different) touch each granule: int64 [num_granules]."""
        edges = np.bincount(self.first_granule(pages), minlength=self.num_granules + 1)
        edges -= np.bincount(self.last_granule(pages) + 1, minlength=self.num_granules + 1)
        return np.cumsum(edges)[: self.num_granules]

    def count(self, marked: BoolArray) -> IntArray:
        """How many marked pages touch each granule, int [num_granules]; `marked` is bool by page
        id, False beyond its end.
        """
        before = np.zeros(self.num_pages + 1, np.int32)
        np.cumsum(marked, out=before[1 : len(marked) + 1])
        before[len(marked) + 1 :] = before[len(marked)]
        return before[self._stop] - before[self._first]

    def touching(self, granules: IntArray) -> PageArray:
        """Pages with at least one byte in `granules`, ascending."""
        first, stop = self._page_range(granules)
        if len(granules) and granules.max() - granules.min() == len(granules) - 1:
            low, high = first.min(), stop.max()  # neighbours, in any order: the usual case
            return np.arange(low, high, dtype=np.int32)
        counts = np.maximum(stop - first, 0)
        ends = np.cumsum(counts)
        offsets = np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - counts, counts)
        return np.unique(np.repeat(first, counts) + offsets).astype(np.int32)

    def complete(self, pages: PageArray, mapped: BoolArray) -> PageArray:
        """Those of `pages` whose granules are all mapped."""
        holes = np.concatenate([[0], np.cumsum(~mapped)])
        return pages[holes[self.last_granule(pages) + 1] == holes[self.first_granule(pages)]]

    def bare(self, granules: IntArray, exists: BoolArray) -> IntArray:
        """Those of `granules` that no existing page touches."""
        if not len(granules):
            return granules
        first, stop = self._page_range(granules)
        low = int(first.min())
        before = np.concatenate([[0], np.cumsum(exists[low : int(stop.max())])])
        return granules[before[np.maximum(stop, first) - low] == before[first - low]]

    def under(self, pages: PageArray | IntArray) -> IntArray:
        """Granules that at least one of `pages` touches, ascending."""
        return np.flatnonzero(self.load(pages))

    def _page_range(self, granules: IntArray) -> tuple[IntArray, IntArray]:
        first = granules * self.granule_bytes // self.page_bytes
        stop = -(-(granules + 1) * self.granule_bytes // self.page_bytes)
        return np.minimum(first, self.num_pages), np.minimum(stop, self.num_pages)
