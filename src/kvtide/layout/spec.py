"""What one layer stores: frozen specs that know their buffers, their bytes and their lifetime."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

from kvtide.errors import ConfigError
from kvtide.layout.buffer import INLINE_SCALES, Buffer, stored, whole
from kvtide.layout.lifetime import (
    Full,
    Lifetime,
    Mirror,
    State,
    Window,
    require_not_negative,
    require_positive,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FullSpec:
    """Keys and values of full attention; `v_head_dim` defaults to `head_dim`.

    `is_tied`: the keys are the values too, and are stored once.
    """

    kv_heads: int
    head_dim: int
    dtype: str
    v_head_dim: int | None = None
    is_tied: bool = False

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
        """`key [kv_heads, head_dim]` and `value [kv_heads, v_head_dim]` per token, and scales."""
        return _key_value(self)

    @property
    def bytes_per_token(self) -> int:
        """Bytes one token takes in one layer."""
        return _sum_bytes(self.buffers)


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowSpec:
    """Keys and values of sliding-window attention over `window` tokens, itself included.

    `is_tied`: the keys are the values too, and are stored once.
    """

    window: int
    sinks: int = 0
    kv_heads: int
    head_dim: int
    dtype: str
    v_head_dim: int | None = None
    is_tied: bool = False

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
        """`key [kv_heads, head_dim]` and `value [kv_heads, v_head_dim]` per token, and scales."""
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
            is_tied=self.is_tied,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSpec:
    """Multi-head latent attention: a compressed latent and a shared rotary key per token.

    `rope_dim` 0 is attention without positions. `dtype` may also be `INLINE_SCALES`.
    """

    rank: int
    rope_dim: int
    dtype: str

    def __post_init__(self) -> None:
        """Refuse sizes below 1 and unknown dtypes."""
        require_positive("rank", self.rank)
        require_not_negative("rope_dim", self.rope_dim)
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
        """`latent [rank]` and `rope [rope_dim]` per token; one `latent` in bytes if inline."""
        if self.dtype == INLINE_SCALES:
            scales = 4 * whole("latent", self.rank, 128)
            return (Buffer("latent", (self.rank + scales + 2 * self.rope_dim,), "uint8"),)
        latent = stored("latent", (self.rank,), self.dtype)
        return latent + (stored("rope", (self.rope_dim,), self.dtype) if self.rope_dim else ())

    @property
    def bytes_per_token(self) -> int:
        """Bytes one token takes in one layer."""
        return _sum_bytes(self.buffers)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedSpec:
    """Keys and values of several tokens folded into one entry, as in DeepSeek-V4.

    An entry [dim] stands for `ratio` tokens, and is key and value at once.
    """

    dim: int
    ratio: int
    dtype: str

    def __post_init__(self) -> None:
        """Refuse sizes below 1 and unknown dtypes."""
        require_positive("dim", self.dim)
        require_positive("ratio", self.ratio)
        _ = self.buffers

    @property
    def kind(self) -> str:
        """Name of the layer groups made of this spec."""
        return f"compressed_{self.ratio}"

    @property
    def lifetime(self) -> Lifetime:
        """Every entry, always."""
        return Full()

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """`compressed [dim]` per entry."""
        return stored("compressed", (self.dim,), self.dtype)

    @property
    def bytes_per_token(self) -> float:
        """Bytes one token takes in one layer."""
        return whole_or_float(_sum_bytes(self.buffers), self.ratio)


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerSpec:
    """Indexer keys of sparse attention, with `scale_bytes` of scales per key if quantised.

    A key stands for `ratio` tokens.
    """

    dim: int
    dtype: str
    scale_bytes: int = 0
    window: int | None = None
    ratio: int = 1

    def __post_init__(self) -> None:
        """Refuse sizes below 1 and unknown dtypes."""
        require_positive("dim", self.dim)
        require_not_negative("scale_bytes", self.scale_bytes)
        require_positive("ratio", self.ratio)
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
        """`index_key [dim]` and, if there are scales, `index_scale [scale_bytes]` per key."""
        keys = (Buffer("index_key", (self.dim,), self.dtype),)
        if not self.scale_bytes:
            return keys
        return (*keys, Buffer("index_scale", (self.scale_bytes,), "uint8"))

    @property
    def bytes_per_token(self) -> float:
        """Bytes one token takes in one layer."""
        return whole_or_float(_sum_bytes(self.buffers), self.ratio)

    def without_window(self) -> IndexerSpec:
        """The same indexer keys kept for every token."""
        return replace(self, window=None)


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


@dataclass(frozen=True, slots=True)
class DraftSpec:
    """What a layer of a speculative drafter stores, which runs `look_ahead` tokens ahead."""

    of: FullSpec | LatentSpec | IndexerSpec
    look_ahead: int

    def __post_init__(self) -> None:
        """Refuse a negative look-ahead, and indexers with windows of their own."""
        require_not_negative("look_ahead", self.look_ahead)
        if isinstance(self.of, IndexerSpec) and self.of.window is not None:
            raise ConfigError(
                f"a drafter's indexer has window {self.of.window}; a mirror keeps every key"
            )

    @property
    def kind(self) -> str:
        """Name of the layer groups made of this spec."""
        return "mirror_indexer" if isinstance(self.of, IndexerSpec) else "mirror"

    @property
    def lifetime(self) -> Lifetime:
        """As full attention, plus the look-ahead."""
        return Mirror(self.look_ahead)

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """Those of the layer it is."""
        return self.of.buffers

    @property
    def bytes_per_token(self) -> float:
        """Bytes one token takes in one layer."""
        return self.of.bytes_per_token


Spec: TypeAlias = (
    FullSpec | WindowSpec | LatentSpec | CompressedSpec | IndexerSpec | StateSpec | DraftSpec
)


def ratio_of(spec: Spec) -> int:
    """Tokens that one stored entry of this spec stands for."""
    stored = spec.of if isinstance(spec, DraftSpec) else spec
    return stored.ratio if isinstance(stored, CompressedSpec | IndexerSpec) else 1


def without_idle_window(spec: Spec, max_tokens: int | None) -> Spec:
    """`spec`, or its full-attention twin if no sequence can outgrow its window."""
    if max_tokens is None or not isinstance(spec, WindowSpec | IndexerSpec):
        return spec
    if spec.window is None or spec.window < max_tokens:
        return spec
    return spec.without_window()


def whole_or_float(amount: int, parts: int) -> float:
    """`amount / parts`, an int where that is whole: sizes stay exact as far as they can."""
    return amount / parts if amount % parts else amount // parts


def _value_dim(spec: FullSpec | WindowSpec) -> int:
    return spec.head_dim if spec.v_head_dim is None else spec.v_head_dim


def _require_heads(spec: FullSpec | WindowSpec) -> None:
    require_positive("kv_heads", spec.kv_heads)
    require_positive("head_dim", spec.head_dim)
    require_positive("v_head_dim", _value_dim(spec))
    if spec.is_tied and _value_dim(spec) != spec.head_dim:
        raise ConfigError(
            f"keys that are values too have head_dim {spec.head_dim} and v_head_dim "
            f"{spec.v_head_dim}; leave v_head_dim out"
        )
    _ = spec.buffers  # their construction checks the dtype


def _key_value(spec: FullSpec | WindowSpec) -> tuple[Buffer, ...]:
    keys = stored("key", (spec.kv_heads, spec.head_dim), spec.dtype)
    if spec.is_tied:
        return keys
    return keys + stored("value", (spec.kv_heads, _value_dim(spec)), spec.dtype)


def _sum_bytes(buffers: tuple[Buffer, ...]) -> int:
    return sum(buffer.bytes for buffer in buffers)
