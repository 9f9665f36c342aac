"""Layouts without a full group: runs that have lost every page leave the index, once."""

from __future__ import annotations

import numpy as np
import pytest

from kvtide.pool import Fences, PageBooks
from kvtide.prefix import Node, Prefixes, PrefixTree, Rule, StateRule, WindowRule
from kvtide.types import ABSENT, Scope

B = 2


class Index:
    """One sparse group over a small pool, and a writer's moves."""

    def __init__(self, rule: Rule) -> None:
        self.tree = PrefixTree(B, 1, ghost_blocks=16)
        self.books = PageBooks(16, Fences())
        self.books.create(np.arange(16, dtype=np.int32))
        self.prefixes = Prefixes(self.tree, [self.books], [rule], partial=False)

    def write(self, *runs: list[int], kept: str) -> Node:
        """Publish one run after another from the root; `kept` says which blocks get pages."""
        node = self.tree.root(Scope())
        node.pins += 1
        held: list[int] = []
        for run in runs:
            num = len(run) // B
            pages = np.full(num, ABSENT, np.int32)
            wanted, kept = [c == "x" for c in kept[:num]], kept[num:]
            got = self.books.take(sum(wanted))
            assert got is not None
            pages[wanted] = got
            node = self.prefixes.publish(node, np.array(run, np.int32).tobytes(), [pages])
            node.sealed = True
            held += pages[pages != ABSENT].tolist()
        self.books.release(np.array(held, np.int32))
        return node

    def leave(self, node: Node) -> None:
        self.prefixes.unpin(node)
        self.prefixes.check()
        self.books.check()

    def look_up(self, tokens: list[int]) -> int:
        """Match and use it."""
        data = np.array(tokens, np.int32).tobytes()
        match = self.prefixes.match(self.tree.root(Scope()), data, len(tokens))
        self.prefixes.touch(match)
        return match.hit


@pytest.mark.parametrize("older", ["parent", "child"])
def test_a_run_and_its_parent_lose_their_pages_at_once(older: str) -> None:
    """Both are victims of one eviction, in either order; each becomes a ghost only once."""
    index = Index(WindowRule(1, 0, B))  # a window of one token: every page is loose
    index.leave(index.write([1, 1], [2, 2], kept="xx"))
    if older == "child":
        assert index.look_up([1, 1, 9]) == 2
    assert index.prefixes.eviction.evict(0, 2) == 2
    index.prefixes.check()
    assert index.tree.nodes() == []
    assert index.tree.num_ghost_blocks == 2
    assert index.books.num_cached == 0


def test_what_a_split_cuts_off_without_pages_does_not_stay() -> None:
    """A writer parts ways inside a run whose rest holds nothing: that rest serves nobody."""
    index = Index(StateRule())
    index.leave(index.write([1, 1, 2, 2, 3, 3], kept="x.."))
    index.leave(index.write([1, 1, 8, 8], kept="xx"))
    assert [node.depth + node.num_blocks for node in index.tree.nodes()] == [1, 2]
    assert index.look_up([1, 1, 8, 8, 9]) == 4
    assert index.prefixes.eviction.evict(0, 9) == 2
    index.prefixes.check()
    assert index.tree.nodes() == []
