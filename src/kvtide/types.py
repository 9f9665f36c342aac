"""Shared vocabulary: array aliases, roundings, scopes and tiers. Imports nothing of ours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

IntArray: TypeAlias = npt.NDArray[np.int64]
"""Indices and counts on the step path: int64, the dtype numpy indexes with."""

PageArray: TypeAlias = npt.NDArray[np.int32]
"""Page ids of one pool; -1 means absent."""

TokenArray: TypeAlias = npt.NDArray[np.int32]
"""Token ids; negative values are media content ids the manager assigned, never an engine's."""

KeyFunction: TypeAlias = Callable[[int, bytes], int]
"""(number of the parent run, tokens of a block) -> key of a child in the prefix index."""

ABSENT = -1
SINK = 0
"""Page 0 of every pool: padding reads and writes go there; it is never owned and never moves."""


class Tier(IntEnum):
    """Where bytes live, hot to cold."""

    GPU = 0
    HOST = 1
    DISK = 2


class Origin(Enum):
    """Who asked for a sequence. Only ``TRAFFIC`` feeds statistics and policy."""

    TRAFFIC = "traffic"
    WARMUP = "warmup"
    PADDING = "padding"


@dataclass(frozen=True, slots=True)
class Scope:
    """Namespace a match may not cross.

    Two sequences share pages only if every field is equal: ``salt`` isolates tenants, ``adapter``
    names the LoRA (or other weights delta) that produced the keys and values.
    """

    salt: bytes = b""
    adapter: str = ""


def ceil_div(a: int, b: int) -> int:
    """Smallest integer >= a / b."""
    return -(-a // b)


def align_up(a: int, unit: int) -> int:
    """Smallest multiple of `unit` >= a."""
    return ceil_div(a, unit) * unit
