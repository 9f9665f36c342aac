"""Control-plane cost: microseconds a request and a decode step, books on null arenas.

    python benchmarks/control_plane/run.py            # the table, and results.json beside this file
    python benchmarks/control_plane/run.py --quick    # one repetition, nothing written
    python benchmarks/control_plane/run.py --snapshots 400    # full + state, so many state pages

Everything real is switched on: matching over all lifetimes, eviction, ghosts, window retirement,
state snapshots and (mode elastic) capacity moving between the pools.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import time
import tracemalloc
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import workload

import kvtide
from kvtide.layout import Buffer, FullSpec, Layout, Spec, StateSpec, WindowSpec

GRANULE = 64 * 1024
FULL = FullSpec(kv_heads=1, head_dim=8, dtype="float16")
WINDOW = WindowSpec(window=1024, kv_heads=1, head_dim=8, dtype="float16")
STATE = StateSpec(buffers=(Buffer("state", (256,), "float16"),), interval_tokens=512)
LAYOUTS: dict[str, dict[int, Spec | tuple[Spec, ...]]] = {
    "full": {0: FULL},
    "full + window 1,024": {0: FULL, 1: WINDOW},
    "full + state every 512": {0: FULL, 1: STATE},
}
SHARE = 0.30
"""Cache size: this part of the distinct whole blocks of the list, in every pool."""

PEERS_PREFILL = {
    ("full", 16): 875.0,
    ("full", 64): 515.0,
    ("full + window 1,024", 16): 1357.0,
    ("full + window 1,024", 64): 519.0,
    ("full + state every 512", 16): 677.0,
    ("full + state every 512", 64): 660.0,
}
"""Fastest of vLLM 0.33.0, SGLang 0.5.23 and nano-vllm on this list, microseconds a request."""

PEERS_DECODE = {"full": 95.0, "full + window 1,024": 298.0, "full + state every 512": 4232.0}
"""The same for 256 sequences, block 16, microseconds a step."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    case: str
    layout: str
    block_tokens: int
    mode: str
    microseconds: float
    nanoseconds_per_token: float
    hit_rate: float | None
    granules_moved: int
    times_faster_than_best_peer: float


def manager(layout: Layout, pages: dict[str, int], *, mode: str, **sizes: int) -> kvtide.KVManager:
    """A manager whose pools start with `pages` pages each."""
    weights = {g.name: pages[g.name] * g.page_bytes for g in layout.groups}
    total = sum(weights.values())
    memory = kvtide.NullMemory(int(total * 1.01), GRANULE)
    options = kvtide.Options(mode=mode, pool_ratio={n: w / total for n, w in weights.items()})
    return kvtide.KVManager(layout, memory, options=options, **sizes)


def serve(kv: kvtide.KVManager, prompts: list[object]) -> tuple[int, int]:
    """Open, admit, compute and commit every prompt with 16 in flight; (hit tokens, tokens)."""
    in_flight: list[kvtide.Sequence] = []
    hit = total = 0
    for prompt in prompts:
        seq = kv.open(prompt)
        while not kv.admit([seq]):
            kv.close([in_flight.pop(0)])
        hit, total = hit + seq.hit, total + seq.length
        while seq.computed < seq.length:
            batch = kv.batch([seq])
            kv.extend(batch, kv.chunk(seq, 1 << 20))
            with kv.step(batch):
                pass
            kv.commit(batch)
        in_flight.append(seq)
        if len(in_flight) >= workload.IN_FLIGHT:
            kv.close([in_flight.pop(0)])
    kv.close(in_flight)
    return hit, total


def prefill(
    name: str,
    block_tokens: int,
    mode: str,
    prompts: list[object],
    blocks: int,
    *,
    snapshots: int | None = None,
) -> Row:
    """2,000 requests under eviction; `snapshots` state pages at the start, by default a share."""
    layout = Layout.from_layers(LAYOUTS[name], block_tokens=block_tokens, max_tokens=8704)
    if snapshots is None:
        snapshots = int(blocks * block_tokens / 512 * SHARE)
    pages = {g.name: snapshots if g.is_state else int(blocks * SHARE) for g in layout.groups}
    kv = manager(layout, pages, mode=mode, max_sequences=64, max_tokens=8704)
    gc.collect()
    began = time.process_time()
    hit, total = serve(kv, prompts)
    spent = time.process_time() - began
    kv.check()
    each = spent / len(prompts) * 1e6
    return Row(
        "requests",
        name,
        block_tokens,
        mode,
        each,
        spent / total * 1e9,
        hit / total,
        kv.snapshot().granules_moved,
        PEERS_PREFILL[name, block_tokens] / each,
    )


def decode(name: str, prompts: list[object], steps: int = 2000) -> Row:
    """256 sequences of about 4k tokens, one more token a step."""
    layout = Layout.from_layers(LAYOUTS[name], block_tokens=16, max_tokens=6400)
    pages = {g.name: 1200 if g.is_state else 256 * 402 for g in layout.groups}
    kv = manager(layout, pages, mode="elastic", max_sequences=256, max_tokens=6400)
    seqs = [kv.open(prompt) for prompt in prompts]
    for seq in seqs:
        assert kv.admit([seq])
        while seq.computed < seq.prompt_tokens:
            num_new = kv.chunk(seq, 1 << 20)
            kv.extend([seq], num_new)
            with kv.step([seq]):
                pass
            kv.commit([seq], [5 if seq.computed + num_new == seq.length else -1])
    batch, ids = kv.batch(seqs), np.arange(256, dtype=np.int32)
    times: list[float] = []
    for _ in range(steps):
        began = time.perf_counter()
        kv.extend(batch, 1)
        with kv.step(batch):
            pass
        kv.commit(batch, ids)
        times.append(time.perf_counter() - began)
    kv.check()
    each = statistics.median(times) * 1e6
    faster = PEERS_DECODE[name] / each
    return Row("decode step", name, 16, "elastic", each, each / 256 * 1e3, None, 0, faster)


def bytes_per_page(name: str, block_tokens: int, prompts: list[object], blocks: int) -> float:
    """Books' bytes per cached page beside the tokens: what the heap grew by on the list."""
    layout = Layout.from_layers(LAYOUTS[name], block_tokens=block_tokens, max_tokens=8704)
    pages = {g.name: int(blocks * SHARE) for g in layout.groups}
    serve(manager(layout, pages, mode="static", max_sequences=64, max_tokens=8704), prompts[:20])
    gc.collect()
    tracemalloc.start()  # after a warm-up, so that modules imported late are not counted
    kv = manager(layout, pages, mode="static", max_sequences=64, max_tokens=8704)
    rows = kv.tables[layout.groups[0].name].rows
    fixed = 64 * 8704 * 4 + rows.nbytes * len(layout.groups)  # token rows and page tables
    serve(kv, prompts)
    gc.collect()
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    cached = sum(pool.cached for pool in kv.snapshot().pools.values())
    tokens = kv.snapshot().pools[layout.groups[0].name].cached * block_tokens * 4
    ghosts = kv.snapshot().ghost_blocks * block_tokens * 4
    return (used - fixed - tokens - ghosts) / cached


def request_rows(repeats: int, prompts: list[object], blocks: dict[int, int]) -> list[Row]:
    """Every layout, block size and mode; medians."""
    rows: list[Row] = []
    for name, specs in LAYOUTS.items():
        for size in (16, 64):
            for mode in ("static", "elastic") if len(specs) > 1 else ("elastic",):
                runs = [prefill(name, size, mode, prompts, blocks[size]) for _ in range(repeats)]
                rows.append(median(runs))
    return rows


def decode_rows(repeats: int) -> list[Row]:
    """Every layout; medians."""
    prompts: list[object] = list(workload.decode())
    return [median([decode(name, prompts) for _ in range(repeats)]) for name in LAYOUTS]


def median(runs: list[Row]) -> Row:
    row = sorted(runs, key=lambda r: r.microseconds)[len(runs) // 2]
    print_row(row)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description="Control-plane cost of the books.")
    parser.add_argument("--quick", action="store_true", help="one repetition, write nothing")
    parser.add_argument("--snapshots", type=int, help="only full + state, with so many state pages")
    arguments = parser.parse_args()
    quick: bool = arguments.quick
    prompts: list[object] = list(workload.prefill())
    blocks = {size: workload.unique_blocks(workload.prefill(), size) for size in (16, 64)}
    if arguments.snapshots is not None:
        for mode in ("static", "elastic"):
            name = "full + state every 512"
            print_row(prefill(name, 16, mode, prompts, blocks[16], snapshots=arguments.snapshots))
        return
    repeats = 1 if quick else 3
    rows = request_rows(repeats, prompts, blocks) + decode_rows(repeats)
    memory = {
        f"{name}, block {size}": bytes_per_page(name, size, prompts, blocks[size])
        for name in list(LAYOUTS)[:2]
        for size in (16, 64)
    }
    for case, value in memory.items():
        print(f"books: {case}: {value:.1f} bytes a cached page")
    if not quick:
        result = {
            "machine": f"{platform.machine()}, Python {platform.python_version()}",
            "numpy": np.__version__,
            "rows": [asdict(row) for row in rows],
            "book_bytes_per_cached_page": memory,
        }
        path = Path(__file__).with_name("results.json")
        path.write_text(json.dumps(result, indent=1) + "\n")


def print_row(row: Row) -> None:
    hit = "     -" if row.hit_rate is None else f"{row.hit_rate:6.3f}"
    print(
        f"{row.case:12} {row.layout:24} block {row.block_tokens:2} {row.mode:8} "
        f"{row.microseconds:8.1f} us {row.nanoseconds_per_token:7.1f} ns/token  hit {hit}  "
        f"{row.times_faster_than_best_peer:5.1f}x  moved {row.granules_moved}"
    )


if __name__ == "__main__":
    main()
