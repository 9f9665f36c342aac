"""State snapshots: at which boundaries they are wanted, taken, and who holds them until published.

A snapshot costs no copy when it is taken: the live page itself becomes the snapshot, and the
sequence restores from it into a fresh live page before its next step, exactly as after a hit.
Wanted are the end of the prompt, the branch point where an earlier match had tokens but no state,
and a grid that thins out towards the prompt's beginning (`retention`); in decode the last block
boundary is kept too, replaced by the next one. Ends and branch points may drop colder cached pages
if they save enough; the grid takes only pages that are free or that no match needs.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np

from kvtide.errors import DeviceError
from kvtide.sequence.retention import may_drop_priced, next_boundary
from kvtide.types import ABSENT, Origin, PageArray

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Sequence as Seq

    from kvtide.sequence.copies import Copies
    from kvtide.sequence.groups import StateGroup
    from kvtide.sequence.rows import Rows
    from kvtide.sequence.sequence import Sequence
    from kvtide.sequence.supply import Supply

_log = logging.getLogger("kvtide.sequence")


class Snapshots:
    """Snapshots of admitted sequences that the prefix index does not hold yet."""

    def __init__(self, rows: Rows, states: Seq[StateGroup], supply: Supply, copies: Copies) -> None:
        self._block = rows.block_tokens
        self._states = states
        self._supply = supply
        self._copies = copies
        self._interval = min((g.interval_tokens for g in states), default=0)

    def next_stop(self, seq: Sequence, computed: int) -> int:
        """First boundary (tokens) after `computed` where a snapshot is wanted in prefill; 0 if
        none.
        """
        if not self._states or seq.origin is not Origin.TRAFFIC:
            return 0
        stops = [self._next_on_grid(seq, computed), *(self._block * b for b in self._ends(seq))]
        return min((stop for stop in stops if stop > computed), default=0)

    def _ends(self, seq: Sequence) -> tuple[int, int]:
        """Blocks where a match is likely to end: the last boundary that a match of the same prompt
        could use (one token must be left to compute), and the branch point (-1: none).
        """
        return (seq.prompt_tokens - 1) // self._block, seq.branch

    def _next_on_grid(self, seq: Sequence, computed: int) -> int:
        # Of all known tokens: a resumed sequence computes its answer again too.
        end = (seq.length - 1) // self._block * self._block
        return next_boundary(computed, end, self._interval)

    def take(self, seq: Sequence, computed: int) -> None:
        """The state after `computed` tokens (a block boundary) is in the live page: keep it if
        wanted and if a page is to be had for it.
        """
        if seq.origin is not Origin.TRAFFIC:
            return  # nobody would ever match it
        block = computed // self._block
        ends = block in self._ends(seq)
        wanted = ends or self._next_on_grid(seq, computed - self._block) == computed
        rolls = computed > seq.prompt_tokens and not wanted
        if block in seq.snapshots or not (wanted or rolls):
            return
        saved, is_grid = computed - seq.restorable, not (ends or rolls)
        fresh = self._fresh_pages(priced=may_drop_priced(saved, self._interval, is_grid=is_grid))
        if fresh is None:
            return
        kept: list[int] = []
        for g, page in zip(self._states, fresh, strict=True):
            live = g.live(seq.row)
            g.table.rows[seq.row, 0] = page
            g.books.share(
                np.array([live], np.int32)
            )  # one lease for the snapshot, one for the copy
            self._copies.plan(seq.row, g.index, live, page)
            kept.append(live)
        self._discard(seq, seq.rolling)
        seq.rolling = block if rolls else -1
        seq.restorable = computed if ends else seq.restorable
        seq.snapshots[block] = kept

    def _fresh_pages(self, *, priced: bool) -> list[int] | None:
        """A page in every state pool, at the cost of nothing live; of colder pages that a match
        could use only if `priced`.
        """
        # All are found before one is taken: a page that nobody names yet could be moved away.
        try:
            if not self._supply.spare([g.index for g in self._states], priced=priced):
                return None
        except DeviceError:  # memory refused: a snapshot is no reason to fail a step
            _log.exception("no ground for a state snapshot")
            return None
        taken = [g.books.take(1) for g in self._states]
        return [int(pages[0]) for pages in taken if pages is not None]

    def held(self, seq: Sequence, group: StateGroup, start: int, stop: int) -> PageArray:
        """Snapshot pages by block for blocks [start, stop), at the block they stand behind."""
        place = self._states.index(group)
        pages = np.full(stop - start, ABSENT, np.int32)
        for block, kept in seq.snapshots.items():
            if start < block <= stop:
                pages[block - 1 - start] = kept[place]
        return pages

    def published(self, seq: Sequence, pages: Seq[PageArray], blocks: int) -> None:
        """The index holds the snapshots up to `blocks` now (`pages` as it left them): end our
        leases.
        """
        for g, held in zip(self._states, pages, strict=True):
            g.books.release(held[held != ABSENT])
        for block in [b for b in seq.snapshots if seq.published < b <= blocks]:
            del seq.snapshots[block]
        if seq.rolling not in seq.snapshots:
            seq.rolling = -1

    def _discard(self, seq: Sequence, block: int) -> None:
        for g, page in zip(self._states, seq.snapshots.pop(block, ()), strict=False):
            g.books.release(np.array([page], np.int32))

    def drop(self, seq: Sequence) -> None:
        """The sequence ends: release what was not published."""
        for block in list(seq.snapshots):
            self._discard(seq, block)
        seq.rolling = -1

    def pages(self, seq: Sequence, group: StateGroup) -> PageArray:
        """Unpublished snapshot pages the sequence holds in `group`."""
        place = self._states.index(group)
        return np.array([kept[place] for kept in seq.snapshots.values()], np.int32)

    def relabel(self, sequences: Iterable[Sequence], group: int, remap: PageArray) -> None:
        """Pages of layer group `group` moved: `remap[old]` is the new id."""
        for place, g in enumerate(self._states):
            if g.index != group:
                continue
            for seq in sequences:
                for kept in seq.snapshots.values():
                    kept[place] = int(remap[kept[place]])
