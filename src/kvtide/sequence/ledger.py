"""Who holds what: the verbs on sequences, over rows, layer groups and the prefix index."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import starmap

import numpy as np

from kvtide.errors import CapacityError, UsageError
from kvtide.pool import NO_OWNER
from kvtide.prefix import Match, Node, Prefixes
from kvtide.sequence.copies import UNPLACED, Copies
from kvtide.sequence.groups import FullGroup, Span, StateGroup, split_groups
from kvtide.sequence.rows import Rows
from kvtide.sequence.sequence import Batch, Sequence, Status
from kvtide.sequence.snapshots import Snapshots
from kvtide.sequence.supply import Supply
from kvtide.types import IntArray, Origin, PageArray, TokenArray, ceil_div


@dataclass(frozen=True, slots=True)
class Answer:
    """May it go ahead? If not, nothing has changed and `pool` said no: `needed` pages, `available`."""

    ok: bool
    pool: str = ""
    needed: int = 0
    available: int = 0

    def __bool__(self) -> bool:
        """True if the verb was carried out."""
        return self.ok


GRANTED = Answer(ok=True)


Tail = tuple[FullGroup | StateGroup, int, int]


@dataclass(slots=True)
class Reuse:
    """Tokens that did and did not have to be computed, counted once a request has really run."""

    num_sequences: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    recomputed_tokens: int = 0

    def prove(self, seq: Sequence) -> None:
        """`seq` has run its first step since admission."""
        if seq.peak:
            self.recomputed_tokens += max(0, seq.peak - seq.hit)
            return
        self.num_sequences += 1
        self.prompt_tokens += seq.prompt_tokens
        self.hit_tokens += seq.hit


class Ledger:
    """Rows, page tables and leases of all sequences. Knows no bytes, no policy and no engine."""

    def __init__(
        self, rows: Rows, groups: Seq[FullGroup | StateGroup], prefixes: Prefixes, supply: Supply
    ) -> None:
        self.rows = rows
        self.groups = groups
        self.prefixes = prefixes
        self.copies = Copies(groups)
        self.paged, self.states = split_groups(groups)
        self.snapshots = Snapshots(rows, self.states, supply, self.copies)
        self.live: dict[int, Sequence] = {}
        self.epoch = 0
        self.membership = 0
        self.stats = Reuse()
        self._supply = supply
        self._shared_tails: set[int] = set()
        self._unproven: set[int] = set()
        self._block = rows.block_tokens

    # -- admission -----------------------------------------------------------------------------

    def match(self, seq: Sequence, tokens: TokenArray) -> Match:
        """Longest reusable prefix of `tokens` in the sequence's scope."""
        data = tokens.tobytes()
        root = self.prefixes.tree.root(seq.scope)
        match = self.prefixes.match(root, data, len(tokens))
        end = match.walk.end
        while end is not None and end.pins and self.publish_at(end):
            match = self.prefixes.match(root, data, len(tokens))
            end = match.walk.end
        return match

    def admit(self, requests: Iterable[tuple[Sequence, int]]) -> Answer:
        """Give each (sequence, tokens) a row, its matched pages and room for so many tokens; all or nothing."""
        entered: list[tuple[Sequence, int]] = []
        wanted = [0] * len(self.groups)
        for seq, num_tokens in requests:
            if not self.rows.num_free:
                return self._leave(entered, Answer(ok=False, pool="rows", needed=1, available=0))
            self._enter(seq)
            blocks = ceil_div(max(num_tokens, seq.hit), self._block)
            entered.append((seq, blocks))
            fresh = blocks - seq.published
            for g in self.paged:
                wanted[g.index] += fresh
            for g in self.states:
                wanted[g.index] += 1
        refused = self._supply.secure(wanted)
        if refused is not None:
            answer = self._leave(entered, self._refusal(refused, wanted[refused]))
            self._require_room(refused, entered)
            return answer
        for seq, blocks in entered:
            self._settle_in(seq, blocks)
        return GRANTED

    def _require_room(self, pool: int, entered: list[tuple[Sequence, int]]) -> None:
        """Raise CapacityError if one request alone asks for more than its pool could ever hold."""
        group, limit = self.groups[pool], self._supply.limit(pool)
        for seq, blocks in entered if isinstance(group, FullGroup) else ():
            need = blocks - group.first_block(seq.hit)
            if need > limit:
                raise CapacityError(
                    f"pool {group.pool.name!r} would have to hold {need} pages for one request but can hold {limit}; "
                    "admit fewer tokens at once (num_tokens), or give it more memory"
                )

    def _enter(self, seq: Sequence) -> None:
        """Take a row and lease what the match offers; undone by `_leave`."""
        match = seq.match
        if match is None or match.version != self.prefixes.tree.version:
            match = seq.match = self.match(seq, seq.tokens)
        row = self.rows.take(seq.tokens)
        seq.row, seq.rows = row, self.rows
        seq.stay += 1
        self.live[row] = seq  # from now on: moved pages must be renamed in this row as well
        for g in self.paged:
            g.attach(row, match, self.prefixes)
        self._hold_sources(seq, match)  # before anchor, which may split the run they are named by
        seq.node = self.prefixes.anchor(match)
        self._anchor(seq, match.blocks)
        self.rows.room[row] = match.blocks * self._block

    def _hold_sources(self, seq: Sequence, match: Match) -> None:
        """Lease what the first step copies from, with the destinations still to come."""
        if match.partial is not None:
            node, block = match.partial
            for g in self.paged:
                source = self.prefixes.page(node, block, g.index)
                g.books.share(source)
                self.copies.plan(seq.row, g.index, int(source[0]), UNPLACED)
        for g in self.states:
            self.copies.plan(seq.row, g.index, g.source(match, self.prefixes), UNPLACED)

    def _leave(self, entered: list[tuple[Sequence, int]], answer: Answer) -> Answer:
        for seq, _ in entered:
            saved = seq.tokens.copy()
            self._let_go(seq)
            seq.saved = saved
        return answer

    def _settle_in(self, seq: Sequence, blocks: int) -> None:
        """Everything is there: take fresh pages, place the copies, start the clock."""
        row, match = seq.row, seq.match
        assert match is not None
        if blocks > match.blocks:
            span = Span(np.full(blocks - match.blocks, row), np.arange(match.blocks, blocks))
            for g in self.paged:
                g.grow(span)
            self.rows.room[row] = blocks * self._block
        for g in self.states:
            g.enter(row)
        self.copies.place(row, [g.first_page(row, match.blocks) for g in self.groups])
        self.rows.computed[row] = match.hit
        seq.status, seq.epoch = Status.ADMITTED, self.epoch
        seq.branch = match.full_blocks if match.full_blocks > match.blocks else -1
        self.prefixes.touch(match)
        self._unproven.add(row)

    def _refusal(self, pool: int, needed: int) -> Answer:
        p = self.groups[pool].pool
        return Answer(ok=False, pool=p.name, needed=needed, available=p.num_available)

    # -- running -------------------------------------------------------------------------------

    def extend(self, batch: Batch, num_new: IntArray | int) -> Answer:
        """Room for `num_new` more tokens each, beyond what is computed; all or nothing. One call a step."""
        rows, table = batch.rows, self.rows
        need = table.computed[rows] + num_new
        room = table.room[rows]
        short = need > room
        tails = self._visible_tails(rows) if self._shared_tails else []
        if tails or short.any():
            refused = self._extend(rows[short], room[short] // self._block, need[short], tails)
            if refused is not None:
                return refused
        batch.num_new = num_new
        return GRANTED

    def _extend(self, rows: IntArray, start: IntArray, need: IntArray, tails: list[Tail]) -> Answer | None:
        if int(need.max(initial=0)) > self.rows.max_tokens:
            raise CapacityError(
                f"a sequence would reach {int(need.max())} tokens, max_tokens is {self.rows.max_tokens}; stop it "
                "earlier or raise max_tokens"
            )
        stop = -(-need // self._block)
        span = Span.of(rows, start, stop)
        wanted = [0] * len(self.groups)
        for g in self.paged:
            wanted[g.index] = len(span.rows)
        for g, _, _ in tails:
            wanted[g.index] += 1
        refused = self._supply.secure(wanted)
        if refused is not None:
            self._require_possible(refused, rows, stop)
            return self._refusal(refused, wanted[refused])
        for g in self.paged:
            g.grow(span)
        self.rows.room[rows] = stop * self._block
        for tail in tails:
            self._replace(*tail)
        return None

    def _require_possible(self, pool: int, rows: IntArray, stop: IntArray) -> None:
        """Raise CapacityError if a single row asks for more than its pool could ever hold."""
        group, limit = self.groups[pool], self._supply.limit(pool)
        if not isinstance(group, FullGroup):
            return
        for row, blocks in zip(rows.tolist(), stop.tolist(), strict=True):
            need = blocks - group.first_block(int(self.rows.computed[row]))
            if need > limit:
                raise CapacityError(
                    f"pool {group.pool.name!r} would have to hold {need} pages for one sequence but can hold "
                    f"{limit}; compute fewer tokens at once, or give it more memory"
                )

    def _visible_tails(self, rows: IntArray) -> list[Tail]:
        """Pages the batch would write although others can see them: (group, row, column)."""
        tails: list[Tail] = []
        for row in sorted(self._shared_tails.intersection(rows.tolist())):
            block, offset = divmod(int(self.rows.computed[row]), self._block)
            for g in self.groups:
                column = block if isinstance(g, FullGroup) else 0
                page = g.table.rows[row, column] if offset or isinstance(g, StateGroup) else -1
                if page >= 0 and (g.books.lease[page] > 1 or g.books.owner[page] != NO_OWNER):
                    tails.append((g, row, column))
        return tails

    def _replace(self, group: FullGroup | StateGroup, row: int, column: int) -> None:
        """Put a fresh page in the place of a shared one, to be copied from it before the next step."""
        old = int(group.table.rows[row, column])
        fresh = group.books.take(1)
        assert fresh is not None
        group.table.rows[row, column] = fresh[0]
        self.copies.plan(row, group.index, old, int(fresh[0]))  # the row's lease becomes the copy's
        self._shared_tails.discard(row)

    def commit(self, batch: Batch, tokens: TokenArray | None, accepted: IntArray | int | None) -> None:
        """The step's tokens are computed; `tokens` (one a sequence, -1 for none) are known from now on."""
        rows, table = batch.rows, self.rows
        count = self._granted(batch) if accepted is None else accepted
        computed = table.computed[rows] + count
        self._require_known(batch, computed)
        added = None if tokens is None else self._appendable(rows, computed, tokens)
        if self.copies:  # no step was entered: the pages must be whole all the same
            self.copies.run()
            self.copies.finish()
        table.computed[rows] = computed
        if self._unproven:
            self._prove(rows)
        if self.states:
            for i in np.flatnonzero(computed % self._block == 0):
                self.snapshots.take(batch.sequences[i], int(computed[i]))
        if isinstance(count, np.ndarray) or count >= self._block:
            for i in np.flatnonzero(np.broadcast_to(count, rows.shape) >= self._block):
                self.publish(batch.sequences[i], int(computed[i]) // self._block)
        for g in self.paged:
            g.retire(rows, computed)
        if added is not None:
            at, places, ids = added
            table.tokens[at, places] = ids
            table.length[at] = places + 1
        if accepted is not None:
            for row, blocks in zip(rows.tolist(), (-(-computed // self._block)).tolist(), strict=True):
                self._shorten(row, blocks)
        batch.num_new = None

    @staticmethod
    def _granted(batch: Batch) -> IntArray | int:
        if batch.num_new is None:
            raise UsageError("nothing was granted to this batch since its last commit; call extend or step first")
        return batch.num_new

    def _prove(self, rows: IntArray) -> None:
        """Count the reuse of sequences that have now run for the first time since admission."""
        for row in self._unproven.intersection(rows.tolist()):
            seq = self.live[row]
            self._unproven.discard(row)
            if seq.origin is Origin.TRAFFIC:
                self.stats.prove(seq)
            seq.peak = max(seq.peak, int(self.rows.computed[row]))

    def _require_known(self, batch: Batch, computed: IntArray) -> None:
        known = self.rows.length[batch.rows]
        if (computed > known).any():
            i = int(np.argmax(computed - known))
            raise UsageError(
                f"sequence in row {batch.rows[i]} would have {computed[i]} tokens computed but only {known[i]} are known; "
                "commit what was computed, and give sampled tokens by commit(..., tokens)"
            )

    def _appendable(
        self, rows: IntArray, computed: IntArray, tokens: TokenArray
    ) -> tuple[IntArray, IntArray, TokenArray]:
        """(rows, positions, ids) of the sampled tokens, checked."""
        table = self.rows
        given = tokens >= 0
        if not given.all():
            rows, computed, tokens = rows[given], computed[given], tokens[given]
        if (table.length[rows] != computed).any() or int(computed.max(initial=0)) >= table.max_tokens:
            raise UsageError(
                "a sampled token must follow the last known one, within max_tokens = "
                f"{table.max_tokens}; give -1 for sequences that have known tokens left to compute"
            )
        return rows, computed, tokens

    def _shorten(self, row: int, blocks: int) -> None:
        held = self.rows.blocks(row)
        if blocks < held:
            for g in self.paged:
                g.release(row, blocks, held)
            self.rows.room[row] = blocks * self._block

    # -- publishing ----------------------------------------------------------------------------

    def publish(self, seq: Sequence, blocks: int) -> None:
        """Make the sequence's first `blocks` blocks (all computed) matchable."""
        if blocks <= seq.published or seq.epoch != self.epoch:
            return
        row, start = seq.row, seq.published
        node = seq.node
        assert node is not None
        pages: list[PageArray] = [
            g.held(row, start, blocks) if isinstance(g, FullGroup) else self.snapshots.held(seq, g, start, blocks)
            for g in self.groups
        ]
        tokens = self.rows.tokens[row, start * self._block : blocks * self._block].tobytes()
        seq.node = self.prefixes.publish(node, tokens, pages, priority=seq.priority)
        for g in self.paged:
            g.table.rows[row, start:blocks] = pages[g.index]
        self.snapshots.published(seq, [pages[g.index] for g in self.states], blocks)
        if (blocks + 1) * self._block > seq.prompt_tokens or blocks == seq.branch:
            seq.node.sealed = True  # the next match may well end here: the run's end keeps its window and state
        self._anchor(seq, blocks)

    def _anchor(self, seq: Sequence, blocks: int) -> None:
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

    # -- leaving -------------------------------------------------------------------------------

    def finish(self, seq: Sequence) -> None:
        """Publish what may be matched again, then let go of everything."""
        blocks = seq.computed // self._block
        if self.states:
            blocks = max([seq.published, *(b for b in seq.snapshots if b <= blocks)])
        self.publish(seq, blocks)
        if seq.node is not None:
            seq.node.sealed = True  # a turn ended here
        self._let_go(seq)

    def _let_go(self, seq: Sequence) -> None:
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
        self._shared_tails.discard(row)
        self._unproven.discard(row)
        self.live.pop(row, None)
        self.rows.give(row)
        seq.row, seq.rows, seq.node, seq.published = -1, None, None, 0

    # -- rare verbs ----------------------------------------------------------------------------

    def trim(self, seq: Sequence, num_tokens: int) -> None:
        """Forget the last `num_tokens` known tokens (and what was computed of them)."""
        row = seq.row
        length = seq.length - num_tokens
        computed = min(seq.computed, length)
        self._require_rewindable(seq, computed)
        self.rows.length[row] = length
        self.rows.computed[row] = computed
        if computed // self._block < seq.published and seq.epoch == self.epoch:
            assert seq.node is not None
            node = self.prefixes.ancestor(seq.node, computed // self._block)
            node.pins += 1
            self.prefixes.unpin(seq.node)
            seq.node = node
            self._anchor(seq, computed // self._block)
        self._shorten(row, ceil_div(computed, self._block))
        if computed % self._block:
            self._shared_tails.add(row)

    def _require_rewindable(self, seq: Sequence, computed: int) -> None:
        if computed == seq.computed:
            return
        if self.states:
            raise UsageError(
                f"pool {self.states[0].pool.name!r} holds a state after {seq.computed} tokens, which cannot rewind to "
                f"{computed}; close the sequence and open the shorter one"
            )
        for g in self.paged:
            if not g.reaches(seq.row, computed):
                raise UsageError(
                    f"pool {g.pool.name!r} has released pages that {computed} tokens need; close the sequence and "
                    "open the shorter one"
                )

    def fork(self, seq: Sequence, child: Sequence) -> bool:
        """Let `child` share everything `seq` holds; whoever writes first copies. False if no row is free."""
        if not self.rows.num_free:
            return False
        if self.copies:  # the child shares pages that a copy is still to fill
            self.copies.run()
            self.copies.finish()
        row = self.rows.take(seq.tokens)
        # Room beyond the computed tokens is the parent's alone: both would write there.
        blocks = ceil_div(seq.computed, self._block)
        self.rows.computed[row], self.rows.room[row] = seq.computed, blocks * self._block
        for g in self.paged:
            g.adopt_row(row, seq.row, blocks)
        for g in self.states:
            g.adopt_row(row, seq.row)
        child.row, child.rows, child.status = row, self.rows, Status.ADMITTED
        child.node, child.epoch = seq.node, seq.epoch
        if child.node is not None:
            child.node.pins += 1
        self._anchor(child, seq.published)
        self._shared_tails.update((seq.row, row))
        self.live[row] = child
        return True

    # -- moving and checking -------------------------------------------------------------------

    def relabel(self, group: int, remap: PageArray) -> None:
        """Pages of `group` moved: fix rows, planned copies and pending snapshots."""
        rows = np.fromiter(self.live, np.int64, len(self.live))
        self.groups[group].relabel(rows, remap)
        self.copies.relabel(group, remap)
        self.snapshots.relabel(self.live.values(), group, remap)

    def count_leases(self, group: FullGroup | StateGroup) -> IntArray:
        """How many leases each page of the group should have, counted from the holders."""
        counts = np.zeros(group.books.max_pages, np.int64)
        for row, seq in self.live.items():
            entries = group.table.rows[row]
            np.add.at(counts, entries[entries >= 0], 1)
            if isinstance(group, StateGroup):
                np.add.at(counts, self.snapshots.pages(seq, group), 1)
        np.add.at(counts, self.copies.leases(group.index), 1)
        return counts
