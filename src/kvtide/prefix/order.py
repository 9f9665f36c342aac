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

_FEW = 64


class Order:
    """A lazy heap of nodes: one entry a node, corrected when it reaches the top.

    An entry may be older than its node's last use; `rank` tells the present rank, or None if the
    node has nothing to evict here, in which case its entry is dropped (queue it again when it has).
    """

    __slots__ = ("_bit", "_bound", "_heap", "_rank")

    def __init__(self, bit: int, rank: Callable[[Node], Rank | None]) -> None:
        self._bit = bit
        self._rank = rank
        self._heap: list[tuple[int, int, int, int, Node]] = []
        self._bound = _FEW

    def queue(self, node: Node) -> None:
        """`node` may have something to evict: give it an entry unless it has one."""
        if not node.queued & self._bit:
            self.requeue(node)

    def requeue(self, node: Node) -> None:
        """`node`'s rank got smaller: an entry in any case, since another would surface too late."""
        rank = self._rank(node)
        if rank is not None:
            node.queued |= self._bit
            heapq.heappush(self._heap, (*rank, node.number, node))
            if len(self._heap) > self._bound:
                self._forget_gone()

    def coldest(self) -> tuple[Rank, Node] | None:
        """The node to evict from next and its rank; None if there is none."""
        heap = self._heap
        while heap:
            kind, priority, used, number, node = heap[0]
            now = self._rank(node)
            if now is None:
                self.discard()
            elif now == (kind, priority, used):
                return now, node
            else:
                heapq.heapreplace(heap, (*now, number, node))
        return None

    def discard(self) -> None:
        """The head has nothing to evict after all: drop its entry."""
        node = heapq.heappop(self._heap)[-1]
        node.queued &= ~self._bit

    def clear(self) -> None:
        """Forget every entry."""
        self._heap.clear()

    def _forget_gone(self) -> None:
        """Drop entries of nodes with nothing to evict: an order nobody asks must not grow."""
        stay = [entry for entry in self._heap if self._rank(entry[-1]) is not None]
        for entry in self._heap:
            entry[-1].queued &= ~self._bit
        for entry in stay:
            entry[-1].queued |= self._bit
        heapq.heapify(stay)
        self._heap = stay
        self._bound = 2 * len(stay) + _FEW
