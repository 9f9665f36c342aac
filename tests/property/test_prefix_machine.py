"""The prefix index against a dict of prefixes: what it matches, keeps, drops and renames."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tests.property.naive_prefixes import NaivePrefixes

from kvtide.pool import Fences, PageBooks
from kvtide.prefix import (
    Match,
    MirrorRule,
    Node,
    Prefixes,
    PrefixTree,
    Rule,
    StateRule,
    WindowRule,
)
from kvtide.prefix.tree import default_key
from kvtide.types import ABSENT, Scope

BLOCK = 2
NUM_PAGES = 28
SCOPES = {"": Scope(), "salted": Scope(salt=b"s"), "adapted": Scope(adapter="a")}

RULES: dict[str, list[Rule | None]] = {
    "full": [None],
    "full, window": [None, WindowRule(5, 0, BLOCK)],
    "full, window with sinks": [None, WindowRule(4, 3, BLOCK)],
    "full, state": [None, StateRule()],
    "full, draft": [None, MirrorRule(3, BLOCK)],
    "window": [WindowRule(6, 1, BLOCK)],
    "state": [StateRule()],
    "two full, window, state": [None, None, WindowRule(3, 0, BLOCK), StateRule()],
}

TEXTS = st.tuples(
    st.sampled_from(["", "", "", *SCOPES]), st.integers(0, 15), st.integers(2, 9 * BLOCK)
)
"""(scope, which text, how much of it in tokens)."""


def text(which: int, num_tokens: int) -> list[int]:
    """Texts part ways at every block: bit d of `which` chooses the block at depth d."""
    blocks = [[depth % 3, which >> depth & 1] for depth in range(num_tokens // BLOCK + 1)]
    return [token for block in blocks for token in block][:num_tokens]


@dataclass(eq=False)
class Writer:
    """A sequence: its text, and the pages it leases of the blocks it has published (-1: none)."""

    scope: str
    which: int
    node: Node
    pages: list[np.ndarray]

    @property
    def blocks(self) -> int:
        return len(self.pages[0])


class PrefixMachine(RuleBasedStateMachine):
    """Writers match, publish and leave; pages are evicted and moved; the index is cleared."""

    limits: ClassVar[list[Rule | None]] = RULES["full"]
    seen: ClassVar[Counter[str]] = Counter()

    @initialize(collide=st.booleans(), ghosts=st.sampled_from([0, 3, 40]))
    def build(self, collide: bool, ghosts: int) -> None:
        key = (lambda parent, block: block[0] % 2) if collide else default_key
        self.tree = PrefixTree(BLOCK, len(self.limits), ghost_blocks=ghosts, key=key)
        self.books = [PageBooks(NUM_PAGES, Fences()) for _ in self.limits]
        for books in self.books:
            books.create(np.arange(NUM_PAGES, dtype=np.int32))
        partial = not any(isinstance(r, StateRule) for r in self.limits)
        self.prefixes = Prefixes(self.tree, self.books, self.limits, partial=partial)
        self.model = NaivePrefixes(BLOCK, self.limits)
        self.writers: list[Writer] = []

    # -- helpers -------------------------------------------------------------------------------

    def match(self, scope: str, tokens: list[int]) -> Match:
        """The index's match, compared with the model's."""
        data = np.array(tokens, np.int32).tobytes()
        match = self.prefixes.match(self.tree.root(SCOPES[scope]), data, len(tokens))
        assert match.blocks == self.model.hit_blocks(scope, tokens)
        assert match.blocks * BLOCK <= match.hit <= self.model.most_shared(scope, tokens)
        assert match.hit - match.blocks * BLOCK < BLOCK or match.partial
        if self.limits == [None]:
            newest_are_all = len(self.model.pages) <= 8  # partial reuse compares the newest eight
            assert match.hit == self.model.most_shared(scope, tokens) or not newest_are_all
        self.seen["hits"] += match.blocks > 0
        self.seen["partial"] += match.partial is not None
        return match

    def take(self, group: int, num: int) -> np.ndarray | None:
        """Fresh pages, at the cost of cached ones."""
        books = self.books[group]
        if books.num_free < num:
            self.evict_from(group, num - books.num_free)
        return books.take(num)

    def evict_from(self, group: int, num: int) -> None:
        books = self.books[group]
        cached, free = books.num_cached, books.num_free
        freed = self.prefixes.eviction.evict(group, num)
        assert books.num_cached == cached - freed
        assert books.num_free == free + freed
        assert freed >= min(num, cached), "cached pages were kept although pages were wanted"
        self.model.forget_evicted(self.books)
        self.seen["evicted"] += freed

    def leave(self, writer: Writer) -> None:
        for books, pages in zip(self.books, writer.pages, strict=True):
            books.release(pages[pages != ABSENT])
        self.prefixes.unpin(writer.node)
        self.writers.remove(writer)

    def stale(self, writer: Writer) -> None:
        """Let go of what a lifetime does not need at the writer's length; states at once."""
        for g, limit in enumerate(self.limits):
            match limit:
                case WindowRule():
                    gone = np.arange(writer.blocks) < limit.first_needed(writer.blocks)
                    gone &= np.arange(writer.blocks) >= limit.sink_blocks
                case StateRule():
                    gone = np.ones(writer.blocks, np.bool_)
                case _:
                    continue
            pages = writer.pages[g]
            self.books[g].release(pages[gone & (pages != ABSENT)])
            pages[gone] = ABSENT

    # -- rules ---------------------------------------------------------------------------------

    @rule(words=TEXTS)
    def look_up(self, words: tuple[str, int, int]) -> None:
        self.match(words[0], text(*words[1:]))

    @precondition(lambda self: len(self.writers) < 4)
    @rule(words=TEXTS, portions=st.integers(0, 3), stay=st.booleans(), priority=st.integers(0, 1))
    def write(self, words: tuple[str, int, int], portions: int, stay: bool, priority: int) -> None:
        """A writer matches, computes the rest of its text in portions, and mostly leaves."""
        scope, which, length = words
        writer = self.start(scope, which, length)
        for _ in range(portions):
            missing = length // BLOCK - writer.blocks
            if missing > 0 and not self.publish(writer, -(-missing // 2), priority):
                return
        if not stay:
            writer.node.sealed = True
            self.leave(writer)

    def start(self, scope: str, which: int, length: int) -> Writer:
        match = self.match(scope, text(which, length))
        pages = []
        for g, books in enumerate(self.books):
            mine = self.tree.gather(match.walk, g, match.blocks).copy()
            books.share(mine[mine != ABSENT])
            pages.append(mine)
        node = self.prefixes.anchor(match)  # last: it may split the run that the walk names
        writer = Writer(scope, which, node, pages)
        self.stale(writer)
        self.prefixes.touch(match)
        self.writers.append(writer)
        return writer

    @precondition(lambda self: self.writers)
    @rule(data=st.data(), blocks=st.integers(1, 5), priority=st.integers(0, 1))
    def go_on(self, data: st.DataObject, blocks: int, priority: int) -> None:
        self.publish(data.draw(st.sampled_from(self.writers)), blocks, priority)

    def publish(self, writer: Writer, blocks: int, priority: int) -> bool:
        """A writer makes some blocks more matchable; or gives up where there are no pages."""
        fresh: list[np.ndarray] = []
        for g, limit in enumerate(self.limits):
            got = self.take(g, 1 if isinstance(limit, StateRule) else blocks)
            if got is None:  # nothing cached is left
                for other, pages in enumerate(fresh):
                    self.books[other].release(pages[pages != ABSENT])
                self.leave(writer)
                return False
            pages = np.full(blocks, ABSENT, np.int32)
            pages[-len(got) :] = got
            fresh.append(pages)
        self.publish_pages(writer, fresh, priority)
        return True

    def publish_pages(self, writer: Writer, fresh: list[np.ndarray], priority: int) -> None:
        start, blocks = writer.blocks, len(fresh[0])
        words = text(writer.which, (start + blocks) * BLOCK)
        keys = self.model.keys(writer.scope, words, start + blocks)[start:]
        given = [pages.copy() for pages in fresh]
        tokens = np.array(words[start * BLOCK :], np.int32).tobytes()
        writer.node = self.prefixes.publish(writer.node, tokens, fresh, priority=priority)
        for i, key in enumerate(keys):
            known = self.model.pages.setdefault(key, [ABSENT] * len(self.limits))
            for g in range(len(self.limits)):
                mine = int(given[g][i])
                if known[g] == ABSENT:
                    known[g] = mine
                elif mine == ABSENT:
                    continue
                assert fresh[g][i] == known[g], "an equal block has two pages"
        writer.pages = [np.concatenate(p) for p in zip(writer.pages, fresh, strict=True)]
        self.stale(writer)
        self.seen["published"] += blocks

    @precondition(lambda self: self.writers)
    @rule(data=st.data(), seal=st.booleans())
    def stop(self, data: st.DataObject, seal: bool) -> None:
        writer = data.draw(st.sampled_from(self.writers))
        if seal:
            writer.node.sealed = True
        self.leave(writer)

    @rule(data=st.data(), num=st.integers(1, 9))
    def evict(self, data: st.DataObject, num: int) -> None:
        self.evict_from(data.draw(st.integers(0, len(self.limits) - 1)), num)

    @rule(data=st.data(), num=st.integers(1, 6))
    def relocate(self, data: st.DataObject, num: int) -> None:
        """Some pages that are in use or cached change places with free ones."""
        g = data.draw(st.integers(0, len(self.limits) - 1))
        books = self.books[g]
        src = np.flatnonzero((books.lease > 0) | (books.owner > 0)).astype(np.int32)[:num]
        avoid = np.isin(np.arange(NUM_PAGES), src)
        dst = books.take_outside(avoid, len(src))
        if dst is None:
            return
        owners = books.owner[src].copy()
        books.move(src, dst)
        remap = np.arange(NUM_PAGES + 1, dtype=np.int32)
        remap[-1] = ABSENT
        remap[src] = dst
        self.prefixes.relabel(g, owners, remap)
        for writer in self.writers:
            writer.pages[g] = remap[writer.pages[g]]
        for pages in self.model.pages.values():
            pages[g] = int(remap[pages[g]])
        self.seen["moved"] += len(src)

    @rule()
    def clear(self) -> None:
        """After a reset writers keep their pages; here they leave, for they may not publish."""
        self.prefixes.clear()
        self.model.pages.clear()
        for writer in list(self.writers):
            self.leave(writer)
        assert [books.num_cached for books in self.books] == [0] * len(self.limits)

    # -- always --------------------------------------------------------------------------------

    @invariant()
    def books_balance(self) -> None:
        self.prefixes.check()
        for g, books in enumerate(self.books):
            books.check()
            named = {pages[g] for pages in self.model.pages.values()} - {ABSENT}
            assert set(np.flatnonzero(books.owner).tolist()) == named
        assert self.tree.num_ghost_blocks <= self.tree.max_ghost_blocks

    @invariant()
    def paths_of_writers_stay(self) -> None:
        for writer in self.writers:
            words = text(writer.which, writer.blocks * BLOCK)
            path = self.model.keys(writer.scope, words, writer.blocks)
            for i, key in enumerate(path):
                for g, pages in enumerate(writer.pages):
                    if pages[i] != ABSENT:
                        assert self.model.pages[key][g] == pages[i]


@pytest.mark.parametrize("rules", RULES)
def test_prefix_index_agrees_with_the_model(rules: str) -> None:
    machine = type("Machine", (PrefixMachine,), {"limits": RULES[rules], "seen": Counter()})
    run_state_machine_as_test(machine)
    if settings.default.derandomize:  # other runs may happen to explore less
        for what in ("hits", "published", "evicted", "moved"):
            assert machine.seen[what], what
