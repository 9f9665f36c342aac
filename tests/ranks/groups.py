"""Managers that agree, all in one thread: what a small engine of several ranks would do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.tiny import GRANULE, full, window

from kvtide import KVManager, Layout, MemfdMemory, Options
from kvtide.ranks import (
    Agreement,
    Change,
    LocalHub,
    LocalTransport,
    Terms,
    Turn,
    agree_pages,
    side_by_side,
)
from kvtide.testing.engine import FakeEngine
from kvtide.testing.faults import FaultyMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvtide import Sequence as Served
    from kvtide.types import IntArray

MAX_TOKENS = 64
"""Of a sequence: 16 blocks of 4."""


def layout(dim: int = 8) -> Layout:
    """Full attention and a window, 256 bytes a page each at the default, so 16 pages a granule."""
    return Layout.from_layers({0: full(dim), 1: window(8, dim=dim)}, block_tokens=4)


class Counted(LocalTransport):
    """A transport that counts what it has begun and ended: ranks must do so equally often."""

    def __init__(self, hub: LocalHub, rank: int) -> None:
        super().__init__(hub, rank, hub.size)
        self.num_started = self.num_finished = 0

    def start(self, words: IntArray) -> None:
        self.num_started += 1
        super().start(words)

    def finish(self, seconds: float) -> IntArray:
        self.num_finished += 1
        return super().finish(seconds)


class Group:
    """Ranks with a manager, an engine and an agreement each; `dims[r]` sets rank r's page bytes.

    Pools get half of `granules[r]` granules each, and memory can be made to fail.
    """

    def __init__(
        self,
        terms: Terms | None = None,
        *,
        size: int = 2,
        dims: Sequence[int] = (),
        granules: Sequence[int] = (),
        allow: Sequence[Callable[[Change], bool]] = (),
        **options: Any,
    ) -> None:
        self.hub = LocalHub(size)
        self.memories: list[FaultyMemory] = []
        self.kvs: list[KVManager] = []
        self.transports = [Counted(self.hub, rank) for rank in range(size)]
        self.agreements: list[Agreement] = []
        options.setdefault("mode", "static")
        if options["mode"] == "static":
            options.setdefault("pool_ratio", {"full": 0.5, "window_8": 0.5})
        for rank, transport in enumerate(self.transports):
            memory = FaultyMemory(MemfdMemory((granules or [16] * size)[rank] * GRANULE, GRANULE))
            kv = KVManager(
                layout(dims[rank] if dims else 8),
                memory,
                max_sequences=32,
                max_tokens=MAX_TOKENS,
                options=Options(**options),
            )
            self.memories.append(memory)
            self.kvs.append(kv)
            may = {"allow": allow[rank]} if allow else {}
            terms = terms or Terms(every=1)
            self.agreements.append(Agreement(kv, transport, terms, **may))
        self.engines = [FakeEngine(kv) for kv in self.kvs]

    def equalise(self) -> dict[str, int]:
        """At the start, give the pools of all ranks the numbers of pages that all can have."""
        agreed: list[dict[str, int]] = [{}] * len(self.kvs)

        def work(transport: LocalTransport) -> None:
            kv = self.kvs[transport.rank]
            mine = {name: pool.num_usable for name, pool in kv.pools.items()}
            agreed[transport.rank] = agree_pages(transport, mine)
            assert kv.resize(agreed[transport.rank]) == agreed[transport.rank]

        assert side_by_side(LocalHub(len(self.kvs)), work) == [None] * len(self.kvs)
        assert all(pages == agreed[0] for pages in agreed)
        return agreed[0]

    def in_threads(self, work: Callable[[int], None]) -> list[BaseException | None]:
        """`work(rank)` on all ranks at once; what each raised."""
        return side_by_side(LocalHub(len(self.kvs)), lambda transport: work(transport.rank))

    def propose(self, change: Change) -> None:
        """On every rank."""
        for agreement in self.agreements:
            agreement.propose(change)

    def boundary(self, in_flight: Sequence[int] | None = None) -> list[Turn]:
        """Every rank's, one after the other: all have begun a tick before any concludes it."""
        if in_flight is None:
            return [agreement.boundary() for agreement in self.agreements]
        return [a.boundary(n) for a, n in zip(self.agreements, in_flight, strict=True)]

    def until_over(self, most: int = 20) -> list[Turn]:
        """Boundaries until something was changed or given up; the turns of the last."""
        for _ in range(most):
            turns = self.boundary()
            if any(turn.changed or turn.refused for turn in turns):
                return turns
        raise AssertionError(f"nothing was decided within {most} boundaries")

    def start(self, tokens: Sequence[int]) -> list[Served]:
        """The same sequence on every rank, admitted and computed."""
        started: list[Served] = []
        for kv, engine in zip(self.kvs, self.engines, strict=True):
            seq = kv.open(list(tokens))
            assert kv.admit([seq])
            engine.prefill([seq], sample=True)
            started.append(seq)
        return started

    def pages(self) -> list[dict[str, int]]:
        """Usable pages of every pool, by rank; the books are audited too."""
        for kv in self.kvs:
            kv.check()
        return [{name: pool.num_usable for name, pool in kv.pools.items()} for kv in self.kvs]
