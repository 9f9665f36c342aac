"""What each kind of layer group does in the life of a sequence: one class a lifetime."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvtide.prefix import Prefixes, Rule, StateRule, WindowRule
from kvtide.prefix.tree import pages_of
from kvtide.types import ABSENT, IntArray, PageArray

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from kvtide.pool import Pool
    from kvtide.prefix.prefixes import Match
    from kvtide.sequence.table import PageTable

ZERO = -1
"""Source of a `PageCopy` that fills with zeros."""


@dataclass(frozen=True, slots=True)
class PageCopy:
    """Copies within one pool, as data: `src[i]` to `dst[i]`, whole pages; src `ZERO` clears.

    Carried out before the step that follows; sources are leased until that step has ended.
    """

    group: str
    src: PageArray
    dst: PageArray


@dataclass(frozen=True, slots=True)
class Span:
    """New blocks of a batch, flattened: (rows[i], blocks[i]) for every block, row by row."""

    rows: IntArray
    blocks: IntArray

    @classmethod
    def of(cls, rows: IntArray, start: IntArray, stop: IntArray) -> Span:
        """Blocks [start, stop) of each row."""
        counts = stop - start
        if np.count_nonzero(counts == 1) == len(counts):
            return cls(rows, start)
        ends = np.cumsum(counts)
        blocks = np.arange(int(ends[-1])) - np.repeat(ends - counts - start, counts)
        return cls(np.repeat(rows, counts), blocks)


class FullGroup:
    """Every block stays: full attention, latent, indexer keys, draft mirrors."""

    def __init__(self, index: int, pool: Pool, table: PageTable, rule: Rule | None) -> None:
        self.index = index
        self.pool = pool
        self.books = pool.books
        self.table = table
        self.rule = rule

    def first_block(self, length: int) -> int:
        """First block still needed after `length` computed tokens."""
        del length
        return 0

    def attach(self, row: int, match: Match, prefixes: Prefixes) -> None:
        """Lease the matched pages this lifetime needs and enter them in the row."""
        first = self.first_block(match.hit)
        pages = prefixes.tree.gather(match.walk, self.index, match.blocks)[first:]
        self.books.share(pages)
        self.table.rows[row, first : match.blocks] = pages

    def grow(self, span: Span) -> None:
        """Enter fresh pages; the caller has made sure that enough are free."""
        pages = self.books.take(len(span.rows))
        assert pages is not None
        self.table.rows[span.rows, span.blocks] = pages

    def retire(self, rows: IntArray, computed: IntArray) -> None:
        """Release what falls out of the lifetime now that `computed` tokens are. Full: nothing."""

    def first_page(self, row: int, block: int) -> int:
        """The page a planned copy at `block` fills."""
        return int(self.table.rows[row, block])

    def reaches(self, row: int, computed: int) -> bool:
        """Does the row still hold what `computed` tokens need?"""
        del row, computed
        return True

    def held(self, row: int, start: int, stop: int) -> PageArray:
        """Copy of the row's entries for blocks [start, stop), `ABSENT` where there is no page."""
        return self.table.rows[row, start:stop].copy()

    def release(self, row: int, start: int, stop: int) -> None:
        """End the row's leases on blocks [start, stop)."""
        entries = self.table.rows[row, start:stop]
        self.books.release(entries if self.rule is None else entries[entries != ABSENT])
        entries.fill(ABSENT)

    def adopt_row(self, row: int, parent: int, blocks: int) -> None:
        """Share the pages of `parent`'s row with `row` (fork)."""
        entries = self.table.rows[parent, :blocks]
        self.books.share(entries[entries != ABSENT])
        self.table.rows[row, :blocks] = entries

    def relabel(self, rows: IntArray, remap: PageArray) -> None:
        """Pages moved: `remap[old]` is the new id, `remap[-1]` is -1."""
        self.table.rows[rows] = remap[self.table.rows[rows]]


class WindowGroup(FullGroup):
    """Only the last `rule.tokens` tokens (and the sinks) stay; older pages go as the window
    passes.
    """

    def __init__(self, index: int, pool: Pool, table: PageTable, rule: WindowRule) -> None:
        super().__init__(index, pool, table, rule)
        self.window = rule
        num_rows = len(table.rows)
        self.first = np.zeros(num_rows, np.int64)  # first block after the sinks that is held
        self.stale_at = np.zeros(num_rows, np.int64)  # computed tokens at which it goes

    def first_block(self, length: int) -> int:
        """First block after the sinks still needed after `length` computed tokens."""
        return max(self.window.first_block(length), self.window.sink_blocks)

    def attach(self, row: int, match: Match, prefixes: Prefixes) -> None:
        """Lease the matched pages of the window and the sinks."""
        pages = prefixes.tree.gather(match.walk, self.index, match.blocks)
        first = self.first_block(match.hit)
        sinks = self.window.sink_blocks
        self.books.share(pages[first:])
        self.table.rows[row, first : match.blocks] = pages[first:]
        if sinks:
            self.books.share(pages[:sinks])
            self.table.rows[row, : min(sinks, match.blocks)] = pages[:sinks]
        self._mark(row, first)

    def reaches(self, row: int, computed: int) -> bool:
        """Has the window not yet passed over what `computed` tokens need?"""
        return self.first_block(computed) >= int(self.first[row])

    def _mark(self, rows: IntArray | int, first: IntArray | int) -> None:
        self.first[rows] = first
        self.stale_at[rows] = (first + 1) * self.table.block_tokens + self.window.tokens - 1

    def retire(self, rows: IntArray, computed: IntArray) -> None:
        """Release pages that no token after `computed` may read, and clear their entries."""
        late = computed >= self.stale_at[rows]
        if not np.count_nonzero(late):
            return
        gone = rows[late]
        old = self.first[gone]
        reach = np.maximum(computed[late] - self.window.tokens + 1, 0) // self.table.block_tokens
        span = Span.of(gone, old, reach)
        pages = self.table.rows[span.rows, span.blocks]
        self.table.rows[span.rows, span.blocks] = ABSENT
        if len(gone) == 1:
            self.books.release(pages)
        else:
            self.books.release_each(pages)
        self._mark(gone, reach)

    def adopt_row(self, row: int, parent: int, blocks: int) -> None:
        """Share the pages of `parent`'s row with `row` (fork)."""
        super().adopt_row(row, parent, blocks)
        self._mark(row, int(self.first[parent]))


class StateGroup:
    """One page a sequence, rewritten by every step; snapshots of it at block boundaries."""

    def __init__(self, index: int, pool: Pool, table: PageTable, interval_tokens: int) -> None:
        self.index = index
        self.pool = pool
        self.books = pool.books
        self.table = table
        self.rule: Rule | None = StateRule()
        self.interval_tokens = interval_tokens

    def source(self, match: Match, prefixes: Prefixes) -> int:
        """The snapshot a matched sequence restores from, leased for the copy; `ZERO` if it starts
        anew.
        """
        del prefixes
        if not match.blocks:
            return ZERO
        node = next(n for n in reversed(match.walk.nodes) if n.depth < match.blocks)
        page = pages_of(node, self.index)[match.blocks - node.depth - 1 : match.blocks - node.depth]
        self.books.share(page)
        return int(page[0])

    def live(self, row: int) -> int:
        """The page with the state after the row's computed tokens."""
        return int(self.table.rows[row, 0])

    def enter(self, row: int) -> int:
        """Give the row a fresh live page (the caller made sure one is free); returns it."""
        pages = self.books.take(1)
        assert pages is not None
        self.table.rows[row, 0] = pages[0]
        return int(pages[0])

    def first_page(self, row: int, block: int) -> int:
        """The page a restored state is copied to: the live one."""
        del block
        return self.live(row)

    def release_live(self, row: int) -> None:
        """End the row's lease on its live page, if it has one yet."""
        if self.table.rows[row, 0] != ABSENT:
            self.books.release(self.table.rows[row])
            self.table.rows[row, 0] = ABSENT

    def adopt_row(self, row: int, parent: int) -> None:
        """Share the live page of `parent`'s row with `row` (fork)."""
        self.books.share(self.table.rows[parent])
        self.table.rows[row] = self.table.rows[parent]

    def relabel(self, rows: IntArray, remap: PageArray) -> None:
        """Pages moved: `remap[old]` is the new id."""
        self.table.rows[rows] = remap[self.table.rows[rows]]


def split_groups(groups: Seq[FullGroup | StateGroup]) -> tuple[list[FullGroup], list[StateGroup]]:
    """The paged groups and the state groups, each in order."""
    paged = [g for g in groups if isinstance(g, FullGroup)]
    return paged, [g for g in groups if isinstance(g, StateGroup)]
