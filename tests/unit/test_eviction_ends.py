"""Ends of runs go by what they save for their age, not by last use alone."""

from __future__ import annotations

import numpy as np

from kvtide.pool import Fences, PageBooks
from kvtide.prefix import Node, Prefixes, PrefixTree, StateRule
from kvtide.types import ABSENT, Scope

B = 256
LONG, SHORT = 5, 1  # blocks: 1,280 and 256 tokens for the one state at their end


class States:
    """A state group alone; every run keeps the state at its end."""

    def __init__(self) -> None:
        self.tree = PrefixTree(B, 1, ghost_blocks=0)
        self.books = PageBooks(64, Fences())
        self.books.create(np.arange(64, dtype=np.int32))
        self.prefixes = Prefixes(self.tree, [self.books], [StateRule()], partial=False)

    def write(self, token: int, *blocks: int) -> Node:
        """Publish runs one after another, the next ones in place of the first grown longer."""
        node = self.tree.root(Scope())
        node.pins += 1
        page = self.books.take(len(blocks))
        assert page is not None
        for i, num in enumerate(blocks):
            pages = np.full(num, ABSENT, np.int32)
            pages[-1:] = page[i : i + 1]
            data = np.full(num * B, token, np.int32).tobytes()
            node = self.prefixes.publish(node, data, [pages])
        self.books.release(page)
        self.prefixes.unpin(node)
        return node

    def age(self, times: int) -> None:
        self.prefixes.eviction.clock += times

    def drop(self) -> set[int]:
        """Evict one page; the runs that can be matched to their ends afterwards."""
        assert self.prefixes.eviction.evict(0, 1) == 1
        self.prefixes.check()
        return {int.from_bytes(n.tokens[:4], "little") for n in self.tree.nodes() if not n.ghost}


def test_an_older_state_that_saves_more_for_its_age_outlives_a_newer_one() -> None:
    states = States()
    states.write(1, LONG)  # unused for 8 when asked: 1,280 / 8 tokens a tick
    states.age(4)
    states.write(2, SHORT)
    states.age(2)  # for 3: 256 / 3
    assert states.drop() == {1}


def test_a_state_that_saves_more_goes_first_once_it_is_old_enough() -> None:
    states = States()
    states.write(1, LONG)  # unused for 26 when asked: 1,280 / 26
    states.age(22)
    states.write(2, SHORT)
    states.age(2)  # for 3: 256 / 3
    assert states.drop() == {2}


def test_equals_go_by_last_use() -> None:
    for blocks in (SHORT, LONG):
        states = States()
        for token in (1, 2, 3):
            states.write(token, blocks)
        assert states.drop() == {2, 3}
        assert states.drop() == {3}


def test_a_run_that_grows_is_valued_as_what_it_has_become() -> None:
    states = States()
    grown = states.write(1, SHORT, SHORT, SHORT, SHORT)  # 1,024 tokens, grown from 256
    assert grown.num_blocks == 4 * SHORT
    states.age(4)
    states.write(2, SHORT)
    states.age(2)
    states.prefixes.eviction.evict(0, 3)  # the loose states within
    assert states.drop() == {1}


def test_a_run_that_is_split_is_valued_as_what_it_has_become() -> None:
    states = States()
    node = states.write(1, LONG)
    states.write(2, LONG)
    match = states.prefixes.match(
        states.tree.root(Scope()), np.full(LONG * B, 1, np.int32).tobytes(), LONG * B
    )
    states.prefixes.touch(match)  # the newer of the two now, as long as it is whole
    data = np.full(4 * B, 1, np.int32).tobytes() + np.full(B, 9, np.int32).tobytes()
    start = states.tree.root(Scope())
    start.pins += 1
    end = states.prefixes.publish(start, data, [np.full(5, ABSENT, np.int32)])
    assert node.num_blocks == SHORT  # its end saves 256 tokens beyond the parting
    states.age(3)
    assert 2 in states.drop()
    assert node.ghost
    states.prefixes.unpin(end)
