"""Frozen facts the core emits to a sink. The core does not know who listens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from kvtide.types import Scope


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksStored:
    """The last `num_blocks` blocks of `tokens` have pages in layer group `group` from now on.

    `tokens` is the whole path from the root to the end of those blocks (int32 bytes, media
    placeholders negative): with `scope` it identifies them, whatever runs the index keeps them in.
    """

    group: str
    scope: Scope
    tokens: bytes
    num_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksRemoved:
    """The last `num_blocks` blocks of `tokens` have no pages in layer group `group` any more."""

    group: str
    scope: Scope
    tokens: bytes
    num_blocks: int


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """The prefix index was reset: every stored block is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityChanged:
    """Pool `pool` had `before` granules mapped and has `granules` now."""

    pool: str
    before: int
    granules: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroundMoved:
    """`granules` granules went from pool `donor` to pool `receiver` (None: to the system).

    `cause` is idle, price, demand, plan or budget; `reason` says in numbers why. With `dry_run`
    they would have moved.
    """

    donor: str
    receiver: str | None
    granules: int
    cause: str
    reason: str
    dry_run: bool = False


Event: TypeAlias = BlocksStored | BlocksRemoved | AllBlocksCleared | CapacityChanged | GroundMoved
Sink: TypeAlias = Callable[[Event], None]
