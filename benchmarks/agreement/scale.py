"""A tick among up to 1,024 ranks, by a model: messages, bytes, critical path, and what jitter does.

    python benchmarks/agreement/scale.py     # seconds; reads result.json, writes nothing

Alpha-beta: a message takes alpha + bytes * beta, a collective what its longest chain of messages
takes. Alpha and beta are fitted to the all-reduces that run.py has measured.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from math import ceil, log2
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

RANKS = (2, 4, 8, 16, 64, 256, 1024)
NODE = 8
"""Ranks of a machine, for two levels."""


@dataclass(frozen=True)
class Link:
    """Microseconds of a message, and of each of its bytes."""

    alpha: float
    beta: float

    def time(self, num_bytes: float) -> float:
        return self.alpha + num_bytes * self.beta


@dataclass(frozen=True)
class Cost:
    """Of one all-reduce: messages and bytes of all ranks, microseconds of the longest chain."""

    messages: int
    num_bytes: float
    path: float


def ring(ranks: int, num_bytes: int, link: Link) -> Cost:
    """As gloo does it: every rank's part, in two segments of at least a word, goes round once to be
    folded and once to be told.
    """
    segment = max(8, 8 * ceil(num_bytes / (2 * ranks) / 8))
    hops = 2 * (ranks - 1)
    messages = hops * ceil(num_bytes / segment)
    return Cost(messages, hops * num_bytes, hops * link.time(2 * segment))


def doubling(ranks: int, num_bytes: int, link: Link) -> Cost:
    """Recursive doubling: in each round everybody exchanges all words with one other."""
    rounds = ceil(log2(ranks))
    messages = rounds * ranks
    return Cost(messages, messages * num_bytes, rounds * link.time(num_bytes))


def tree(ranks: int, num_bytes: int, link: Link) -> Cost:
    """Up a binomial tree to the leader, and down again."""
    messages = 2 * (ranks - 1)
    path = 2 * ceil(log2(ranks)) * link.time(num_bytes)
    return Cost(messages, messages * num_bytes, path)


def two_rings(ranks: int, num_bytes: int, link: Link) -> Cost:
    """A ring on each machine, one of the machines, and a ring on each to tell."""
    nodes = ceil(ranks / NODE)
    inner = ring(min(NODE, ranks), num_bytes, link)
    if nodes == 1:
        return inner
    outer = ring(nodes, num_bytes, link)
    return Cost(
        2 * nodes * inner.messages + outer.messages,
        2 * nodes * inner.num_bytes + outer.num_bytes,
        2 * inner.path + outer.path,
    )


SHAPES: dict[str, Callable[[int, int, Link], Cost]] = {
    "ring": ring,
    "two rings": two_rings,
    "doubling": doubling,
    "tree": tree,
}


def fit(results: list[dict]) -> tuple[float, Link]:
    """Least squares over medians: what beginning and waiting cost, alpha and beta (0 or more)."""
    rows, times = [], []
    for found in results:
        hops = 2 * (found["ranks"] - 1)
        for name, num_bytes in (("same bytes", found["bytes"]), ("1 MiB", 1 << 20)):
            rows.append((1, hops, hops * num_bytes / found["ranks"]))
            times.append(found[name]["p50"])
    # Relative errors count: else only the largest group would.
    weights = 1 / np.array(times)
    solved, *_ = np.linalg.lstsq(np.array(rows) * weights[:, None], np.ones(len(times)))
    base, alpha, beta = (max(0.0, float(x)) for x in solved)
    return base, Link(alpha, beta)


def slowed(ranks: int, latency: float, *, every: int, step: float, jitter: float) -> float:
    """Share of time that ticks cost ranks which nothing else holds together.

    A rank's step takes `step` and something exponential with mean `jitter` (milliseconds). A tick
    is begun at a boundary by each rank and waited for at its next one, `latency` milliseconds after
    the last has begun.
    """
    rng = np.random.default_rng(ranks)
    steps = 64 * every
    now, free, begun = np.zeros(ranks), np.zeros(ranks), None
    for number in range(steps):
        if begun is not None:
            now, begun = np.maximum(now, begun + latency), None
        if number % every == 0:
            begun = now.max()
        took = step + rng.exponential(jitter, ranks)
        now, free = now + took, free + took
    return float(now.mean() / free.mean() - 1)


def table(num_bytes: int, link: Link) -> str:
    """Messages of a tick, its bytes and the longest chain, by shape."""
    heads = [f"{name}: messages / KB / ms" for name in SHAPES]
    lines = ["| ranks | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    for ranks in RANKS:
        costs = [shape(ranks, num_bytes, link) for shape in SHAPES.values()]
        cells = [f"{c.messages:,} / {c.num_bytes / 1e3:,.0f} / {c.path / 1e3:.2f}" for c in costs]
        lines.append(f"| {ranks:,} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def jitter_table(num_bytes: int, link: Link, *, step: float, jitter: float) -> str:
    """What ticks cost ranks that run freely otherwise, in percent of their time."""
    cases = [(name, every) for name in ("ring", "two rings", "doubling") for every in (1, 8, 32)]
    heads = [f"{name}, every {every}" for name, every in cases]
    lines = ["| ranks | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    for ranks in RANKS:
        cells = []
        for name, every in cases:
            latency = SHAPES[name](ranks, num_bytes, link).path / 1e3
            share = slowed(ranks, latency, every=every, step=step, jitter=jitter)
            cells.append(f"{100 * share:.1f}")
        lines.append(f"| {ranks:,} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--alpha", type=float, help="microseconds a message, instead of the fit's")
    parser.add_argument("--beta", type=float, help="microseconds a byte, instead of the fit's")
    parser.add_argument("--step", type=float, default=20.0, help="milliseconds")
    parser.add_argument("--jitter", type=float, default=1.0, help="milliseconds, mean")
    args = parser.parse_args()
    told = json.loads(Path(__file__).with_name("result.json").read_text())
    base, link = fit(told["results"])
    print(f"fitted: {base:.0f} us and {link.alpha:.1f} us + {link.beta:.5f} us/byte a hop")
    link = Link(
        link.alpha if args.alpha is None else args.alpha,
        link.beta if args.beta is None else args.beta,
    )
    num_bytes = told["results"][0]["bytes"]
    print(f"used: {link}; {num_bytes:,} bytes a ballot\n")
    print(table(num_bytes, link))
    print(f"\nsteps of {args.step:g} ms, jitter {args.jitter:g} ms:\n")
    print(jitter_table(num_bytes, link, step=args.step, jitter=args.jitter))


if __name__ == "__main__":
    main()
