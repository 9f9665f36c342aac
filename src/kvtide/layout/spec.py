"""What one layer stores: frozen specs that know their buffers, their bytes and their lifetime."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TypeAlias

from kvtide.errors import ConfigError
from kvtide.layout.lifetime import (
    Full,
    Lifetime,
    Mirror,
    State,
    Window,
    require_not_negative,
    require_positive,
)

ITEM_BYTES: dict[str, int] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int32": 4,
    "int8": 1,
    "uint8": 1,
}
"""Bytes per element of every dtype a buffer may have, by its torch name."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """One tensor of one layer in a page.

    `shape` is the shape per token (or of the whole state, in a state group); `dtype` a key of
    `ITEM_BYTES`. Raises ConfigError for an unknown dtype or a size below 1.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        """Refuse unknown dtypes and empty shapes."""
        if self.dtype not in ITEM_BYTES:
            known = ", ".join(ITEM_BYTES)
            raise ConfigError(f"dtype of {self.name!r} is {self.dtype!r}; use one of {known}")
        for size in self.shape:
            if size < 1:
                raise ConfigError(
                    f"shape of {self.name!r} is {self.shape}; every size must be >= 1"
                )

    @property
    def bytes(self) -> int:
        """Bytes per token, or per state in a state group."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class FullSpec:
    """Keys and values of full attention; `v_head_dim` defaults to `head_dim`."""

    kv_heads: int
    head_dim: int
    dtype: str
    v_head_dim: int | None = None

    def __post_init__(self) -> None:
        """Refuse sizes below 1 and unknown dtypes."""
        _require_heads(self)

    @property
    def kind(self) -> str:
        """Name of the layer groups made of this spec."""
        return "full"

    @property
    def lifetime(self) -> Lifetime:
        """Every token, always."""
        return Full()

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """`key [kv_heads, head_dim]` and `value [kv_heads, v_head_dim]` per token."""
        return _key_value(self)

    @property
    def bytes_per_token(self) -> int:
        """Bytes one token takes in one layer."""
        return _sum_bytes(self.buffers)


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowSpec:
    """Keys and values of sliding-window attention over `window` tokens, itself included."""

    window: int
    sinks: int = 0
    kv_heads: int
    head_dim: int
    dtype: str
    v_head_dim: int | None = None

    def __post_init__(self) -> None:
        """Refuse sizes below 1, negative sinks and unknown dtypes."""
        require_positive("window", self.window)
        require_not_negative("sinks", self.sinks)
        _require_heads(self)

    @property
    def kind(self) -> str:
        """Name of the layer groups made of this spec."""
        return f"window_{self.window}"

    @property
    def lifetime(self) -> Lifetime:
        """The last `window` tokens and the sinks."""
        return Window(self.window, self.sinks)

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """`key [kv_heads, head_dim]` and `value [kv_heads, v_head_dim]` per token."""
        return _key_value(self)

    @property
    def bytes_per_token(self) -> int:
        """Bytes one token takes in one layer."""
        return _sum_bytes(self.buffers)

    def without_window(self) -> FullSpec:
        """The same keys and values under full attention."""
        return FullSpec(
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            dtype=self.dtype,
            v_head_dim=self.v_head_dim,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSpec:
    """Multi-head latent attention: a compressed latent and a shared rotary key per token."""

    rank: int
    rope_dim: int
    dtype: str

    def __post_init__(self) -> None:
        """Refuse sizes below 1 and unknown dtypes."""
        require_positive("rank", self.rank)
        require_positive("rope_dim", self.rope_dim)
        _ = self.buffers

    @property
    def kind(self) -> str:
        """Name of the layer groups made of this spec."""
        return "latent"

    @property
    def lifetime(self) -> Lifetime:
        """Every token, always."""
        return Full()

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """`latent [rank]` and `rope [rope_dim]` per token."""
        return (
            Buffer("latent", (self.rank,), self.dtype),
            Buffer("rope", (self.rope_dim,), self.dtype),
        )

    @property
    def bytes_per_token(self) -> int:
        """Bytes one token takes in one layer."""
        return _sum_bytes(self.buffers)


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerSpec:
    """Indexer keys of sparse attention, with `scale_bytes` of scales per token if quantised."""

    dim: int
    dtype: str
    scale_bytes: int = 0
    window: int | None = None

    def __post_init__(self) -> None:
        """Refuse sizes below 1 and unknown dtypes."""
        require_positive("dim", self.dim)
        require_not_negative("scale_bytes", self.scale_bytes)
        if self.window is not None:
            require_positive("window", self.window)
        _ = self.buffers

    @property
    def kind(self) -> str:
        """Name of the layer groups made of this spec."""
        return "indexer"

    @property
    def lifetime(self) -> Lifetime:
        """As the attention it selects for: full, or a window."""
        return Full() if self.window is None else Window(self.window)

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """`index_key [dim]` and, if there are scales, `index_scale [scale_bytes]` per token."""
        keys = (Buffer("index_key", (self.dim,), self.dtype),)
        if not self.scale_bytes:
            return keys
        return (*keys, Buffer("index_scale", (self.scale_bytes,), "uint8"))

    @property
    def bytes_per_token(self) -> int:
        """Bytes one token takes in one layer."""
        return _sum_bytes(self.buffers)

    def without_window(self) -> IndexerSpec:
        """The same indexer keys kept for every token."""
        return IndexerSpec(dim=self.dim, dtype=self.dtype, scale_bytes=self.scale_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpec:
    """Recurrent state of one layer: any number of buffers, whose shapes are whole shapes."""

    buffers: tuple[Buffer, ...]
    interval_tokens: int

    def __post_init__(self) -> None:
        """Refuse a state of nothing, doubled names and an interval below 1."""
        names = [buffer.name for buffer in self.buffers]
        if not names or len(set(names)) != len(names):
            raise ConfigError(
                f"buffers of a state are {names}; give at least one, each with its own name"
            )
        require_positive("interval_tokens", self.interval_tokens)

    @property
    def kind(self) -> str:
        """Name of the layer groups made of this spec."""
        return "state"

    @property
    def lifetime(self) -> Lifetime:
        """A snapshot exactly at the length wanted."""
        return State(self.interval_tokens)

    @property
    def bytes_per_state(self) -> int:
        """Bytes one state takes in one layer."""
        return _sum_bytes(self.buffers)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSpec:
    """Keys and values of a speculative drafter that runs `look_ahead` tokens ahead."""

    kv_heads: int
    head_dim: int
    dtype: str
    look_ahead: int

    def __post_init__(self) -> None:
        """Refuse sizes below 1, a negative look-ahead and unknown dtypes."""
        require_not_negative("look_ahead", self.look_ahead)
        _require_heads(self)

    @property
    def kind(self) -> str:
        """Name of the layer groups made of this spec."""
        return "mirror"

    @property
    def lifetime(self) -> Lifetime:
        """As full attention, plus the look-ahead."""
        return Mirror(self.look_ahead)

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """`key` and `value`, both `[kv_heads, head_dim]` per token."""
        return _key_value(self)

    @property
    def bytes_per_token(self) -> int:
        """Bytes one token takes in one layer."""
        return _sum_bytes(self.buffers)


Spec: TypeAlias = FullSpec | WindowSpec | LatentSpec | IndexerSpec | StateSpec | DraftSpec


def without_idle_window(spec: Spec, max_tokens: int | None) -> Spec:
    """`spec`, or its full-attention twin if no sequence can outgrow its window."""
    if max_tokens is None or not isinstance(spec, WindowSpec | IndexerSpec):
        return spec
    if spec.window is None or spec.window < max_tokens:
        return spec
    return spec.without_window()


def _value_dim(spec: FullSpec | WindowSpec | DraftSpec) -> int:
    if isinstance(spec, DraftSpec) or spec.v_head_dim is None:
        return spec.head_dim
    return spec.v_head_dim


def _require_heads(spec: FullSpec | WindowSpec | DraftSpec) -> None:
    require_positive("kv_heads", spec.kv_heads)
    require_positive("head_dim", spec.head_dim)
    require_positive("v_head_dim", _value_dim(spec))
    _ = spec.buffers  # their construction checks the dtype


def _key_value(spec: FullSpec | WindowSpec | DraftSpec) -> tuple[Buffer, ...]:
    return (
        Buffer("key", (spec.kv_heads, spec.head_dim), spec.dtype),
        Buffer("value", (spec.kv_heads, _value_dim(spec)), spec.dtype),
    )


def _sum_bytes(buffers: tuple[Buffer, ...]) -> int:
    return sum(buffer.bytes for buffer in buffers)
