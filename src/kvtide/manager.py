"""KVManager: what an engine sees. A thin facade; the work is done by the parts below it."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from typing import TYPE_CHECKING, Self

import numpy as np
import numpy.typing as npt

from kvtide.assembly import Parts, assemble
from kvtide.audit import audit
from kvtide.capacity import Capacity, Progress
from kvtide.config import Options
from kvtide.errors import CapacityError, UsageError
from kvtide.events import AllBlocksCleared
from kvtide.facts import Snapshot, take_snapshot
from kvtide.media import Media, MediaIds
from kvtide.peer import Peer
from kvtide.sequence import Answer, Batch, PageTable, Sequence, Status, Step
from kvtide.sequence.misuse import require, require_all, require_unregistered
from kvtide.tokens import TokenSource, as_tokens
from kvtide.types import IntArray, Origin, Scope

if TYPE_CHECKING:
    from kvtide.layout import Layout
    from kvtide.memory import Memory
    from kvtide.pool import Pool
    from kvtide.rebalance import Plan

Sequences = Batch | Seq[Sequence]


class KVManager:
    """The KV cache of one rank: several pools over one memory, and who may use which page of them.

    Not thread-safe: call it from the thread that schedules. Close it (or use `with`) to give the
    memory back.
    """

    def __init__(
        self,
        layout: Layout,
        memory: Memory,
        *,
        max_sequences: int = 256,
        max_tokens: int,
        options: Options | None = None,
    ) -> None:
        """Build pools for `layout` in `memory`, for sequences of at most `max_tokens` tokens.

        Raises ConfigError if one such sequence cannot fit in every pool at once.
        """
        self.layout = layout
        self.memory = memory
        self.options = options or Options()
        self.max_tokens = max_tokens
        self._parts: Parts = assemble(layout, memory, max_sequences, max_tokens, self.options)
        self._capacity = Capacity(self._parts)
        self.peer = Peer(self._parts)
        self._media = MediaIds()
        self._last: Batch | None = None

    # -- what an engine reads ------------------------------------------------------------------

    @property
    def pools(self) -> Mapping[str, Pool]:
        """Pools by layer-group name; their arenas' bases never change."""
        return self._parts.pools

    @property
    def tables(self) -> Mapping[str, PageTable]:
        """Page tables by layer-group name, int32, written in place for life."""
        return self._parts.tables

    @property
    def moved(self) -> tuple[int, int]:
        """Granules that changed pools and live pages relocated for it, since the start."""
        return self._parts.journal.total, self._parts.mover.num_relocated

    @property
    def epoch(self) -> int:
        """Goes up whenever a granule came or went or a page changed places."""
        return self._parts.mover.epoch

    @property
    def num_in_flight(self) -> int:
        """Steps that have not ended or whose fence has not passed; asks the fences."""
        fences = self._parts.fences
        return fences.issued - fences.poll()

    # -- the life of a sequence ----------------------------------------------------------------

    def open(
        self,
        tokens: TokenSource,
        *,
        scope: Scope | None = None,
        media: Seq[Media] = (),
        priority: int = 0,
        origin: Origin = Origin.TRAFFIC,
    ) -> Sequence:
        """A new sequence with this prompt. Holds nothing yet; `hit` says what could be reused now.

        `tokens`: anything with the buffer protocol (int32 is taken as it is, int64 converted), or a
        list. Raises CapacityError if the prompt can never fit, UsageError for negative ids.
        """
        ids = as_tokens(tokens)
        if len(ids) > self.max_tokens:
            raise CapacityError(
                f"the prompt has {len(ids)} tokens, max_tokens is {self.max_tokens}; shorten it "
                "or raise max_tokens"
            )
        if media:
            ids = self._media.mark(ids, media)
        seq = Sequence(
            scope=scope or Scope(),
            priority=priority,
            origin=origin,
            prompt_tokens=len(ids),
            saved=ids,
        )
        seq.match = self._parts.ledger.admission.match(seq, ids)
        return seq

    def admit(self, sequences: Seq[Sequence], num_tokens: int | Seq[int] | None = None) -> Answer:
        """Give sequences a row, their matched pages and room for their first `num_tokens` tokens.

        All of them in every pool, or nothing: a false answer names the pool that refused.
        Afterwards `computed` is what was reused; compute on from there. Default: all known tokens.
        Raises CapacityError if one request alone can never have that much.
        """
        counts = (
            [num_tokens] * len(sequences)
            if num_tokens is None or isinstance(num_tokens, int)
            else num_tokens
        )
        if len(counts) != len(sequences):
            raise UsageError(f"num_tokens has {len(counts)} counts for {len(sequences)} sequences")
        require_all(sequences, Status.OPEN, Status.SUSPENDED)
        requests: list[tuple[Sequence, int]] = []
        for seq, count in zip(sequences, counts, strict=True):
            known = seq.length
            if count is not None and not 0 < count <= known:
                raise UsageError(
                    f"num_tokens is {count}; the sequence knows {known} tokens, admit 1 to {known}"
                )
            requests.append((seq, known if count is None else count))
        return self._parts.ledger.admission.admit(requests)

    def chunk(self, seq: Sequence, limit: int) -> int:
        """How many of the known tokens to compute next, at most `limit`.

        Less than that if a state snapshot is wanted at a boundary on the way: a state can be kept
        only where a chunk ends.
        """
        require(seq, Status.ADMITTED)
        computed = seq.computed
        n = min(limit, seq.length - computed)
        stop = self._parts.ledger.holdings.snapshots.next_stop(seq, computed)
        return min(n, stop - computed) if stop else n

    def batch(self, sequences: Seq[Sequence]) -> Batch:
        """Freeze a set of admitted sequences that run together."""
        require_all(sequences, Status.ADMITTED)
        require_unregistered(sequences)
        return Batch(tuple(sequences), self._parts.ledger.holdings.membership)

    def extend(self, sequences: Sequences, num_new: IntArray | int = 1) -> Answer:
        """Make room so that each sequence can compute `num_new` more tokens; all of them or
        nothing.
        """
        batch = self._batch(sequences)
        if (num_new if isinstance(num_new, int) else num_new.min(initial=0)) < 0:
            raise UsageError(f"num_new is {num_new}; give counts of 0 or more")
        return self._parts.ledger.growth.extend(batch, num_new)

    @contextmanager
    def step(self, sequences: Sequences, num_new: IntArray | int | None = None) -> Generator[Step]:
        """Run the model on these sequences inside this block: their pages stay put until its fence.

        Planned page copies are done on entry. `num_new` may be left out after `extend`; if given,
        it is granted here and CapacityError raised if that is not possible (use `extend` to be
        told).
        """
        batch = self._batch(sequences)
        if num_new is None and batch.granted_in != self._parts.ledger.holdings.membership:
            num_new = batch.num_new  # pages may have been given back or shared since: grant anew
        if num_new is not None:
            answer = self.extend(batch, num_new)
            if not answer:
                raise CapacityError(
                    f"pool {answer.pool!r} has {answer.available} pages, the step needs "
                    f"{answer.needed}; "
                    "call extend first and preempt a sequence when it says no"
                )
        parts = self._parts
        self._capacity.advance()
        copies = parts.ledger.holdings.copies.run() if parts.ledger.holdings.copies else ()
        step = Step(
            parts.fences.begin(), batch, parts.ledger.holdings.rows.computed[batch.rows], copies
        )
        try:
            yield step
        finally:
            parts.fences.end(step.number, step.fence)
            parts.ledger.holdings.copies.finish()

    def commit(
        self,
        sequences: Sequences,
        tokens: npt.ArrayLike | None = None,
        accepted: IntArray | int | None = None,
    ) -> None:
        """The step's tokens are computed now, and matchable by whole blocks.

        `tokens`: one sampled id a sequence, known from now on but not computed (-1: none), or
        [sequences, k]: accepted drafts and then the sampled id, padded with -1. `accepted`: how
        many of the step's tokens count, if not all (speculation); the room of the others is given
        back, and a live state page must hold the state after the accepted ones. Sequences closed
        meanwhile are passed over.
        """
        batch = sequences if isinstance(sequences, Batch) else self._remembered(sequences)
        ids = None if tokens is None else np.asarray(tokens, np.int32)
        accepted = accepted if accepted is None else np.asarray(accepted, np.int64)
        if ids is not None and (ids.ndim > 2 or ids.shape[:1] != batch.rows.shape):
            raise UsageError(
                f"tokens have shape {list(ids.shape)} for {len(batch)} sequences; give one each "
                "(-1: none)"
            )
        if batch.membership != self._parts.ledger.holdings.membership:
            here = np.array(batch.present(), np.bool_)
            if not here.all():
                batch, ids = batch.only(here), None if ids is None else ids[here]
                accepted = accepted[here] if accepted is not None and accepted.ndim else accepted
        if len(batch):
            self._parts.ledger.growth.commit(batch, ids, accepted)

    def trim(self, seq: Sequence, num_tokens: int) -> None:
        """Forget the last `num_tokens` known tokens; pages beyond the rest are given back."""
        require(seq, Status.ADMITTED)
        require_unregistered([seq])
        if not 0 <= num_tokens < seq.length:
            raise UsageError(f"cannot trim {num_tokens} of {seq.length} tokens; one must stay")
        self._parts.ledger.trim(seq, num_tokens)

    def fork(self, seq: Sequence) -> Sequence | None:
        """A second sequence with the same tokens on the same pages; whoever writes first copies.

        Fork after commit: between step and commit a live state is ahead of the computed tokens.
        None, and nothing changed, if every row is taken.
        """
        require(seq, Status.ADMITTED)
        require_unregistered([seq])
        child = Sequence(
            scope=seq.scope,
            priority=seq.priority,
            origin=seq.origin,
            prompt_tokens=seq.prompt_tokens,
        )
        return child if self._parts.ledger.fork(seq, child) else None

    def suspend(self, sequences: Seq[Sequence]) -> None:
        """Let go of all pages. Whole computed blocks stay cached for as long as there is room for
        them.
        """
        require_all(sequences, Status.ADMITTED)
        require_unregistered(sequences)
        for seq in sequences:
            saved = seq.tokens.copy()
            seq.peak = max(seq.peak, seq.computed)
            self._parts.ledger.finish(seq)
            seq.saved, seq.status, seq.match = saved, Status.SUSPENDED, None

    def resume(self, sequences: Seq[Sequence], num_tokens: int | Seq[int] | None = None) -> Answer:
        """Admit suspended sequences again, as `admit`. What is no longer cached must be
        recomputed.
        """
        return self.admit(sequences, num_tokens)

    def close(self, sequences: Seq[Sequence]) -> None:
        """End sequences. Whole computed blocks stay cached. Closing twice does nothing."""
        require_unregistered(sequences)
        for seq in sequences:
            if seq.status is Status.ADMITTED:
                self._parts.ledger.finish(seq)
            seq.status = Status.CLOSED

    # -- capacity ------------------------------------------------------------------------------

    def rebalance(self, plan: Plan, *, dry_run: bool = False) -> Progress:
        """Move granules between pools as planned: some now, the rest at the entries of the next
        steps, at most `Options.move_bytes_per_step` each time.

        Replaces what is left of the plan before; an empty plan gives that up. Live pages are moved
        out of the way, never dropped; pages that a step in flight may touch stay until its fence.
        `dry_run` changes nothing: `moved` is what could move now. What floors and ceilings
        forbid is given up: neither moved nor pending. UsageError for unknown pools.
        """
        return self._capacity.rebalance(plan, dry_run=dry_run)

    def set_budget(self, num_bytes: int, *, dry_run: bool = False) -> Progress:
        """Use `num_bytes` (whole granules) of the memory from now on, for all pools together.

        Growing holds at once. Shrinking drops what is cached and cheapest first, a little at each
        step; the answer says which live sequences are in the way, and it goes on when they leave.
        Memory that is given up goes back to the system afterwards, a granule at each step.
        ConfigError below what one longest sequence needs and above what the memory has; with
        `dry_run` that is all.
        """
        return self._capacity.set_budget(num_bytes, dry_run=dry_run)

    def resize(self, pages: Mapping[str, int], *, dry_run: bool = False) -> dict[str, int]:
        """Give pools exactly these numbers of pages (by name, the sinks apart), all or nothing;
        returns what they can have now.

        If that is less than was asked (or more, where live pages are in the way), or with
        `dry_run`, nothing has changed. A pool keeps its lowest pages: on ranks whose pages differ
        in bytes the same page ids stay, and no later plan takes a pool beyond its size. For static
        splits, between steps: UsageError otherwise.
        """
        return self._capacity.resize(pages, dry_run=dry_run)

    def settle(self) -> Progress:
        """Carry out now all that `rebalance` and `set_budget` left for later, however long it
        takes.
        """
        return self._capacity.settle()

    def reset(self) -> None:
        """Drop every cached prefix. Live sequences keep their pages but publish nothing any
        more.
        """
        self._parts.ledger.holdings.epoch += 1
        self._parts.prefixes.clear()
        self._media.clear()
        if self.options.events is not None:
            self.options.events(AllBlocksCleared())

    def snapshot(self) -> Snapshot:
        """Frozen facts about pools, reuse and capacity moves."""
        return take_snapshot(self._parts)

    def check(self) -> None:
        """Raise InvariantError unless all books balance. Slow: for tests and debugging."""
        audit(self._parts)

    def shut_down(self) -> None:
        """Close every sequence and give the memory back. A second call does nothing."""
        live = list(self._parts.ledger.holdings.live.values())
        for seq in live:
            seq.registered = False  # the graphs that rely on it end with the memory
        self.close(live)
        self.memory.close()

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Shut down."""
        self.shut_down()

    # -- helpers -------------------------------------------------------------------------------

    def _batch(self, sequences: Sequences) -> Batch:
        """The batch itself, its rows known to be right, or a new one that the next call
        remembers.
        """
        ledger = self._parts.ledger
        if not isinstance(sequences, Batch):
            remembered = self._last
            if (
                remembered is None
                or remembered.sequences != tuple(sequences)
                or not all(remembered.present())
            ):
                remembered = self._last = self.batch(sequences)
            return remembered
        if sequences.membership != ledger.holdings.membership:
            if not all(sequences.present()):
                raise UsageError(
                    "a sequence of this batch was closed or suspended; make a new batch"
                )
            sequences.membership = ledger.holdings.membership
        return sequences

    def _remembered(self, sequences: Seq[Sequence]) -> Batch:
        """The batch a list was given to `extend` or `step` as, closed sequences and all."""
        if self._last is None or self._last.sequences != tuple(sequences):
            raise UsageError(
                "commit names other sequences than the last extend or step; give the same list"
            )
        return self._last
