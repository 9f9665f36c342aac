"""Requests and clocks so simple that what happens can be worked out by hand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvtide.layout import FullSpec, Layout, StateSpec, WindowSpec
from kvtide.layout.buffer import Buffer
from kvtide.sim.lab import Setup
from kvtide.sim.traces import TraceRequest

BLOCK = 4


@dataclass(frozen=True)
class Metronome:
    """Every step takes as long as every other."""

    tick: float = 1.0

    @dataclass(frozen=True)
    class hardware:
        name = "metronome"

    def seconds(self, starts: Any, num_new: Any) -> float:
        return self.tick

    def decode_seconds(self, starts: Any, count: int) -> Any:
        return np.full(count, self.tick)

    def flops(self, starts: Any, num_new: Any) -> float:
        return float(num_new.sum())

    def decode_flops(self, starts: Any, count: int) -> float:
        return float(len(starts) * count)

    def move_seconds(self, num_bytes: int, copies: int) -> float:
        return num_bytes * 1e-9


def request(arrival: float, ids: list[int], output: int, *, tokens: int = 0) -> TraceRequest:
    """A prompt of these blocks, or of the first `tokens` tokens of them."""
    runs = np.array([(i, 1) for i in ids], np.int64)
    return TraceRequest(
        arrival=arrival,
        input_tokens=tokens or BLOCK * len(ids),
        output_tokens=output,
        runs=runs,
        block=BLOCK,
    )


FULL = FullSpec(kv_heads=1, head_dim=32, dtype="float32")
WINDOW = WindowSpec(window=8, kv_heads=1, head_dim=32, dtype="float32")
STATE = StateSpec(buffers=(Buffer("recurrent", (256,), "float32"),), interval_tokens=8)


def setup(*specs: Any, granules: int = 64, **options: Any) -> Setup:
    """A lab of pages of 1,024 bytes, two to a granule."""
    layout = Layout.from_layers(dict(enumerate(specs or (FULL,))), block_tokens=BLOCK)
    return Setup(
        layout=layout,
        memory_bytes=granules * 2048,
        granule_bytes=2048,
        **{"clock": Metronome(), "max_tokens": 128, "check_every": 7, **options},
    )


def shared_traffic(seed: int, num_requests: int = 80, gap: float = 3.0) -> list[TraceRequest]:
    """Prompts of one of three beginnings and an ending of their own."""
    rng = np.random.default_rng(seed)
    requests: list[TraceRequest] = []
    for i in range(num_requests):
        start = int(rng.integers(3)) * 10
        ids = [*range(start, start + int(rng.integers(2, 8))), 100 + 3 * i, 101 + 3 * i]
        requests.append(request(i * gap, ids, int(rng.integers(1, 20))))
    return requests
