"""Content ids of several spaces laid into one, as they come, so that tokens stay below int32."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvtide.sim.traces.request import check_tokens
from kvtide.types import align_up

if TYPE_CHECKING:
    from collections.abc import Hashable

    from kvtide.types import IntArray

SLAB_TOKENS = 2**16
"""Ids are laid out in slabs of this many tokens; a space takes one when it first uses it, so an
id space may be read as it comes, without knowing how far it reaches.
"""


class IdSpace:
    """One id space for many: equal (space, block, id) get an equal id, others share no token."""

    def __init__(self) -> None:
        self._next_token = 0
        self._slabs: dict[tuple[Hashable, int, int], int] = {}

    def place(self, space: Hashable, runs: IntArray, block: int, where: str) -> IntArray:
        """The `runs` [k, 2] of `space` in the common space, in units of `block` tokens.

        Raises ConfigError, naming `where`, once all token ids are used up.
        """
        size = max(1, SLAB_TOKENS // block)
        placed: list[list[int]] = []
        for first, count in runs.tolist():
            at, end = first, first + count
            while at < end:
                slab, offset = divmod(at, size)
                step = min(end - at, size - offset)
                start = self._slab(space, block, slab, where) + offset
                if placed and sum(placed[-1]) == start:
                    placed[-1][1] += step
                else:
                    placed.append([start, step])
                at += step
        return np.array(placed, np.int64).reshape(-1, 2)

    def fresh(self, count: int, block: int, where: str) -> int:
        """The first of `count` successive ids that stand for new content, `block` tokens each.

        Raises ConfigError, naming `where`, once all token ids are used up.
        """
        start = align_up(self._next_token, block)
        end = start + count * block
        check_tokens(end, where)
        self._next_token = end
        return start // block

    def _slab(self, space: Hashable, block: int, slab: int, where: str) -> int:
        key = (space, block, slab)
        first = self._slabs.get(key)
        if first is None:
            first = self._slabs[key] = self.fresh(max(1, SLAB_TOKENS // block), block, where)
        return first
