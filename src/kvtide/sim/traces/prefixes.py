"""All prompts seen so far as a tree of runs of content ids: how long a prefix is known?"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvtide.types import IntArray


class _Node:
    """The ids [first, first + count); children by their first id."""

    __slots__ = ("children", "count", "first")

    def __init__(self, first: int, count: int) -> None:
        self.first = first
        self.count = count
        self.children: dict[int, _Node] = {}

    def split(self, offset: int) -> None:
        """End after `offset` ids; the rest becomes the only child."""
        rest = _Node(self.first + offset, self.count - offset)
        rest.children, self.children = self.children, {rest.first: rest}
        self.count = offset


class Prefixes:
    """A radix tree whose labels are runs of successive ids.

    It grows with the distinct runs, not with the blocks; adding a prompt takes time by its runs.
    """

    def __init__(self) -> None:
        self._root = _Node(-1, 0)

    def add(self, runs: IntArray, blocks: int) -> int:
        """Add the first `blocks` ids of `runs`; answer how many of them, from the first, were
        there.
        """
        node, offset, known = self._root, 0, 0
        for first, count in _clipped(runs, blocks):
            at, end = first, first + count
            while at < end:
                if offset < node.count and node.first + offset != at:
                    node.split(offset)
                if offset == node.count:
                    child = node.children.get(at)
                    if child is None:
                        child = node.children[at] = _Node(at, end - at)
                        node, offset = child, child.count
                        break
                    node, offset = child, 0
                step = min(end - at, node.count - offset)
                known += step
                offset += step
                at += step
        return known


def _clipped(runs: IntArray, blocks: int) -> Iterator[tuple[int, int]]:
    for first, count in runs.tolist():
        if blocks <= 0:
            return
        yield first, min(count, blocks)
        blocks -= count
