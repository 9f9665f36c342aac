"""What the graph guard adds to a decode step, on null arenas.

python benchmarks/graph_guard/run.py      # the table, and results.json beside this file
"""

from __future__ import annotations

import json
import platform
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

import kvtide
from kvtide.layout import Buffer, FullSpec, Layout, StateSpec, WindowSpec

if TYPE_CHECKING:
    from collections.abc import Callable

SHAPE = {"kv_heads": 8, "head_dim": 128, "dtype": "bfloat16"}
STATE = StateSpec(buffers=(Buffer("state", (4096,), "float32"),), interval_tokens=1 << 20)
LAYERS = {0: FullSpec(**SHAPE), 1: WindowSpec(window=1024, **SHAPE), 2: STATE}
SIZES = ((8, 2000), (8, 32000), (256, 2000), (256, 8000), (256, 32000))
STEPS = 300


@dataclass(frozen=True, slots=True)
class Row:
    """Medians in microseconds: extend, step and commit; what the guard adds; one check of it."""

    sequences: int
    tokens: int
    plain: float
    guarded: float
    check: float


def manager(num: int, tokens: int) -> tuple[kvtide.KVManager, list[kvtide.Sequence]]:
    """`num` sequences of `tokens` tokens, all computed and one sampled."""
    layout = Layout.from_layers(LAYERS, block_tokens=16)
    memory = kvtide.NullMemory(num * (tokens + 4096) * 3 << 12)
    kv = kvtide.KVManager(layout, memory, max_sequences=num, max_tokens=tokens + 4096)
    seqs = [kv.open(np.full(tokens, i, np.int32)) for i in range(num)]
    for seq in seqs:
        assert kv.admit([seq])
        while seq.computed < tokens:
            count = min(4096, tokens - seq.computed)
            with kv.step([seq], count):
                pass
            kv.commit([seq], [7 if seq.computed + count == tokens else -1])
    return kv, seqs


def measure(num: int, tokens: int) -> Row:
    """Alternate plain and guarded steps, so that both see the same lengths and the same noise."""
    kv, seqs = manager(num, tokens)
    guard, batch, ids = kvtide.GraphGuard(kv), kv.batch(seqs), np.full(num, 7)
    graph = guard.capture(num)

    def plain() -> None:
        kv.extend(batch, 1)
        with kv.step(batch):
            pass
        kv.commit(batch, ids)

    def guarded() -> None:
        kv.extend(batch, 1)
        guard.begin_step(batch, graph=graph)
        guard.end_step()
        kv.commit(batch, ids)

    def check() -> None:
        guard.capture(num)

    times: dict[Callable[[], None], list[float]] = {plain: [], guarded: [], check: []}
    for _ in range(STEPS):
        for work, spent in times.items():
            began = time.perf_counter()
            work()
            spent.append((time.perf_counter() - began) * 1e6)
    medians = [statistics.median(spent) for spent in times.values()]
    return Row(num, tokens, *(round(us, 1) for us in medians))


def main() -> None:
    rows = [measure(num, tokens) for num, tokens in SIZES]
    print("| sequences | tokens each | plain step, us | guarded, us | added, us | check, us |")
    print("|---|---|---|---|---|---|")
    for r in rows:
        cells = [f"{r.tokens:,}", r.plain, r.guarded, round(r.guarded - r.plain, 1), r.check]
        print(f"| {r.sequences} | {' | '.join(map(str, cells))} |")
    result = {
        "command": "python benchmarks/graph_guard/run.py",
        "python": platform.python_version(),
        "numpy": np.__version__,
        "rows": [asdict(row) for row in rows],
    }
    Path(__file__).with_name("results.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
