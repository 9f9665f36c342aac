"""Live sequences that check their own pages: a light engine that costs the measurement nothing.

Every page in use bears, in its first and last eight bytes, a hash of the token prefix that it
belongs to. A step reads and compares the stamps of all pages that its sequences may still use, then
writes those of the tokens it computes. Only the manager's own calls are timed.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from kvtide.layout import State, Window
from kvtide.testing import stamps

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    import kvtide
    from kvtide.layout import LayerGroup
    from kvtide.sequence import Step


class WrongStampError(Exception):
    """A page does not hold what its sequence wrote there."""


@dataclass(slots=True)
class Times:
    """What the manager took in each step, in microseconds, and whether ground moved in it."""

    wall: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)
    moved: list[bool] = field(default_factory=list)


class Clock:
    """Adds up the time of the manager's calls within one step."""

    def __init__(self) -> None:
        self.wall = self.processor = 0.0

    def time(self, call: Callable[[], object]) -> object:
        """The answer of `call`, its time added."""
        processor, wall = time.thread_time(), time.perf_counter()
        answer = call()
        self.wall += time.perf_counter() - wall
        self.processor += time.thread_time() - processor
        return answer


class _Stamped:
    """First and last word of every page of one pool."""

    def __init__(self, group: LayerGroup, kv: kvtide.KVManager) -> None:
        pool = kv.pools[group.name]
        self.group, self.rows = group, kv.tables[group.name].rows
        words = np.frombuffer(pool.arena.buffer(), np.uint64)
        shape, strides = (pool.space.num_pages,), (pool.page_bytes,)
        last = pool.page_bytes // 8 - 1
        strided = np.lib.stride_tricks.as_strided
        self._ends = [strided(words[at:], shape, strides) for at in (0, last)]

    def write(self, row: int, hashes: npt.NDArray[np.uint64], start: int, stop: int) -> None:
        """The tokens [start, stop) of a sequence are computed."""
        pages, stamp = self._places(row, hashes, start, stop, stop)
        for end in self._ends:
            end[pages] = stamp

    def check(self, row: int, hashes: npt.NDArray[np.uint64], length: int) -> int:
        """Compare what a sequence with `length` computed tokens may still read; pages compared."""
        lifetime = self.group.lifetime
        first = max(0, length - lifetime.tokens + 1) if isinstance(lifetime, Window) else 0
        pages, stamp = self._places(row, hashes, first, length, length)
        if any((end[pages] != stamp).any() for end in self._ends):
            raise WrongStampError(f"row {row} of pool {self.group.name!r} reads foreign bytes")
        return len(pages)

    def _places(
        self, row: int, hashes: npt.NDArray[np.uint64], start: int, stop: int, absorbed: int
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint64]]:
        if isinstance(self.group.lifetime, State):
            return self.rows[row], hashes[absorbed - 1 : absorbed]
        size = self.group.block_tokens
        blocks = np.arange(start // size, -(-stop // size))
        return self.rows[row, blocks], hashes[blocks * size]


class Fleet:
    """Sequences of a manager, stepped together."""

    def __init__(self, kv: kvtide.KVManager) -> None:
        self.kv = kv
        self.live: list[kvtide.Sequence] = []
        self.pages_checked = 0
        self._stamped = [_Stamped(group, kv) for group in kv.layout.groups]
        self._tokens: dict[kvtide.Sequence, npt.NDArray[np.int32]] = {}
        self._hashes: dict[kvtide.Sequence, npt.NDArray[np.uint64]] = {}

    def start(
        self, tokens: npt.NDArray[np.int32], prompt: int, clock: Clock, *, room: int | None = None
    ) -> bool:
        """Open and admit a sequence that will say `tokens`, the first `prompt` of which are known,
        with room for `room` of them or all; False if there is none.
        """
        seq = self.kv.open(tokens[:prompt])
        if not clock.time(lambda: self.kv.admit([seq], room)):
            self.kv.close([seq])
            return False
        self._tokens[seq], self._hashes[seq] = tokens, stamps.prefix_hashes(tokens, 1)
        self.live.append(seq)
        return True

    def catch_up(self, chunk: int = 1 << 20) -> int:
        """Compute all that is known but for the last token, `chunk` tokens of each in turn; how
        many it were.
        """
        total = 0
        while late := [seq for seq in self.live if seq.computed < seq.length - 1]:
            for seq in late:
                count = min(self.kv.chunk(seq, chunk), seq.length - 1 - seq.computed)
                self._run([seq], count, Clock())
                total += count
        return total

    def step(self, clock: Clock) -> None:
        """One more token for every sequence."""
        self._run(self.live, 1, clock)

    def end(self, seqs: Sequence[kvtide.Sequence]) -> None:
        """Close sequences; what they computed stays cached."""
        self.kv.close(seqs)
        self.live = [seq for seq in self.live if seq not in set(seqs)]

    def finished(self) -> list[kvtide.Sequence]:
        """Sequences that have said all they will."""
        return [seq for seq in self.live if seq.length >= len(self._tokens[seq])]

    def _run(self, seqs: list[kvtide.Sequence], count: int, clock: Clock) -> None:
        kv = self.kv
        batch = kv.batch(seqs)
        if not clock.time(lambda: kv.extend(batch, count)):
            raise WrongStampError("no room for a step: the case is too tight")
        block = kv.step(batch)
        step = clock.time(block.__enter__)
        self._compute(step)
        clock.time(lambda: block.__exit__(None, None, None))
        ids = [self._next(seq, count) for seq in seqs]
        clock.time(lambda: kv.commit(batch, ids))

    def _next(self, seq: kvtide.Sequence, count: int) -> int:
        tokens = self._tokens[seq]
        done = seq.computed + count == seq.length < len(tokens)
        return int(tokens[seq.length]) if done else -1

    def _compute(self, step: Step) -> None:
        pairs = zip(step.batch.sequences, step.starts.tolist(), step.num_new.tolist(), strict=True)
        for seq, start, count in pairs:
            for group in self._stamped:
                if start:
                    self.pages_checked += group.check(seq.row, self._hashes[seq], start)
                group.write(seq.row, self._hashes[seq], start, start + count)
