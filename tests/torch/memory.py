"""How little memory will do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtide.sizing import least_pages
from kvtide.types import ceil_div

if TYPE_CHECKING:
    from kvtide import Layout

GRANULE = 4096


def least_bytes(layout: Layout, max_tokens: int) -> int:
    """Memory that holds one sequence of so many tokens, and nothing else."""
    pages = {group: 1 + least_pages(group, max_tokens) for group in layout.groups}
    return sum(ceil_div(n * group.page_bytes, GRANULE) for group, n in pages.items()) * GRANULE
