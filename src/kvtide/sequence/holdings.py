"""Who holds what: the state that all verbs on sequences share, and how it is published and let
go.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvtide.sequence.answer import Answer, Reuse
from kvtide.sequence.copies import Copies
from kvtide.sequence.groups import FullGroup, StateGroup, split_groups
from kvtide.sequence.snapshots import Snapshots
from kvtide.types import Origin

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from kvtide.prefix import Node, Prefixes
    from kvtide.sequence.rows import Rows
    from kvtide.sequence.sequence import Sequence
    from kvtide.sequence.supply import Supply
    from kvtide.types import IntArray, PageArray


class Holdings:
    """Rows, page tables and leases of all sequences. Knows no bytes, no policy and no engine.

    `live` are the sequences that have a row; `epoch` counts resets of the index; `membership`
    changes whenever somebody leaves a row, shares pages or gives some back: what was granted before
    has to be looked at again.
    """

    def __init__(
        self,
        rows: Rows,
        groups: Seq[FullGroup | StateGroup],
        prefixes: Prefixes,
        supply: Supply,
    ) -> None:
        self.rows = rows
        self.groups = groups
        self.paged, self.states = split_groups(groups)
        self.prefixes = prefixes
        self.supply = supply
        self.copies = Copies(groups)
        self.snapshots = Snapshots(rows, self.states, supply, self.copies)
        self.live: dict[int, Sequence] = {}
        self.epoch = 0
        self.membership = 0
        self.stats = Reuse()
        self.shared_tails: set[int] = set()
        """Rows whose next write may hit a page that others can see."""
        self.made_up: set[int] = set()
        """Rows of warm-up and padding sequences, from which nothing is learned."""
        self.unproven: set[int] = set()
        """Rows admitted that have not run a step since."""
        self._block = rows.block_tokens

    def publish(self, seq: Sequence, blocks: int) -> None:
        """Make the sequence's first `blocks` blocks (all computed) matchable; made-up ones never
        are.
        """
        made_up = seq.origin is not Origin.TRAFFIC
        if blocks <= seq.published or seq.epoch != self.epoch or made_up:
            return
        row, start = seq.row, seq.published
        node = seq.node
        assert node is not None
        pages: list[PageArray] = [
            g.held(row, start, blocks)
            if isinstance(g, FullGroup)
            else self.snapshots.held(seq, g, start, blocks)
            for g in self.groups
        ]
        tokens = self.rows.tokens[row, start * self._block : blocks * self._block].tobytes()
        seq.node = self.prefixes.publish(node, tokens, pages, priority=seq.priority)
        for g in self.paged:
            g.table.rows[row, start:blocks] = pages[g.index]
        self.snapshots.published(seq, [pages[g.index] for g in self.states], blocks)
        if (blocks + 1) * self._block > seq.prompt_tokens or blocks == seq.branch:
            # The next match may well end here: the run's end keeps its window and state.
            seq.node.sealed = True
        self.anchor(seq, blocks)

    def anchor(self, seq: Sequence, blocks: int) -> None:
        """The sequence's published path ends at `seq.node` now, after `blocks` blocks."""
        assert seq.node is not None
        seq.published = blocks
        self.rows.anchor[seq.row] = seq.node.slot
        self.rows.published[seq.row] = blocks * self._block

    def publish_at(self, node: Node) -> bool:
        """Publish what sequences anchored at `node` have computed beyond it; True if any had.

        Token-by-token growth is published only when somebody's match arrives there, or at the end.
        """
        rows = self.rows
        late = (rows.anchor == node.slot) & (rows.computed - rows.published >= self._block)
        found = [self.live[r] for r in np.flatnonzero(late).tolist() if r in self.live]
        found = [seq for seq in found if seq.node is node and seq.epoch == self.epoch]
        for seq in found:
            self.publish(seq, seq.computed // self._block)
        return bool(found)

    def publish_snapshots(self) -> None:
        """Hand every snapshot that live sequences hold to the index, where it may be evicted."""
        for seq in list(self.live.values()):
            if seq.snapshots:
                self.publish(seq, max(seq.snapshots))

    def let_go(self, seq: Sequence) -> None:
        """End everything the sequence holds: row, pages, copies, snapshots, its pin on the
        index.
        """
        self.membership += 1
        row = seq.row
        held = self.rows.blocks(row)
        self.copies.cancel(row)
        for g in self.paged:
            g.release(row, 0, held)
        for g in self.states:
            g.release_live(row)
        self.snapshots.drop(seq)
        if seq.node is not None:
            self.prefixes.unpin(seq.node)
        self.shared_tails.discard(row)
        self.unproven.discard(row)
        self.made_up.discard(row)
        self.live.pop(row, None)
        self.rows.give(row)
        seq.row, seq.rows, seq.node, seq.published = -1, None, None, 0

    def shorten(self, row: int, blocks: int) -> None:
        """Give back the row's pages beyond `blocks` blocks."""
        held = self.rows.blocks(row)
        if blocks < held:
            for g in self.paged:
                g.release(row, blocks, held)
            self.rows.room[row] = blocks * self._block

    def limit(self, group: int) -> int:
        """Most pages that requests could ever have in a pool: registered padding keeps its own."""
        kept = [row for row, seq in self.live.items() if seq.registered]
        entries = self.groups[group].table.rows[kept]
        return self.supply.limit(group) - int(np.count_nonzero(entries >= 0))

    def refusal(self, pool: int, needed: int) -> Answer:
        """The answer when a pool has no room for `needed` pages."""
        p = self.groups[pool].pool
        return Answer(ok=False, pool=p.name, needed=needed, available=p.num_available)

    # -- moving and checking -------------------------------------------------------------------

    def relabel(self, group: int, remap: PageArray) -> None:
        """Pages of `group` moved: fix rows, planned copies and pending snapshots."""
        rows = np.fromiter(self.live, np.int64, len(self.live))
        self.groups[group].relabel(rows, remap)
        self.copies.relabel(group, remap)
        self.snapshots.relabel(self.live.values(), group, remap)

    def count_leases(self, group: FullGroup | StateGroup) -> IntArray:
        """How many leases each page of the group should have, counted from the holders."""
        counts = np.zeros(len(group.books.lease), np.int64)
        for row, seq in self.live.items():
            entries = group.table.rows[row]
            np.add.at(counts, entries[entries >= 0], 1)
            if isinstance(group, StateGroup):
                np.add.at(counts, self.snapshots.pages(seq, group), 1)
        np.add.at(counts, self.copies.leases(group.index), 1)
        return counts
