"""A fixture that builds managers over real memory and closes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.torch.driver import Driver
from tests.torch.tiny import tiny_model

from kvtide import KVManager, MemfdMemory, Options
from kvtide.torch import PagedCache, layout_from_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

torch.set_num_threads(1)  # threads that wait for each other cost more than these models compute


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
        **options: Any,
    ) -> Driver:
        model = tiny_model(family, dtype)
        layout = layout_from_model(model, block_tokens=block_tokens, state_interval=block_tokens)
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
