"""Cache layers of transformers whose content is a state in a kvtide page."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from kvtide.errors import ConfigError, UsageError
from kvtide.torch.layers import PagedLayer, Refusals

if TYPE_CHECKING:
    from kvtide.torch.binding import Binding
    from kvtide.torch.layers import Column
    from kvtide.torch.views import StatePages


class StateView:
    """The state of one layer during a forward: views into copies of the sequences' pages."""

    def __init__(self, pages: StatePages, layer_position: int, names: tuple[str, ...]) -> None:
        self.names = names
        self.is_started = False
        self._pages = pages
        self._position = layer_position
        self._parts: dict[str, torch.Tensor] = {}

    def attach(self, states: torch.Tensor, *, is_started: bool) -> None:
        """Look into `states` [batch, page_bytes] for the forward that begins."""
        self.is_started = is_started
        self._parts = {n: self._pages.part(states, self._position, n) for n in self.names}

    def detach(self) -> None:
        """Let go of the states: between forwards a layer has none."""
        self._parts = {}

    def part(self, name: str) -> torch.Tensor:
        """One buffer [batch, *shape], writable; UsageError without a forward or such a buffer."""
        if name in self._parts:
            return self._parts[name]
        if name in self.names:
            raise UsageError("no forward is bound; call the model inside `with cache.bind(...)`")
        raise UsageError(
            f"the layout keeps {', '.join(self.names)} of this layer, and the model needs "
            f"{name!r}; build the layout from this model"
        )


class PagedStateLayer(Refusals, LinearAttentionCacheLayerMixin):
    """Recurrent state of a linear-attention layer: convolution inputs and recurrent states.

    Buffers `conv`, `conv_1`, ... and `recurrent`, `recurrent_1`, ... are transformers' states 0, 1,
    ... A model may change them in place; the binding writes them back after the forward.
    """

    is_compileable = False  # pyright: ignore[reportIncompatibleMethodOverride, reportAssignmentType]
    is_croppable = False  # pyright: ignore[reportIncompatibleMethodOverride, reportAssignmentType]

    def __init__(self, view: StateView) -> None:
        self._conv = _numbered(view.names, "conv")
        self._recurrent = _numbered(view.names, "recurrent")
        states = 1 + max(*self._conv, *self._recurrent, 0, 0)
        super().__init__(number_of_states=states)  # pyright: ignore[reportUnknownMemberType]
        self._view = view

    def attach(self, states: torch.Tensor, *, is_started: bool) -> None:
        """Look into `states` [batch, page_bytes] for the forward that begins."""
        self._view.attach(states, is_started=is_started)
        for index, name in self._conv.items():
            self.conv_states[index] = self._view.part(name)
        for index, name in self._recurrent.items():
            self.recurrent_states[index] = self._view.part(name)
        self.has_previous_state = dict.fromkeys(range(self.number_of_states), is_started)

    def detach(self) -> None:
        """Let go of the states: between forwards a layer has none."""
        self._view.detach()
        self.conv_states = dict.fromkeys(range(self.number_of_states))
        self.recurrent_states = dict.fromkeys(range(self.number_of_states))
        self.has_previous_state = dict.fromkeys(range(self.number_of_states), False)

    def update_conv_state(
        self, conv_states: torch.Tensor, state_idx: int = 0, **kwargs: object
    ) -> torch.Tensor:
        """Keep the last inputs of the convolution, return them with the past: [batch, ..., n].

        Without a past, inputs shorter than the kernel are padded with zeros on the left.
        """
        state = self._view.part(_name("conv", state_idx))
        kernel = state.shape[-1]
        if self.has_previous_state[state_idx]:
            full = torch.cat([state, conv_states], dim=-1)
        else:
            full = pad(conv_states, (max(0, kernel - conv_states.shape[-1]), 0))
        keep(state, full[..., -kernel:])
        self.has_previous_state[state_idx] = True
        return full

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, state_idx: int = 0, **kwargs: object
    ) -> torch.Tensor:
        """Keep the recurrent state [batch, ...] and return it."""
        return keep(self._view.part(_name("recurrent", state_idx)), recurrent_states)

    def lazy_initialization(self, *args: object, **kwargs: object) -> None:
        """Nothing to do: state pages exist before the first token."""

    def activate_past_recording(self) -> None:
        """Refuse: a state page holds one state, not those of the tokens before."""
        raise UsageError("a paged cache cannot roll a state back; use KVManager.trim")


class PagedFoldedLayer(PagedLayer):
    """DeepSeek-V4: a window, entries that stand for `compress_rate` tokens, and a state.

    The state holds the tokens that fill no entry yet and, where entries overlap, the last entry's
    tokens. All rows of a forward are equally long, so that they fold at the same token.
    """

    def __init__(
        self, binding: Binding, keys: Column, folded: dict[str, Column], view: StateView
    ) -> None:
        super().__init__(binding, keys, None)
        self._folded = folded
        self._view = view
        self.compress_rate = folded["compressor"].group.ratio

    def attach(self, states: torch.Tensor, *, is_started: bool) -> None:
        """Look into `states` [batch, page_bytes] for the forward that begins."""
        self._view.attach(states, is_started=is_started)

    def detach(self) -> None:
        """Let go of the states: between forwards a layer has none."""
        self._view.detach()

    def store_compression_weights(
        self, name: str, kv: torch.Tensor, gate: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Take new tokens [batch, n, width], keep those that fill no entry, return the others.

        The others are [batch, k * compress_rate, width], older tokens included, with the position
        of the first.
        """
        past = self._binding.forward.past
        waiting = past % self.compress_rate
        ready_kv = self._fill(f"{name}_kv", kv, waiting)
        ready_gate = self._fill(f"{name}_gate", gate, waiting)
        return ready_kv, ready_gate, past - waiting

    def update_compressor_states(self, name: str, compressed: torch.Tensor) -> torch.Tensor:
        """Write new entries [batch, n, dim], n >= 0, and return all there are."""
        return self._folded[name].exchange(compressed)

    def update_overlap_state(
        self, name: str, chunk_kv: torch.Tensor, chunk_gate: torch.Tensor, head_dim: int
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Keep the first `head_dim` elements of the newest entry's tokens for the next entry.

        Takes [batch, k, compress_rate, ...]. Returns those of the last forward's newest entry,
        [batch, compress_rate, head_dim], None if there was no entry yet.
        """
        prefix = "" if name == "compressor" else f"{name}_"
        kv = self._swap(f"{prefix}overlap_kv", chunk_kv[:, -1, :, :head_dim])
        gate = self._swap(f"{prefix}overlap_gate", chunk_gate[:, -1, :, :head_dim])
        return (kv, gate) if self._binding.forward.past >= self.compress_rate else (None, None)

    def _fill(self, name: str, new: torch.Tensor, waiting: int) -> torch.Tensor:
        state = self._view.part(name)
        if waiting:
            new = torch.cat([state[:, :waiting], new], dim=1)
        ready = new.shape[1] // self.compress_rate * self.compress_rate
        keep(state[:, : new.shape[1] - ready], new[:, ready:])
        return new[:, :ready]

    def _swap(self, name: str, new: torch.Tensor) -> torch.Tensor:
        state = self._view.part(name)
        old = state.clone()
        keep(state, new)
        return old


def keep(state: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Overwrite `state` and return it; ConfigError if it would have to be rounded."""
    if new.requires_grad:
        raise UsageError("a paged cache keeps no gradients; call the model in torch.no_grad()")
    if state.dtype != new.dtype:
        raise ConfigError(
            f"the model keeps a state in {new.dtype}, the layout stores {state.dtype}; "
            "build the layout with the model's dtype"
        )
    return state.copy_(new)


def _numbered(names: tuple[str, ...], kind: str) -> dict[int, str]:
    """Names of this kind by number: `conv` is 0, `conv_1` is 1."""
    numbers: dict[int, str] = {}
    for name in names:
        head, _, number = name.partition("_")
        if head == kind and (not number or number.isdecimal()):
            numbers[int(number or 0)] = name
    return numbers


def _name(kind: str, number: int) -> str:
    return f"{kind}_{number}" if number else kind
