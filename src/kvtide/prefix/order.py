"""Eviction orders: who goes first. Total and deterministic, so that ranks agree."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtide.prefix.node import Node

Rank = tuple[int, int, int]
"""(class, priority, last use): smaller goes first; ties go to the node created first."""

DEAD, LOOSE, LIVE = -1, 0, 1
"""Classes: useless to any match; useless to a match at the run's end; useful."""


class Order:
    """A lazy heap of nodes: one entry a node, corrected when it reaches the top.

    An entry may be older than its node's last use; `rank` tells the present rank, or None if the
    node has nothing to evict here, in which case its entry is dropped (queue it again when it has).
    """

    __slots__ = ("_bit", "_heap", "_rank")

    def __init__(self, bit: int, rank: Callable[[Node], Rank | None]) -> None:
        self._bit = bit
        self._rank = rank
        self._heap: list[tuple[Rank, int, Node]] = []

    def queue(self, node: Node) -> None:
        """`node` may have something to evict: give it an entry unless it has one."""
        if node.queued & self._bit:
            return
        rank = self._rank(node)
        if rank is not None:
            node.queued |= self._bit
            heapq.heappush(self._heap, (rank, node.number, node))

    def requeue(self, node: Node) -> None:
        """`node`'s rank got smaller: a second entry, since the first would surface too late."""
        rank = self._rank(node)
        if rank is not None:
            node.queued |= self._bit
            heapq.heappush(self._heap, (rank, node.number, node))

    def coldest(self) -> tuple[Rank, Node] | None:
        """The node to evict from next and its rank; None if there is none."""
        heap = self._heap
        while heap:
            rank, number, node = heap[0]
            now = self._rank(node)
            if now == rank:
                return rank, node
            if now is None:
                heapq.heappop(heap)
                node.queued &= ~self._bit
            else:
                heapq.heapreplace(heap, (now, number, node))
        return None

    def discard(self) -> None:
        """The head has nothing to evict after all: drop its entry."""
        _, _, node = heapq.heappop(self._heap)
        node.queued &= ~self._bit

    def clear(self) -> None:
        """Forget every entry."""
        self._heap.clear()
