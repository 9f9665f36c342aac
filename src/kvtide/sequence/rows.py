"""Per-sequence numbers as arrays indexed by row, and which rows are taken."""

from __future__ import annotations

import heapq

import numpy as np

from kvtide.errors import InvariantError
from kvtide.types import TokenArray, ceil_div


class Rows:
    """`length`, `computed` and `room` (all in tokens, int64) and known tokens of up to
    `max_sequences`.
    """

    __slots__ = (
        "_free",
        "anchor",
        "block_tokens",
        "computed",
        "length",
        "max_blocks",
        "max_tokens",
        "published",
        "room",
        "tokens",
    )  # fmt: skip

    def __init__(self, max_sequences: int, max_tokens: int, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.max_tokens = max_tokens
        self.max_blocks = ceil_div(max_tokens, block_tokens)
        self.length = np.zeros(max_sequences, np.int64)
        self.computed = np.zeros(max_sequences, np.int64)
        self.room = np.zeros(max_sequences, np.int64)
        self.anchor = np.zeros(
            max_sequences, np.int64
        )  # slot of the node the published path ends at
        self.published = np.zeros(max_sequences, np.int64)  # tokens on that path
        self.tokens = np.empty((max_sequences, max_tokens), np.int32)
        self._free = list(range(max_sequences))

    @property
    def num_free(self) -> int:
        """Rows that a new sequence could have."""
        return len(self._free)

    def take(self, tokens: TokenArray) -> int:
        """Give the lowest free row to a sequence with these known tokens (nothing computed yet)."""
        row = heapq.heappop(self._free)
        self.tokens[row, : len(tokens)] = tokens
        self.length[row] = len(tokens)
        return row

    def give(self, row: int) -> None:
        """The sequence at `row` is gone."""
        self.length[row] = self.computed[row] = self.room[row] = self.published[row] = 0
        heapq.heappush(self._free, row)

    def blocks(self, row: int) -> int:
        """Blocks for which the sequence at `row` holds pages (stale ones included)."""
        return int(self.room[row]) // self.block_tokens

    def check(self) -> None:
        """Raise InvariantError unless computed <= length, computed <= room, and free rows are
        clear.
        """
        free = np.array(self._free, np.int64)
        if len(set(self._free)) != len(self._free):
            raise InvariantError("a row is free twice")
        if self.length[free].any() or self.computed[free].any() or self.room[free].any():
            raise InvariantError("a free row is not clear")
        if (self.computed > self.length).any() or (self.computed > self.room).any():
            raise InvariantError(
                "a sequence has computed more tokens than it knows or has room for"
            )
        if (self.room % self.block_tokens).any():
            raise InvariantError("room is not a whole number of blocks")
