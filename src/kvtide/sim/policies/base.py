"""What a policy is: how a manager is set up, and who moves capacity while it serves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtide.config import Mode
    from kvtide.facts import Snapshot
    from kvtide.layout import Layout
    from kvtide.rebalance import Plan


class Decider(Protocol):
    """Decides between two steps; it sees facts only."""

    stops_the_world: bool
    """Whether every running sequence is suspended before its plans are carried out."""

    def plan(self, now: float, facts: Callable[[], Snapshot]) -> Plan:
        """Moves to make now (`now` in virtual seconds), or none. `facts` is not for nothing: ask
        for it only when it is needed."""
        ...

    def ended(self, input_tokens: int, output_tokens: int) -> None:
        """A request with a prompt and an answer of these lengths has ended."""
        ...


class Idle:
    """Moves nothing: the manager's own rules are all there is."""

    stops_the_world = False

    def plan(self, now: float, facts: Callable[[], Snapshot]) -> Plan:
        """Nothing."""
        return ()

    def ended(self, input_tokens: int, output_tokens: int) -> None:
        """Of no interest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """What a decider may know beforehand: pages, budget, and the longest sequence."""

    layout: Layout
    num_granules: int
    granule_bytes: int
    max_tokens: int


def _idle(ground: Ground) -> Decider:
    return Idle()


def _same_layout(layout: Layout) -> Layout:
    return layout


def _same_granule(layout: Layout, granule_bytes: int) -> int:
    return granule_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A way to run pools of one memory.

    `mode` of the manager; `decide(ground)` who moves granules on top of it; `layout` and
    `granule(layout, granule_bytes)` what it makes of pages and granules. `pays`: whether moving
    granules costs time (designs with one page size have nothing to move). `boundless`: memory for
    everything.
    """

    name: str
    mode: Mode
    decide: Callable[[Ground], Decider] = _idle
    layout: Callable[[Layout], Layout] = _same_layout
    granule: Callable[[Layout, int], int] = _same_granule
    pays: bool = True
    boundless: bool = False
