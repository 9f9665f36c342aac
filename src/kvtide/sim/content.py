"""What a trace's prompts have in common: the hits that memory without end would give."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from kvtide.sim.traces import TraceRequest


class SeenContent:
    """Which content ids have been part of a prompt before. Ids are those of a trace: 0 and up."""

    def __init__(self) -> None:
        self._seen = np.zeros(1 << 16, np.bool_)

    def shared_tokens(self, request: TraceRequest) -> int:
        """Leading tokens of this prompt that an earlier one had, all but the last of its own."""
        blocks = 0
        for first, count in request.runs.tolist():
            known = self._within(first, count)
            new = int(known.argmin()) if not known.all() else count
            blocks += new
            if new < count:
                break
        return min(blocks * request.block, request.input_tokens - 1)

    def add(self, request: TraceRequest) -> None:
        """This prompt has been seen."""
        for first, count in request.runs.tolist():
            self._within(first, count)[:] = True

    @property
    def num_blocks(self) -> int:
        """Different content ids seen."""
        return int(np.count_nonzero(self._seen))

    def _within(self, first: int, count: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        stop = first + count
        if stop > len(self._seen):
            grown = np.zeros(max(stop, 2 * len(self._seen)), np.bool_)
            grown[: len(self._seen)] = self._seen
            self._seen = grown
        return self._seen[first:stop]
