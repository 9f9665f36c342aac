"""The paged cache behind `model.generate(...)`: it runs the manager's steps by itself."""

from __future__ import annotations

import uuid
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Protocol, Self, cast

import numpy as np

from kvtide.errors import CapacityError, KvError, UsageError
from kvtide.manager import KVManager
from kvtide.memory import MemfdMemory
from kvtide.torch.cache import PagedCache
from kvtide.torch.forward import Forward
from kvtide.torch.model_layout import layout_from_model, text_config
from kvtide.types import Origin, Scope

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch
    from torch.utils.hooks import RemovableHandle
    from transformers import PreTrainedModel

    from kvtide.sequence import Batch, Sequence


class Hookable(Protocol):
    """A torch module, as far as a cache follows its calls."""

    def register_forward_pre_hook(
        self, hook: Callable[..., None], *, with_kwargs: bool
    ) -> RemovableHandle:
        """Call `hook(module, args, kwargs)` before each forward."""
        ...

    def register_forward_hook(
        self, hook: Callable[..., None], *, with_kwargs: bool, always_call: bool
    ) -> RemovableHandle:
        """Call `hook(module, args, kwargs, result)` after each; `result` is None if it failed."""
        ...


class GenerateCache(PagedCache):
    """One batch of `generate`, kept in a manager's pages; made by `PagedCache.for_generate`.

    As with transformers' own caches a row's padding counts as tokens, and calling `generate` again
    with the same cache continues the batch. Token ids are not known here, so the sequences get
    placeholders in a scope of their own: nothing of them is ever shared. The model is followed by
    forward hooks until `close`; each forward is one manager step.
    """

    def __new__(cls, kv: KVManager, model: Hookable, *, owns_manager: bool) -> Self:
        """As of every paged cache."""
        return super().__new__(cls, kv)

    def __init__(self, kv: KVManager, model: Hookable, *, owns_manager: bool) -> None:
        """Follow `model`; with `owns_manager`, `close` shuts the manager down as well."""
        super().__init__(kv)
        self._binding.is_one_batch = True
        self._kv = kv
        self._owns_manager = owns_manager
        self._sequences: list[Sequence] = []
        self._stack: ExitStack | None = None
        self._batch: Batch | None = None
        self._hooks = (
            model.register_forward_pre_hook(self._enter, with_kwargs=True),
            model.register_forward_hook(self._leave, with_kwargs=True, always_call=True),
        )

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Close."""
        self.close()

    def close(self) -> None:
        """Stop following the model and give the pages back. A second call does nothing."""
        for hook in self._hooks:
            hook.remove()
        self.reset()
        if self._owns_manager:
            self._owns_manager = False
            self._kv.shut_down()

    def reset(self) -> None:
        """Forget the batch: the next forward starts another one."""
        self._kv.close(self._sequences)
        self._sequences = []
        self._batch = None
        self._binding.idle_length = 0

    def _enter(self, _module: object, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Before a forward: make room for its tokens and bind it."""
        if kwargs.get("cache") is not self:
            return
        num_rows, num_new = _batch_shape(args, kwargs)
        batch = self._admitted(num_rows, num_new)
        with ExitStack() as stack:
            step = stack.enter_context(self._kv.step(batch, num_new))
            self._binding.begin(Forward(step.starts, step.num_new), batch.rows)
            self._stack = stack.pop_all()

    def _leave(
        self, _module: object, _args: object, _kwargs: Mapping[str, Any], result: object
    ) -> None:
        """After a forward: its tokens are computed, unless it failed (`result` None)."""
        stack, self._stack = self._stack, None
        if stack is None or self._batch is None:
            return
        length = self._binding.forward.length
        if result is not None:
            self._binding.commit()
        self._binding.end()
        stack.close()
        if result is not None:
            self._kv.commit(self._batch)
            self._binding.idle_length = length

    def _admitted(self, num_rows: int, num_new: int) -> Batch:
        """The batch in progress, or a new one with room for its first tokens."""
        if self._batch is None:
            self._batch = self._open(num_rows, num_new)
        if len(self._batch) != num_rows:
            raise UsageError(
                f"the model is called with {num_rows} rows, the cache holds {len(self._batch)}; "
                "call reset() before another batch"
            )
        return self._batch

    def _open(self, num_rows: int, num_new: int) -> Batch:
        # How long a row will grow is not known here: as many placeholders as there may be tokens.
        # They are no traffic to learn from, whence the origin.
        placeholders = np.zeros(self._kv.max_tokens, np.int32)
        if num_new > len(placeholders):
            raise CapacityError(
                f"the prompt has {num_new} tokens, max_tokens is {len(placeholders)}; "
                "build the cache with more max_tokens"
            )
        self._sequences = [
            self._kv.open(placeholders, scope=Scope(salt=uuid.uuid4().bytes), origin=Origin.PADDING)
            for _ in range(num_rows)
        ]
        answer = self._kv.admit(self._sequences, num_new)
        if not answer:
            self.reset()
            raise CapacityError(
                f"pool {answer.pool!r} has {answer.available} pages, a batch of {num_rows} rows of "
                f"{num_new} tokens needs {answer.needed}; give the manager more memory"
            )
        return self._kv.batch(self._sequences)


def manager_for(
    model: PreTrainedModel,
    num_bytes: int,
    *,
    block_tokens: int,
    max_tokens: int | None,
    max_sequences: int,
) -> KVManager:
    """A manager over `num_bytes` of memory of its own, for what this model caches."""
    if max_tokens is None:
        max_tokens = cast("int", text_config(model.config).max_position_embeddings)
    layout = layout_from_model(model, block_tokens=block_tokens, max_tokens=max_tokens)
    memory = MemfdMemory(num_bytes)
    try:
        return KVManager(layout, memory, max_sequences=max_sequences, max_tokens=max_tokens)
    except KvError:
        memory.close()
        raise


def _batch_shape(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[int, int]:
    """Rows and new tokens of a model call."""
    given: torch.Tensor | None = kwargs.get("input_ids")
    if given is None:
        given = kwargs.get("inputs_embeds")
    if given is None and args:
        given = args[0]
    if given is None:
        raise UsageError("the model is called without input_ids or inputs_embeds; pass one")
    return given.shape[0], given.shape[1]
