"""Steps that are begun and whose tokens have not been taken in: with pipeline stages several."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtide.engine.parallel.alone import Tokens
    from kvtide.engine.plan import StepPlan
    from kvtide.types import IntArray


@dataclass(slots=True)
class Flight:
    """A plan that was begun, and the fence of its step: that it is over shows at the same call on
    all ranks, and so says nothing of how fast one of them is.
    """

    plan: StepPlan
    tokens: Tokens | None = None
    is_over: bool = False

    def done(self) -> bool:
        """Whether its tokens have been taken in."""
        return self.is_over

    def land(self) -> IntArray:
        """Take the tokens in, once they are here."""
        assert self.tokens is not None, "a plan is to land and was not run"
        tokens = self.tokens.take()
        self.is_over = True
        return tokens


class Flights:
    """As many turns as may be under way at once, oldest first; a turn without a plan is None."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._turns: deque[Flight | None] = deque()

    @property
    def num_begun(self) -> int:
        """Plans under way."""
        return sum(flight is not None for flight in self._turns)

    def push(self, flight: Flight | None) -> Flight | None:
        """Begin a turn; the one that has to land now, if there is one."""
        self._turns.append(flight)
        return self._turns.popleft() if len(self._turns) >= self._depth else None
