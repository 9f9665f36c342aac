"""The joint rule: how much of a path all layer groups can use together. Pure functions.

With h tokens computed the next token of a window layer may read indices >= h - W + 1, so a hit of n
tokens needs the blocks that cover [n - W + 1, n), the sink blocks, and a state snapshot exactly at
n.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvtide.sizing import window_blocks
from kvtide.types import ceil_div

if TYPE_CHECKING:
    from collections.abc import Sequence

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class WindowRule:
    """What a window group needs: the last `tokens` tokens and the first `sinks`."""

    tokens: int
    sinks: int
    block_tokens: int

    def first_block(self, length: int) -> int:
        """First block the token after `length` computed tokens may read (sinks apart)."""
        return max(0, length - self.tokens + 1) // self.block_tokens

    def first_needed(self, blocks: int) -> int:
        """First block a hit of `blocks` blocks makes use of."""
        return self.first_block(blocks * self.block_tokens)

    @property
    def sink_blocks(self) -> int:
        """Leading blocks that are never stale."""
        return ceil_div(self.sinks, self.block_tokens)

    @property
    def max_blocks(self) -> int:
        """Most blocks the window can touch at once, over all alignments, without the sinks."""
        return window_blocks(self.tokens, self.block_tokens)

    def usable(self, present: BoolArray) -> BoolArray:
        """Boolean [blocks + 1]: may a hit end after b blocks, given which window pages are
        present?
        """
        num = len(present)
        bounds = np.arange(num + 1)
        # Index of the last hole before each boundary, -1 if there is none.
        holes = np.where(present, -1, np.arange(num))
        last_hole = np.maximum.accumulate(np.concatenate([[-1], holes]))
        first = np.maximum(0, bounds * self.block_tokens - self.tokens + 1) // self.block_tokens
        usable = last_hole < first
        sinks = self.sink_blocks
        if sinks:
            absent = np.flatnonzero(~present[:sinks])
            if len(absent):
                usable[int(absent[0]) + 1 :] = False
        return usable

    def kept_span(self, depth: int, num_blocks: int) -> tuple[int, int]:
        """(s, t): blocks [0, s) and [t, num_blocks) of a run from block `depth` serve a match at
        its end.

        The rest is loose: dropped first.
        """
        end = (depth + num_blocks) * self.block_tokens
        return (
            min(max(0, self.sink_blocks - depth), num_blocks),
            min(max(0, self.first_block(end) - depth), num_blocks),
        )


@dataclass(frozen=True, slots=True)
class StateRule:
    """What a state group needs: a snapshot at the very boundary."""

    def first_needed(self, blocks: int) -> int:
        """The block whose end the snapshot stands at."""
        return blocks - 1

    def usable(self, present: BoolArray) -> BoolArray:
        """Boolean [blocks + 1]: may a hit end after b blocks? `present[b - 1]` is the snapshot
        there.
        """
        return np.concatenate([[True], present])

    def kept_span(self, depth: int, num_blocks: int) -> tuple[int, int]:
        """(0, last block): of a run's snapshots the one at its end serves a match there."""
        del depth  # a snapshot stands for itself wherever the run starts
        return 0, num_blocks - 1


@dataclass(frozen=True, slots=True)
class MirrorRule:
    """What a draft mirror needs: its last `look_ahead` cached tokens are always computed again."""

    look_ahead: int
    block_tokens: int

    def usable(self, present: BoolArray) -> BoolArray:
        """Boolean [blocks + 1]: may a hit end after b blocks?"""
        bounds = np.arange(len(present) + 1) * self.block_tokens
        usable = bounds <= max(0, len(present) * self.block_tokens - self.look_ahead)
        return usable & np.concatenate([[True], np.logical_and.accumulate(present)])


SparseRule = WindowRule | StateRule
"""Rules of groups that lose single pages of a run; the others live and die with their run."""

Rule = SparseRule | MirrorRule


def longest_hit(num_blocks: int, needs: Sequence[tuple[Rule, BoolArray]]) -> int:
    """Largest b <= `num_blocks` such that every (rule, presence over the blocks) allows a hit
    of b.
    """
    if not needs:
        return num_blocks
    usable = np.ones(num_blocks + 1, np.bool_)
    for rule, present in needs:
        usable &= rule.usable(present)
    return int(np.flatnonzero(usable)[-1])
