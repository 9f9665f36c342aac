"""Admission: match, then a row, the matched pages and room in every pool, or nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from kvtide.errors import CapacityError
from kvtide.sequence.answer import GRANTED, Answer
from kvtide.sequence.copies import UNPLACED
from kvtide.sequence.groups import FullGroup, Span
from kvtide.sequence.sequence import Sequence, Status
from kvtide.types import Origin, TokenArray, ceil_div

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Sequence as Seq

    from kvtide.prefix import Match
    from kvtide.sequence.holdings import Holdings


class Admission:
    """Lets sequences in, all or nothing."""

    def __init__(self, holdings: Holdings) -> None:
        self._held = holdings
        self._block = holdings.rows.block_tokens

    def match(self, seq: Sequence, tokens: TokenArray) -> Match:
        """Longest reusable prefix of `tokens` in the sequence's scope."""
        data = tokens.tobytes()
        root = self._held.prefixes.tree.root(seq.scope)
        match = self._held.prefixes.match(root, data, len(tokens))
        end = match.walk.end
        while end is not None and end.pins and self._held.publish_at(end):
            match = self._held.prefixes.match(root, data, len(tokens))
            end = match.walk.end
        return match

    def admit(self, requests: Iterable[tuple[Sequence, int]]) -> Answer:
        """Give each (sequence, tokens) a row, its matched pages and room for so many tokens; all or
        nothing.
        """
        requests = list(requests)
        answer = self._try_admit(requests, partial=True)
        if not answer and any(s.match is not None and s.match.partial for s, _ in requests):
            # The pages to copy from are needed on top: better computed again than not admitted.
            answer = self._try_admit(requests, partial=False)
            if not answer:
                for seq, _ in requests:
                    seq.match = self.match(seq, seq.tokens)
        return answer

    def _try_admit(self, requests: Seq[tuple[Sequence, int]], *, partial: bool) -> Answer:
        entered: list[tuple[Sequence, int]] = []
        wanted = [0] * len(self._held.groups)
        for seq, num_tokens in requests:
            if not self._held.rows.num_free:
                return self._leave(entered, Answer(ok=False, pool="rows", needed=1, available=0))
            self._enter(seq, partial=partial)
            blocks = ceil_div(max(num_tokens, seq.hit), self._block)
            entered.append((seq, blocks))
            fresh = blocks - seq.published
            for g in self._held.paged:
                wanted[g.index] += fresh
            for g in self._held.states:
                wanted[g.index] += 1
        learn = any(seq.origin is Origin.TRAFFIC for seq, _ in requests)
        try:
            refused = self._held.supply.secure(wanted, learn=learn)
        except BaseException:  # memory refused: nobody is let in halfway
            self._leave(entered, GRANTED)
            raise
        if refused is not None:
            answer = self._leave(entered, self._held.refusal(refused, wanted[refused]))
            self._require_room(refused, entered)
            return answer
        for seq, blocks in entered:
            self._settle_in(seq, blocks)
        return GRANTED

    def _require_room(self, pool: int, entered: list[tuple[Sequence, int]]) -> None:
        """Raise CapacityError if one request alone asks for more than its pool could ever hold."""
        group, limit = self._held.groups[pool], self._held.limit(pool)
        if not isinstance(group, FullGroup):
            return
        for seq, blocks in entered:
            need = blocks - group.first_block(seq.hit)
            if need > limit:
                raise CapacityError(
                    f"pool {group.pool.name!r} would have to hold {need} pages for one request "
                    f"but can hold {limit}; "
                    "admit fewer tokens at once (num_tokens), or give it more memory"
                )

    def _enter(self, seq: Sequence, *, partial: bool) -> None:
        """Take a row and lease what the match offers; undone by `_leave`."""
        match = seq.match
        if match is None or match.version != self._held.prefixes.tree.version:
            match = self.match(seq, seq.tokens)
        if not partial:
            match = replace(match, hit=match.blocks * self._block, partial=None)
        seq.match = match
        row = self._held.rows.take(seq.tokens)
        seq.row, seq.rows = row, self._held.rows
        if seq.origin is not Origin.TRAFFIC:
            self._held.made_up.add(row)
        seq.stay += 1
        self._held.live[row] = seq  # from now on: moved pages must be renamed in this row as well
        for g in self._held.paged:
            g.attach(row, match, self._held.prefixes)
        self._hold_sources(seq, match)  # before anchor, which may split the run they are named by
        seq.node = self._held.prefixes.anchor(match)
        self._held.anchor(seq, match.blocks)
        self._held.rows.room[row] = match.blocks * self._block

    def _hold_sources(self, seq: Sequence, match: Match) -> None:
        """Lease what the first step copies from, with the destinations still to come."""
        if match.partial is not None:
            node, block = match.partial
            for g in self._held.paged:
                source = self._held.prefixes.page(node, block, g.index)
                g.books.share(source)
                self._held.copies.plan(seq.row, g.index, int(source[0]), UNPLACED)
        for g in self._held.states:
            self._held.copies.plan(seq.row, g.index, g.source(match, self._held.prefixes), UNPLACED)

    def _leave(self, entered: list[tuple[Sequence, int]], answer: Answer) -> Answer:
        for seq, _ in entered:
            saved = seq.tokens.copy()
            self._held.let_go(seq)
            seq.saved = saved
        return answer

    def _settle_in(self, seq: Sequence, blocks: int) -> None:
        """Everything is there: take fresh pages, place the copies, start the clock."""
        row, match = seq.row, seq.match
        assert match is not None
        if blocks > match.blocks:
            span = Span(np.full(blocks - match.blocks, row), np.arange(match.blocks, blocks))
            for g in self._held.paged:
                g.grow(span)
            self._held.rows.room[row] = blocks * self._block
        for g in self._held.states:
            g.enter(row)
        self._held.copies.place(row, [g.first_page(row, match.blocks) for g in self._held.groups])
        self._held.rows.computed[row] = match.hit
        seq.status, seq.epoch = Status.ADMITTED, self._held.epoch
        seq.branch = match.full_blocks if match.full_blocks > match.blocks else -1
        seq.restorable = match.hit
        self._held.prefixes.touch(match)
        self._held.unproven.add(row)
