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

Mode = Literal["elastic", "static"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a manager may be told beyond its layout, memory and sizes. Checked once, here."""

    mode: Mode = "elastic"
    """elastic: pools take granules on demand and give ground to each other. static: the split
    stays.
    """
    pool_ratio: Mapping[str, float] | None = None
    """Share of the budget per pool name, summing to 1: the start in elastic mode, the split in
    static.
    """
    floor_pages: Mapping[str, int] = field(default_factory=dict[str, int])
    """Least pages a pool keeps, by name, when others ask for ground."""
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
        if self.mode not in ("elastic", "static"):
            raise ConfigError(f"mode is {self.mode!r}; use 'elastic' or 'static'")
        if not (math.isfinite(self.ghost_ratio) and 0 <= self.ghost_ratio <= 16):
            raise ConfigError(
                f"ghost_ratio is {self.ghost_ratio}; use a number from 0 (none) to 16"
            )
        for name, pages in self.floor_pages.items():
            if pages < 0:
                raise ConfigError(f"floor_pages[{name!r}] is {pages}; use 0 or more")
        if self.pool_ratio is not None:
            self._check_ratio(self.pool_ratio)

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
