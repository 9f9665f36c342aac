"""Rules of where a state is kept, put in the place of kvtide's own while a run lasts.

The rejected rules are not in the product. Each is at most three small functions: the grid, what may
drop pages that have a price, and the boundaries where a match is expected to end.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING
from unittest import mock

from kvtide.sequence import retention, snapshots

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from kvtide.sequence.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Rule:
    """`interval` tokens of the grid (None: kvtide's default, 0: no grid).

    `grid(computed, end, interval)` is the next boundary, `may_drop(saved, interval, is_grid=)`
    whether it may drop priced pages; `branches` whether branch points are kept.
    """

    name: str
    about: str
    interval: int | None = None
    grid: Callable[[int, int, int], int] = retention.next_boundary
    may_drop: Callable[..., bool] = retention.may_drop_priced
    branches: bool = True

    @contextmanager
    def in_force(self) -> Generator[None]:
        """Sequences keep states by this rule."""
        own = snapshots.Snapshots._ends

        def ends(self: snapshots.Snapshots, seq: Sequence) -> tuple[int, int]:
            return own(self, seq)[0], -1

        functions = {"next_boundary": self.grid, "may_drop_priced": self.may_drop}
        with mock.patch.multiple(snapshots, **functions):
            if self.branches:
                yield
                return
            with mock.patch.object(snapshots.Snapshots, "_ends", ends):
                yield


def even(computed: int, end: int, interval: int) -> int:
    """The next multiple of the interval."""
    following = (computed // interval + 1) * interval
    return following if following <= end else 0


def none(computed: int, end: int, interval: int) -> int:
    """No grid."""
    del computed, end, interval
    return 0


def always(saved: int, interval: int, *, is_grid: bool) -> bool:
    """Whatever is coldest goes."""
    del saved, interval, is_grid
    return True


def ends_always(saved: int, interval: int, *, is_grid: bool) -> bool:
    """A grid drops nothing that has a price; an end always may."""
    del saved, interval
    return not is_grid


RULES = (
    Rule("keep-last", "the prompt's end and the turn's end", 0, none, always, branches=False),
    Rule("branches", "these and branch points", 0, none, always),
    Rule("every block", "a state wherever a block ends", 64, even, always),
    Rule("every 256", "a grid of 256 (kvtide until now)", 256, even, always),
    Rule("every 2048", "a grid of 2,048", 2048, even, always),
    Rule("thin", "a grid that thins out and drops nothing priced", 1024, may_drop=ends_always),
    Rule("kvtide", "the same, and short gains drop nothing priced either"),
)
