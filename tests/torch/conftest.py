"""A fixture that builds managers over real memory and closes them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.torch.driver import Driver
from tests.torch.tiny import tiny_model

from kvtide import KVManager, Layout, MemfdMemory, Options
from kvtide.layout import Full, FullSpec, LayerGroup
from kvtide.torch import PagedCache, layout_from_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

torch.set_num_threads(1)  # threads that wait for each other cost more than these models compute


def with_spare_pool(layout: Layout) -> Layout:
    """`layout` and a group of a layer that the model does not have: ground to move to and from."""
    spare = LayerGroup(
        name="spare",
        lifetime=Full(),
        layers=(99,),
        buffers=FullSpec(kv_heads=1, head_dim=8, dtype="float32").buffers,
        block_tokens=layout.block_tokens,
    )
    return replace(layout, groups=(*layout.groups, spare))


@pytest.fixture
def drive() -> Iterator[Callable[..., Driver]]:
    """`drive(family, **settings)`: a driver over a tiny model and a manager with small granules."""
    built: list[KVManager] = []

    def make(
        family: str,
        *,
        block_tokens: int = 4,
        num_bytes: int = 4 << 20,
        dtype: torch.dtype = torch.float64,
        spare_pool: bool = False,
        **options: Any,
    ) -> Driver:
        model = tiny_model(family, dtype)
        layout = layout_from_model(model, block_tokens=block_tokens, state_interval=block_tokens)
        if spare_pool:
            layout = with_spare_pool(layout)
        kv = KVManager(
            layout,
            MemfdMemory(num_bytes, granule_bytes=4096),
            max_sequences=8,
            max_tokens=128,
            options=Options(**options),
        )
        built.append(kv)
        return Driver(model, kv, PagedCache(kv))

    yield make
    for kv in built:
        kv.shut_down()
