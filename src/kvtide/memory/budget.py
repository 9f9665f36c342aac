"""Granules of one tier, shared by the pools of that tier."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvtide.errors import ConfigError, InvariantError, UsageError
from kvtide.memory.books import as_indices

if TYPE_CHECKING:
    import numpy.typing as npt

    from kvtide.memory.arena import Memory
    from kvtide.types import IntArray


class Budget:
    """Who may map which physical granule: each handle is either untaken here or taken by someone.

    `quota` is how many may be taken at most. It may be set below what is taken: then nothing is
    free until the `overdraft` has been given back. The physical memory of granules beyond the quota
    goes back to the system when `discard` is called.
    """

    def __init__(self, memory: Memory) -> None:
        """Start with every granule of `memory` free."""
        # A stack, lowest handle on top: granules given back last are taken first, so physical
        # memory that was never touched stays untouched as long as possible.
        self._stack = np.arange(memory.num_granules - 1, -1, -1, dtype=np.int64)
        self._is_taken = np.zeros(memory.num_granules, dtype=np.bool_)
        self._is_backed = np.zeros(memory.num_granules, dtype=np.bool_)
        self._num_untaken = memory.num_granules
        self._memory = memory
        self._quota = memory.num_granules

    @property
    def num_granules(self) -> int:
        """Granules of the memory: the most the quota can be."""
        return len(self._stack)

    @property
    def granule_bytes(self) -> int:
        """Bytes per granule."""
        return self._memory.granule_bytes

    @property
    def quota(self) -> int:
        """Granules that may be taken at the same time."""
        return self._quota

    @property
    def num_taken(self) -> int:
        """Granules that are taken."""
        return len(self._stack) - self._num_untaken

    @property
    def num_free(self) -> int:
        """Granules that can be taken now."""
        return max(0, self._quota - self.num_taken)

    @property
    def overdraft(self) -> int:
        """Granules taken beyond the quota."""
        return max(0, self.num_taken - self._quota)

    def set_quota(self, num_granules: int) -> None:
        """Allow so many granules from now on. ConfigError unless the memory has as many."""
        if not 0 < num_granules <= self.num_granules:
            raise ConfigError(
                f"a budget of {num_granules} granules was asked for; the memory has "
                f"{self.num_granules}, so use 1 to {self.num_granules}, or create a larger memory"
            )
        self._quota = num_granules

    def take(self, n: int) -> IntArray | None:
        """Take `n` handles (int64 [n], ascending), or return None and change nothing."""
        if n < 0:
            raise UsageError(f"cannot take {n} granules; ask for 0 or more")
        if n > self.num_free:
            return None
        self._num_untaken -= n
        handles = np.sort(self._stack[self._num_untaken : self._num_untaken + n])
        self._is_taken[handles] = True
        self._is_backed[handles] = True
        return handles

    def is_zero(self, handles: IntArray) -> npt.NDArray[np.bool_]:
        """Which of these granules need not be cleared before use; see `Memory.is_zero`."""
        return self._memory.is_zero(handles)

    def give(self, handles: IntArray) -> None:
        """Give taken handles back; unmap them first. UsageError if one is not taken."""
        handles = as_indices("handle", handles, self.num_granules)
        stray = handles[~self._is_taken[handles]]
        if stray.size:
            raise UsageError(
                f"handle {stray[0]} is not taken ({self.num_free} of {self._quota} are free)"
            )
        self._is_taken[handles] = False
        self._stack[self._num_untaken : self._num_untaken + len(handles)] = np.sort(handles)[::-1]
        self._num_untaken += len(handles)

    def discard(self, most: int | None = None) -> int:
        """Give the system the memory of up to `most` granules (None: all) that the quota leaves no
        use for; how many.

        It takes the system a quarter of a microsecond or so for each 4 KiB, hence in small pieces.
        """
        withheld = self._num_untaken - self.num_free
        if not withheld:
            return 0
        idle = self._stack[:withheld]  # the bottom: what was given back longest ago
        idle = idle[self._is_backed[idle]][:most]
        if len(idle):
            self._memory.discard(idle)
            self._is_backed[idle] = False
        return len(idle)

    def check(self) -> None:
        """InvariantError unless every handle is exactly once untaken or taken."""
        free = self._stack[: self._num_untaken]
        num_taken = int(self._is_taken.sum())
        if self._num_untaken + num_taken != self.num_granules:
            raise InvariantError(
                f"{self._num_untaken} untaken + {num_taken} taken != {self.num_granules} granules"
            )
        if self._is_taken[free].any() or len(np.unique(free)) != len(free):
            raise InvariantError(
                f"a handle among the free {free.tolist()} is taken or listed twice"
            )
