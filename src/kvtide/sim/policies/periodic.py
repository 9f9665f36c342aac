"""The published design of TensorRT-LLM's KVCacheManagerV2 as a baseline: average lengths decide.

At the close of every request its length enters an exponential average. After 2,000 samples, at most
every 120 s, the ratio that suits a sequence of the average length is compared with the present one;
where a pool is off by more than 1.25 times, everything is stopped and the pools are cut anew. (Pull
request 19077 of NVIDIA/TensorRT-LLM names the constants.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtide.planner.demand import running_pages
from kvtide.rebalance import Move
from kvtide.sizing import granules_by_share, least_pages
from kvtide.types import ceil_div

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtide.facts import Snapshot
    from kvtide.rebalance import Plan
    from kvtide.sim.policies.base import Ground

MIN_SAMPLES = 2000
COOL_DOWN = 120.0
CHECK_EVERY = 100
THRESHOLD = 1.25
DECAY = 0.9999


class Periodic:
    """Recuts all pools at once when average lengths have drifted."""

    stops_the_world = True

    def __init__(
        self, ground: Ground, *, min_samples: int = MIN_SAMPLES, cool_down: float = COOL_DOWN
    ) -> None:
        self._ground = ground
        self._min_samples, self._cool_down = min_samples, cool_down
        self._mean = self._weight = 0.0
        self._samples = self._unchecked = 0
        self._last = 0.0

    def ended(self, input_tokens: int, output_tokens: int) -> None:
        """One more sample of a length."""
        self._samples += 1
        self._unchecked += 1
        self._weight = DECAY * self._weight + 1
        self._mean += (input_tokens + output_tokens - self._mean) / self._weight

    def plan(self, now: float, facts: Callable[[], Snapshot]) -> Plan:
        """The moves to the ratio of the average length, if it is time and worth it."""
        if self._samples < self._min_samples or self._unchecked < CHECK_EVERY:
            return ()
        self._unchecked = 0
        if now - self._last < self._cool_down:
            return ()
        held = {name: pool.granules for name, pool in facts().pools.items()}
        wanted = target(self._ground, max(1, round(self._mean)))
        drift = max(
            max(wanted[name] / max(1, held[name]), held[name] / max(1, wanted[name]))
            for name in held
        )
        if drift <= THRESHOLD:
            return ()
        self._last = now
        return moves(held, wanted, f"a sequence is {self._mean:.0f} tokens long on average")


def target(ground: Ground, length: int) -> dict[str, int]:
    """Granules by pool in the proportion of one sequence of this length, never below the floors."""
    groups = ground.layout.groups
    floors = {
        g.name: ceil_div(
            (1 + least_pages(g, ground.max_tokens)) * g.page_bytes, ground.granule_bytes
        )
        for g in groups
    }
    sizes = {g.name: running_pages(g, length, snapshots=1) * g.page_bytes for g in groups}
    total = sum(sizes.values())
    free = ground.num_granules - sum(floors.values())
    extra = granules_by_share({name: size / total for name, size in sizes.items()}, max(0, free))
    return {name: floors[name] + extra[name] for name in floors}


def moves(held: dict[str, int], wanted: dict[str, int], reason: str) -> Plan:
    """Granules from those that have too many to those that have too few."""
    over = {name: held[name] - wanted[name] for name in held}
    donors = [[name, extra] for name, extra in over.items() if extra > 0]
    plan: list[Move] = []
    for receiver, extra in over.items():
        missing = -extra
        while missing > 0 and donors:
            name, spare = donors[-1]
            count = min(missing, int(spare))
            plan.append(Move(donor=str(name), receiver=receiver, granules=count, reason=reason))
            missing -= count
            donors[-1][1] = int(spare) - count
            if not donors[-1][1]:
                donors.pop()
    return tuple(plan)
