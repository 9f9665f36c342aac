"""How much may move at a step boundary, in granules: no clock, so that ranks agree."""

from __future__ import annotations

_THOUSAND = 1000
_UNLIMITED = 1 << 62


class Allowance:
    """Granules that may be mapped, or copied for, per step and per thousand steps.

    Per step it limits what can wait: ground taken ahead of need, plans and budgets. What a step
    itself lacks only uses it up. Over a thousand steps it limits all but live demand.
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
        return max(0, min(self._per_step - self._spent, self.remaining(step)))

    def remaining(self, step: int) -> int:
        """Granules left of the limit over a thousand steps."""
        self._turn(step)
        if self._per_thousand is None:
            return _UNLIMITED
        return max(0, self._per_thousand - self._spent_since)

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
