"""Cache layers of transformers that read and write kvtide pages instead of growing tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from transformers.cache_utils import CacheLayerMixin

from kvtide.errors import UsageError
from kvtide.torch.convert import tensor_of

if TYPE_CHECKING:
    from kvtide.torch.binding import Binding, TokenGroup
    from kvtide.torch.forward import Forward
    from kvtide.torch.views import TokenRows


class Column:
    """One buffer of one layer, written and read as the layer's model calls it.

    `role` names the scratch memory of what is read; buffers in use at the same time have their own.
    """

    def __init__(self, binding: Binding, group: TokenGroup, rows: TokenRows, role: str) -> None:
        self.group = group
        self._binding = binding
        self._rows = rows
        self._role = role

    def exchange(self, states: torch.Tensor) -> torch.Tensor:
        """Write new entries, return all visible ones: [batch, heads, n, dim] or [batch, n, dim].

        The result is valid until the same role is read again, or for as long as it is held.
        """
        heads = states.dim() == 4
        entries = states.transpose(1, 2) if heads else states
        self.group.write(self._rows, entries.flatten(2).flatten(0, 1))
        if self._binding.forward.is_fresh:
            return states
        return self.group.read(self._rows, self._role, heads=heads)


class Refusals:
    """Verbs of transformers' cache layers that only a manager can carry out."""

    is_compileable = False
    is_croppable = False
    supports_early_init = False

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse: tokens are removed by `KVManager.trim`, which knows whose they are."""
        raise UsageError(f"a paged cache cannot crop {tokens_to_remove} tokens; use KVManager.trim")

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Refuse: beams are forks, which only the manager can make."""
        raise UsageError("a paged cache cannot reorder its rows; use KVManager.fork")

    def reset(self) -> None:
        """Refuse: sequences are closed by the manager."""
        raise UsageError("a paged cache cannot reset; close its sequences with KVManager.close")


class PagedLayer(Refusals, CacheLayerMixin):
    """Attention over pages.

    `keys` are keys or latents; `values` values or rotary keys, None if the keys are the values too
    or there are none. A layer that reads another one's keys and values has neither.
    """

    def __init__(self, binding: Binding, keys: Column | None, values: Column | None) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self.is_initialized = True
        self.window = None if keys is None else keys.group.window
        self.is_sliding = self.window is not None
        self._binding = binding
        self._keys, self._values = keys, values
        self._updated: Forward | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new tokens, return all the layer may read: [batch, heads, width, head_dim]."""
        if self._keys is None:
            raise UsageError(
                "the layout keeps no keys and values of this layer; build it from this model"
            )
        self._updated = self._binding.forward
        keys = self._keys.exchange(key_states)
        if self._values is not None:
            return keys, self._values.exchange(value_states)
        if value_states is key_states:
            return keys, keys
        if value_states.shape[-1] == 0:  # latents without rotary keys
            return keys, keys[..., :0]
        raise UsageError(
            "the layout keeps one tensor of this layer and the model caches two; "
            "build the layout from this model"
        )

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """How many columns `update` returns, and the position of the first."""
        forward = self._binding.forward
        width = forward.width(self.window)
        return width, forward.length - width

    def get_seq_length(self) -> int:
        """Tokens the layer has, padding included; those of this forward once `update` has run."""
        current = self._binding.current
        if current is not None and current is self._updated:
            return current.length
        return self._binding.past

    def get_max_length(self) -> int:
        """The window, or -1: the page table sets the limit, not the layer."""
        return -1 if self.window is None else self.window

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: pages exist before the first token."""


class PagedIndexedLayer(PagedLayer):
    """Sparse attention: as `PagedLayer`, with indexer keys in a group of their own."""

    def __init__(
        self, binding: Binding, keys: Column | None, values: Column | None, index: Column
    ) -> None:
        super().__init__(binding, keys, values)
        self._index = index
        self._positions: torch.Tensor | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `PagedLayer.update`; `keys` then has the shape of all keys, and no memory."""
        found = super().update(key_states, value_states)
        self.keys = torch.empty(found[0].shape, device="meta")  # GLM-5.3 looks how many there are
        return found

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Write new indexer keys [batch, q, dim], return all of them: [batch, width, dim]."""
        return self._index.exchange(indexer_key_states)

    def update_index(self, idx_k: torch.Tensor) -> torch.Tensor:
        """As `update_indexer`, [batch, 1, n, dim]: MiniMax-M3, which selects blocks of columns."""
        if self._binding.forward.is_padded:
            raise UsageError(
                "this model selects blocks of columns, so padding would shift its blocks: all rows "
                "of a forward must be equally long; give PagedCache the model, and use its `split`"
            )
        return self._index.exchange(idx_k)

    @property
    def indexer_position_ids(self) -> torch.Tensor | None:
        """Positions of the tokens before this forward, int64 [3, batch, past]; None without a past.

        Text has equal positions in all three dimensions, and they follow from the columns, unless
        `generate` pads: then they are those the model has assigned.
        """
        past = self._binding.past
        if not past:
            return None
        if self._binding.is_one_batch and self._positions is not None:
            return self._positions[..., :past]
        forward = self._binding.forward
        return tensor_of(forward.past_positions()).expand(3, -1, -1)

    @indexer_position_ids.setter
    def indexer_position_ids(self, positions: torch.Tensor) -> None:
        """Kept for the next forward of the same batch."""
        if self._binding.is_one_batch:
            self._positions = positions
