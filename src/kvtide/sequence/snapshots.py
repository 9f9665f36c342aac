"""State snapshots: at which boundaries they are wanted, taken, and who holds them until published.

A snapshot costs no copy when it is taken: the live page itself becomes the snapshot, and the
sequence restores from it into a fresh live page before its next step, exactly as after a hit.
Wanted are the end of the prompt, the branch point where an earlier match had tokens but no state,
and a grid; in decode the last block boundary is kept too, replaced by the next one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvtide.types import ABSENT, Origin, PageArray

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Sequence as Seq

    from kvtide.sequence.copies import Copies
    from kvtide.sequence.groups import StateGroup
    from kvtide.sequence.rows import Rows
    from kvtide.sequence.sequence import Sequence
    from kvtide.sequence.supply import Supply


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
        grid = (computed // self._interval + 1) * self._interval
        stops = [grid, self._prompt_end(seq) * self._block, seq.branch * self._block]
        return min(stop for stop in stops if stop > computed)

    def _prompt_end(self, seq: Sequence) -> int:
        """Last boundary a match of the same prompt could use: one token must be left to compute."""
        return (seq.prompt_tokens - 1) // self._block

    def take(self, seq: Sequence, computed: int) -> None:
        """The state after `computed` tokens (a block boundary) is in the live page: keep it if
        wanted.
        """
        if seq.origin is not Origin.TRAFFIC:
            return  # nobody would ever match it
        block = computed // self._block
        wanted = block in (seq.branch, self._prompt_end(seq)) or computed % self._interval == 0
        if block in seq.snapshots or not (wanted or computed > seq.prompt_tokens):
            return
        fresh = self._fresh_pages()
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
        seq.rolling = -1 if wanted else block
        seq.snapshots[block] = kept

    def _fresh_pages(self) -> list[int] | None:
        """A page in every state pool, at the cost of colder snapshots but of nothing else."""
        # All are found before one is taken: a page that nobody names yet could be moved away.
        if not self._supply.spare([g.index for g in self._states]):
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
