"""A manager whose live pages have to move for capacity to move, driven by a captured step; and what
its engine does without a guard.
"""

from __future__ import annotations

from contextlib import ExitStack
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
from tests.tiny import GRANULE, full, state, window

from kvtide import GraphGuard, KVManager, Layout, MemfdMemory, Move, Options
from kvtide.testing.graphs import TwinEngine

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtide import Sequence

BLOCK = 4


class Captured:
    """Pools full, window_8 and state, four pages a granule, and an engine that decodes on them with
    one captured step.
    """

    def __init__(
        self,
        *,
        num_rows: int = 4,
        padding: int = 0,
        granules: int = 60,
        guard: Callable[[KVManager], Any] = GraphGuard,
        **options: Any,
    ) -> None:
        layers = {0: full(32), 1: window(8, dim=32), 2: state(256, interval=8)}
        layout = Layout.from_layers(layers, block_tokens=BLOCK)
        options.setdefault("pool_ratio", {"full": 0.5, "window_8": 0.3, "state": 0.2})
        self.kv = KVManager(
            layout,
            MemfdMemory(granules * GRANULE, GRANULE),
            max_sequences=16,
            max_tokens=64,
            options=Options(**options),
        )
        assert all(pool.page_bytes == GRANULE // 4 for pool in self.kv.pools.values())
        self.guard = guard(self.kv)
        self.padding = self.guard.register_padding(padding) if padding else None
        self.twin = TwinEngine(self.kv, self.guard, num_rows, padding=self.padding)
        self.num_started = 0

    def start(self, num: int = 1) -> list[Sequence]:
        """Admit new sequences of one known token each."""
        seqs = [self.kv.open([self.num_started + i]) for i in range(num)]
        self.num_started += num
        assert self.kv.admit(seqs)
        return seqs

    def decode(self, seqs: list[Sequence], steps: int) -> None:
        """Run steps, the device right behind: every word is checked."""
        for _ in range(steps):
            self.twin.step(seqs)
            self.twin.device.run()

    def scatter(self) -> list[Sequence]:
        """Four live sequences whose pages stand between the holes that others left."""
        seqs, others = self.start(4), self.start(8)
        for _ in range(24):
            for i, seq in enumerate(seqs):
                self.decode([seq, *others[2 * i : 2 * i + 2]], 1)
        self.kv.close(others)
        self.kv.reset()
        self.kv.check()
        return seqs

    def move(self, donor: str, receiver: str, granules: int) -> Any:
        """Ask for a move; how far it got."""
        plan = (Move(donor=donor, receiver=receiver, granules=granules, reason="test"),)
        return self.kv.rebalance(plan)

    def move_live_pages(self) -> None:
        """Move granules from full to state, and more, until live pages had to make way."""
        (moved, relocated) = self.kv.moved
        while self.kv.moved[1] == relocated:
            self.move("full", "state", 2)
            self.kv.settle()
            assert self.kv.moved[0] > moved, "full has no more to give"
            moved = self.kv.moved[0]

    def addresses(self) -> list[int]:
        """Where graphs find pools and page tables."""
        bases = [pool.arena.base for pool in self.kv.pools.values()]
        return bases + [table.rows.ctypes.data for table in self.kv.tables.values()]


class NoGuard:
    """An engine that plans steps and replays, and never tells the manager that one is in flight."""

    def __init__(self, kv: KVManager) -> None:
        self.kv = kv

    def capture(self, num_rows: int, **_: object) -> None:
        self.num_rows = num_rows

    def begin_step(self, sequences: list[Sequence], num_new: int, **_: object) -> SimpleNamespace:
        assert self.kv.extend(sequences, num_new)
        starts = np.array([seq.computed for seq in sequences])
        return SimpleNamespace(
            step=SimpleNamespace(starts=starts, copies=()), tables=self.tables(sequences)
        )

    def tables(self, sequences: list[Sequence]) -> dict[str, Any]:
        rows = np.array([seq.row for seq in sequences])
        tables = {}
        for name, table in self.kv.tables.items():
            tables[name] = np.zeros((self.num_rows, table.rows.shape[1]), np.int32)
            tables[name][: len(rows)] = table.padded(rows)
        return tables

    def end_step(self, fence: object) -> None:
        """Nobody is told."""


class NoStaging(NoGuard):
    """An engine that says when steps are in flight but lets the device read the live tables.

    Its rows must be neighbours in the tables.
    """

    def begin_step(self, sequences: list[Sequence], num_new: int, **_: object) -> SimpleNamespace:
        self.stack = ExitStack()
        self.step = self.stack.enter_context(self.kv.step(sequences, num_new))
        return SimpleNamespace(step=self.step, tables=self.tables(sequences))

    def tables(self, sequences: list[Sequence]) -> dict[str, Any]:
        first = sequences[0].row
        assert [seq.row for seq in sequences] == list(range(first, first + self.num_rows))
        return {n: t.rows[first : first + self.num_rows] for n, t in self.kv.tables.items()}

    def end_step(self, fence: Any) -> None:
        self.step.fence = fence
        self.stack.close()
