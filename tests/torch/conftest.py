"""A fixture that builds managers over real memory and closes them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.torch.driver import Driver
from tests.torch.memory import GRANULE, least_bytes
from tests.torch.tiny import FOLD, tiny_model

from kvtide import KVManager, Layout, MemfdMemory, Options
from kvtide.layout import Full, FullSpec, LayerGroup
from kvtide.torch import PagedCache, layout_from_model
from kvtide.types import align_up

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MAX_TOKENS = 128

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
    """`drive(family, **settings)`: a driver over a tiny model and a manager with small granules.

    `block_tokens` is rounded up to what the family's entries fold; a state may be kept at the end
    of every block. There are 4 MiB, or `tight` times what the longest sequence needs.
    """
    built: list[KVManager] = []

    def make(
        family: str,
        *,
        block_tokens: int = 4,
        state_interval: int | None = None,
        tight: float | None = None,
        dtype: torch.dtype = torch.float64,
        spare_pool: bool = False,
        **options: Any,
    ) -> Driver:
        model = tiny_model(family, dtype)
        block_tokens = align_up(block_tokens, FOLD.get(family, 1))
        layout = layout_from_model(
            model, block_tokens=block_tokens, state_interval=state_interval or block_tokens
        )
        if spare_pool:
            layout = with_spare_pool(layout)
        num_bytes = 4 << 20 if tight is None else int(tight * least_bytes(layout, MAX_TOKENS))
        kv = KVManager(
            layout,
            MemfdMemory(align_up(num_bytes, GRANULE), granule_bytes=GRANULE),
            max_sequences=8,
            max_tokens=MAX_TOKENS,
            options=Options(**options),
        )
        built.append(kv)
        return Driver(model, kv, PagedCache(kv, model))

    yield make
    for kv in built:
        kv.shut_down()
