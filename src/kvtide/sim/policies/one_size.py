"""Designs with one page size for everything, as layouts of ours.

`padded`: vLLM's rule (docs/planner.md has it). All pages are equal, a page is a granule and any
pool may take any of them, which is one shared pool; what differs is the padding.

`lcm`: Jenga's rule. A large page, which the pages of all groups divide, is a granule; it changes
pools only when it is empty.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvtide.errors import ConfigError
from kvtide.layout import Buffer, LayerGroup, Layout, State
from kvtide.planner.padded import common_multiple, equal_pages
from kvtide.rebalance import Move
from kvtide.types import ceil_div

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvtide.facts import PoolFacts, Snapshot
    from kvtide.layout.lifetime import Lifetime
    from kvtide.rebalance import Plan
    from kvtide.sim.policies.base import Ground

LOOK_EVERY = 4
"""Steps between two looks at the pools: often enough that an empty page waits for nobody long."""


def padded_layout(layout: Layout) -> Layout:
    """The groups of a layout cut to equally many layers and padded to equal pages.

    Blocks grow until a page of attention is as large as a state; all groups get the longest block
    of those with the most bytes a token.
    """
    rule = equal_pages(layout.groups)
    if rule is None:
        return layout
    tokens = [
        kind.block_tokens
        for kind, group in zip(rule.kinds, layout.groups, strict=True)
        if not group.is_state
    ]
    block = min(tokens, default=layout.block_tokens)
    groups: list[LayerGroup] = []
    for group in layout.groups:
        groups += _cut(group, rule.layers_per_group, block, rule.page_bytes)
    return Layout(block_tokens=block, groups=tuple(groups))


def _cut(group: LayerGroup, size: int, block: int, page_bytes: int) -> Iterator[LayerGroup]:
    for start in range(0, len(group.layers), size):
        layers = group.layers[start : start + size]
        name = group.name if start == 0 else f"{group.name}_part{start // size + 1}"
        lifetime = _lifetime(group, block)
        bare = replace(group, name=name, layers=layers, block_tokens=block, lifetime=lifetime)
        missing = page_bytes - bare.page_bytes
        if missing < 0:
            raise ConfigError(
                f"group {group.name!r} has pages of {bare.page_bytes} bytes, more than the equal "
                f"ones of {page_bytes}; this layout cannot be padded"
            )
        if not missing:
            yield bare
            continue
        # Padding is one more buffer per layer; what does not divide is left to its alignment.
        per_entry = missing // (len(layers) * bare.entries)
        padding = Buffer("padding", (max(1, per_entry),), "uint8")
        yield replace(bare, buffers=(*bare.buffers, padding))


def _lifetime(group: LayerGroup, block: int) -> Lifetime:
    """As it was; states are kept where the longer blocks end."""
    lifetime = group.lifetime
    if isinstance(lifetime, State):
        return State(ceil_div(lifetime.interval_tokens, block) * block)
    return lifetime


def page_granule(layout: Layout, granule_bytes: int) -> int:
    """A granule is the largest page: pages of one size are granules by themselves."""
    return max(group.page_bytes for group in layout.groups)


def large_granule(layout: Layout, granule_bytes: int) -> int:
    """A granule is a large page that the pages of all groups divide."""
    return common_multiple(layout.groups)


class WhenEmpty:
    """Gives large pages that are wholly empty to pools that evict."""

    stops_the_world = False

    def __init__(self, ground: Ground) -> None:
        self._granule_bytes = ground.granule_bytes
        self._steps = 0
        self._evicted: dict[str, int] = {}

    def ended(self, input_tokens: int, output_tokens: int) -> None:
        """Of no interest."""

    def plan(self, now: float, facts: Callable[[], Snapshot]) -> Plan:
        """One empty large page from each pool that has two, to the pool that evicted most."""
        self._steps += 1
        if self._steps % LOOK_EVERY:
            return ()
        pools = facts().pools
        evicted = {
            name: (pool.evicted - self._evicted.get(name, 0)) * pool.page_bytes
            for name, pool in pools.items()
        }
        self._evicted = {name: pool.evicted for name, pool in pools.items()}
        short = max(evicted, key=lambda name: (evicted[name], name))
        if not evicted[short]:
            return ()
        return tuple(
            Move(donor=name, receiver=short, granules=count - 1, reason="empty large pages")
            for name, pool in pools.items()
            if name != short and (count := self._empty(pool)) > 1
        )

    def _empty(self, pool: PoolFacts) -> int:
        return min(pool.empty_granules, pool.free * pool.page_bytes // self._granule_bytes)
