"""Policies: who gets which granules, decided between steps from facts alone."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, cast

from kvtide.errors import ConfigError
from kvtide.sim.policies.base import Decider, Ground, Idle, Policy
from kvtide.sim.policies.one_size import WhenEmpty, large_granule, padded_layout, page_granule
from kvtide.sim.policies.periodic import Periodic

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtide.facts import Snapshot
    from kvtide.rebalance import Plan

    PlanFunction = Callable[[Snapshot], Plan]

__all__ = ["POLICIES", "Decider", "Ground", "Idle", "Policy", "policy"]

DECIDE_EVERY = 50
"""Steps between two calls of a policy given as a function."""

POLICIES = {
    it.name: it
    for it in (
        Policy(name="static", mode="static"),
        Policy(name="elastic", mode="elastic"),
        Policy(name="periodic", mode="static", decide=Periodic),
        Policy(
            name="padded",
            mode="elastic",
            layout=padded_layout,
            granule=page_granule,
            pays=False,
        ),
        Policy(name="lcm", mode="static", decide=WhenEmpty, granule=large_granule, pays=False),
        Policy(name="infinite", mode="elastic", boundless=True, pays=False),
    )
}
"""By name. `oracle-static` is a search over `static` and stands in `kvtide.sim.oracle`."""


class Called:
    """A policy that is a pure function from a snapshot to a plan."""

    stops_the_world = False

    def __init__(self, function: PlanFunction) -> None:
        self._function = function
        self._steps = 0

    def plan(self, now: float, facts: Callable[[], Snapshot]) -> Plan:
        """What the function says, every `DECIDE_EVERY` steps."""
        self._steps += 1
        return () if self._steps % DECIDE_EVERY else tuple(self._function(facts()))

    def ended(self, input_tokens: int, output_tokens: int) -> None:
        """Of no interest."""


def policy(name: str) -> Policy:
    """A policy by name, or `module:function` for a function from a snapshot to a plan."""
    if name in POLICIES:
        return POLICIES[name]
    module, colon, attribute = name.partition(":")
    if not colon:
        raise ConfigError(
            f"policy is {name!r}; use one of {', '.join((*POLICIES, 'oracle-static'))}, "
            "or module:function"
        )
    try:
        function = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"policy {name!r} cannot be imported: {error}") from error
    if not callable(function):
        raise ConfigError(f"policy {name!r} is no function; it must take a Snapshot")
    given = cast("PlanFunction", function)
    return Policy(name=name, mode="static", decide=lambda _: Called(given))
