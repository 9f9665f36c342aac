"""Telling a listener which blocks became matchable and which no longer are, in order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvtide.events import BlocksRemoved, BlocksStored

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvtide.events import Sink
    from kvtide.prefix.joint import BoolArray
    from kvtide.prefix.node import Node
    from kvtide.prefix.tree import PrefixTree


class Herald:
    """Compares a run's pages before and after a change. Costs nothing while nobody listens."""

    def __init__(self, tree: PrefixTree, names: Sequence[str], sink: Sink | None) -> None:
        self._tree = tree
        self._names = names
        self._sink = sink

    def changed(self, node: Node, group: int, before: bytes, after: bytes) -> None:
        """The pages of `node`'s run in layer group `group` were `before` and are `after`."""
        if self._sink is None or before == after:
            return
        was = np.frombuffer(before, np.int32) >= 0
        now = np.frombuffer(after, np.int32) >= 0
        for kind, mask in ((BlocksRemoved, was & ~now), (BlocksStored, now & ~was)):
            for start, stop in _spans(mask):
                self._sink(
                    kind(
                        group=self._names[group],
                        scope=self._tree.scope_of(node),
                        tokens=self._tokens(node, stop),
                        num_blocks=stop - start,
                    )
                )

    def _tokens(self, node: Node, blocks: int) -> bytes:
        path = b"".join(run.tokens for run in node.path())
        return path[: (node.depth + blocks) * self._tree.block_bytes]


def _spans(mask: BoolArray) -> Iterator[tuple[int, int]]:
    """Half-open ranges of True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.view(np.int8), [0]])))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)
