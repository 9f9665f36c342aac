"""Page books against naive sets: every page in one state, and none reused before its fence."""

from __future__ import annotations

from collections import Counter
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

from kvtide.errors import UsageError
from kvtide.pool import Fences, PageBooks
from kvtide.testing.engine import ManualFence
from kvtide.types import SINK, PageArray

MAX_PAGES = 24


def pages(numbers: set[int] | list[int]) -> PageArray:
    return np.array(sorted(numbers), np.int32)


class PageBooksMachine(RuleBasedStateMachine):
    """Pages are created, leased, shared, named, released and moved, with steps in flight.

    The model: which pages exist, how many leases and which owner each has, and for every page that
    nobody names the last step that was in flight when its last user left.
    """

    seen: ClassVar[Counter[str]] = Counter()

    @initialize()
    def build(self) -> None:
        self.fences = Fences()
        self.books = PageBooks(MAX_PAGES, self.fences)
        self.exists: set[int] = set()
        self.leases: Counter[int] = Counter()
        self.owner: dict[int, int] = {}
        self.last_step: dict[int, int] = {}
        self.flying: list[tuple[int, ManualFence]] = []
        self.completed = 0
        self.create(set(range(MAX_PAGES // 2)))

    # -- the model -----------------------------------------------------------------------------

    def leased(self) -> set[int]:
        return {page for page, n in self.leases.items() if n}

    def cached(self) -> set[int]:
        return set(self.owner) - self.leased()

    def idle(self) -> set[int]:
        return self.exists - self.leased() - self.cached() - {SINK}

    def waiting(self) -> set[int]:
        """Idle pages that a step in flight may still read."""
        return {page for page in self.idle() if self.last_step.get(page, 0) > self.completed}

    def leave(self, page: int) -> None:
        """A page lost its last lease now: the steps issued so far may read it."""
        self.last_step[page] = self.fences.issued

    def draw(self, data: st.DataObject, among: set[int]) -> set[int]:
        return data.draw(st.sets(st.sampled_from(sorted(among)), min_size=1))

    # -- rules ---------------------------------------------------------------------------------

    @precondition(lambda self: len(self.exists) < MAX_PAGES)
    @rule(data=st.data())
    def create_more(self, data: st.DataObject) -> None:
        self.create(self.draw(data, set(range(MAX_PAGES)) - self.exists))

    def create(self, new: set[int]) -> None:
        self.books.create(pages(new))
        self.exists |= new

    @precondition(lambda self: len(self.exists) > 1)
    @rule(data=st.data())
    def destroy(self, data: st.DataObject) -> None:
        doomed = self.draw(data, self.exists - {SINK})
        self.books.drain()
        if doomed <= self.idle() - self.waiting():
            self.books.destroy(pages(doomed))
            self.exists -= doomed
        else:
            with pytest.raises(UsageError, match="are not free; vacate them first"):
                self.books.destroy(pages(doomed))

    @rule(n=st.integers(0, MAX_PAGES))
    def take(self, n: int) -> None:
        got = self.books.take(n)
        free = self.idle() - self.waiting()
        assert (got is None) == (n > len(free))
        if got is not None:
            taken = set(got.tolist())
            assert len(taken) == n
            assert taken <= free
            self.leases.update(taken)
            self.seen["taken"] += n

    @precondition(lambda self: self.leased() | self.cached())
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        shared = self.draw(data, self.leased() | self.cached())
        self.books.share(pages(shared))
        self.leases.update(shared)

    @precondition(lambda self: self.leased())
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        given = self.draw(data, self.leased())
        self.books.release(pages(given))
        for page in given:
            self.leases[page] -= 1
            if not self.leases[page]:
                self.leave(page)

    @precondition(lambda self: self.leased())
    @rule(data=st.data())
    def release_each(self, data: st.DataObject) -> None:
        """One entry a lease: the same page may be listed as often as it is leased."""
        held = [page for page, n in sorted(self.leases.items()) for _ in range(n)]
        order = data.draw(st.permutations(held))
        given = order[: data.draw(st.integers(1, len(order)))]
        self.books.release_each(np.array(given, np.int32))
        self.leases.subtract(given)
        for page in set(given):
            if not self.leases[page]:
                self.leave(page)

    @precondition(lambda self: self.leased() - set(self.owner))
    @rule(data=st.data(), owner=st.integers(1, 4))
    def adopt(self, data: st.DataObject, owner: int) -> None:
        named = self.draw(data, self.leased() - set(self.owner))
        self.books.adopt(pages(named), owner)
        self.owner.update(dict.fromkeys(named, owner))

    @precondition(lambda self: self.owner)
    @rule(data=st.data())
    def disown(self, data: st.DataObject) -> None:
        dropped = self.draw(data, set(self.owner))
        left = self.books.disown(pages(dropped))
        assert left == len(dropped & self.cached())
        for page in dropped:
            del self.owner[page]

    @precondition(lambda self: self.leased() | self.cached())
    @rule(data=st.data())
    def move(self, data: st.DataObject) -> None:
        """Vacate some pages for others outside a forbidden range; only between steps."""
        for _, fence in self.flying:
            fence.passed = True
        self.completed = max([self.completed, *(number for number, _ in self.flying)])
        self.flying.clear()
        self.books.drain()
        src = self.draw(data, self.leased() | self.cached())
        forbidden = data.draw(st.sets(st.sampled_from(range(MAX_PAGES)))) | src
        mask = np.zeros(MAX_PAGES, np.bool_)
        mask[list(forbidden)] = True
        free = sorted(self.idle() - forbidden)
        dst = self.books.take_outside(mask, len(src))
        assert (dst is None) == (len(free) < len(src))
        if dst is None:
            return
        assert dst.tolist() == free[: len(src)], "the lowest free pages are taken"
        self.books.move(pages(src), dst)
        for old, new in zip(sorted(src), dst.tolist(), strict=True):
            self.leases[new] = self.leases.pop(old, 0)
            if old in self.owner:
                self.owner[new] = self.owner.pop(old)
        self.seen["moved"] += len(src)

    @rule()
    def start_step(self) -> None:
        number, fence = self.fences.begin(), ManualFence()
        self.fences.end(number, fence)
        self.flying.append((number, fence))

    @precondition(lambda self: self.flying)
    @rule(data=st.data())
    def finish_a_step(self, data: st.DataObject) -> None:
        """Fences may pass in any order; steps count as complete in the order they were issued."""
        which = data.draw(st.integers(0, len(self.flying) - 1))
        self.flying[which][1].passed = True
        while self.flying and self.flying[0][1].passed:
            self.completed = self.flying.pop(0)[0]
        assert self.fences.poll() == self.completed
        assert self.fences.quiesced == (not self.flying)

    # -- always --------------------------------------------------------------------------------

    @invariant()
    def books_balance(self) -> None:
        books = self.books
        books.check()
        assert books.num_pages == len(self.exists)
        assert books.num_leased == len(self.leased())
        assert books.num_cached == len(self.cached())
        assert books.num_free + books.num_in_flight == len(self.idle())
        assert set(np.flatnonzero(books.free_mask()).tolist()) <= self.idle() - self.waiting()
        assert self.waiting() <= set(books.in_flight_pages().tolist())
        there = sorted(self.exists)
        assert np.flatnonzero(books.exists).tolist() == there
        assert books.lease[there].tolist() == [self.leases[page] for page in there]
        assert books.owner[there].tolist() == [self.owner.get(page, 0) for page in there]
        self.seen["waiting"] += len(self.waiting())

    @invariant()
    def draining_frees_all_that_may_be(self) -> None:
        self.books.drain()
        assert self.books.num_in_flight == len(self.waiting())


def test_page_books_agree_with_the_model() -> None:
    PageBooksMachine.seen.clear()
    run_state_machine_as_test(PageBooksMachine)
    if settings.default.derandomize:  # other runs may happen to explore less
        for what in ("taken", "moved", "waiting"):
            assert PageBooksMachine.seen[what] > 20, what
