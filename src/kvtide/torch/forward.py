"""What one forward covers: which sequences, from where, how many tokens. Index arithmetic only."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvtide.errors import UsageError
from kvtide.types import ABSENT, SINK

if TYPE_CHECKING:
    import numpy.typing as npt

    from kvtide.types import IntArray, PageArray


class Forward:
    """The rows of one model call, aligned at their right ends.

    columns:   0                        length - width              length - q      length
    row i:     |  padding (sink page)   |  past the layer may read  |  new tokens   |

    Every row ends in the last column, so a row with fewer tokens has padding on its left, as a
    left-padded batch in `generate`; a model that masks its padding needs to know nothing of pages.
    `starts` and `num_new` are int64 [batch]: tokens computed before, tokens computed now (>= 1,
    or `least_new`).
    """

    def __init__(self, starts: IntArray, num_new: IntArray, *, least_new: int = 1) -> None:
        if len(starts) == 0 or num_new.min() < least_new or starts.min() < 0:
            raise UsageError(
                f"a forward needs sequences with starts >= 0 and num_new >= {least_new}, "
                f"got starts {starts} and num_new {num_new}"
            )
        self.starts = starts
        self.num_new = num_new
        self.ends: IntArray = starts + num_new
        self.num_queries = int(num_new.max())
        self.length = int(self.ends.max())
        self.past = self.length - self.num_queries
        self.is_fresh = not starts.any()
        """Whether no row has a past: what is written now is all there is to read."""
        self.is_mixed = not self.is_fresh and not starts.all()
        """Whether some rows have a past and others have none."""
        self.is_even = bool((num_new == self.num_queries).all())
        """Whether all rows compute equally many tokens."""
        self.is_padded = bool((self.ends != self.length).any())
        """Whether a row is shorter than `length`."""
        self._cells: dict[int, tuple[IntArray, IntArray]] = {}

    @property
    def batch_size(self) -> int:
        """Number of sequences."""
        return len(self.starts)

    @property
    def is_uniform(self) -> bool:
        """Whether all rows have the same past and compute equally many tokens."""
        return self.is_even and not self.is_padded

    def folded(self, ratio: int) -> Forward:
        """The same in entries that stand for `ratio` tokens each; there may be no new ones."""
        starts = self.starts // ratio
        return Forward(starts, self.ends // ratio - starts, least_new=0)

    def width(self, window: int | None) -> int:
        """Columns a layer reads, new tokens included; `window` None is full attention.

        The same as `DynamicSlidingWindowLayer`: at most `window - 1` tokens of the past.
        """
        past = self.past if window is None else min(self.past, window - 1)
        return past + self.num_queries

    def mask(self) -> npt.NDArray[np.bool_]:
        """True where a column holds a token, [batch, length]."""
        return np.arange(self.length) >= (self.length - self.ends)[:, None]

    def positions(self) -> IntArray:
        """Position of every query in its sequence, [batch, num_queries]; padding counts as 0."""
        columns = np.arange(self.num_queries) - self.num_queries
        return np.maximum(self.ends[:, None] + columns, 0)

    def past_positions(self) -> IntArray:
        """Position of every past column in its sequence, [batch, past]; padding counts as 0."""
        return np.maximum(np.arange(self.past) - (self.length - self.ends)[:, None], 0)

    def is_new(self) -> npt.NDArray[np.bool_]:
        """True where a query column holds a new token, [batch, num_queries]."""
        return np.arange(self.num_queries) >= (self.num_queries - self.num_new)[:, None]

    def pages(self, table: PageArray, width: int, block_tokens: int) -> tuple[IntArray, IntArray]:
        """Page and offset of the last `width` columns, both int64 [batch, width].

        `table` int32 [batch, blocks] is the page table of the rows. Padding, and columns beyond a
        window that only a padded row has, read the sink page.
        """
        blocks, offsets = self._blocks(width, block_tokens)
        pages = np.take_along_axis(table, np.maximum(blocks, 0), axis=1).astype(np.int64)
        pages[(blocks < 0) | (pages == ABSENT)] = SINK
        return pages, offsets

    def _blocks(self, width: int, block_tokens: int) -> tuple[IntArray, IntArray]:
        """Block (negative: padding) and offset of the last `width` columns."""
        if width not in self._cells:
            at = (self.ends - width)[:, None] + np.arange(width)
            blocks = at // block_tokens
            self._cells[width] = (blocks, at - blocks * block_tokens)
        return self._cells[width]
