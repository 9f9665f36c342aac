"""Bytes that prove where they came from: hashes of token prefixes, spread over bytes."""

from __future__ import annotations

import zlib
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

HashArray: TypeAlias = npt.NDArray[np.uint64]
"""One 64-bit hash per token: of the prefix that ends with it."""

_STEP = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


NOTHING = 0
"""Hash of no tokens at all: a state that has absorbed nothing, all of whose bytes are zero."""


def mix(values: HashArray) -> HashArray:
    """Scramble 64-bit words (splitmix64): one-to-one, and every bit depends on all."""
    x = values + np.uint64(_STEP)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def label(*names: object) -> int:
    """A 64-bit number for a name such as (group, layer, buffer); equal in every process."""
    text = repr(names).encode()
    return (zlib.crc32(text) << 32 | zlib.adler32(text)) & _MASK


def prefix_hashes(tokens: npt.NDArray[np.int32], seed: int) -> HashArray:
    """Hash of `tokens[: i + 1]` for every i, uint64 [n]: depends on ids, order and `seed`."""
    place = np.arange(1, len(tokens) + 1, dtype=np.uint64) * np.uint64(_STEP)
    ids = tokens.astype(np.int64).view(np.uint64)
    return mix(np.cumsum(mix(ids ^ mix(place)), dtype=np.uint64) ^ np.uint64(seed))


def stamps(hashes: HashArray, role: int, num_bytes: int) -> npt.NDArray[np.uint8]:
    """`num_bytes` bytes for each hash, uint8 [n, num_bytes]: another pattern for every `role`.

    Zero bytes for `NOTHING`.
    """
    words = np.arange(-(-num_bytes // 8), dtype=np.uint64) * np.uint64(_STEP)
    spread = mix((hashes ^ np.uint64(role))[:, None] + words)
    spread[hashes == NOTHING] = 0
    return np.ascontiguousarray(spread).view(np.uint8)[:, :num_bytes]
