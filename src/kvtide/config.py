"""Frozen, validated settings of a manager."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from kvtide.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvtide.events import Sink
    from kvtide.types import KeyFunction

Mode = Literal["elastic", "static", "dry_run"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a manager may be told beyond its layout, memory and sizes. Checked once, here."""

    mode: Mode = "elastic"
    """elastic: pools take granules on demand and give ground to each other. static: the split
    stays. dry_run: the split stays, and every trade that elastic would begin is reported.
    """
    budget_bytes: int | None = None
    """Memory to use at start, whole granules; `KVManager.set_budget` changes it. None: all of it.
    """
    pool_ratio: Mapping[str, float] | None = None
    """Share of the budget per pool name, summing to 1: the start in elastic mode, else the split.
    """
    floor_pages: Mapping[str, int] = field(default_factory=dict[str, int])
    """Least pages a pool keeps, by name, when others ask for ground."""
    ceiling_pages: Mapping[str, int] = field(default_factory=dict[str, int])
    """Most pages a pool may have, by name; at least what one longest sequence needs."""
    move_bytes_per_step: int = 8 << 20
    """Memory that may change pools, or be copied for it, at one step boundary: cached value and
    plans wait for the next step, live demand does not. At least one granule moves.
    """
    move_bytes_per_1000_steps: int | None = None
    """The same over a thousand steps; None: no such limit."""
    partial_reuse: bool | None = None
    """Reuse part of a block by copying its page. None: where the layout allows it (no state group).
    """
    ghost_ratio: float = 0.25
    """Keys of evicted blocks remembered, as a share of the blocks the largest pool could hold."""
    tables: Mapping[str, npt.NDArray[np.int32]] = field(
        default_factory=dict[str, npt.NDArray[np.int32]]
    )
    """The engine's own page-table buffers by group name, int32 [max_sequences, max_blocks]."""
    events: Sink | None = None
    """Called with every event; must not call back."""
    key: KeyFunction | None = None
    """Key of a child in the prefix index. Only finds candidates: equal tokens decide a hit."""

    def __post_init__(self) -> None:
        """Refuse impossible values; names and floors are checked against the layout by the
        manager.
        """
        if self.mode not in ("elastic", "static", "dry_run"):
            raise ConfigError(f"mode is {self.mode!r}; use 'elastic', 'static' or 'dry_run'")
        if not (math.isfinite(self.ghost_ratio) and 0 <= self.ghost_ratio <= 16):
            raise ConfigError(
                f"ghost_ratio is {self.ghost_ratio}; use a number from 0 (none) to 16"
            )
        for name, pages in self.floor_pages.items():
            if pages < 0:
                raise ConfigError(f"floor_pages[{name!r}] is {pages}; use 0 or more")
            if pages > self.ceiling_pages.get(name, pages):
                raise ConfigError(
                    f"floor_pages[{name!r}] is {pages}, above ceiling_pages[{name!r}] = "
                    f"{self.ceiling_pages[name]}; lower the floor or raise the ceiling"
                )
        self._check_bytes()
        if self.pool_ratio is not None:
            self._check_ratio(self.pool_ratio)

    def _check_bytes(self) -> None:
        for field_name in ("budget_bytes", "move_bytes_per_step", "move_bytes_per_1000_steps"):
            value: int | None = getattr(self, field_name)
            if value is not None and value < 0:
                raise ConfigError(f"{field_name} is {value}; use 0 or more bytes")

    @staticmethod
    def _check_ratio(ratio: Mapping[str, float]) -> None:
        for name, share in ratio.items():
            if not (math.isfinite(share) and share > 0):
                raise ConfigError(
                    f"pool_ratio[{name!r}] is {share}; every pool needs a share above 0"
                )
        total = sum(ratio.values())
        if abs(total - 1) > 1e-6:
            raise ConfigError(
                f"pool_ratio sums to {total:g}; make the shares {dict(ratio)} sum to 1"
            )
