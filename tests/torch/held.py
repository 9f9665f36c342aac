"""What transformers' own cache holds, in the words of a layout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


class Held(NamedTuple):
    """One tensor of one layer: `count` entries of this shape and dtype (a state is one entry)."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    count: int

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize * self.count


def held(cache: Any) -> dict[int, dict[str, Held]]:
    """Everything a cache of one row holds, by layer and name of the buffer.

    Of keys that are the values too only one, though some layers of DeepSeek-V4 keep both. Not the
    positions that Qwen4's cache carries along: they are a function of the index.
    """
    return {layer: dict(_of_layer(cache, layer)) for layer in range(len(cache))}


def _of_layer(cache: Any, layer: int) -> Iterator[tuple[str, Held]]:
    linear = getattr(cache, "linear_cache", [])
    if layer < len(linear) and linear[layer] != []:
        yield "recurrent", _state(linear[layer])
    if layer < len(cache.layers):
        it = cache.layers[layer]
        yield from _keys_and_values(it)
        yield from _states(it)
        yield from _folded(it)


def _keys_and_values(layer: Any) -> Iterator[tuple[str, Held]]:
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    index = getattr(layer, "indexer_keys", None)
    index = getattr(layer, "idx_keys", None) if index is None else index
    if index is not None:
        yield "index_key", Held((index.shape[-1],), index.dtype, index.shape[-2])
    if keys is None:
        return
    # Latents are one head wide, and no two tensors of them are as wide.
    is_latent = keys.shape[1] == 1 and keys.shape[3] != values.shape[3]
    names = ("latent", "rope") if is_latent else ("key", "value")
    tied = keys.shape == values.shape and torch.equal(keys, values)
    for name, tensor in zip(names, (keys,) if tied else (keys, values), strict=not tied):
        if tensor.numel():
            sizes = tensor.shape[3:] if is_latent else (tensor.shape[1], tensor.shape[3])
            yield name, Held(tuple(sizes), tensor.dtype, tensor.shape[2])


def _states(layer: Any) -> Iterator[tuple[str, Held]]:
    for kind in ("conv", "recurrent"):
        for number, tensor in getattr(layer, f"{kind}_states", {}).items():
            if tensor is not None:
                yield f"{kind}_{number}" if number else kind, _state(tensor)


def _folded(layer: Any) -> Iterator[tuple[str, Held]]:
    for name, tensor in getattr(layer, "compressed_kv", {}).items():
        entry = "compressed" if name == "compressor" else "index_key"
        yield entry, Held((tensor.shape[2],), tensor.dtype, tensor.shape[1])
    for part in ("kv", "gate"):
        for name, tensor in getattr(layer, f"buffer_{part}", {}).items():
            yield f"{name}_{part}", _state(tensor)
        for name, tensor in getattr(layer, f"overlap_{part}", {}).items():
            prefix = "" if name == "compressor" else f"{name}_"
            yield f"{prefix}overlap_{part}", _state(tensor)


def _state(tensor: torch.Tensor) -> Held:
    return Held(tuple(tensor.shape[1:]), tensor.dtype, 1)
