"""What the layers of a few transformers text models cache, read from their configurations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, cast

from transformers import cache_utils
from transformers.configuration_utils import PreTrainedConfig

from kvtide.errors import ConfigError
from kvtide.layout import (
    Buffer,
    FullSpec,
    IndexerSpec,
    LatentSpec,
    Layout,
    Spec,
    StateSpec,
    WindowSpec,
)
from kvtide.torch.views import DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

DEFAULT_STATE_INTERVAL = 256
"""Tokens between the places where a recurrent state may be kept for reuse, about."""


class HasConfig(Protocol):
    """A transformers model, as far as its layout goes."""

    config: PreTrainedConfig

    @property
    def dtype(self) -> torch.dtype:
        """What its weights are stored in."""
        ...


def layout_from_model(
    model: HasConfig | PreTrainedConfig,
    *,
    block_tokens: int,
    dtype: str | None = None,
    max_tokens: int | None = None,
    state_interval: int | None = None,
) -> Layout:
    """The layout of a transformers text model (or its configuration).

    `dtype` is what its attention computes in, by default the model's. `max_tokens` is the longest
    sequence there will be: windows it cannot outgrow become full attention. `state_interval`
    (default: about 256, a multiple of `block_tokens`) is how often a recurrent state may be kept.
    Knows full, sliding and indexed attention of the families in `FAMILIES`; anything else is a
    ConfigError that names the field.
    """
    config = model if isinstance(model, PreTrainedConfig) else model.config
    text = text_config(config)
    family = text.model_type
    if family not in FAMILIES:
        raise ConfigError(
            f"model_type is {family!r}; layouts are known for {', '.join(sorted(FAMILIES))}: "
            "build a Layout by hand for others"
        )
    kinds, options = _layer_types(text)
    interval = state_interval or block_tokens * max(1, DEFAULT_STATE_INTERVAL // block_tokens)
    reader = _Reader(
        text, dtype=dtype or _dtype_of(model), interval=interval, state=FAMILIES[family]
    )
    layers: dict[int, Spec | tuple[Spec, ...]] = {}
    for layer, (kind, option) in enumerate(zip(kinds, options, strict=True)):
        spec = reader.spec(kind, option.get("sliding_window", 0))
        if spec is not None:
            layers[layer] = spec
    return Layout.from_layers(layers, block_tokens=block_tokens, max_tokens=max_tokens)


class _Reader:
    """Turns the layer types of one configuration into specs."""

    def __init__(
        self,
        config: PreTrainedConfig,
        *,
        dtype: str,
        interval: int,
        state: Callable[[_Reader], tuple[Buffer, ...]] | None,
    ) -> None:
        self._config = config
        self.dtype = dtype
        self._interval = interval
        self._state = state

    def size(self, field: str) -> int:
        """An integer of the configuration; ConfigError naming the field if it has none."""
        value = getattr(self._config, field, None)
        if not isinstance(value, int):
            raise ConfigError(
                f"{field} of {self._config.model_type!r} is {value!r}; the layout needs an integer"
            )
        return value

    def spec(self, kind: str, window: int) -> Spec | tuple[Spec, ...] | None:
        """What a layer of this type stores; None if nothing."""
        match kind:
            case "dummy":
                return None
            case "full_attention":
                return FullSpec(
                    kv_heads=self.size("num_key_value_heads"),
                    head_dim=self.size("head_dim"),
                    dtype=self.dtype,
                )
            case "sliding_attention":
                return WindowSpec(
                    window=window,
                    kv_heads=self.size("num_key_value_heads"),
                    head_dim=self.size("head_dim"),
                    dtype=self.dtype,
                )
            case "indexed_attention":
                return self._indexed()
            case "linear_attention" if self._state is not None:
                return StateSpec(buffers=self._state(self), interval_tokens=self._interval)
            case _:
                raise ConfigError(
                    f"layer_types of {self._config.model_type!r} has {kind!r}; "
                    "no layout is known for it: build a Layout by hand"
                )

    def _indexed(self) -> tuple[Spec, ...]:
        latent = LatentSpec(
            rank=self.size("kv_lora_rank"), rope_dim=self.size("qk_rope_head_dim"), dtype=self.dtype
        )
        return latent, IndexerSpec(dim=self.size("index_head_dim"), dtype=self.dtype)


def _gated_delta_net(config: _Reader) -> tuple[Buffer, ...]:
    """Qwen3-Next: inputs of the convolution, and a float32 matrix per value head."""
    key_heads, key_dim = config.size("linear_num_key_heads"), config.size("linear_key_head_dim")
    value_heads = config.size("linear_num_value_heads")
    value_dim = config.size("linear_value_head_dim")
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    return (
        Buffer("conv", (channels, config.size("linear_conv_kernel_dim")), config.dtype),
        Buffer("recurrent", (value_heads, key_dim, value_dim), "float32"),
    )


def _mamba2(config: _Reader) -> tuple[Buffer, ...]:
    """Nemotron-H: inputs of the convolution, and a float32 state per head."""
    heads, head_dim = config.size("mamba_num_heads"), config.size("mamba_head_dim")
    state = config.size("ssm_state_size")
    channels = heads * head_dim + 2 * config.size("n_groups") * state
    return (
        Buffer("conv", (channels, config.size("conv_kernel")), config.dtype),
        Buffer("recurrent", (heads, head_dim, state), "float32"),
    )


FAMILIES: dict[str, Callable[[_Reader], tuple[Buffer, ...]] | None] = {
    "deepseek_v32": None,
    "gemma3_text": None,
    "gpt_oss": None,
    "nemotron_h": _mamba2,
    "qwen3": None,
    "qwen3_next": _gated_delta_net,
}
"""Known `model_type`s, and what their linear-attention layers store if they have any."""


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The configuration of the text decoder inside a composite one, or itself."""
    return config.get_text_config(decoder=True)  # pyright: ignore[reportUnknownMemberType]


def _layer_types(config: PreTrainedConfig) -> tuple[list[str], list[dict[str, int]]]:
    """Cache type of every layer and its options, as transformers itself infers them."""
    infer = cast(
        "Callable[[PreTrainedConfig], tuple[list[str], list[dict[str, int]]]]",
        cache_utils.get_layer_types_and_kwargs,  # pyright: ignore[reportUnknownMemberType]
    )
    return infer(config)


def _dtype_of(model: HasConfig | PreTrainedConfig) -> str:
    """Name of the model's dtype; ConfigError if a bare configuration does not say."""
    dtype = cast("object", getattr(model, "dtype", None))
    for name, known in DTYPES.items():
        if dtype in (known, name):
            return name
    raise ConfigError(f"dtype is {dtype!r}; pass dtype, one of {', '.join(DTYPES)}")
