"""A transformers cache whose layers live in kvtide pages; models use it unmodified."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import numpy as np
from transformers.cache_utils import Cache, DummyLayer

from kvtide.errors import ConfigError
from kvtide.torch.binding import Binding, Scratch, StateGroup, TokenGroup
from kvtide.torch.convert import tensor_of
from kvtide.torch.forward import Forward
from kvtide.torch.layers import PagedIndexedLayer, PagedLayer, PagedStateLayer
from kvtide.torch.views import StatePages, TokenRows

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence

    import torch
    from transformers import PreTrainedModel

    from kvtide.layout import LayerGroup, Layout
    from kvtide.manager import KVManager
    from kvtide.torch.binding import HasRows
    from kvtide.torch.generate import GenerateCache
    from kvtide.torch.views import HasArena
    from kvtide.types import IntArray


class Paged(Protocol):
    """What a cache needs of a manager: the layout, the pools and the page tables, by group name."""

    @property
    def layout(self) -> Layout:
        """What the pages hold."""
        ...

    @property
    def pools(self) -> Mapping[str, HasArena]:
        """Where the pages are."""
        ...

    @property
    def tables(self) -> Mapping[str, HasRows]:
        """Whose the pages are; a state group's table has one column."""
        ...


class HasBatch(Protocol):
    """Sequences that run together."""

    @property
    def rows(self) -> IntArray:
        """Page-table rows, int64 [n]."""
        ...


class Step(Protocol):
    """What a cache needs of a manager's step, per sequence."""

    @property
    def batch(self) -> HasBatch:
        """The sequences of the step."""
        ...

    @property
    def starts(self) -> IntArray:
        """Tokens computed before the step, int64 [n]."""
        ...

    @property
    def num_new(self) -> IntArray:
        """Tokens the step computes, int64 [n]."""
        ...


class PagedCache(Cache):
    """Reads and writes the pages of sequences that a manager owns.

    Inside a step, bind the sequences of each model call::

        with kv.step(batch, num_new) as step:
            with cache.bind(step, indices) as inputs:
                out = model(input_ids, cache=cache, use_cache=True, **inputs)

    The batch is aligned at its right end: `input_ids` [n, max(num_new)] of a sequence with fewer
    new tokens is padded on the left, and its padding is never written. Page tables are read when a
    forward is bound, so pages may have moved since the last one. Holds views of the arenas: let it
    go before the manager closes them.
    """

    def __init__(self, kv: Paged) -> None:
        groups = kv.layout.groups
        scratch = Scratch()
        token_groups = {
            g.name: TokenGroup(g, kv.tables[g.name], scratch) for g in groups if not g.is_state
        }
        state_groups = {
            g.name: StateGroup(g, kv.tables[g.name], StatePages(kv.pools[g.name], g))
            for g in groups
            if g.is_state
        }
        self._binding = Binding(token_groups, state_groups)
        num_layers = 1 + max(max(group.layers) for group in groups)
        super().__init__(layers=[self._layer(kv, layer) for layer in range(num_layers)])

    @contextmanager
    def bind(
        self, step: Step, indices: Sequence[int] | None = None
    ) -> Generator[dict[str, torch.Tensor]]:
        """Bind one model call to sequences `indices` of `step` (None: all, in order).

        Yields the inputs the model needs besides `input_ids`: `position_ids` [n, q] and, if rows
        differ in length, `attention_mask` [n, length]. States are written back on leaving, but
        not after an exception: then the token pages of this call hold anything, and the sequences
        stand where they stood.
        """
        chosen = slice(None) if indices is None else np.asarray(indices, np.int64)
        forward = Forward(
            np.asarray(step.starts, np.int64)[chosen], np.asarray(step.num_new, np.int64)[chosen]
        )
        self._binding.begin(forward, np.asarray(step.batch.rows, np.int64)[chosen])
        try:
            yield _inputs(forward)
            self._binding.commit()
        finally:
            self._binding.end()

    @staticmethod
    def for_generate(
        model: PreTrainedModel,
        memory: KVManager | int,
        *,
        block_tokens: int = 16,
        max_tokens: int | None = None,
        max_sequences: int = 64,
    ) -> GenerateCache:
        """A cache for `model.generate(..., cache=cache)` and plain `model(..., cache=cache)`.

        `memory` is a manager for this model's layout, or the bytes of one to make; only then do
        the other arguments matter, and `max_tokens` (padding included) defaults to the longest
        position the model has. Close the cache, or use it in `with`.
        """
        from kvtide.torch.generate import GenerateCache, manager_for  # noqa: PLC0415 (its base)

        if not isinstance(memory, int):
            return GenerateCache(model, memory, owns_manager=False)
        kv = manager_for(
            model,
            memory,
            block_tokens=block_tokens,
            max_tokens=max_tokens,
            max_sequences=max_sequences,
        )
        return GenerateCache(model, kv, owns_manager=True)

    def _layer(self, kv: Paged, layer: int) -> PagedLayer | PagedStateLayer | DummyLayer:
        """The cache layer of one model layer, from the groups that hold something of it."""
        groups = [group for group in kv.layout.groups if layer in group.layers]
        index = [g for g in groups if g.buffers[0].name == "index_key"]
        rest = [g for g in groups if g.buffers[0].name != "index_key"]
        if not groups:
            return DummyLayer()
        if len(rest) != 1 or len(index) > 1:
            names = ", ".join(group.name for group in groups)
            raise ConfigError(
                f"layer {layer} is in groups {names}; a cache layer is made of one group of keys "
                "and values, latents or state, and at most one of indexer keys"
            )
        group, position = rest[0], rest[0].layers.index(layer)
        pool = kv.pools[group.name]
        if group.is_state:
            return self._state_layer(group, position, StatePages(pool, group))
        pair = _pair(pool, group, position)
        mine = self._binding.tokens[group.name]
        if not index:
            return PagedLayer(self._binding, mine, pair)
        at = index[0].layers.index(layer)
        return PagedIndexedLayer(
            self._binding,
            mine,
            pair,
            index_group=self._binding.tokens[index[0].name],
            index_rows=TokenRows(
                kv.pools[index[0].name], index[0], layer_position=at, name="index_key"
            ),
        )

    def _state_layer(self, group: LayerGroup, position: int, pages: StatePages) -> PagedStateLayer:
        names = tuple(buffer.name for buffer in group.buffers)
        layer = PagedStateLayer(pages, position, names)
        self._binding.states[group.name].layers.append(layer)
        return layer


def _pair(pool: HasArena, group: LayerGroup, position: int) -> tuple[TokenRows, TokenRows]:
    """The two buffers `update` writes: keys and values, or latents and rotary keys."""
    names = [buffer.name for buffer in group.buffers]
    if names not in (["key", "value"], ["latent", "rope"]):
        raise ConfigError(
            f"group {group.name!r} stores {', '.join(names)}; "
            "a cache layer stores key and value, or latent and rope"
        )
    first, second = (TokenRows(pool, group, layer_position=position, name=name) for name in names)
    return first, second


def _inputs(forward: Forward) -> dict[str, torch.Tensor]:
    inputs = {"position_ids": tensor_of(forward.positions())}
    if forward.is_padded:
        inputs["attention_mask"] = tensor_of(forward.mask())
    return inputs
