"""Granules of one tier, shared by the pools of that tier."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvtide.errors import InvariantError, UsageError
from kvtide.memory.books import as_indices

if TYPE_CHECKING:
    from kvtide.memory.arena import Memory
    from kvtide.types import IntArray


class Budget:
    """Who may map which physical granule: each handle is either free here or taken by someone."""

    def __init__(self, memory: Memory) -> None:
        """Start with every granule of `memory` free."""
        # A stack, lowest handle on top: granules given back last are taken first, so physical
        # memory that was never touched stays untouched as long as possible.
        self._stack = np.arange(memory.num_granules - 1, -1, -1, dtype=np.int64)
        self._is_taken = np.zeros(memory.num_granules, dtype=np.bool_)
        self._num_free = memory.num_granules

    @property
    def num_granules(self) -> int:
        """Granules of the tier, free or taken."""
        return len(self._stack)

    @property
    def num_free(self) -> int:
        """Granules that can be taken now."""
        return self._num_free

    def take(self, n: int) -> IntArray | None:
        """Take `n` handles (int64 [n], ascending), or return None and change nothing."""
        if n < 0:
            raise UsageError(f"cannot take {n} granules; ask for 0 or more")
        if n > self._num_free:
            return None
        self._num_free -= n
        handles = np.sort(self._stack[self._num_free : self._num_free + n])
        self._is_taken[handles] = True
        return handles

    def give(self, handles: IntArray) -> None:
        """Give taken handles back; unmap them first. UsageError if one is not taken."""
        handles = as_indices("handle", handles, self.num_granules)
        stray = handles[~self._is_taken[handles]]
        if stray.size:
            raise UsageError(
                f"handle {stray[0]} is not taken ({self._num_free} of {self.num_granules} are free)"
            )
        self._is_taken[handles] = False
        self._stack[self._num_free : self._num_free + len(handles)] = np.sort(handles)[::-1]
        self._num_free += len(handles)

    def check(self) -> None:
        """InvariantError unless every handle is exactly once free or taken."""
        free = self._stack[: self._num_free]
        num_taken = int(self._is_taken.sum())
        if self._num_free + num_taken != self.num_granules:
            raise InvariantError(
                f"{self._num_free} free + {num_taken} taken != {self.num_granules} granules"
            )
        if self._is_taken[free].any() or len(np.unique(free)) != len(free):
            raise InvariantError(
                f"a handle among the free {free.tolist()} is taken or listed twice"
            )
