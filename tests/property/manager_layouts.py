"""What the manager's state machine runs on: layouts, sizes and prompts that keep meeting."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
from tests.tiny import GRANULE, draft, full, state, window

from kvtide import ConfigError, KVManager, Layout, NullMemory, Scope
from kvtide.layout import CompressedSpec, IndexerSpec

BLOCK = 4
MAX_TOKENS = 40
MAX_SEQUENCES = 5
SCOPES = (Scope(), Scope(salt=b"x"))

LAYOUTS: dict[str, tuple[Any, ...]] = {
    "full": (full(48),),
    "full + window": (full(48), window(8, dim=48)),
    "full + window with sinks": (full(32), window(8, sinks=3, dim=48)),
    "full + state": (full(48), state(500, interval=4)),
    "window only": (window(10, dim=64),),
    "state only": (state(700, interval=4),),
    "full + draft mirror": (full(48), draft(3, dim=24)),
    "two states": (full(40), state(500), state(300, interval=16)),
    "pages that do not divide a granule": (full(52), window(9, dim=100), state(300, interval=4)),
    "pages larger than a granule": (full(200), state(3000), window(6, dim=140)),
    "entries of several tokens": (
        window(8, dim=48),
        CompressedSpec(dim=190, ratio=2, dtype="float32"),
        IndexerSpec(dim=300, ratio=4, dtype="float32"),
        state(300, interval=4),
    ),
    "shares of two ranks": (full(96), window(10, dim=100)),
}

CONTEXT = {"shares of two ranks": 2}
"""Ranks that share the tokens of a block, where they are several."""

PROMPTS = st.tuples(st.integers(0, 8), st.integers(0, 36), st.integers(0, 99))
"""(which known text, how much of it, seed of the rest)"""

BASES = ([0] * 12, [1] * 9, [0] * 6 + [2] * 9, [1] * 20, [2] * 26)


def least_granules(layout: Layout) -> int:
    """Fewest granules with which a manager for one longest sequence can be built."""
    for num in range(1, 1000):
        try:
            KVManager(layout, NullMemory(num * GRANULE, GRANULE), max_tokens=MAX_TOKENS)
        except ConfigError:
            continue
        return num
    raise AssertionError("1000 granules are not enough for a test")
