"""Names of dtypes that people write, and which of them a cache may have."""

from __future__ import annotations

from kvtide.layout.buffer import INLINE_SCALES, SCALED_DTYPES

ALIASES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "float": "float32",
    "fp64": "float64",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}
"""Other names of dtypes that people write."""

WIDE = ("float64", "float32", "float16", "bfloat16")
"""Dtypes a model may compute in."""

FLOATS = (*WIDE, "float8_e4m3fn", "float8_e5m2")
"""Dtypes of recurrent states and of index keys without scales."""

KV_DTYPES = (*FLOATS, *SCALED_DTYPES, INLINE_SCALES)
"""Dtypes of keys, values and latents."""


def plain_dtype(name: str) -> str:
    """The torch name of a dtype."""
    bare = name.removeprefix("torch.")
    return ALIASES.get(bare, bare)
