"""Which groups of a layout make which cache layer of transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from transformers.cache_utils import (
    CacheLayerMixin,
    DummyLayer,
    LinearAttentionCacheLayerMixin,
)

from kvtide.errors import ConfigError
from kvtide.torch.binding import Binding, StateGroup, TokenGroup
from kvtide.torch.layers import Column, PagedIndexedLayer, PagedLayer
from kvtide.torch.scratch import Scratch
from kvtide.torch.states import PagedFoldedLayer, PagedStateLayer, StateView
from kvtide.torch.views import StatePages, TokenRows

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvtide.layout import LayerGroup, Layout
    from kvtide.torch.binding import HasRows
    from kvtide.torch.views import HasArena

Layer: TypeAlias = CacheLayerMixin | LinearAttentionCacheLayerMixin | DummyLayer

_PAIRS = (("key", "value"), ("latent", "rope"), ("key",), ("latent",))
"""Buffers that `update` writes."""


def bind_groups(
    layout: Layout, pools: Mapping[str, HasArena], tables: Mapping[str, HasRows]
) -> Binding:
    """The groups of a layout over their pools; ConfigError if a model could not use one."""
    for group in layout.groups:
        _require_readable(group)
    scratch = Scratch()
    return Binding(
        {g.name: TokenGroup(g, tables[g.name], scratch) for g in layout.groups if not g.is_state},
        {
            g.name: StateGroup(g, tables[g.name], StatePages(pools[g.name], g))
            for g in layout.groups
            if g.is_state
        },
    )


def layers_of(layout: Layout, pools: Mapping[str, HasArena], binding: Binding) -> list[Layer]:
    """The cache layers of a model, from the groups that hold something of each."""
    num_layers = 1 + max(max(group.layers) for group in layout.groups)
    return [_Parts(layout, pools, binding, layer).build() for layer in range(num_layers)]


class _Parts:
    """What the groups hold of one layer."""

    def __init__(
        self, layout: Layout, pools: Mapping[str, HasArena], binding: Binding, layer: int
    ) -> None:
        self._layer = layer
        self._pools, self._binding = pools, binding
        self._groups = [group for group in layout.groups if layer in group.layers]

    def build(self) -> Layer:
        """The one kind of cache layer that has just these parts."""
        roles = sorted(_role(group) for group in self._groups)
        index = self._column("index", "index_key", "index")
        match roles:
            case []:
                return DummyLayer()
            case ["state"]:
                layer = PagedStateLayer(self._view())
                self._binding.states[self._group("state").name].layers.append(layer)
                return layer
            case ["pair"]:
                return PagedLayer(self._binding, *self._pair())
            case ["index"] | ["index", "pair"] if index is not None:
                return PagedIndexedLayer(self._binding, *self._pair(), index=index)
            case ["folded", "pair", "state"] | ["folded", "index", "pair", "state"]:
                return self._folded(index)
            case _:
                raise self._unknown()

    def _folded(self, index: Column | None) -> PagedFoldedLayer:
        keys, values = self._pair()
        entries = self._column("folded", "compressed", "compressed")
        if keys is None or values is not None or entries is None:
            raise self._unknown()
        folded = {"compressor": entries}
        if index is not None:
            folded["indexer"] = index
        layer = PagedFoldedLayer(self._binding, keys, folded, self._view())
        self._binding.states[self._group("state").name].layers.append(layer)
        return layer

    def _pair(self) -> tuple[Column | None, Column | None]:
        """The columns of keys and values, or of latents and rotary keys."""
        names = next((_names(g) for g in self._groups if _role(g) == "pair"), ())
        keys = self._column("pair", names[0], "key") if names else None
        values = self._column("pair", names[1], "value") if len(names) > 1 else None
        return keys, values

    def _column(self, part: str, name: str, role: str) -> Column | None:
        for group in self._groups:
            if _role(group) == part:
                position = group.layers.index(self._layer)
                pool = self._pools[group.name]
                rows = TokenRows(pool, group, layer_position=position, name=name)
                return Column(self._binding, self._binding.tokens[group.name], rows, role)
        return None

    def _group(self, part: str) -> LayerGroup:
        return next(group for group in self._groups if _role(group) == part)

    def _view(self) -> StateView:
        group = self._group("state")
        names = tuple(buffer.name for buffer in group.buffers)
        pages = self._binding.states[group.name].pages
        return StateView(pages, group.layers.index(self._layer), names)

    def _unknown(self) -> ConfigError:
        names = ", ".join(group.name for group in self._groups)
        return ConfigError(
            f"layer {self._layer} is in groups {names}; a cache layer is a state, or keys and "
            "values or latents, indexer keys with or without them, or (DeepSeek-V4) a window of "
            "keys, folded entries and their state, each once"
        )


def _names(group: LayerGroup) -> tuple[str, ...]:
    return tuple(buffer.name for buffer in group.buffers)


def _role(group: LayerGroup) -> str:
    """Which part of a cache layer the group's buffers are."""
    if group.is_state:
        return "state"
    match _names(group):
        case ("index_key",):
            return "index"
        case ("compressed",):
            return "folded"
        case names if names in _PAIRS:
            return "pair"
        case names:
            raise ConfigError(
                f"group {group.name!r} stores {', '.join(names)}; a cache layer stores key and "
                "value, or latent and rope, index_key, or compressed"
            )


def _require_readable(group: LayerGroup) -> None:
    """Refuse what only kernels can read: quantised entries, and shares of a block."""
    packed = [b.name for b in group.buffers if b.dtype == "uint8" or b.name.endswith("_scale")]
    if packed:
        raise ConfigError(
            f"group {group.name!r} stores {', '.join(packed)}, which transformers' models cannot "
            "read: build the layout with kv_dtype and index_dtype of the model, as "
            "layout_from_model does"
        )
    if group.context > 1:
        raise ConfigError(
            f"context of group {group.name!r} is {group.context}; a model in one process reads all "
            "tokens of a block: build the layout without context parallelism"
        )
