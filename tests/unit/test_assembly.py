"""What construction refuses, and what it makes of what it accepts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.tiny import draft, full, state, window

from kvtide import ConfigError, KVManager, Layout, NullMemory, Options
from kvtide.types import SINK

GRANULE = 256


def build(*specs: Any, granules: int, max_tokens: int = 16, **options: Any) -> KVManager:
    layout = Layout.from_layers(dict(enumerate(specs)), block_tokens=4)
    memory = NullMemory(granules * GRANULE, GRANULE)
    return KVManager(
        layout, memory, max_sequences=3, max_tokens=max_tokens, options=Options(**options)
    )


@pytest.mark.parametrize("mode", ["elastic", "static"])
@pytest.mark.parametrize(
    ("specs", "least"),
    [
        ((full(),), 1 + 4),  # 256 bytes a page: the sink and 16 tokens
        ((full(), window(8)), (1 + 4) + (1 + 3)),  # the window at its worst alignment
        ((full(), window(8, sinks=5)), (1 + 4) + (1 + 4)),  # no more than all blocks
        ((full(), state()), (1 + 4) + (1 + 2)),  # a live state and the one it restores from
        ((full(), draft(dim=8)), (1 + 4) + (1 + 4)),
        ((full(), window(16)), (1 + 4) + (1 + 4)),  # no longer than the longest sequence: full
    ],
)
def test_the_least_memory_holds_one_longest_sequence(
    specs: tuple[Any, ...], least: int, mode: str
) -> None:
    build(*specs, granules=least, mode=mode).check()
    with pytest.raises(ConfigError) as caught:
        build(*specs, granules=least - 1, mode=mode)
    says = str(caught.value)
    assert f"memory of {(least - 1) * GRANULE:,} bytes" in says
    assert f"{least * GRANULE:,} bytes are needed" in says
    assert "max_tokens = 16" in says
    assert "give more memory or lower max_tokens" in says
    for name in build(*specs, granules=least).pools:
        assert name in says


def test_floors_add_to_the_least_memory() -> None:
    build(full(), window(), granules=5 + 8, floor_pages={"window_8": 7}).check()
    with pytest.raises(ConfigError, match=r"window_8 2,048\)"):
        build(full(), window(), granules=5 + 7, floor_pages={"window_8": 7})


@pytest.mark.parametrize(
    "buffer", [np.zeros((3, 3), np.int32), np.zeros((3, 4), np.int64)], ids=["shape", "dtype"]
)
def test_tables_of_another_form_are_refused(buffer: np.ndarray) -> None:
    with pytest.raises(ConfigError, match=r"give int32\[3, 4\] or none"):
        build(full(), granules=20, tables={"full": buffer})


def test_a_state_table_has_one_column() -> None:
    mine = np.zeros((3, 1), np.int32)
    kv = build(full(), state(), granules=20, tables={"state": mine})
    assert kv.tables["state"].rows is mine
    assert kv.tables["full"].rows.shape == (3, 4)


def test_every_pool_starts_with_its_sink() -> None:
    kv = build(full(), window(), state(), granules=40)
    for pool in kv.pools.values():
        assert pool.books.exists[SINK]
        assert pool.num_mapped == 1
    assert kv.snapshot().unmapped_bytes == 37 * GRANULE


def test_a_static_split_takes_the_whole_budget() -> None:
    kv = build(full(), window(), granules=41, mode="static")
    assert kv.snapshot().unmapped_bytes == 0
    kv.check()


@pytest.mark.parametrize(
    ("specs", "allowed"), [((full(), window()), True), ((full(), state()), False)]
)
def test_parts_of_blocks_are_reused_where_the_layout_allows(
    specs: tuple[Any, ...], allowed: bool
) -> None:
    kv = build(*specs, granules=40)
    first = kv.open([1, 2, 3, 4, 5])
    assert kv.admit([first])
    with kv.step([first], 5):
        pass
    kv.commit([first])
    assert kv.open([1, 2, 3, 9]).hit == (3 if allowed else 0)
