"""What agreement between ranks costs a step, beside a small all-reduce of the same process group.

    python benchmarks/agreement/run.py            # 2, 4 and 8 ranks; writes result.json
    python benchmarks/agreement/run.py --quick    # few rounds, nothing written
    python benchmarks/agreement/run.py --hot      # one process: what the parts cost in a tight loop

Every rank is a process over gloo with a manager of its own (books only): 64 sequences of about
4,000 tokens in three pools. A round does one of each case, so that all cases see the same machine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import timeit
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from kvtide import KVManager, Layout, NullMemory, Options
from kvtide.layout import Buffer, FullSpec, StateSpec, WindowSpec
from kvtide.ranks import Agreement, Terms
from kvtide.ranks.ballot import Tally
from kvtide.ranks.member import Member, Observed
from kvtide.torch.ranks import DistributedTransport

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvtide.types import IntArray

HERE = Path(__file__).parent
SIZES = (2, 4, 8)
WORK = 0.005
"""Seconds of a step in which the host waits for the device."""

CASES = (
    "one word", "same bytes", "tick", "other step",
    "same bytes, overlapped", "tick, overlapped",
)  # fmt: skip
PARTS = ("digest", "cast", "wait", "conclude", "processor", "processor, same bytes")
"""Of a tick. Processor: the time of the thread that serves, which others do not lengthen."""
BIG = "1 MiB"
"""An all-reduce that says what a byte costs, for scale.py."""


def build() -> KVManager:
    """A manager with 64 live sequences of 3,900 to 4,100 tokens: full, window 1,024 and state."""
    shape: dict[str, Any] = {"kv_heads": 8, "head_dim": 64, "dtype": "bfloat16"}
    layers = {
        0: FullSpec(**shape),
        1: WindowSpec(window=1024, **shape),
        2: StateSpec(buffers=(Buffer("ssm", (65536,), "float32"),), interval_tokens=512),
    }
    layout = Layout.from_layers(layers, block_tokens=16)
    memory = NullMemory(4 << 30, 2 << 20)
    kv = KVManager(
        layout, memory, max_sequences=256, max_tokens=8192, options=Options(mode="static")
    )
    rng = np.random.default_rng(1)
    for _ in range(64):
        seq = kv.open(rng.integers(0, 32000, int(rng.integers(3900, 4100)), np.int32))
        if not kv.admit([seq]):
            raise RuntimeError("the memory is too small for this benchmark")
        while seq.computed < seq.length:
            with kv.step([seq], kv.chunk(seq, 4096)):
                pass
            kv.commit([seq])
    return kv


class Timed:
    """A transport whose two calls are timed, in seconds."""

    def __init__(self, transport: DistributedTransport) -> None:
        self._transport = transport
        self.rank, self.size = transport.rank, transport.size
        self.halt, self.gather = transport.halt, transport.gather
        self.num_bytes = 0
        self.started = self.waited = 0.0

    def start(self, words: IntArray) -> None:
        before = time.perf_counter()
        self._transport.start(words)
        self.started = time.perf_counter() - before
        self.num_bytes = words.nbytes

    def finish(self, seconds: float) -> IntArray:
        before = time.perf_counter()
        folded = self._transport.finish(seconds)
        self.waited = time.perf_counter() - before
        return folded


class Bench:
    """One rank's part. Every case returns the seconds its calls took, the work apart."""

    def __init__(self) -> None:
        self.kv = build()
        self.transport = Timed(DistributedTransport(name="bench"))
        # A tick is cast at an even boundary and concluded at the odd one after it.
        self.ticking = Agreement(self.kv, self.transport, Terms(every=2))
        self.resting = Agreement(self.kv, DistributedTransport(name="rest"), Terms(every=1 << 40))
        self.resting.boundary()
        self.resting.boundary()  # step 0 is a tick
        self.tick()
        self.small = torch.zeros(self.transport.num_bytes // 8, dtype=torch.int64)
        self.word = torch.zeros(1, dtype=torch.int64)
        self.big = torch.zeros(1 << 17, dtype=torch.int64)
        self.parts: dict[str, list[float]] = {part: [] for part in (*PARTS, BIG)}

    def rounds(self, count: int) -> dict[str, list[float]]:
        cases: dict[str, Callable[[], float]] = {
            "one word": lambda: self.reduce(self.word),
            "same bytes": lambda: self.reduce(self.small),
            "tick": self.tick,
            "other step": self.rest,
            "same bytes, overlapped": lambda: self.reduce(self.small, WORK),
            "tick, overlapped": lambda: self.tick(WORK),
        }
        found: dict[str, list[float]] = {name: [] for name in CASES}
        for turn in range(count):
            order = CASES[turn % len(CASES) :] + CASES[: turn % len(CASES)]
            for name in order:
                dist.barrier()  # all begin a case together; what one lags is not the case's
                before = time.thread_time()
                found[name].append(cases[name]())
                spent = time.thread_time() - before
                if name == "same bytes":
                    self.parts["processor, same bytes"].append(spent)
                if name == "tick":
                    self.parts["processor"].append(spent)
                    self.note_parts()
        for _ in range(count // 20):
            dist.barrier()
            self.parts[BIG].append(self.reduce(self.big))
        return found

    def reduce(self, tensor: torch.Tensor, work: float = 0.0) -> float:
        """The least that any agreement would cost: one all-reduce, begun, then waited for."""
        start = time.perf_counter()
        handle = dist.all_reduce(tensor, op=dist.ReduceOp.MIN, async_op=True)
        begun = time.perf_counter()
        if work:
            time.sleep(work)
        waits = time.perf_counter()
        handle.wait()
        return begun - start + time.perf_counter() - waits

    def tick(self, work: float = 0.0) -> float:
        start = time.perf_counter()
        self.ticking.boundary()
        self.begun = time.perf_counter() - start
        if work:
            time.sleep(work)
        waits = time.perf_counter()
        self.ticking.boundary()
        self.ended = time.perf_counter() - waits
        return self.begun + self.ended

    def rest(self) -> float:
        start = time.perf_counter()
        self.resting.boundary()
        return time.perf_counter() - start

    def note_parts(self) -> None:
        """Of the tick just made; the digest is taken once more by itself."""
        turn = len(self.parts["digest"])
        start = time.perf_counter()
        self.kv.peer.digest(turn)
        digest = time.perf_counter() - start
        self.parts["digest"].append(digest)
        self.parts["cast"].append(self.begun - digest)
        self.parts["wait"].append(self.transport.waited)
        self.parts["conclude"].append(self.ended - self.transport.waited)


def hot(repeats: int = 9, loops: int = 300) -> dict[str, float]:
    """Microseconds of the parts of a tick in one process, warm: the best of some repetitions, which
    other processes disturb little.
    """
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    kv, transport = build(), DistributedTransport(name="hot")
    group = Agreement(kv, transport, Terms(every=2))
    group.boundary()
    group.boundary()
    facts, rules = group._facts, group._rules
    member = Member(0, rules)
    words = member.cast(Observed(facts=facts))
    tensor = torch.zeros(len(words), dtype=torch.int64)
    turns = itertools.count()

    def cast() -> None:
        member.is_cast = False
        member.cast(Observed(facts=facts))

    def conclude() -> None:
        member.is_cast = True
        member.conclude(Tally(words, rules.shape))

    def reduce() -> None:
        dist.all_reduce(tensor, op=dist.ReduceOp.MIN, async_op=True).wait()

    def carry() -> None:
        transport.start(words)
        transport.finish(60.0)

    def tick() -> None:
        group.boundary()
        group.boundary()

    parts: dict[str, Callable[[], object]] = {
        "digest": lambda: kv.peer.digest(next(turns)),
        "ballot": cast,
        "decision": conclude,
        "transport": carry,
        "all-reduce alone": reduce,
        "tick": tick,
    }
    return {
        name: 1e6 * min(timeit.repeat(part, number=loops, repeat=repeats)) / loops
        for name, part in parts.items()
    }


def be_rank(folder: Path, rank: int, size: int, rounds: int) -> None:
    """Measure, and leave the microseconds of every round in a file."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size
    )
    bench = Bench()
    bench.rounds(20)
    for times in bench.parts.values():
        times.clear()
    found = {**bench.rounds(rounds), **bench.parts}
    told = {name: [1e6 * s for s in times] for name, times in found.items()}
    told["bytes"] = [bench.transport.num_bytes]
    (folder / f"rank-{rank}.json").write_text(json.dumps(told))
    dist.barrier()
    dist.destroy_process_group()


def measure(size: int, rounds: int) -> dict[str, Any]:
    """Run a group; per case the median and p99 over rounds of the slowest rank of each round."""
    with tempfile.TemporaryDirectory() as name:
        command = [sys.executable, __file__, "--rounds", str(rounds), "--folder", name]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        ranks = [
            subprocess.Popen([*command, "--rank", str(rank), "--size", str(size)], env=env)
            for rank in range(size)
        ]
        if [code for rank in ranks if (code := rank.wait())]:
            raise RuntimeError(f"a rank of {size} failed")
        told = [json.loads(Path(name, f"rank-{rank}.json").read_text()) for rank in range(size)]
    cases = dict(summed_up(told))
    return {"ranks": size, "rounds": rounds, "bytes": int(told[0]["bytes"][0]), **cases}


def summed_up(told: list[dict[str, list[float]]]) -> Iterator[tuple[str, dict[str, float]]]:
    for name in (*CASES, *PARTS, BIG):
        slowest = np.max([rank[name] for rank in told], axis=0)
        yield name, {"p50": float(np.median(slowest)), "p99": float(np.percentile(slowest, 99))}


def table(results: list[dict[str, Any]]) -> str:
    """The README's two tables."""
    lines = ["| ranks | " + " | ".join(CASES) + " | tick / same bytes | overlapped |"]
    lines.append("|---" * (len(CASES) + 3) + "|")
    for found in results:
        cells = [f"{found[c]['p50']:.1f} / {found[c]['p99']:.0f}" for c in CASES]
        ratio = found["tick"]["p50"] / found["same bytes"]["p50"]
        overlapped = found["tick, overlapped"]["p50"] / found["same bytes, overlapped"]["p50"]
        cells += [f"{ratio:.2f}", f"{overlapped:.2f}"]
        lines.append(f"| {found['ranks']} | " + " | ".join(cells) + " |")
    lines += ["", "| ranks | " + " | ".join(PARTS) + " |", "|---" * (len(PARTS) + 1) + "|"]
    for found in results:
        cells = [f"{found[p]['p50']:.1f}" for p in PARTS]
        lines.append(f"| {found['ranks']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few rounds, nothing written")
    parser.add_argument("--hot", action="store_true", help="the parts in one process, only shown")
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--out", type=Path, default=HERE / "result.json")
    parser.add_argument("--rank", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--size", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank >= 0:
        be_rank(args.folder, args.rank, args.size, args.rounds)
        return
    if args.hot:
        print("\n".join(f"{name:20}{us:8.1f} us" for name, us in hot().items()))
        return
    rounds = 100 if args.quick else args.rounds
    results = [measure(size, rounds) for size in args.sizes]
    print(table(results))
    if not args.quick:
        machine = (
            f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
        )
        told = {"machine": machine, "torch": torch.__version__, "results": results}
        args.out.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
