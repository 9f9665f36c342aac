"""What a transformers model caches in this process, read from its configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, cast

from transformers.configuration_utils import PreTrainedConfig

from kvtide.errors import ConfigError
from kvtide.layout import Layout
from kvtide.torch.views import DTYPES

if TYPE_CHECKING:
    import torch

COLUMN_LAYERS = frozenset({"minimax_m3_sparse"})
"""Types of layers that select blocks of columns, padding included, where others select tokens."""


KERNEL_FIELDS = ("mamba_ssm_cache_dtype", "mamba_ssm_dtype")
"""For other engines: in transformers a recurrent state is float32 whatever these say."""


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
    """The layout of a transformers text model (or its configuration), as it computes.

    `Layout.from_config` with everything in `dtype`, by default the model's: the model itself reads
    what is stored. `max_tokens` is the longest sequence there will be; `state_interval` (default:
    about 1,024, a multiple of `block_tokens`) is how far apart the last recurrent states of a
    prompt are kept. Raises ConfigError naming the field that is missing or unknown, or by which
    tokens would read those after them: then what a prefix caches depends on what follows it.
    """
    config = model if isinstance(model, PreTrainedConfig) else model.config
    _require_causal(text_config(config))
    dtype = dtype or _dtype_of(model)
    return Layout.from_config(
        _as_transformers_reads(config),
        block_tokens=block_tokens,
        kv_dtype=dtype,
        index_dtype=dtype,
        max_tokens=max_tokens,
        state_interval=state_interval,
    )


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The configuration of the text decoder inside a composite one, or itself."""
    return config.get_text_config(decoder=True)  # pyright: ignore[reportUnknownMemberType]


def selects_columns(config: PreTrainedConfig) -> bool:
    """Whether rows of different lengths cannot be padded to one: see `COLUMN_LAYERS`."""
    types = cast("list[str] | None", getattr(text_config(config), "layer_types", None))
    return not COLUMN_LAYERS.isdisjoint(types or ())


def _as_transformers_reads(config: PreTrainedConfig) -> dict[str, object]:
    """All fields but those that only other engines obey."""
    values = cast("dict[str, object]", config.to_dict())
    for part in (values, *values.values()):
        if isinstance(part, dict):
            for name in KERNEL_FIELDS:
                cast("dict[str, object]", part).pop(name, None)
    return values


def _require_causal(config: PreTrainedConfig) -> None:
    how = cast("object", getattr(config, "use_bidirectional_attention", None))
    if how and how != "vision":  # "vision" is among the patches of an image
        raise ConfigError(
            f"use_bidirectional_attention of {config.model_type!r} is {how!r}: a prompt's tokens "
            "read those after them, so its prefixes cannot be cached; use transformers' own cache"
        )


def _dtype_of(model: HasConfig | PreTrainedConfig) -> str:
    """Name of the model's dtype; ConfigError if a bare configuration does not say."""
    dtype = cast("object", getattr(model, "dtype", None))
    for name, known in DTYPES.items():
        if dtype in (known, name):
            return name
    raise ConfigError(f"dtype is {dtype!r}; pass dtype, one of {', '.join(DTYPES)}")
