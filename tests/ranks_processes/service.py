"""One rank as an engine runs it: a manager over real memory, requests from a seed, all checked."""

from __future__ import annotations

import random
from collections import deque
from typing import TYPE_CHECKING, Any

from tests.tiny import GRANULE, full, state, window

from kvtide import KVManager, Layout, MemfdMemory, Move, Options
from kvtide.events import GroundMoved
from kvtide.ranks import Change
from kvtide.testing.engine import FakeEngine

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtide import Sequence
    from kvtide.events import Event
    from kvtide.memory import Memory

BLOCK = 4
MAX_TOKENS = 32
CHUNK = 8
FLOORS = {"full": 8, "window_8": 4, "state": 2}
"""Pages that a longest sequence needs: below that no plan may bring a pool."""


def hybrid(scale: int = 1) -> Layout:
    """Full attention (two pages a granule), a window (a page a granule) and a state (three quarters
    of a granule, so that pages straddle granules); `scale` times as many bytes.
    """
    floats = scale * GRANULE // 4
    specs = (
        full(floats // (2 * BLOCK) // 2),
        window(8, dim=floats // (2 * BLOCK)),
        state(floats * 3 // 4),
    )
    return Layout.from_layers(dict(enumerate(specs)), block_tokens=BLOCK)


class Service:
    """Serves requests of a seed step by step; what it does follows from what its manager says.

    Request i is the same in every run, so the ids that two runs generate for it must be. With
    `lanes` a step runs only its lane's sequences: those of one micro-batch of a pipeline.
    """

    def __init__(
        self,
        *,
        layout: Layout | None = None,
        granules: int = 34,
        seed: int = 0,
        most: int = 5,
        lanes: int = 1,
        wrap: Callable[[Memory], Memory] = lambda memory: memory,
        **options: Any,
    ) -> None:
        layout = layout or hybrid()
        options.setdefault("mode", "static")
        options.setdefault("events", self._note)
        options.setdefault("floor_pages", {g.name: FLOORS[g.name] for g in layout.groups})
        self.kv = KVManager(
            layout,
            wrap(MemfdMemory(granules * GRANULE, GRANULE)),
            max_sequences=8,
            max_tokens=MAX_TOKENS,
            options=Options(**options),
        )
        self.engine = FakeEngine(self.kv)
        self.finished: dict[int, list[int]] = {}
        self.num_opened = 0
        self.num_waits = 0
        self.trades: set[str] = set()
        """Directions in which ground has moved, "full > state" say."""
        self._seed, self._most, self._lanes = seed, most, lanes
        self._numbers: dict[Sequence, int] = {}
        self._goals: dict[Sequence, int] = {}
        self._running: list[Sequence] = []
        self._waiting: deque[Sequence] = deque()

    @property
    def running(self) -> list[Sequence]:
        return self._running

    @property
    def is_busy(self) -> bool:
        return bool(self._running or self._waiting)

    def step(self, *, opens: bool = True, in_flight: bool = False, lane: int = 0) -> bool:
        """One step of a lane's sequences; False if there was nothing to run, or no room."""
        self._admit(opens=opens)
        while chosen := [s for s in self._running if self._numbers[s] % self._lanes == lane]:
            batch = self.kv.batch(chosen)
            counts = self.engine.chunks(chosen, CHUNK)
            if self.kv.extend(batch, counts):
                self.engine.step(batch, counts, in_flight=in_flight)
                self._end_those_done()
                return True
            self.num_waits += 1
            if len(self._running) == 1:
                return False  # pages wait for a fence, or for ground
            last = self._running.pop()
            self.kv.suspend([last])
            self._waiting.appendleft(last)
        return False

    def serve(self, requests: int) -> None:
        """Alone: all of the first so many requests, to their ends."""
        while self.num_opened < requests or self.is_busy:
            self.step(opens=self.num_opened < requests)

    def pages(self) -> dict[str, int]:
        return {name: pool.num_usable for name, pool in self.kv.pools.items()}

    def digests(self) -> list[list[int]]:
        """All that ranks compare at ticks, with every row of the page tables."""
        return [list(self.kv.peer.digest(turn)) for turn in range(16)]

    def audit(self) -> None:
        """The books balance and every byte that a live sequence may read is right."""
        self.kv.check()
        self.engine.verify(self._running)

    def _note(self, event: Event) -> None:
        if isinstance(event, GroundMoved):
            self.trades.add(f"{event.donor} > {event.receiver}")

    # -- requests ------------------------------------------------------------------------------

    def _admit(self, *, opens: bool) -> None:
        if opens and len(self._running) < self._most and not self._waiting:
            self._waiting.append(self._open())
        while self._waiting and len(self._running) < self._most:
            if not self.kv.admit([self._waiting[0]], [min(CHUNK, self._waiting[0].length)]):
                self.num_waits += 1
                return
            self._running.append(self._waiting.popleft())

    def _open(self) -> Sequence:
        number = self.num_opened
        self.num_opened += 1
        rng = random.Random(f"{self._seed}/{number}")
        stem = [rng.randrange(3)] * (BLOCK * rng.randrange(1, 4))
        prompt = stem + [rng.randrange(9) for _ in range(rng.randrange(1, 8))]
        seq = self.kv.open(prompt)
        self._numbers[seq] = number
        self._goals[seq] = min(MAX_TOKENS, len(prompt) + rng.randrange(2, 9))
        return seq

    def _end_those_done(self) -> None:
        done = [seq for seq in self._running if seq.length >= self._goals[seq]]
        for seq in done:
            self.finished[self._numbers.pop(seq)] = seq.tokens.tolist()
            del self._goals[seq]
        self._running = [seq for seq in self._running if seq not in done]
        self.kv.close(done)


def some_change(rng: random.Random, service: Service) -> Change:
    """A plan between any pools, or a budget: down and up."""
    names = list(service.kv.pools)
    most = service.kv.memory.num_granules
    if rng.random() < 0.4:
        return Change(budget_bytes=rng.randrange(most * 3 // 4, most + 1) * GRANULE)
    moves = []
    for _ in range(rng.randrange(1, 3)):
        donor, receiver = rng.sample(names, 2)
        granules = rng.randrange(1, 4)
        moves.append(Move(donor=donor, receiver=receiver, granules=granules, reason="drawn"))
    return Change(plan=tuple(moves))
