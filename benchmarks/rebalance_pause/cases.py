"""What is moved under the fleet, and how often: layouts, starting states, limits of the machine."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from fleet import Clock, Fleet, Times

import kvtide
from kvtide.layout import Buffer, FullSpec, Layout, Spec, StateSpec, WindowSpec

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

GRANULE = 2 << 20
BUDGET = 1536 << 20
MAX_TOKENS = 8192
FULL = FullSpec(kv_heads=2, head_dim=64, dtype="float16")
WINDOW = WindowSpec(window=1024, kv_heads=2, head_dim=64, dtype="float16")
STATE = StateSpec(buffers=(Buffer("state", (98304,), "float16"),), interval_tokens=512)


def layout(name: str) -> Layout:
    """Full attention (pages of 32 KiB) with a window (128 KiB) or a state (768 KiB)."""
    other: dict[int, Spec] = dict.fromkeys(range(4, 20), WINDOW)
    if name == "full + state":
        other = dict.fromkeys(range(4, 8), STATE)
    layers: dict[int, Spec] = {**dict.fromkeys(range(4), FULL), **other}
    return Layout.from_layers(layers, block_tokens=16, max_tokens=MAX_TOKENS)


@dataclass(slots=True)
class Texts:
    """Token ids, the same in every run; all texts begin with the same 512 tokens."""

    rng: np.random.Generator

    def make(self, length: int) -> npt.NDArray[np.int32]:
        """A text nobody has seen."""
        system = np.arange(512, dtype=np.int32)
        return np.concatenate([system, self.rng.integers(1000, 32000, length - 512, np.int32)])


def build(name: str, state: str, move_bytes: int) -> Fleet:
    """Half the budget to each pool, 12 live sequences, in one of three states.

    empty: what is not in use is free; cached: it is full of prefixes that ended; live: so it is,
    and pages in use lie among them on every other granule, so that they must be relocated.
    """
    made = layout(name)
    names = [group.name for group in made.groups]
    options = kvtide.Options(pool_ratio=dict.fromkeys(names, 0.5), move_bytes_per_step=move_bytes)
    memory = kvtide.MemfdMemory(BUDGET, GRANULE)
    kv = kvtide.KVManager(made, memory, max_sequences=128, max_tokens=MAX_TOKENS, options=options)
    fleet = Fleet(kv)
    warm(fleet)
    settle_in(fleet, state, Texts(np.random.default_rng(7)))
    return fleet


def warm(fleet: Fleet) -> None:
    """Have physical memory behind every mapped byte, as where an engine has written for a while:
    the system makes it at the first touch, at 0.9 us for each 4 KiB.
    """
    for pool in fleet.kv.pools.values():
        touched = np.frombuffer(pool.arena.buffer(), np.uint8).reshape(-1, GRANULE)[:, ::4096]
        for granule in np.flatnonzero(pool.mapped).tolist():
            touched[granule] += 0


def settle_in(fleet: Fleet, state: str, texts: Texts) -> None:
    """Serve until the pools are in the wanted state and 12 sequences are left."""
    if state == "cached":
        for _ in range(40):
            begin(fleet, texts, 6000)
            fleet.catch_up()
            fleet.end(fleet.live[-1:])
    if state == "live":
        for _ in range(84):
            begin(fleet, texts, 3200, room=64)
        fleet.catch_up(256)  # in turn, so that their pages lie side by side
        fleet.end([seq for i, seq in enumerate(fleet.live) if i % 7])
    while len(fleet.live) < 12:
        begin(fleet, texts, 1500 + 100 * len(fleet.live))
        fleet.catch_up()


def begin(fleet: Fleet, texts: Texts, prompt: int, room: int | None = None) -> None:
    """Start one more sequence, with room for its first tokens or all, that will say 2,000 more."""
    if not fleet.start(texts.make(min(MAX_TOKENS, prompt + 2000)), prompt, Clock(), room=room):
        raise RuntimeError("no room for another sequence: the case is too tight")


def steps(fleet: Fleet, times: Times, *, most: int) -> Iterator[None]:
    """Up to `most` decode steps, the manager's time of each noted."""
    for _ in range(most):
        clock, epoch = Clock(), fleet.kv.epoch
        fleet.step(clock)
        times.wall.append(clock.wall * 1e6)
        times.processor.append(clock.processor * 1e6)
        times.moved.append(fleet.kv.epoch != epoch)
        yield


@dataclass(frozen=True, slots=True)
class Limits:
    """What the machine allows, GiB/s: remapping with and without clearing, and memcpy."""

    remap: float
    remap_and_clear: float
    memcpy: float


def limits(granules: int = 256, at_once: int = 4) -> Limits:
    """Map, clear and unmap as many granules as a plan moves, four at a time, no books."""
    with kvtide.MemfdMemory(2 * granules * GRANULE, GRANULE) as memory:
        one, other = memory.reserve(granules), memory.reserve(2 * granules)
        ids = np.arange(granules)
        one.map(ids, ids)
        other.map(ids + granules, ids + granules)
        one.zero(ids * GRANULE, GRANULE)
        other.zero((ids + granules) * GRANULE, GRANULE)
        remapped = cleared = copied = 0.0
        for at in np.split(ids, granules // at_once):
            began = time.perf_counter()
            one.unmap(at)
            other.map(at, at)
            middle = time.perf_counter()
            other.zero(at * GRANULE, GRANULE)
            after = time.perf_counter()
            other.copy(at * GRANULE, (at + granules) * GRANULE, GRANULE)
            copied += time.perf_counter() - after
            remapped += middle - began
            cleared += after - began
    gib = granules * GRANULE / 2**30
    return Limits(gib / remapped, gib / cleared, gib / copied)
