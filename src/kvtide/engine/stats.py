"""What one engine step did, as plain data, and the watch that times the memory manager."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """Facts about one step.

    `hit_tokens` were found in the cache by requests admitted in this step; `recomputed_tokens` had
    been computed before a preemption and must be computed again. `pause_ms` is the time spent in
    the memory manager, during which the model does not run; `step_ms` is the whole step.
    """

    step: int
    waiting: int
    running: int
    prompt_tokens: int
    decode_tokens: int
    hit_tokens: int
    recomputed_tokens: int
    num_admitted: int
    num_preempted: int
    pause_ms: float
    step_ms: float


class Stopwatch:
    """Adds up the seconds spent inside its `with` blocks until they are taken."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._started = 0.0
        self._seconds = 0.0

    def __enter__(self) -> None:
        self._started = self._now()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._seconds += self._now() - self._started

    def take(self) -> float:
        """Seconds since the last call; starts again at zero."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds
