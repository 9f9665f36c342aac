"""Graph guard: what captured graphs rely on stays true while capacity moves between pools.

A captured graph replays the addresses it was recorded with. Those it may rely on are the pools'
bases, the page tables' buffers, and the row and pages of padding that was registered. The guard
checks the first two at every replay, keeps the third alive, and lets nothing move under a replay.
"""

from __future__ import annotations

from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvtide.errors import CapacityError, StaleGraphError, UsageError
from kvtide.sizing import least_pages
from kvtide.types import SINK, Origin, Scope, ceil_div

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from collections.abc import Sequence as Seq

    from kvtide.layout import LayerGroup
    from kvtide.manager import KVManager
    from kvtide.pool import Fence
    from kvtide.sequence import Batch, Sequence, Step
    from kvtide.types import IntArray, PageArray

_SCOPE = Scope(salt=b"\0kvtide registered padding")
"""Matches nothing: graphs write into padding, so no page of it may be anybody else's."""


class Padding:
    """A sequence that fills unused rows of captured batches, from `GraphGuard.register_padding`.

    Its row in the page tables never changes. Its pages may be moved, bytes and all, between
    replays; the row names them where they are. It publishes nothing and feeds no statistics.
    """

    __slots__ = ("_kv", "num_tokens", "seq")

    def __init__(self, kv: KVManager, seq: Sequence) -> None:
        self._kv = kv
        self.seq = seq
        self.num_tokens = seq.length

    @property
    def row(self) -> int:
        """Its row in every page table, -1 once unregistered."""
        return self.seq.row

    def unregister(self) -> None:
        """Give its row and pages back; graphs captured with it are refused from now on.

        A replay in flight may still use them until its fence. A second call does nothing.
        """
        self.seq.registered = False
        self._kv.close([self.seq])


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """What one captured graph relies on, from `GraphGuard.capture`: see there.

    `epoch` is that of the capacity layout it was captured in.
    """

    num_rows: int
    padding: Padding | None
    bakes_pages: bool
    epoch: int


@dataclass(slots=True, kw_only=True)
class Replay:
    """A step in flight, from `GraphGuard.begin_step`.

    `rows` are the page-table rows of the batch, int64, then the padding's (-1: the sink page's).
    `tables` are the rows' page ids by pool, int32 [rows, blocks]: a copy that is this step's alone
    until its fence has passed, so a device may read it late. Every entry is the id of a page that
    exists; where a row has none it is the sink page, 0. Empty for a step without a graph.
    """

    step: Step
    rows: IntArray
    tables: Mapping[str, PageArray]


@dataclass(slots=True)
class _Staging:
    """One step's page-table buffers; `used` of their columns may name more than the sink."""

    num_rows: int
    tables: dict[str, PageArray]
    used: dict[str, int]


class GraphGuard:
    """Between an engine that replays captured graphs and its manager. Not thread-safe.

    Every step goes through `begin_step` and `end_step`, captured or not; between them, and until
    the fence has passed, nothing a replay may touch is moved. At the same time the manager's other
    verbs may be called, as ever: what they want moved waits.
    """

    def __init__(
        self,
        kv: KVManager,
        *,
        allocate: Callable[[tuple[int, int]], PageArray] | None = None,
    ) -> None:
        """Guard the graphs over `kv`.

        `allocate(shape)` makes the int32 buffers that `Replay.tables` live in, such as pinned
        memory; ordinary memory by default.
        """
        self._kv = kv
        self._allocate = allocate or _ordinary
        self._bases = {name: pool.arena.base for name, pool in kv.pools.items()}
        self._tables = {name: table.rows for name, table in kv.tables.items()}
        self._paddings: list[Padding] = []
        self._open: tuple[Replay, ExitStack] | None = None
        self._idle: dict[int, list[_Staging]] = {}
        self._busy: deque[tuple[int, _Staging]] = deque()

    # -- the five calls ------------------------------------------------------------------------

    def register_padding(self, num_tokens: int = 1) -> Padding | None:
        """A padding sequence of that many tokens, alive until it is unregistered.

        Do it at start-up, once a shape: its pages are no longer there for requests. None, and
        nothing changed, if rows or pages are short now. CapacityError if a sequence of `max_tokens`
        would never fit beside it.
        """
        kv = self._kv
        self._require_room_beside(num_tokens)
        tokens = np.zeros(num_tokens, np.int32)
        seq = kv.open(tokens, scope=_SCOPE, origin=Origin.PADDING)
        if not kv.admit([seq]):
            kv.close([seq])
            return None
        seq.registered = True
        padding = Padding(kv, seq)
        self._paddings = [p for p in self._paddings if p.seq.registered] + [padding]
        return padding

    def capture(
        self, num_rows: int, *, padding: Padding | None = None, bakes_pages: bool = False
    ) -> Graph:
        """Say, before recording, what a graph of `num_rows` rows will rely on.

        `padding` fills the rows a batch leaves empty; by default they name the sink page.
        `bakes_pages`: the graph has page ids or page addresses in it, instead of looking them up at
        replay; then it is good only until pages move.
        """
        if num_rows < 1:
            raise UsageError(f"num_rows is {num_rows}; capture for 1 row or more")
        graph = Graph(
            num_rows=num_rows,
            padding=padding,
            bakes_pages=bakes_pages,
            epoch=self._kv.epoch,
        )
        self._require_valid(graph)
        return graph

    def begin_step(
        self,
        sequences: Batch | Seq[Sequence],
        num_new: IntArray | int | None = None,
        *,
        graph: Graph | None = None,
    ) -> Replay:
        """Enter `KVManager.step` (pending moves and page copies run), then check what is replayed.

        `graph`: what will be replayed; None for a step without one. Raises StaleGraphError if it
        may not be replayed any more, UsageError if it has fewer rows than there are sequences or
        a step has begun and not ended; then no step is in flight for it.
        """
        if self._open is not None:
            raise UsageError(
                f"step {self._open[0].step.number} has not ended; call end_step before begin_step"
            )
        with ExitStack() as stack:
            step = stack.enter_context(self._kv.step(sequences, num_new))
            replay = Replay(step=step, rows=step.batch.rows, tables={})
            if graph is not None:
                self._require_valid(graph)  # after the moves that ran on entry
                replay.rows, length = self._rows(step, graph)
                replay.tables = self._stage(step, replay.rows, length)
            self._open = replay, stack.pop_all()
        return replay

    def end_step(self, fence: Fence | None = None) -> None:
        """The step's work is issued; it is over when `fence` has passed (None: it is over now)."""
        if self._open is None:
            raise UsageError("no step has begun; call begin_step first")
        (replay, stack), self._open = self._open, None
        replay.step.fence = fence
        stack.close()

    def quiesce(self) -> bool:
        """Finish every pending move; False, and nothing done, while a replay is in flight.

        True means that nothing moves before the next call to the manager: synchronise the device,
        quiesce, then capture a graph that bakes pages in, or look at memory from outside.
        """
        if self._kv.num_in_flight:
            return False
        self._kv.settle()
        return True

    # -- what holds ----------------------------------------------------------------------------

    @property
    def num_in_flight(self) -> int:
        """Steps begun whose fence has not passed."""
        return self._kv.num_in_flight

    def _require_valid(self, graph: Graph) -> None:
        """Raise StaleGraphError unless all that the graph relies on is as it was captured."""
        now = self._kv.epoch
        if graph.bakes_pages and graph.epoch != now:
            raise StaleGraphError(
                f"the graph has page ids of epoch {graph.epoch} baked in and pages have moved, the "
                f"epoch is {now}; capture it again, or let it look pages up in the page tables"
            )
        moved = self._moved_addresses()
        if moved:
            raise StaleGraphError(
                f"{moved} is not where the graph found it: captured in epoch {graph.epoch}, "
                f"replayed in epoch {now}; write page tables in place and keep the memory open, "
                "then make a new guard and capture again"
            )
        self._require_padding(graph)

    def _moved_addresses(self) -> str:
        """What has another address than at construction; nothing ever should. "" if all is well."""
        for name, pool in self._kv.pools.items():
            if pool.arena.base != self._bases[name]:
                return f"the base of pool {name!r}"
        for name, table in self._kv.tables.items():
            if table.rows is not self._tables[name]:  # the array owns its address for life
                return f"page table {name!r}"
        return ""

    def _require_padding(self, graph: Graph) -> None:
        if graph.padding is not None and not graph.padding.seq.registered:
            raise StaleGraphError(
                f"the padding of the graph was unregistered after epoch {graph.epoch} (now "
                f"{self._kv.epoch}); register padding and capture it again"
            )

    def _require_room_beside(self, num_tokens: int) -> None:
        """Raise CapacityError if with that padding a longest sequence could never be admitted."""
        kv = self._kv
        need = {g.name: self._granules_beside(g, num_tokens) for g in kv.layout.groups}
        if kv.options.mode == "elastic":
            total = kv.snapshot().budget_bytes // kv.memory.granule_bytes
            short = None if sum(need.values()) <= total else max(need, key=lambda n: need[n])
        else:
            short = next((n for n in need if need[n] > kv.pools[n].num_mapped), None)
            total = 0 if short is None else kv.pools[short].num_mapped
        if short is not None:
            raise CapacityError(
                f"padding of {num_tokens} tokens would leave no room for a sequence of max_tokens "
                f"= {kv.max_tokens}: pool {short!r} would need {need[short]} granules, all pools "
                f"{sum(need.values())}, and there are {total}; pad with the sink page (no "
                "padding), lower max_tokens or give more memory"
            )

    def _granules_beside(self, group: LayerGroup, num_tokens: int) -> int:
        """Granules a pool needs for its sink, all padding, and its floor or a longest sequence."""
        kv, block = self._kv, group.block_tokens
        padding = [num_tokens, *(p.num_tokens for p in self._paddings if p.seq.registered)]
        kept = sum(1 if group.is_state else ceil_div(n, block) for n in padding)
        least = least_pages(group, kv.max_tokens)
        pages = 1 + max(kept + least, kv.options.floor_pages.get(group.name, 0))
        return kv.pools[group.name].space.granules_for(pages)

    # -- page tables of one step ---------------------------------------------------------------

    @staticmethod
    def _rows(step: Step, graph: Graph) -> tuple[IntArray, int]:
        """Rows of the batch and of what fills it up, and the tokens the longest of them has."""
        rows = step.batch.rows
        length = int((step.starts + step.num_new).max(initial=0))
        empty = graph.num_rows - len(rows)
        if empty < 0:
            raise UsageError(
                f"the graph has {graph.num_rows} rows and the batch {len(rows)} sequences; replay "
                "a graph captured for as many, or split the batch"
            )
        filler = -1 if graph.padding is None else graph.padding.row
        if empty and graph.padding is not None:
            length = max(length, graph.padding.num_tokens)
        return np.concatenate([rows, np.full(empty, filler, np.int64)]), length

    def _stage(self, step: Step, rows: IntArray, length: int) -> dict[str, PageArray]:
        """Copy the rows' page ids into buffers that no step in flight uses."""
        completed = step.number - self._kv.num_in_flight
        while self._busy and self._busy[0][0] <= completed:
            _, staging = self._busy.popleft()
            self._idle[staging.num_rows].append(staging)
        idle = self._idle.setdefault(len(rows), [])
        staging = idle.pop() if idle else self._new_staging(len(rows))
        self._busy.append((step.number, staging))
        filled = rows[rows >= 0]
        for name, table in self._kv.tables.items():
            out, most = staging.tables[name], table.rows.shape[1]
            width = min(max(1, ceil_div(length, table.block_tokens)), most) if length else 0
            pages = table.rows[filled, :width]
            pages[pages < 0] = SINK
            out[: len(filled), :width] = pages
            out[len(filled) :, :width] = SINK
            out[:, width : staging.used[name]] = SINK
            staging.used[name] = width
        return staging.tables

    def _new_staging(self, num_rows: int) -> _Staging:
        tables: dict[str, PageArray] = {}
        for name, table in self._kv.tables.items():
            tables[name] = self._allocate((num_rows, table.rows.shape[1]))
            tables[name].fill(SINK)
        return _Staging(num_rows, tables, dict.fromkeys(tables, 0))


def _ordinary(shape: tuple[int, int]) -> PageArray:
    return np.empty(shape, np.int32)
