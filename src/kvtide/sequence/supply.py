"""Where sequences get pages from: the seam to capacity that moves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence


class Supply(Protocol):
    """Finds free pages, by dropping cached ones or moving capacity if it must."""

    def secure(self, wanted: Sequence[int], *, learn: bool = True) -> int | None:
        """Make `wanted[g]` pages free in every pool g at once; None, or the pool that refused.

        Not `learn`: for warm-up or padding, from which nothing is learned about traffic.
        """
        ...

    def spare(self, groups: Sequence[int], *, priced: bool) -> bool:
        """Make one page free in each of these pools at the cost of nothing live: free budget, else
        a cached page, which must be dead or loose unless `priced`.
        """
        ...

    def limit(self, group: int) -> int:
        """Most pages the pool could ever hand out."""
        ...
