"""Cache layers of transformers that read and write kvtide pages instead of growing tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

from kvtide.errors import UsageError

if TYPE_CHECKING:
    from kvtide.torch.binding import Binding, TokenGroup
    from kvtide.torch.views import StatePages, TokenRows


class PagedLayer(CacheLayerMixin):
    """Attention over pages; `window` None is full attention.

    `update` returns tensors that stay valid until the same group's next layer updates: they live
    in scratch memory shared by the layers of a forward.
    """

    is_compileable = False
    is_croppable = False
    supports_early_init = False

    def __init__(
        self, binding: Binding, group: TokenGroup, buffers: tuple[TokenRows, TokenRows]
    ) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self.is_initialized = True
        self.is_sliding = group.window is not None
        self._binding = binding
        self._group = group
        self._key_rows, self._value_rows = buffers

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new tokens, return all the layer may read: [batch, heads, width, head_dim]."""
        if self._binding.forward.is_fresh:
            self._write(self._key_rows, key_states)
            self._write(self._value_rows, value_states)
            return key_states, value_states
        return self._exchange(self._key_rows, "key", key_states), self._exchange(
            self._value_rows, "value", value_states
        )

    def _exchange(self, rows: TokenRows, role: str, states: torch.Tensor) -> torch.Tensor:
        """Write [batch, heads, q, dim], read back the same of all visible tokens."""
        self._write(rows, states)
        tokens = self._group.read(rows, role)
        return tokens.transpose(1, 2) if tokens.dim() == 4 else tokens.unsqueeze(1)

    def _write(self, rows: TokenRows, states: torch.Tensor) -> None:
        tokens = states.transpose(1, 2).reshape(-1, states.shape[1] * states.shape[3])
        self._group.write(rows, tokens)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """How many columns `update` returns, and the position of the first."""
        forward = self._binding.forward
        width = forward.width(self._group.window)
        return width, forward.length - width

    def get_seq_length(self) -> int:
        """Tokens computed before this forward, padding included."""
        return self._binding.past

    def get_max_length(self) -> int:
        """The window, or -1: the page table sets the limit, not the layer."""
        return -1 if self._group.window is None else self._group.window

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: pages exist before the first token."""

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse: tokens are removed by `KVManager.trim`, which knows whose they are."""
        raise UsageError(f"a paged cache cannot crop {tokens_to_remove} tokens; use KVManager.trim")

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Refuse: beams are forks, which only the manager can make."""
        raise UsageError("a paged cache cannot reorder its rows; use KVManager.fork")

    def reset(self) -> None:
        """Refuse: sequences are closed by the manager."""
        raise UsageError("a paged cache cannot reset; close its sequences with KVManager.close")


class PagedIndexedLayer(PagedLayer):
    """Sparse attention: as `PagedLayer`, with indexer keys in a group of their own."""

    def __init__(
        self,
        binding: Binding,
        group: TokenGroup,
        buffers: tuple[TokenRows, TokenRows],
        *,
        index_group: TokenGroup,
        index_rows: TokenRows,
    ) -> None:
        super().__init__(binding, group, buffers)
        self._index_group = index_group
        self._index_rows = index_rows

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Write new indexer keys [batch, q, dim], return all of them: [batch, width, dim]."""
        tokens = indexer_key_states.reshape(-1, indexer_key_states.shape[-1])
        self._index_group.write(self._index_rows, tokens)
        if self._binding.forward.is_fresh:
            return indexer_key_states
        return self._index_group.read(self._index_rows, "index")


class PagedStateLayer(LinearAttentionCacheLayerMixin):
    """Recurrent state of a linear-attention layer: convolution inputs and recurrent states.

    `conv_states` and `recurrent_states` are, during a forward, views into copies of the sequences'
    state pages; a model may change them in place. The binding writes the copies back afterwards.
    """

    is_compileable = False  # pyright: ignore[reportIncompatibleMethodOverride, reportAssignmentType]
    is_croppable = False  # pyright: ignore[reportIncompatibleMethodOverride, reportAssignmentType]

    def __init__(self, pages: StatePages, layer_position: int, buffers: tuple[str, ...]) -> None:
        conv = [name for name in buffers if name.startswith("conv")]
        recurrent = [name for name in buffers if name.startswith("recurrent")]
        states = max(len(conv), len(recurrent))
        super().__init__(number_of_states=states)  # pyright: ignore[reportUnknownMemberType]
        self._pages = pages
        self._position = layer_position
        self._conv = dict(enumerate(conv))
        self._recurrent = dict(enumerate(recurrent))

    def attach(self, states: torch.Tensor, *, is_started: bool) -> None:
        """Look into `states` [batch, page_bytes] for the forward that begins."""
        for index, name in self._conv.items():
            self.conv_states[index] = self._pages.part(states, self._position, name)
        for index, name in self._recurrent.items():
            self.recurrent_states[index] = self._pages.part(states, self._position, name)
        self.has_previous_state = dict.fromkeys(range(self.number_of_states), is_started)

    def detach(self) -> None:
        """Let go of the states: between forwards a layer has none."""
        self.conv_states = dict.fromkeys(range(self.number_of_states))
        self.recurrent_states = dict.fromkeys(range(self.number_of_states))
        self.has_previous_state = dict.fromkeys(range(self.number_of_states), False)

    def update_conv_state(
        self, conv_states: torch.Tensor, state_idx: int = 0, **kwargs: object
    ) -> torch.Tensor:
        """Keep the last inputs of the convolution, return them with the past: [batch, dim, n].

        Without a past, inputs shorter than the kernel are padded with zeros on the left.
        """
        state = _attached(self.conv_states[state_idx])
        kernel = state.shape[-1]
        if self.has_previous_state[state_idx]:
            full = torch.cat([state, conv_states], dim=-1)
        else:
            full = pad(conv_states, (max(0, kernel - conv_states.shape[-1]), 0))
        state.copy_(full[..., -kernel:])
        self.has_previous_state[state_idx] = True
        return full

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, state_idx: int = 0, **kwargs: object
    ) -> torch.Tensor:
        """Keep the recurrent state [batch, ...] and return it."""
        return _attached(self.recurrent_states[state_idx]).copy_(recurrent_states)

    def lazy_initialization(self, *args: object, **kwargs: object) -> None:
        """Nothing to do: state pages exist before the first token."""

    def activate_past_recording(self) -> None:
        """Refuse: a state page holds one state, not those of the tokens before."""
        raise UsageError("a paged cache cannot roll a state back; use KVManager.trim")

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse: tokens are removed by `KVManager.trim`, which knows whose they are."""
        raise UsageError(f"a paged cache cannot crop {tokens_to_remove} tokens; use KVManager.trim")

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Refuse: beams are forks, which only the manager can make."""
        raise UsageError("a paged cache cannot reorder its rows; use KVManager.fork")

    def reset(self) -> None:
        """Refuse: sequences are closed by the manager."""
        raise UsageError("a paged cache cannot reset; close its sequences with KVManager.close")


def _attached(state: torch.Tensor | None) -> torch.Tensor:
    if state is None:
        raise UsageError("no forward is bound; call the model inside `with cache.bind(...)`")
    return state
