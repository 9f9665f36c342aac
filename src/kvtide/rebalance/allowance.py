"""How much may move at a step boundary, in granules: no clock, so that ranks agree."""

from __future__ import annotations

_THOUSAND = 1000


class Allowance:
    """Granules that may be mapped, or copied for, per step and per thousand steps.

    It limits what can wait: cached value and what was asked for. Live demand only uses it up.
    """

    __slots__ = ("_per_step", "_per_thousand", "_since", "_spent", "_spent_since", "_step")

    def __init__(self, per_step: int, per_thousand: int | None = None) -> None:
        self._per_step = per_step
        self._per_thousand = per_thousand
        self._step: int = -1
        self._since: int = -1
        self._spent: int = 0
        self._spent_since: int = 0

    def left(self, step: int) -> int:
        """Granules left at this step."""
        self._turn(step)
        left = self._per_step - self._spent
        if self._per_thousand is not None:
            left = min(left, self._per_thousand - self._spent_since)
        return max(0, left)

    def spend(self, step: int, granules: int) -> None:
        """So many more were moved, or as many bytes copied, at this step."""
        self._turn(step)
        self._spent += granules
        self._spent_since += granules

    def _turn(self, step: int) -> None:
        if step != self._step:
            self._step, self._spent = step, 0
            if step // _THOUSAND != self._since:
                self._since, self._spent_since = step // _THOUSAND, 0
