"""Frozen facts the core emits to a sink. The core does not know who listens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from kvtide.types import Scope


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """`num_blocks` blocks after `start_block` of a path in `scope` became matchable.

    `tokens` are their ids as int32 bytes, media placeholders negative.
    """

    scope: Scope
    start_block: int
    num_blocks: int
    tokens: bytes


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """`num_blocks` blocks after `start_block` of a path in `scope` can no longer be matched."""

    scope: Scope
    start_block: int
    num_blocks: int
    tokens: bytes


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """The prefix index was reset."""


@dataclass(frozen=True, slots=True)
class GranulesMoved:
    """Pool `pool` now has `num_mapped` granules; it had `before`."""

    pool: str
    before: int
    num_mapped: int


Event: TypeAlias = BlocksStored | BlocksRemoved | AllBlocksCleared | GranulesMoved
Sink: TypeAlias = Callable[[Event], None]
