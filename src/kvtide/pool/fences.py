"""Steps in flight, as two counters. A page or granule is reused only behind the steps that
read it.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol


class Fence(Protocol):
    """Anything that can tell whether the device has finished a step (a CUDA event, a future)."""

    def done(self) -> bool:
        """Return True once every read and write of the step has happened. Must not block."""
        ...


class Fences:
    """Which steps were issued and which are known complete. Steps complete in order.

    `issued` and `completed` are step numbers; equal means quiesced: no step in flight.
    """

    __slots__ = ("_pending", "completed", "horizon", "issued")

    def __init__(self) -> None:
        self.issued = 0
        self.completed = 0
        self.horizon: int | None = None
        """Steps with a fence count as complete only up to this one: what all ranks have reached."""
        self._pending: deque[tuple[int, Fence | None]] = deque()

    @property
    def quiesced(self) -> bool:
        """True when no step is in flight."""
        return self.issued == self.completed

    def begin(self) -> int:
        """Issue the next step and return its number."""
        self.issued += 1
        return self.issued

    def end(self, step: int, fence: Fence | None) -> None:
        """The host is done with `step`; its device work ends with `fence` (None: has ended)."""
        if fence is None and not self._pending and step == self.completed + 1:
            self.completed = step
            return
        self._pending.append((step, fence))
        self.poll()

    def poll(self) -> int:
        """Ask the fences of the oldest steps, return the number of the last completed step."""
        while self._pending:
            step, fence = self._pending[0]
            if fence is not None and not self._has_passed(step, fence):
                break
            self._pending.popleft()
            self.completed = step
        return self.completed

    def reached(self) -> int:
        """The last step whose fence has passed, up to the horizon or beyond it; changes nothing."""
        last = self.completed
        for step, fence in self._pending:
            if fence is not None and not fence.done():
                break
            last = step
        return last

    def _has_passed(self, step: int, fence: Fence) -> bool:
        return fence.done() if self.horizon is None else step <= self.horizon
