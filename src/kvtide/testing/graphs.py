"""CPU twin of captured graphs: raw-address operations, recorded once, replayed without asking.

A kernel is frozen with the addresses it was recorded with, as in a captured GPU graph: it looks
page ids up when it runs, at a fixed address, and follows them from a fixed base. Whatever moved
without a word to it shows as wrong bytes or as a fault. `TwinDevice` runs late, as devices do.
"""

from __future__ import annotations

import ctypes
from collections import defaultdict, deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np

from kvtide.layout import State, Window
from kvtide.sequence.groups import ZERO
from kvtide.testing.engine import ManualFence
from kvtide.testing.places import WrongBytesError
from kvtide.testing.stamps import label

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Sequence as Seq
    from typing import Any

    import numpy.typing as npt

    from kvtide.guard import GraphGuard, Padding, Replay
    from kvtide.layout import LayerGroup
    from kvtide.manager import KVManager
    from kvtide.sequence import PageCopy, Sequence
    from kvtide.types import IntArray, PageArray

WORD = 8
"""Bytes of what the twin keeps per token, and of what it adds to a state: one int64."""


class Kernel(Protocol):
    """One node of a captured graph: every argument is fixed, addresses included."""

    def __call__(self) -> None:
        """Run it on the bytes as they are now."""
        ...


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy `num_bytes` from address `src` to address `dst`."""

    dst: int
    src: int
    num_bytes: int

    def __call__(self) -> None:
        """Copy what is at `src` now."""
        ctypes.memmove(self.dst, self.src, self.num_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Paged:
    """Where the words of a batch stand in one pool: all that a paged kernel is launched with.

    Addresses: the pool's `base`, its page `table` (int32 [*, width]), the batch's `rows` in it and
    the `positions` it computes now (int64 [num_rows] each). `span` is how many of the latest words
    the new token reads, its own included.
    """

    base: int
    page_bytes: int
    table: int
    width: int
    rows: int
    positions: int
    num_rows: int
    block_tokens: int
    word_bytes: int
    span: int

    def word(self, i: int, position: int) -> int:
        """Address of the word of a position of batch row `i`, by the page table as it is now."""
        block, offset = divmod(position, self.block_tokens)
        page = _int32(self.table + 4 * (_int64(self.rows + WORD * i) * self.width + block))
        return self.base + page * self.page_bytes + offset * self.word_bytes

    def position(self, i: int) -> int:
        """The position that batch row `i` computes now."""
        return _int64(self.positions + WORD * i)


@dataclass(frozen=True, slots=True)
class Locate:
    """Look up where each row's new word goes, once for all later kernels: addresses to `places`."""

    paged: Paged
    places: int

    def __call__(self) -> None:
        """Look up by the tables as they are now."""
        for i in range(self.paged.num_rows):
            place = self.paged.word(i, self.paged.position(i))
            ctypes.c_int64.from_address(self.places + WORD * i).value = place


@dataclass(frozen=True, slots=True)
class Add:
    """Add each row's `values[i]` to the word at `places[i]` (first set it to 0 if `fresh`)."""

    places: int
    values: int
    num_rows: int
    fresh: bool

    def __call__(self) -> None:
        """Write to the places that were looked up."""
        for i in range(self.num_rows):
            word = ctypes.c_int64.from_address(_int64(self.places + WORD * i))
            word.value = (0 if self.fresh else word.value) + _int64(self.values + WORD * i)


@dataclass(frozen=True, slots=True)
class Sum:
    """Sum of the words each row may read, its new one included, to `out` (int64 [num_rows])."""

    paged: Paged
    out: int

    def __call__(self) -> None:
        """Read through the tables as they are now."""
        for i in range(self.paged.num_rows):
            last = self.paged.position(i)
            read = range(max(0, last + 1 - self.paged.span), last + 1)
            total = sum(_int64(self.paged.word(i, p)) for p in read)
            ctypes.c_int64.from_address(self.out + WORD * i).value = total


class TwinDevice:
    """A stream: what is queued happens in order, and only when told to."""

    def __init__(self) -> None:
        self._queue: deque[Callable[[], object]] = deque()

    def __len__(self) -> int:
        """Pieces of work that have not run."""
        return len(self._queue)

    def enqueue(self, work: Callable[[], object]) -> None:
        """Run `work` after everything queued before."""
        self._queue.append(work)

    def copy(self, dst: npt.NDArray[Any], src: npt.NDArray[Any]) -> None:
        """Queue a copy that reads `src` when it runs, as an asynchronous copy from a host does.

        ValueError unless both are contiguous and of equal size.
        """
        if dst.nbytes != src.nbytes or not (dst.flags.c_contiguous and src.flags.c_contiguous):
            raise ValueError(f"cannot copy {src.nbytes} bytes to {dst.nbytes} contiguous ones")
        copy = Copy(dst.ctypes.data, src.ctypes.data, dst.nbytes)
        self.enqueue(lambda _arrays=(dst, src): copy())  # which live until then

    def fence(self) -> ManualFence:
        """A fence that passes when all that is queued now has run."""
        fence = ManualFence()
        self.enqueue(lambda: setattr(fence, "passed", True))
        return fence

    def run(self, num: int | None = None) -> None:
        """Run the next `num` pieces of work; all of them by default."""
        for _ in range(len(self._queue) if num is None else num):
            self._queue.popleft()()


class TwinGraph:
    """A captured decode step of `num_rows` rows over all pools of a manager.

    Its inputs and outputs are arrays at fixed addresses: `rows` (which row of `tables` each batch
    row is), `positions`, `values` to store, and by pool `tables` and `sums`. `tables=None` gives
    it page tables of its own to be filled each step; else it reads these in place.
    """

    def __init__(
        self, kv: KVManager, num_rows: int, tables: dict[str, PageArray] | None = None
    ) -> None:
        self.num_rows = num_rows
        self.rows: IntArray = np.arange(num_rows)
        self.positions: IntArray = np.zeros(num_rows, np.int64)
        self.values: IntArray = np.zeros(num_rows, np.int64)
        self.tables: dict[str, PageArray] = tables or {
            name: np.zeros((num_rows, table.rows.shape[1]), np.int32)
            for name, table in kv.tables.items()
        }
        self.sums: dict[str, IntArray] = {n: np.zeros(num_rows, np.int64) for n in kv.pools}
        self._places = {n: np.zeros(num_rows, np.int64) for n in kv.pools}
        paged = {g.name: self._paged(kv, g) for g in kv.layout.groups}
        self.kernels: list[Kernel] = [
            Locate(p, self._places[n].ctypes.data) for n, p in paged.items()
        ]
        for group in kv.layout.groups:
            places = self._places[group.name].ctypes.data
            fresh = not group.is_state
            self.kernels.append(Add(places, self.values.ctypes.data, num_rows, fresh))
        self.kernels += [Sum(p, self.sums[n].ctypes.data) for n, p in paged.items()]

    def replay(self, device: TwinDevice) -> None:
        """Queue every kernel, with the addresses of the day it was captured."""
        for kernel in self.kernels:
            device.enqueue(kernel)

    def _paged(self, kv: KVManager, group: LayerGroup) -> Paged:
        pool, table = kv.pools[group.name], self.tables[group.name]
        return Paged(
            base=pool.arena.base,
            page_bytes=pool.page_bytes,
            table=table.ctypes.data,
            width=table.shape[1],
            rows=self.rows.ctypes.data,
            positions=self.positions.ctypes.data,
            num_rows=self.num_rows,
            block_tokens=kv.max_tokens if group.is_state else group.block_tokens,
            word_bytes=0 if group.is_state else WORD,
            span=_span(group, kv.max_tokens),
        )


class TwinEngine:
    """Decodes token by token with one captured graph, on a device that may run steps later.

    Each step's result is checked when the device gets there: WrongBytesError if a word was lost.
    """

    def __init__(
        self, kv: KVManager, guard: GraphGuard, num_rows: int, *, padding: Padding | None = None
    ) -> None:
        self.kv, self.guard, self.padding = kv, guard, padding
        self.device = TwinDevice()
        self.handle = guard.capture(num_rows, padding=padding)
        self.graph = TwinGraph(kv, num_rows)
        self.num_checked = 0
        self._numbers: dict[Sequence, int] = {}
        self._words: defaultdict[Sequence, list[int]] = defaultdict(list)

    def step(self, sequences: Seq[Sequence]) -> None:
        """Queue the next token of each sequence and commit it; `device.run` computes it."""
        replay = self.guard.begin_step(sequences, 1, graph=self.handle)
        for copies in replay.step.copies:
            self._repeat(copies)
        self._send(replay, sequences)
        self.graph.replay(self.device)
        self._check(sequences)
        self.guard.end_step(self.device.fence())
        known = [seq.computed + 1 < seq.length for seq in sequences]
        self.kv.commit(sequences, [-1 if k else 1 for k in known])

    def _repeat(self, copies: PageCopy) -> None:
        """Queue page copies that ran when the step began: late as it is, this device was not done
        with their sources.
        """
        pool = self.kv.pools[copies.group]
        base, size = pool.arena.base, pool.page_bytes
        for src, dst in zip(copies.src.tolist(), copies.dst.tolist(), strict=True):
            if src == ZERO:
                self.device.enqueue(partial(ctypes.memset, base + dst * size, 0, size))
            else:
                self.device.enqueue(Copy(base + dst * size, base + src * size, size))

    def _send(self, replay: Replay, sequences: Seq[Sequence]) -> None:
        """Queue the copies of this step's inputs; their sources stay as they are until it ran."""
        filler = 0 if self.padding is None else self.padding.num_tokens - 1
        positions = np.full(self.graph.num_rows, filler, np.int64)
        values = np.full(self.graph.num_rows, -1, np.int64)
        positions[: len(sequences)] = replay.step.starts
        for i, seq in enumerate(sequences):
            number, words = self._numbers.setdefault(seq, len(self._numbers)), self._words[seq]
            del words[int(positions[i]) :]  # computed again after a suspension
            words.append(label(number, int(positions[i])) >> 24)
            values[i] = words[-1]
        self.device.copy(self.graph.positions, positions)
        self.device.copy(self.graph.values, values)
        for name, table in replay.tables.items():
            self.device.copy(self.graph.tables[name], table)

    def _check(self, sequences: Seq[Sequence]) -> None:
        """Queue the comparison of every pool's sums with what the sequences wrote."""
        words = [list(self._words[seq]) for seq in sequences]

        def check() -> None:
            for group in self.kv.layout.groups:
                span = _span(group, self.kv.max_tokens)
                want = [sum(w) if group.is_state else sum(w[-span:]) for w in words]
                got = self.graph.sums[group.name][: len(words)].tolist()
                if got != want:
                    raise WrongBytesError(f"pool {group.name!r} gave {got}, written was {want}")
            self.num_checked += len(words)

        self.device.enqueue(check)


def _span(group: LayerGroup, max_tokens: int) -> int:
    """Words that the newest token reads: the window's, one state, or all."""
    match group.lifetime:
        case State():
            return 1
        case Window(tokens, _):
            return tokens
        case _:
            return max_tokens


def _int32(address: int) -> int:
    return ctypes.c_int32.from_address(address).value


def _int64(address: int) -> int:
    return ctypes.c_int64.from_address(address).value
