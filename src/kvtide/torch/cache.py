"""A transformers cache whose layers live in kvtide pages; models use it unmodified."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, Self

import numpy as np
from transformers.cache_utils import Cache

from kvtide.errors import UsageError
from kvtide.torch.assemble import bind_groups, layers_of
from kvtide.torch.convert import tensor_of
from kvtide.torch.forward import Forward
from kvtide.torch.linear_cache import keeps_linear_cache, with_linear_cache
from kvtide.torch.model_layout import selects_columns

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence

    import torch
    from transformers import PreTrainedModel

    from kvtide.layout import Layout
    from kvtide.manager import KVManager
    from kvtide.torch.binding import HasRows
    from kvtide.torch.generate import GenerateCache
    from kvtide.torch.model_layout import HasConfig
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
    new tokens is padded on the left, and its padding is never written; where a model cannot take
    such rows together, `split` tells them apart. Page tables are read when a forward is bound, so
    pages may have moved since the last one. Holds views of the arenas: let it go before the
    manager closes them. `model` is the model (or anything with its `config`): some say only there
    that their rows must be alike; without it they are refused when it matters.
    """

    def __new__(cls, kv: Paged, model: HasConfig | None = None) -> Self:
        """A `MiniMaxCache` too, for layouts of the models that take no other."""
        made = with_linear_cache(cls) if keeps_linear_cache(kv.layout) else cls
        return super().__new__(made)

    def __init__(self, kv: Paged, model: HasConfig | None = None) -> None:
        self._binding = bind_groups(kv.layout, kv.pools, kv.tables)
        self._has_state = bool(self._binding.states)
        self.needs_equal_rows = any(group.ratio > 1 for group in kv.layout.groups)
        """Whether all rows of a forward must have the same past and compute equally many tokens."""
        if model is not None and selects_columns(model.config):
            self.needs_equal_rows = True
        layers = layers_of(kv.layout, kv.pools, self._binding)
        Cache.__init__(self, layers=layers)  # not super(): MiniMaxCache takes no layers

    def split(self, starts: IntArray, num_new: IntArray) -> list[IntArray]:
        """Which rows of a step may share a model call: their indices, ascending, call by call.

        Rows of a call compute equally many tokens, so that new tokens are never padded. Where there
        is state, all of them have a past or none; where `needs_equal_rows`, the same past.
        """
        apart = starts if self.needs_equal_rows else (starts > 0) & self._has_state
        kinds = num_new * (int(starts.max(initial=0)) + 2) + apart
        return [np.flatnonzero(kinds == kind) for kind in np.unique(kinds)]

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
        if self.needs_equal_rows and not forward.is_uniform:
            raise UsageError(
                f"this model folds or selects blocks of tokens, so all rows of a forward must be "
                f"alike, got starts {forward.starts} and num_new {forward.num_new}; "
                "bind them apart, as `split` says"
            )
        self._binding.begin(forward, np.asarray(step.batch.rows, np.int64)[chosen])
        try:
            yield _inputs(forward)
            self._binding.commit()
        finally:
            self._binding.end()

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Refuse: copies of a row are forks, which only the manager can make."""
        raise UsageError(
            f"a paged cache cannot repeat its rows {repeats} times; use KVManager.fork"
        )

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Refuse: rows are chosen by `bind`, and left out with `KVManager.close`."""
        raise UsageError("a paged cache cannot select its rows; use bind and KVManager.close")

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
            return GenerateCache(memory, model, owns_manager=False)
        kv = manager_for(
            model,
            memory,
            block_tokens=block_tokens,
            max_tokens=max_tokens,
            max_sequences=max_sequences,
        )
        return GenerateCache(kv, model, owns_manager=True)


def _inputs(forward: Forward) -> dict[str, torch.Tensor]:
    inputs = {"position_ids": tensor_of(forward.positions())}
    if forward.is_padded:
        inputs["attention_mask"] = tensor_of(forward.mask())
    return inputs
