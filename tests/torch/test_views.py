"""Tensors over arenas: same memory, right places, nothing touched that is not mapped."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from kvtide import ConfigError, Layout, MemfdMemory
from kvtide.layout import Buffer, CompressedSpec, FullSpec, IndexerSpec, LatentSpec, StateSpec
from kvtide.torch import page_view
from kvtide.torch.views import StatePages, TokenRows

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvtide.layout import LayerGroup
    from kvtide.memory import Arena

GRANULE = 4096


class OnePool:
    """A reservation of 16 granules of which 4 and 5 are mapped, or those given."""

    def __init__(self, *mapped: int) -> None:
        self.memory = MemfdMemory(16 * GRANULE, granule_bytes=GRANULE)
        self.arena: Arena = self.memory.reserve(16)
        granules = np.array(mapped)
        self.arena.map(granules, np.arange(len(granules)))

    def bytes_at(self, start: int, count: int) -> bytes:
        return bytes(memoryview(self.arena.buffer())[start : start + count])


@pytest.fixture
def pool() -> Iterator[OnePool]:
    made = OnePool(0, 1, 2, 3)
    yield made
    made.memory.close()


def full_group(block_tokens: int = 4, **changes: object) -> LayerGroup:
    fields: dict[str, object] = {"kv_heads": 2, "head_dim": 4, "dtype": "float32"}
    spec = FullSpec(**(fields | changes))  # type: ignore[arg-type]
    return Layout.from_layers({0: spec, 1: spec}, block_tokens=block_tokens).groups[0]


def test_a_view_shows_the_arenas_bytes(pool: OnePool) -> None:
    group = full_group()
    view = page_view(pool, group, layer_position=1, name="value")
    assert view.shape == (16 * GRANULE // group.page_bytes, 4, 2, 4)
    view[3, 2, 1] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    token = 2 * 4 * 4  # heads, dims, bytes
    at = 3 * group.page_bytes + group.offset(1, "value") + 2 * token + token // 2
    assert np.frombuffer(pool.bytes_at(at, 16), np.float32).tolist() == [1, 2, 3, 4]


def test_pages_may_straddle_granules(pool: OnePool) -> None:
    group = full_group(block_tokens=5)
    assert GRANULE % group.page_bytes
    view = page_view(pool, group, layer_position=0, name="key")
    page = GRANULE // group.page_bytes  # the first to cross a border
    view[page] = 7.0
    start = page * group.page_bytes
    assert set(np.frombuffer(pool.bytes_at(start, 5 * 32), np.float32).tolist()) == {7.0}


def test_a_state_view_has_whole_shapes(pool: OnePool) -> None:
    spec = StateSpec(
        buffers=(Buffer("conv", (3, 4), "float64"), Buffer("recurrent", (2, 2), "float32")),
        interval_tokens=4,
    )
    group = Layout.from_layers({0: spec, 1: spec}, block_tokens=4).groups[0]
    assert page_view(pool, group, layer_position=1, name="conv").shape[1:] == (3, 4)
    assert page_view(pool, group, layer_position=1, name="recurrent").dtype == torch.float32


def test_nothing_unmapped_is_touched() -> None:
    pool = OnePool(4, 5)
    group = full_group()
    per_granule = GRANULE // group.page_bytes
    view = page_view(pool, group, layer_position=0, name="key")
    rows = TokenRows(pool, group, layer_position=0, name="key")
    first, stop = 4 * per_granule, 6 * per_granule
    view[first:stop] = 1.0  # a fault here would end the process
    units = torch.arange(first, stop) * rows.grid.page_units
    out = torch.empty(len(units), 8)
    rows.read(units, out)
    assert bool((out == 1).all())
    rows.write(units, out + 1)
    assert bool((view[first:stop, 0] == 2).all())
    pool.memory.close()


def test_a_view_follows_its_pages_when_granules_move(pool: OnePool) -> None:
    view = page_view(pool, full_group(), layer_position=0, name="key")
    view[0] = 5.0
    granules, other = np.array([0]), np.array([9])
    handles = pool.arena.handles_at(granules)
    pool.arena.unmap(granules)
    pool.arena.map(other, handles)
    assert bool((view[9 * GRANULE // full_group().page_bytes] == 5).all())


@pytest.mark.parametrize("block_tokens", [1, 3, 4, 16])
@pytest.mark.parametrize(
    "spec",
    [
        FullSpec(kv_heads=2, head_dim=4, dtype="float32"),
        FullSpec(kv_heads=1, head_dim=3, dtype="float64", v_head_dim=5),
        FullSpec(kv_heads=3, head_dim=5, dtype="bfloat16"),
        LatentSpec(rank=16, rope_dim=6, dtype="float16"),
        IndexerSpec(dim=7, dtype="float32", scale_bytes=3),
    ],
)
def test_rows_are_the_tokens_of_the_pages(
    pool: OnePool, spec: FullSpec | LatentSpec | IndexerSpec, block_tokens: int
) -> None:
    group = Layout.from_layers({0: spec, 1: spec}, block_tokens=block_tokens).groups[0]
    num_pages = 4 * GRANULE // group.page_bytes
    rng = np.random.default_rng(0)
    for buffer in group.buffers:
        view = page_view(pool, group, layer_position=1, name=buffer.name)
        rows = TokenRows(pool, group, layer_position=1, name=buffer.name)
        view[:num_pages] = torch.from_numpy(rng.integers(0, 9, view[:num_pages].shape))
        pages = rng.permutation(num_pages)
        offsets = rng.integers(0, block_tokens, num_pages)
        first = pages * rows.grid.page_units + offsets * rows.grid.row_units
        units = torch.from_numpy((first[:, None] + np.arange(rows.grid.row_units)).reshape(-1))
        out = torch.empty(len(units), rows.unit_elements, dtype=rows.shape.dtype)
        rows.read(units, out)
        want = view[torch.from_numpy(pages), torch.from_numpy(offsets)].flatten(1)
        assert out.view(num_pages, -1).equal(want)
        rows.write(units, want + 1)
        assert view[torch.from_numpy(pages), torch.from_numpy(offsets)].flatten(1).equal(want + 1)


def test_a_whole_row_is_one_unit_when_it_divides_the_page(pool: OnePool) -> None:
    assert TokenRows(pool, full_group(), layer_position=0, name="key").grid.row_units == 1
    odd = full_group(block_tokens=3, head_dim=5, v_head_dim=3)
    assert TokenRows(pool, odd, layer_position=0, name="value").grid.row_units > 1


def test_state_pages_are_copied_out_changed_and_written_back(pool: OnePool) -> None:
    spec = StateSpec(
        buffers=(Buffer("conv", (2, 3), "float64"), Buffer("recurrent", (4,), "float32")),
        interval_tokens=4,
    )
    group = Layout.from_layers({0: spec, 1: spec}, block_tokens=4).groups[0]
    pages = StatePages(pool, group)
    view = page_view(pool, group, layer_position=1, name="recurrent")
    view[torch.tensor([2, 5])] = torch.tensor([[1.0], [2.0]])
    at = torch.tensor([5, 2])
    states = pages.read(at)
    part = pages.part(states, 1, "recurrent")
    assert part[:, 0].tolist() == [2, 1]
    part += 10
    assert view[5, 0] == 2  # a copy until it is written back
    pages.write(at, states)
    assert view[torch.tensor([5, 2]), 0].tolist() == [12, 11]
    assert not pages.part(pages.blank(2), 0, "conv").any()


def test_unknown_buffers_are_refused(pool: OnePool) -> None:
    with pytest.raises(ConfigError, match="no buffer 'rope'; it has key, value"):
        page_view(pool, full_group(), layer_position=0, name="rope")


def test_entries_of_several_tokens_fill_a_page_sooner(pool: OnePool) -> None:
    waiting = StateSpec(buffers=(Buffer("compressor_kv", (3, 4), "float32"),), interval_tokens=8)
    layers = {0: (CompressedSpec(dim=4, ratio=4, dtype="float32"), waiting)}
    group = Layout.from_layers(layers, block_tokens=8).group("compressed_4")
    assert page_view(pool, group, layer_position=0, name="compressed").shape[1:] == (2, 4)
