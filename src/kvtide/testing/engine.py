"""FakeEngine: a model stand-in whose every byte says which prefix, layer and buffer it belongs to.

It drives a `KVManager` over memory with bytes. In each step it first reads what the lifetimes of
the layer groups entitle it to, then writes what it computes: for a token, bytes derived from the
whole prefix that ends there; for a state, bytes derived from all tokens absorbed. So wrong sharing,
a missed copy, a stale window, lost bytes of a moved page and traces of a former tenant all show as
`WrongBytesError`. Sampled tokens are a pure function of the prefix, so runs can be compared.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvtide.layout import Lifetime, State, Window
from kvtide.sequence import Batch, Sequence
from kvtide.testing.places import GroupBytes, Places, WrongBytesError
from kvtide.testing.stamps import NOTHING, HashArray, label, prefix_hashes
from kvtide.types import ABSENT, IntArray, TokenArray

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from kvtide.manager import KVManager
    from kvtide.sequence import Step

__all__ = ["FakeEngine", "ManualFence", "WrongBytesError"]

REJECTED = 2**31 - 1
"""Token id of made-up drafts, always rejected: no prompt should hold it."""


class ManualFence:
    """A fence that passes when told to."""

    def __init__(self) -> None:
        self.passed = False

    def done(self) -> bool:
        """Whether `passed` was set."""
        return self.passed


@dataclass(slots=True)
class _Flight:
    """A step whose fence has not passed: everything it read or wrote must stay as it is."""

    number: int
    fence: ManualFence
    touched: list[Places]


@dataclass(frozen=True, slots=True)
class _Work:
    """One sequence's part of a step: known positions before `start`, computes [start, stop).

    `kept` of them count; a state absorbs only those.
    """

    seq: Sequence
    user: int
    row: int
    start: int
    stop: int
    kept: int
    hashes: HashArray

    def after(self, length: int) -> HashArray:
        """Hash of the first `length` tokens, uint64 [1]."""
        return self.hashes[length - 1 : length] if length else np.full(1, NOTHING, np.uint64)


class FakeEngine:
    """Runs sequences of a manager step by step and checks every byte on the way."""

    def __init__(self, kv: KVManager, *, vocabulary: int = 16) -> None:
        self.kv = kv
        self.vocabulary = vocabulary
        self._groups = [GroupBytes(group, kv.pools[group.name]) for group in kv.layout.groups]
        self._flying: deque[_Flight] = deque()
        self._users: dict[Sequence, int] = {}

    # -- verbs ---------------------------------------------------------------------------------

    def step(
        self,
        sequences: Batch | Seq[Sequence],
        num_new: IntArray | Seq[int] | int = 1,
        *,
        accepted: IntArray | Seq[int] | None = None,
        in_flight: bool = False,
    ) -> IntArray:
        """Run one step and commit it; returns the sampled ids (-1 where known tokens are left).

        Tokens beyond the known ones are drafts that will be rejected: say with `accepted` how many
        tokens count. Raises CapacityError if the manager cannot grant the step.
        """
        batch = sequences if isinstance(sequences, Batch) else self.kv.batch(sequences)
        kept = None if accepted is None else np.asarray(accepted, np.int64)
        self.run(batch, num_new, accepted=kept, in_flight=in_flight)
        ids = self.sample(batch, kept)
        self.kv.commit(batch, ids, kept)
        return ids

    def run(
        self,
        batch: Batch,
        num_new: IntArray | Seq[int] | int,
        *,
        accepted: IntArray | None = None,
        in_flight: bool = False,
    ) -> None:
        """Read, verify and write one step's tokens, without committing them."""
        counts = num_new if isinstance(num_new, int) else np.asarray(num_new, np.int64)
        with self.kv.step(batch, counts) as step:
            touched = self._compute(step, accepted)
            if in_flight:
                step.fence = ManualFence()
                self._flying.append(_Flight(step.number, step.fence, touched))

    def prefill(
        self, sequences: Seq[Sequence], *, limit: int = 1 << 30, sample: bool = False
    ) -> None:
        """Compute all known tokens of admitted sequences, at most `limit` each step.

        `sample`: append one id to each at the end, so that `step` can go on from there.
        """
        ends = {seq: seq.length for seq in sequences}
        while rest := [seq for seq, end in ends.items() if seq.computed < end]:
            batch = self.kv.batch(rest)
            self.run(batch, self.chunks(rest, limit))
            self.kv.commit(batch, self.sample(batch) if sample else None)

    def chunks(self, sequences: Seq[Sequence], limit: int) -> IntArray:
        """Tokens each sequence should compute next, at most `limit`, int64."""
        return np.array([self.kv.chunk(seq, limit) for seq in sequences], np.int64)

    def sample(self, batch: Batch, accepted: IntArray | None = None) -> IntArray:
        """The next id of each sequence whose known tokens are all computed by the step; else -1."""
        granted = batch.num_new if accepted is None else accepted
        counts = np.broadcast_to(
            np.asarray(granted or 0 if granted is None else granted), len(batch)
        )
        ids = np.full(len(batch), -1, np.int64)
        for i, seq in enumerate(batch.sequences):
            if seq.computed + counts[i] == seq.length < self.kv.max_tokens:
                ids[i] = self.next_token(seq.tokens, seq)
        return ids

    def next_token(self, tokens: TokenArray, seq: Sequence) -> int:
        """What the model says after `tokens` in the sequence's scope: an id below `vocabulary`."""
        return int(prefix_hashes(tokens, label(seq.scope))[-1]) % self.vocabulary

    def fork(self, seq: Sequence) -> Sequence | None:
        """Fork, and know the two as one family: either may inherit a page that the other wrote."""
        child = self.kv.fork(seq)
        if child is not None:
            self._users[child] = self._user(seq)
        return child

    def verify(self, sequences: Seq[Sequence]) -> None:
        """Read and check everything these admitted sequences may read now (an empty step)."""
        with self.kv.step(sequences, 0) as step:
            self._compute(step, None)

    # -- steps in flight -----------------------------------------------------------------------

    @property
    def num_in_flight(self) -> int:
        """Steps whose fence has not passed."""
        return len(self._flying)

    def complete(self, num_steps: int = 1) -> None:
        """The device finishes its oldest steps: nothing they touched may have changed until now."""
        for _ in range(min(num_steps, len(self._flying))):
            flight = self._flying.popleft()
            for group, places in zip(self._groups, flight.touched, strict=True):
                group.verify(places, f"step {flight.number} in flight")
            flight.fence.passed = True

    # -- one step ------------------------------------------------------------------------------

    def _compute(self, step: Step, accepted: IntArray | None) -> list[Places]:
        """Verify all reads, then do all writes; returns what was touched, per layer group."""
        works = self._works(step, accepted)
        reads = [self._reads(group, works) for group in self._groups]
        writes = [self._writes(group, works) for group in self._groups]
        for group, places in zip(self._groups, reads, strict=True):
            group.verify(places, f"step {step.number}")
        for index, (group, places) in enumerate(zip(self._groups, writes, strict=True)):
            for flight in self._flying:
                flight.touched[index] = _overtake(flight, index, places)
            group.write(places)
        # A state is read and written in the same place: what stays behind is what was written.
        return [
            Places.join([written, read.only(~np.isin(read.keys, written.keys))])
            for read, written in zip(reads, writes, strict=True)
        ]

    def _works(self, step: Step, accepted: IntArray | None) -> list[_Work]:
        works: list[_Work] = []
        for i, seq in enumerate(step.batch.sequences):
            start, n = int(step.starts[i]), int(step.num_new[i])
            kept = min(n, seq.length - start) if accepted is None else int(accepted[i])
            drafts = np.full(max(0, start + n - seq.length), REJECTED, np.int32)
            hashes = prefix_hashes(np.concatenate([seq.tokens, drafts]), label(seq.scope))
            works.append(_Work(seq, self._user(seq), seq.row, start, start + n, kept, hashes))
        return works

    def _user(self, seq: Sequence) -> int:
        return self._users.setdefault(seq, len(self._users))

    def _reads(self, group: GroupBytes, works: list[_Work]) -> Places:
        lifetime = group.group.lifetime
        if isinstance(lifetime, State):
            return Places.join([self._state(group, w, w.start) for w in works])
        parts = [self._tokens(group, w, _readable(lifetime, w.start)) for w in works]
        for work in works:
            self._require_stale_rows_clear(group, work)
        return Places.join(parts)

    def _writes(self, group: GroupBytes, works: list[_Work]) -> Places:
        if group.group.is_state:
            return Places.join([self._state(group, w, w.start + w.kept) for w in works if w.kept])
        return Places.join([self._tokens(group, w, np.arange(w.start, w.stop)) for w in works])

    def _tokens(self, group: GroupBytes, work: _Work, positions: IntArray) -> Places:
        # An entry of several tokens, or a token of several ranks' share, is there with its last.
        fold = group.group.block_tokens // group.group.entries
        positions = positions[(positions + 1) % fold == 0]
        block, offsets = np.divmod(positions, group.group.block_tokens)
        slots = offsets // fold
        pages = self.kv.tables[group.group.name].rows[work.row, block].astype(np.int64)
        users = np.full(len(positions), work.user)
        return Places(pages, slots, users, positions, work.hashes[positions])

    def _state(self, group: GroupBytes, work: _Work, absorbed: int) -> Places:
        pages = self.kv.tables[group.group.name].rows[work.row].astype(np.int64)
        zero = np.zeros(1, np.int64)
        return Places(pages, zero, zero + work.user, zero + absorbed, work.after(absorbed))

    def _require_stale_rows_clear(self, group: GroupBytes, work: _Work) -> None:
        """Entries behind the window, and beyond the room, must name no page."""
        lifetime, size = group.group.lifetime, group.group.block_tokens
        entries = self.kv.tables[group.group.name].rows[work.row]
        stale = [entries[-(-work.seq.capacity // size) :]]
        if isinstance(lifetime, Window):
            first = max(0, work.start - lifetime.tokens + 1) // size
            stale.append(entries[-(-lifetime.sinks // size) : first])
        if any((part != ABSENT).any() for part in stale):
            raise WrongBytesError(
                f"row {work.row} of pool {group.pool.name!r} still names pages it has no right to"
            )


def _readable(lifetime: Lifetime, length: int) -> IntArray:
    """Positions the next token may read after `length` computed ones."""
    if not isinstance(lifetime, Window):
        return np.arange(length)
    first = max(0, length - lifetime.tokens + 1)
    return np.union1d(np.arange(min(lifetime.sinks, length)), np.arange(first, length))


def _overtake(flight: _Flight, index: int, written: Places) -> Places:
    """What a flight still vouches for after a write: a sequence may overwrite only its own."""
    touched = flight.touched[index]
    again = np.isin(touched.keys, written.keys)
    mine, theirs = touched.only(again), written.only(np.argsort(written.keys))
    writers = theirs.users[np.searchsorted(theirs.keys, mine.keys)]
    if (writers != mine.users).any():
        raise WrongBytesError(
            f"sequence {int(writers[0])} writes to page {mine.pages[0]} of layer group {index}, "
            f"which step {flight.number} may still read"
        )
    return touched.only(~again)
