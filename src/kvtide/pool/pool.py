"""One pool: the pages of one layer group on one tier, over granules of the tier's budget."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvtide.errors import InvariantError
from kvtide.events import CapacityChanged
from kvtide.pool.pages import PageBooks
from kvtide.pool.space import PageSpace
from kvtide.types import SINK, IntArray, PageArray

if TYPE_CHECKING:
    from kvtide.events import Sink
    from kvtide.memory import Arena, Budget
    from kvtide.pool.fences import Fences


class Pool:
    """Pages of equal size that come and go with the granules under them.

    The arena reserves addresses for the whole tier, so page p is always at `base + p * page_bytes`.
    """

    def __init__(
        self, name: str, page_bytes: int, budget: Budget, arena: Arena, fences: Fences
    ) -> None:
        self.name = name
        self.page_bytes = page_bytes
        self.arena = arena
        self.space = PageSpace(page_bytes, arena.granule_bytes, budget.num_granules)
        self.books = PageBooks(self.space.num_pages, fences)
        self.mapped = np.zeros(budget.num_granules, np.bool_)
        self.num_mapped = 0
        self.limit = self.space.num_pages
        """Pages from this id on never exist, whatever granules are mapped."""
        self._handles = np.full(budget.num_granules, -1, np.int64)
        self._budget = budget
        self.events: Sink | None = None
        """Told when granules come or go."""

    def growth_for(self, num_pages: int) -> IntArray:
        """Unmapped granules (ascending) that would bring `num_pages` more pages into existence."""
        absent = np.flatnonzero(~self.books.exists[: self.limit])[:num_pages]
        under = self.space.under(absent)
        return under[~self.mapped[under]]

    def grow(self, granules: IntArray) -> bool:
        """Map free granules of the budget at `granules`; False, changing nothing, if there are too
        few.

        Granules that were in use are zeroed first: another pool's bytes, in another number format,
        must never reach this pool's readers.
        """
        handles = self._budget.take(len(granules))
        if handles is None:
            return False
        self._show_zeroed(granules, handles)
        self.mapped[granules] = True
        self._handles[granules] = handles
        self.num_mapped += len(granules)
        whole = self.space.touching(granules)
        if not self.space.is_even:
            whole = self.space.complete(whole, self.mapped)
        self._create(whole)
        self._announce(self.num_mapped - len(granules))
        return True

    def _create(self, whole: PageArray) -> None:
        """Those of `whole`, pages with all their granules, that may exist and do not yet."""
        whole = whole[whole < self.limit]
        self.books.create(whole[~self.books.exists[whole]])

    def raise_limit(self, limit: int) -> bool:
        """Let all pages below `limit` exist, and map what they need of the budget's free granules;
        False, changing nothing, if there are too few.
        """
        before, self.limit = self.limit, limit
        try:
            under = self.space.under(np.arange(limit, dtype=np.int32))
            missing = under[~self.mapped[under]]
            grown = not len(missing) or self.grow(missing)
        except BaseException:
            self.limit = before
            raise
        if not grown:
            self.limit = before
            return False
        self._create(self.space.complete(np.arange(limit, dtype=np.int32), self.mapped))
        return True

    def lower_limit(self, limit: int) -> None:
        """No page from `limit` on exists any more, and no granule that only they were on is mapped.
        UsageError, changing nothing, if one of them is not free.
        """
        before, self.limit = self.limit, limit
        try:
            top = self.space.under(np.arange(limit, self.space.num_pages, dtype=np.int32))
            top = top[self.mapped[top]]
            doomed = (limit + np.flatnonzero(self.books.exists[limit:])).astype(np.int32)
            self.books.destroy(doomed)
            self._unmap(self.space.bare(top, self.books.exists), doomed)
        except BaseException:
            self.limit = before
            raise

    def _show_zeroed(self, granules: IntArray, handles: IntArray) -> None:
        """Map and clear; if either fails, everything is as before and the handles are free."""
        used = granules[~self._budget.is_zero(handles)]
        try:
            self.arena.map(granules, handles)
            try:
                self.arena.zero(used * self.space.granule_bytes, self.space.granule_bytes)
            except BaseException:
                self.arena.unmap(granules)
                raise
        except BaseException:
            self._budget.give(handles)
            raise

    def shrink(self, granules: IntArray) -> int:
        """Destroy the free pages over `granules`, return to the budget every granule left under
        none.

        Raises UsageError, changing nothing, if a page there is not free. Returns the number of
        granules given back: at least `len(granules)`, more where a destroyed page was the last
        one on a neighbour.
        """
        touched = self.space.touching(granules)
        doomed = touched[self.books.exists[touched]]
        self.books.destroy(doomed)
        bare = granules[self.mapped[granules]]
        if not self.space.is_even:
            near = np.union1d(granules, self.space.under(doomed))
            bare = self.space.bare(near[self.mapped[near]], self.books.exists)
        self._unmap(bare, doomed)
        return len(bare)

    def _unmap(self, bare: IntArray, doomed: PageArray) -> None:
        """Give granules back to the budget; if memory refuses, the pages just destroyed exist
        again.
        """
        if not len(bare):
            return
        try:
            self.arena.unmap(bare)
        except BaseException:
            self.books.create(doomed)
            raise
        handles = self._handles[bare]
        self.mapped[bare] = False
        self._handles[bare] = -1
        self.num_mapped -= len(bare)
        self._budget.give(handles)
        self._announce(self.num_mapped + len(bare))

    def _announce(self, before: int) -> None:
        if self.events is not None:
            change = CapacityChanged(pool=self.name, before=before, granules=self.num_mapped)
            self.events(change)

    def copy(self, src: PageArray, dst: PageArray) -> None:
        """Copy whole pages `src[i]` to `dst[i]`."""
        size = self.page_bytes
        self.arena.copy(src.astype(np.int64) * size, dst.astype(np.int64) * size, size)

    def zero(self, pages: PageArray) -> None:
        """Fill whole pages with zero bytes."""
        self.arena.zero(pages.astype(np.int64) * self.page_bytes, self.page_bytes)

    @property
    def num_usable(self) -> int:
        """Pages that can hold data: all that exist but the sink."""
        return self.books.num_pages - 1

    @property
    def num_available(self) -> int:
        """Pages a new user could have without any other pool giving ground: free + cached."""
        return self.books.num_free + self.books.num_cached

    def check(self) -> None:
        """Raise InvariantError unless pages, granules and the budget's books agree."""
        self.books.check()
        whole = self.space.complete(np.arange(self.space.num_pages, dtype=np.int32), self.mapped)
        whole = whole[whole < self.limit]
        if not np.array_equal(whole, np.flatnonzero(self.books.exists)):
            raise InvariantError(
                f"pool {self.name!r}: a page exists without its granules, or lacks them"
            )
        if not self.books.exists[SINK]:
            raise InvariantError(f"pool {self.name!r}: the sink page does not exist")
        if self.num_mapped != int(np.count_nonzero(self.mapped)):
            raise InvariantError(f"pool {self.name!r}: num_mapped is {self.num_mapped}")
        if ((self._handles >= 0) != self.mapped).any():
            raise InvariantError(f"pool {self.name!r}: handles and mapped granules disagree")
