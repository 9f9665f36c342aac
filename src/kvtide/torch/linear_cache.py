"""MiniMax-01 and M1 want a cache class of their own: the paged cache in its shape."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar, cast

if TYPE_CHECKING:
    import torch

    from kvtide.layout import Layout
    from kvtide.torch.cache import PagedCache
    from kvtide.torch.states import PagedStateLayer

    AnyCache = TypeVar("AnyCache", bound=PagedCache)


def keeps_linear_cache(layout: Layout) -> bool:
    """Whether layers keep a recurrent state and no convolution: lightning attention."""
    return any(
        tuple(buffer.name for buffer in group.buffers) == ("recurrent",) for group in layout.groups
    )


def with_linear_cache(base: type[AnyCache]) -> type[AnyCache]:
    """`base` as a subclass of transformers' `MiniMaxCache`, which that model insists on."""
    if issubclass(base, LinearCache):
        return base
    # Only this model needs the module, and importing it takes a while.
    from transformers.models.minimax.modeling_minimax import MiniMaxCache  # noqa: PLC0415

    made = type(f"MiniMax{base.__name__}", (LinearCache, base, MiniMaxCache), {})
    return cast("type[AnyCache]", made)


class LinearCache:
    """`MiniMaxCache`'s verbs over paged states."""

    layers: list[PagedStateLayer]

    def get_linear_cache(self, layer_idx: int) -> torch.Tensor | None:
        """The state of a layer [batch, heads, dim, dim], None before the first token."""
        layer = self.layers[layer_idx]
        return layer.recurrent_states[0] if layer.has_previous_state[0] else None

    def set_linear_cache(self, layer_idx: int, linear_cache: torch.Tensor) -> None:
        """Keep the state of a layer."""
        self.layers[layer_idx].update_recurrent_state(linear_cache)

    def __len__(self) -> int:
        """Number of layers."""
        return len(self.layers)

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse, as the layers do."""
        self.layers[0].crop(tokens_to_remove)
