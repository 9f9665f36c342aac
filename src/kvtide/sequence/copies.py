"""Page copies that must run before a sequence's next step: planned here, carried out on step
entry.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvtide.sequence.groups import ZERO, FullGroup, PageCopy, StateGroup

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from kvtide.types import PageArray

UNPLACED = -2
"""Destination of a planned copy whose fresh page is still to be taken."""


class Copies:
    """Planned copies by row. Each holds a lease on its source until the step that ran it has
    ended.
    """

    def __init__(self, groups: Seq[FullGroup | StateGroup]) -> None:
        self._groups = groups
        self._planned: dict[int, list[tuple[int, int, int]]] = {}
        self._running: list[tuple[int, PageArray]] = []

    def plan(self, row: int, group: int, src: int, dst: int) -> None:
        """Copy page `src` (leased by the caller, or `ZERO`) to `dst` before the row's next step."""
        self._planned.setdefault(row, []).append((group, src, dst))

    def __bool__(self) -> bool:
        """True while copies are planned."""
        return bool(self._planned)

    def place(self, row: int, pages: Seq[int]) -> None:
        """Fill in the destinations that were `UNPLACED`: `pages[group]`."""
        planned = self._planned.get(row)
        if planned:
            self._planned[row] = [(g, s, pages[g] if d == UNPLACED else d) for g, s, d in planned]

    def cancel(self, row: int) -> None:
        """The row is given up: forget its copies and end their leases."""
        for group, src, _ in self._planned.pop(row, ()):
            if src != ZERO:
                self._groups[group].books.release(np.array([src], np.int32))

    def run(self) -> tuple[PageCopy, ...]:
        """Carry out every planned copy now; returns them. `finish` ends the leases on their
        sources.
        """
        if not self._planned:
            return ()
        by_group: dict[int, list[tuple[int, int]]] = {}
        for copies in self._planned.values():
            for group, src, dst in copies:
                by_group.setdefault(group, []).append((src, dst))
        self._planned.clear()
        done: list[PageCopy] = []
        for index, pairs in by_group.items():
            group = self._groups[index]
            src, dst = np.array(pairs, np.int32).T
            cleared = src == ZERO
            if cleared.any():
                group.pool.zero(dst[cleared])
            copied = src[~cleared]
            if len(copied):
                group.pool.copy(copied, dst[~cleared])
                self._running.append((index, copied))
            done.append(PageCopy(group.pool.name, src, dst))
        return tuple(done)

    def finish(self) -> None:
        """The step that needed the copies has been issued: end the leases on their sources."""
        for index, src in self._running:
            self._groups[index].books.release_each(src)
        self._running.clear()

    def relabel(self, group: int, remap: PageArray) -> None:
        """Pages of `group` moved: `remap[old]` is the new id."""

        def new(page: int) -> int:
            return page if page < 0 else int(remap[page])  # ZERO and UNPLACED name no page

        for row, copies in self._planned.items():
            self._planned[row] = [
                (g, new(src), new(dst)) if g == group else (g, src, dst) for g, src, dst in copies
            ]

    def leases(self, group: int) -> PageArray:
        """Sources leased in `group`, once per lease."""
        planned = [
            s for copies in self._planned.values() for g, s, _ in copies if g == group and s != ZERO
        ]
        running = [src for g, src in self._running if g == group]
        return np.concatenate([np.array(planned, np.int32), *running])
