"""The verbs on sequences: admission and growth, and the rarer ones here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtide.errors import UsageError
from kvtide.sequence.admission import Admission
from kvtide.sequence.growth import Growth
from kvtide.sequence.sequence import Sequence, Status
from kvtide.types import ceil_div

if TYPE_CHECKING:
    from kvtide.sequence.holdings import Holdings


class Ledger:
    """All verbs over one `Holdings`."""

    def __init__(self, holdings: Holdings) -> None:
        self.holdings = self._held = holdings
        self.admission = Admission(holdings)
        self.growth = Growth(holdings)
        self._block = holdings.rows.block_tokens

    def finish(self, seq: Sequence) -> None:
        """Publish what may be matched again, then let go of everything."""
        blocks = seq.computed // self._block
        if self._held.states:
            blocks = max([seq.published, *(b for b in seq.snapshots if b <= blocks)])
        self._held.publish(seq, blocks)
        if seq.node is not None:
            seq.node.sealed = True  # a turn ended here
        self._held.let_go(seq)

    def trim(self, seq: Sequence, num_tokens: int) -> None:
        """Forget the last `num_tokens` known tokens (and what was computed of them)."""
        row = seq.row
        length = seq.length - num_tokens
        computed = min(seq.computed, length)
        self._require_rewindable(seq, computed)
        self._held.rows.length[row] = length
        self._held.rows.computed[row] = computed
        if computed // self._block < seq.published and seq.epoch == self._held.epoch:
            assert seq.node is not None
            node = self._held.prefixes.ancestor(seq.node, computed // self._block)
            node.pins += 1
            self._held.prefixes.unpin(seq.node)
            seq.node = node
            self._held.anchor(seq, computed // self._block)
        self._held.shorten(row, ceil_div(computed, self._block))
        self._held.membership += 1
        if computed % self._block:
            self._held.shared_tails.add(row)

    def _require_rewindable(self, seq: Sequence, computed: int) -> None:
        if computed == seq.computed:
            return
        if self._held.states:
            raise UsageError(
                f"pool {self._held.states[0].pool.name!r} holds a state after {seq.computed} "
                "tokens, which cannot rewind to "
                f"{computed}; close the sequence and open the shorter one"
            )
        for g in self._held.paged:
            if not g.reaches(seq.row, computed):
                raise UsageError(
                    f"pool {g.pool.name!r} has released pages that {computed} tokens need; close "
                    "the sequence and "
                    "open the shorter one"
                )

    def fork(self, seq: Sequence, child: Sequence) -> bool:
        """Let `child` share everything `seq` holds; whoever writes first copies. False if no row is
        free.
        """
        if not self._held.rows.num_free:
            return False
        if self._held.copies:  # the child shares pages that a copy is still to fill
            self._held.copies.run()
            self._held.copies.finish()
        row = self._held.rows.take(seq.tokens)
        # Room beyond the computed tokens is the parent's alone: both would write there.
        blocks = ceil_div(seq.computed, self._block)
        self._held.rows.computed[row], self._held.rows.room[row] = (
            seq.computed,
            blocks * self._block,
        )
        for g in self._held.paged:
            g.adopt_row(row, seq.row, blocks)
        for g in self._held.states:
            g.adopt_row(row, seq.row)
        child.row, child.rows, child.status = row, self._held.rows, Status.ADMITTED
        child.node, child.epoch, child.restorable = seq.node, seq.epoch, seq.restorable
        if child.node is not None:
            child.node.pins += 1
        self._held.anchor(child, seq.published)
        self._held.shared_tails.update((seq.row, row))
        self._held.live[row] = child
        self._held.membership += 1
        return True
