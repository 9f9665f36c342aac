"""One tensor of one layer in a page, the dtypes it may have, and the scales some dtypes need."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from kvtide.errors import ConfigError

ITEM_BYTES: dict[str, int] = {
    "float64": 8,
    "int64": 8,
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

INLINE_SCALES = "fp8_ds_mla"
"""Latents as FlashMLA reads them: fp8 values, a float32 scale per 128 of them, the rotary key in
bfloat16, all of a token together; 656 bytes for 512 + 64."""

SCALED_DTYPES = ("int8", "int4", "nvfp4")
"""Dtypes of keys and values that come with scales in the same page: `int8` and `int4` one float32
per token and head, `nvfp4` one float8_e4m3fn per 16 elements. Two 4-bit values share a byte."""


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


def stored(name: str, shape: tuple[int, ...], dtype: str) -> tuple[Buffer, ...]:
    """Values of this shape and dtype per token, followed by `<name>_scale` if the dtype has scales.

    `dtype` is a key of `ITEM_BYTES` or one of `SCALED_DTYPES`. Raises ConfigError if 4-bit values
    do not fill whole bytes, or nvfp4 values whole blocks of 16.
    """
    match dtype:
        case "int8":
            return Buffer(name, shape, "int8"), Buffer(f"{name}_scale", shape[:-1], "float32")
        case "int4":
            packed = Buffer(name, (*shape[:-1], whole(name, shape[-1], 2)), "uint8")
            return packed, Buffer(f"{name}_scale", shape[:-1], "float32")
        case "nvfp4":
            scales = (*shape[:-1], whole(name, shape[-1], 16))
            packed = Buffer(name, (*shape[:-1], shape[-1] // 2), "uint8")
            return packed, Buffer(f"{name}_scale", scales, "float8_e4m3fn")
        case _:
            return (Buffer(name, shape, dtype),)


def whole(name: str, size: int, unit: int) -> int:
    """`size / unit`; ConfigError if a dtype that packs `unit` elements together cannot."""
    if size % unit:
        raise ConfigError(
            f"{name} has {size} elements per head, and this dtype packs {unit} together; "
            "use one with a byte per element"
        )
    return size // unit
