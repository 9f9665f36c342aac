"""Rules that construction and planning share: what one sequence needs at least, and how shares of
the memory become granules. Pure arithmetic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtide.layout import State, Window
from kvtide.types import ceil_div

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvtide.layout import LayerGroup

_ROUNDING = 1e-9
"""Granules: a share that is whole but for floating point loses nothing."""


def window_blocks(tokens: int, block_tokens: int) -> int:
    """Most blocks a window can touch at once, over all alignments, without the sinks: what it may
    read next and the open one.
    """
    return (tokens - 2) // block_tokens + 2


def least_pages(group: LayerGroup, max_tokens: int) -> int:
    """Most pages one sequence of `max_tokens` tokens holds while it decodes token by token.

    A pool that cannot hold so many can never serve such a sequence. The sink page comes on top.
    """
    blocks = ceil_div(max_tokens, group.block_tokens)
    match group.lifetime:
        case State():
            return 2
        case Window(tokens, sinks):
            touched = window_blocks(tokens, group.block_tokens)
            return min(blocks, touched + ceil_div(sinks, group.block_tokens))
        case _:
            return blocks


def granules_by_share(ratio: Mapping[str, float], total: int) -> dict[str, int]:
    """`total` granules split by `ratio`, what rounding leaves going to the largest shares."""
    shares = {name: int(share * total + _ROUNDING) for name, share in ratio.items()}
    for name, _ in sorted(ratio.items(), key=lambda kv: (-kv[1], kv[0]))[
        : total - sum(shares.values())
    ]:
        shares[name] += 1
    return shares
