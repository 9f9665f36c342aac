"""One request alone always goes on, in the least memory a manager accepts, whatever is cached.

The promise behind admission: construction proves that a longest sequence fits, so a scheduler that
falls back to one sequence and one token at a time never stands still.
"""

from __future__ import annotations

import math
import random

import pytest

from kvtide import CapacityError, ConfigError, KVManager, NullMemory, Options
from kvtide.layout import Buffer, DraftSpec, FullSpec, Layout, Spec, StateSpec, WindowSpec

MAX_TOKENS = 64
BLOCK_TOKENS = 4


def full(dim: int) -> FullSpec:
    return FullSpec(kv_heads=1, head_dim=dim, dtype="float32")


def window(dim: int, tokens: int, sinks: int = 0) -> WindowSpec:
    return WindowSpec(window=tokens, sinks=sinks, kv_heads=1, head_dim=dim, dtype="float32")


def state(size: int) -> StateSpec:
    return StateSpec(buffers=(Buffer("state", (size,), "float32"),), interval_tokens=16)


LAYOUTS: dict[str, dict[int, Spec | tuple[Spec, ...]]] = {
    "full": {0: full(8)},
    "full+window": {0: full(8), 1: window(8, 8)},
    "full+state": {0: full(8), 1: state(64)},
    "full+sinks+state": {0: full(12), 1: window(8, 8, sinks=3), 2: state(100)},
    "window": {0: window(8, 12)},
    "state": {0: state(64)},
    "full+mirror": {
        0: full(8),
        1: DraftSpec(FullSpec(kv_heads=1, head_dim=4, dtype="float32"), look_ahead=3),
    },
    "full+large state": {0: full(8), 1: state(3000)},
    "three odd sizes": {0: full(24), 1: state(300), 2: window(40, 20)},
}


def smallest(layout: Layout, granule: int, mode: str) -> KVManager:
    """A manager over the least memory that construction accepts."""
    total = sum(group.page_bytes for group in layout.groups)
    for granules in range(math.ceil(total / granule), 10_000):
        try:
            return KVManager(
                layout,
                NullMemory(granules * granule, granule),
                max_sequences=8,
                max_tokens=MAX_TOKENS,
                options=Options(mode=mode),  # pyright: ignore[reportArgumentType]
            )
        except ConfigError:
            continue
    raise AssertionError("no memory size was accepted")


def run_alone(kv: KVManager, rng: random.Random) -> None:
    """One request to its end; fails if even a single token is refused while nothing else runs."""
    stem = rng.choice([[1] * 12, [2] * 9, [1] * 6 + [3] * 9, [5] * 20, [7] * 30])
    seq = kv.open(stem + [rng.randrange(9) for _ in range(rng.randrange(1, 30))])
    goal = rng.randrange(seq.length, MAX_TOKENS)
    answer = kv.admit([seq], 1)
    assert answer, answer
    while seq.computed < goal:
        num_new = kv.chunk(seq, rng.choice([1, 5, 16]))
        while not _granted(kv, seq, num_new):
            assert num_new > 1, f"stuck at {seq.computed} tokens: {kv.snapshot().pools}"
            num_new //= 2
        with kv.step([seq]):
            pass
        last = seq.computed + num_new == seq.length
        kv.commit([seq], [rng.randrange(9) if last else -1])
    kv.check()
    kv.close([seq])


def _granted(kv: KVManager, seq: object, num_new: int) -> bool:
    try:
        return bool(kv.extend([seq], num_new))  # pyright: ignore[reportArgumentType]
    except CapacityError:
        return False


@pytest.mark.parametrize("mode", ["elastic", "static"])
@pytest.mark.parametrize("granule", [160, 512, 4096])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_request_alone_always_goes_on(name: str, granule: int, mode: str) -> None:
    layout = Layout.from_layers(LAYOUTS[name], block_tokens=BLOCK_TOKENS, max_tokens=MAX_TOKENS)
    kv = smallest(layout, granule, mode)
    rng = random.Random(f"{name} {granule} {mode}")
    for _ in range(40):
        run_alone(kv, rng)
    assert all(pool.used == 0 for pool in kv.snapshot().pools.values())
