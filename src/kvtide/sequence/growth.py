"""Running: room for a step's tokens, copy on write, and what a step's end changes. One call a
step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from kvtide.errors import CapacityError, UsageError
from kvtide.pool import NO_OWNER
from kvtide.sequence.answer import GRANTED, Answer
from kvtide.sequence.groups import FullGroup, Span, StateGroup
from kvtide.types import IntArray, Origin, TokenArray

if TYPE_CHECKING:
    from kvtide.sequence.holdings import Holdings
    from kvtide.sequence.sequence import Batch

Tail: TypeAlias = tuple[FullGroup | StateGroup, int, int]
"""(group, row, column) of a page that its row is about to write."""


class Growth:
    """Extends and commits batches of admitted sequences."""

    def __init__(self, holdings: Holdings) -> None:
        self._held = holdings
        self._rows = holdings.rows
        self._block = holdings.rows.block_tokens

    def extend(self, batch: Batch, num_new: IntArray | int) -> Answer:
        """Room for `num_new` more tokens each, beyond what is computed; all or nothing. One call a
        step.
        """
        table = self._rows
        need = table.computed[batch.rows] + num_new
        room = table.room[batch.rows]
        short = need > room
        tails = self._visible_tails(batch.rows) if self._held.shared_tails else []
        if tails or np.count_nonzero(short):
            refused = self._extend(batch.rows[short], room[short], need[short], tails)
            if refused is not None:
                return refused
        batch.num_new, batch.granted_in = num_new, self._held.membership
        return GRANTED

    def _extend(
        self, rows: IntArray, room: IntArray, need: IntArray, tails: list[Tail]
    ) -> Answer | None:
        if np.count_nonzero(need > self._rows.max_tokens):
            raise CapacityError(
                f"a sequence would reach {need.max()} tokens, max_tokens is "
                f"{self._rows.max_tokens}; stop it earlier or raise max_tokens"
            )
        start, stop = room // self._block, -(-need // self._block)
        span = Span.of(rows, start, stop)
        wanted = [0] * len(self._held.groups)
        for g in self._held.paged:
            wanted[g.index] = len(span.rows)
        for g, _, _ in tails:
            wanted[g.index] += 1
        made_up = self._held.made_up
        learn = not made_up or not made_up.issuperset(rows.tolist())
        refused = self._held.supply.secure(wanted, learn=learn)
        if refused is not None:
            self._require_possible(refused, rows, stop)
            return self._held.refusal(refused, wanted[refused])
        for g in self._held.paged:
            g.grow(span)
        self._rows.room[rows] = stop * self._block
        for tail in tails:
            self._replace(*tail)
        return None

    def _require_possible(self, pool: int, rows: IntArray, stop: IntArray) -> None:
        """Raise CapacityError if a single row asks for more than its pool could ever hold."""
        group, limit = self._held.groups[pool], self._held.limit(pool)
        if not isinstance(group, FullGroup):
            return
        for row, blocks in zip(rows.tolist(), stop.tolist(), strict=True):
            need = blocks - group.first_block(int(self._rows.computed[row]))
            if need > limit:
                raise CapacityError(
                    f"pool {group.pool.name!r} would have to hold {need} pages for one sequence "
                    "but can hold "
                    f"{limit}; compute fewer tokens at once, or give it more memory"
                )

    def _visible_tails(self, rows: IntArray) -> list[Tail]:
        """Pages the batch would write although others can see them: (group, row, column)."""
        tails: list[Tail] = []
        for row in sorted(self._held.shared_tails.intersection(rows.tolist())):
            block, offset = divmod(int(self._rows.computed[row]), self._block)
            for g in self._held.groups:
                column = block if isinstance(g, FullGroup) else 0
                page = g.table.rows[row, column] if offset or isinstance(g, StateGroup) else -1
                if page >= 0 and (g.books.lease[page] > 1 or g.books.owner[page] != NO_OWNER):
                    tails.append((g, row, column))
        return tails

    def _replace(self, group: FullGroup | StateGroup, row: int, column: int) -> None:
        """Put a fresh page in the place of a shared one, to be copied from it before the next
        step.
        """
        old = int(group.table.rows[row, column])
        fresh = group.books.take(1)
        assert fresh is not None
        group.table.rows[row, column] = fresh[0]
        self._held.copies.plan(
            row, group.index, old, int(fresh[0])
        )  # the row's lease becomes the copy's
        self._held.shared_tails.discard(row)

    def commit(
        self, batch: Batch, tokens: TokenArray | None, accepted: IntArray | int | None
    ) -> None:
        """The step's tokens are computed; `tokens` (one each, -1 for none) are known from now
        on.
        """
        rows, table, held = batch.rows, self._rows, self._held
        granted = self._granted(batch)
        count = granted if accepted is None else self._checked(accepted, granted)
        computed = table.computed[batch.rows] + count
        sampled = self._write_sampled(batch, computed, tokens)
        if held.copies:  # no step was entered: the pages must be whole all the same
            held.copies.run()
            held.copies.finish()
        table.computed[batch.rows] = computed
        if held.unproven:
            self._prove(rows)
        self._keep(batch, computed, count)
        for g in held.paged:
            g.retire(rows, computed)
        if sampled is not None:
            table.length[sampled[0]] = sampled[1]
        if accepted is not None:
            blocks = -(-computed // self._block)
            for row, num_blocks in zip(rows.tolist(), blocks.tolist(), strict=True):
                held.shorten(row, num_blocks)
        batch.num_new = None

    def _keep(self, batch: Batch, computed: IntArray, count: IntArray | int) -> None:
        """Take the snapshots that are due; publish where whole blocks were computed at once."""
        held = self._held
        if held.states:
            for i in np.flatnonzero(computed % self._block == 0):
                held.snapshots.take(batch.sequences[i], int(computed[i]))
        if isinstance(count, np.ndarray) or count >= self._block:
            for i in np.flatnonzero(np.broadcast_to(count, computed.shape) >= self._block):
                held.publish(batch.sequences[i], int(computed[i]) // self._block)

    @staticmethod
    def _granted(batch: Batch) -> IntArray | int:
        if batch.num_new is None:
            raise UsageError(
                "nothing was granted to this batch since its last commit; call extend or step first"
            )
        return batch.num_new

    @staticmethod
    def _checked(accepted: IntArray | int, granted: IntArray | int) -> IntArray | int:
        counts, limits = np.broadcast_arrays(accepted, granted)
        wrong = np.flatnonzero((counts < 0) | (counts > limits))
        if len(wrong):
            i = wrong[0]
            raise UsageError(
                f"accepted is {counts.flat[i]}, but {limits.flat[i]} tokens were granted; "
                "accept 0 to that many"
            )
        return accepted

    def _prove(self, rows: IntArray) -> None:
        """Count the reuse of sequences that have now run for the first time since admission."""
        for row in self._held.unproven.intersection(rows.tolist()):
            seq = self._held.live[row]
            self._held.unproven.discard(row)
            if seq.origin is Origin.TRAFFIC:
                self._held.stats.prove(seq)
            seq.peak = max(seq.peak, int(self._rows.computed[row]))

    def _write_sampled(
        self, batch: Batch, computed: IntArray, tokens: TokenArray | None
    ) -> tuple[IntArray, IntArray] | None:
        """Check a commit, then put the sampled ids behind the known ones: (rows, new lengths).

        Nothing counts before the lengths are set, so a commit that is refused here changes nothing.
        """
        table, rows = self._rows, batch.rows
        known = table.length[rows]
        if tokens is not None and tokens.ndim > 1:
            return self._write_accepted(batch, computed, tokens)
        if np.count_nonzero(known < computed):
            i = int(np.argmax(computed - known))
            raise UsageError(
                f"sequence in row {rows[i]} would have {computed[i]} tokens computed but only "
                f"{known[i]} are known; give sampled tokens by commit(..., tokens)"
            )
        if tokens is None:
            return None
        given = tokens >= 0
        if np.count_nonzero(given) < len(given):
            rows = rows[given]
            computed, known, tokens = computed[given], known[given], tokens[given]
        if np.count_nonzero((known != computed) | (computed >= table.max_tokens)):
            raise UsageError(
                "a sampled token must follow the last known one, within max_tokens = "
                f"{table.max_tokens}; give -1 for sequences that have known tokens left to compute"
            )
        table.tokens[rows, computed] = tokens
        return rows, computed + 1

    def _write_accepted(
        self, batch: Batch, computed: IntArray, tokens: TokenArray
    ) -> tuple[IntArray, IntArray]:
        """The same for several ids a sequence: accepted drafts, then the sampled one; -1: none."""
        table, rows = self._rows, batch.rows
        given, known = tokens >= 0, table.length[rows]
        lengths = known + given.sum(axis=1)
        wrong = np.where(lengths > known, lengths != computed + 1, known < computed)
        wrong |= lengths > table.max_tokens
        if wrong.any():
            i = int(np.argmax(wrong))
            raise UsageError(
                f"sequence in row {rows[i]} has {computed[i]} tokens computed and would know "
                f"{lengths[i]} of at most {table.max_tokens}; give every accepted draft and one "
                "sampled id, or only -1"
            )
        places = known[:, None] + np.cumsum(given, axis=1) - 1
        table.tokens[np.broadcast_to(rows[:, None], given.shape)[given], places[given]] = tokens[
            given
        ]
        return rows, lengths
