"""Where matches end: what window pages inside a run are worth beside those at its end."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtide.prefix.joint import WindowRule
    from kvtide.types import IntArray

_FADE = 0.995
"""Per match: how fast what was learned fades; half of it after 140."""

_ONCE = 0.2
"""A run that a match parted has an end there from then on: uses within are mostly a run's first."""

_STEP = 8
"""Boundaries on the grid are this many windows apart."""


class Grid:
    """Boundaries inside runs that a window group keeps matchable longer than the others.

    One every eight windows of a path; a match that ends between two falls back to the one before.
    What their pages are worth is learned from the matches: blocks gained within runs, or lost
    there, for each block gained at an end. It starts with a little of each, so that the first
    matches do not decide alone.
    """

    def __init__(self, rule: WindowRule) -> None:
        far = 1 << 20
        self._wide = max(1, far - rule.first_needed(far))
        self._every = _STEP * self._wide
        self._at_end = 64.0
        self._within = 8.0

    def on(self, blocks: IntArray) -> IntArray:
        """Those of `blocks`, counted from the root, that a boundary on the grid needs."""
        return blocks[blocks % self._every >= self._every - self._wide]

    def learn(self, at_end: int, start: int, parted: int) -> None:
        """A match gained `at_end` blocks of the run it ended at, or parted from one that starts at
        block `start` after `parted` blocks of its path.
        """
        within = max(0, parted // self._every * self._every - start)
        self._at_end = _FADE * self._at_end + at_end
        self._within = _FADE * self._within + within

    def worth(self, num_pages: int) -> float:
        """Blocks to be expected to be lost, of later matches, with so many pages on the grid."""
        share = self._within / self._at_end if self._at_end else 0.0
        return _ONCE * share * _STEP * num_pages
