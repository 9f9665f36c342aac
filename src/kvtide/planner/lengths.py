"""What sequences of some lengths take, and how many of them fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtide.planner.demand import growth_bytes, loads_at, sequence_bytes
from kvtide.planner.fit import most_in_budget, running_ramps
from kvtide.planner.padded import LengthFit, Padded, padded
from kvtide.planner.split import judge

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvtide.layout import Layout
    from kvtide.planner.split import Memory


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthPlan:
    """Running sequences of one length, that share nothing and keep one snapshot of each state.

    `next_token_bytes`: what one more token adds. `shares`: the split that makes all pools run out
    together. `sequences` is None without memory, `ratio_*` without a `pool_ratio`.
    """

    length: int
    bytes: int
    bytes_by_pool: dict[str, int]
    bytes_per_token: float
    next_token_bytes: float
    shares: dict[str, float]
    padded: Padded
    sequences: int | None
    ratio_sequences: int | None
    ratio_stranded_bytes: int | None


def shown_lengths(max_tokens: int) -> tuple[int, ...]:
    """Lengths worth showing: 1k, 8k, 32k, 128k as far as they go, and the longest."""
    return (*(n << 10 for n in (1, 8, 32, 128) if n << 10 < max_tokens), max_tokens)


def plan_length(
    layout: Layout, length: int, memory: Memory | None, ratio: Mapping[str, float] | None
) -> LengthPlan:
    """Running sequences of `length` tokens, in a memory all pools share and under a given split."""
    groups = layout.groups
    by_pool = sequence_bytes(groups, length)
    total = sum(by_pool.values())
    sequences, verdict = None, None
    if memory is not None:
        loads = loads_at(layout, length)
        ramps = running_ramps(loads)
        sequences = most_in_budget(ramps, memory.num_granules, memory.granule_bytes)
        verdict = judge(groups, loads, ratio, memory, None) if ratio else None
    ours = LengthFit(
        bytes=total, sequences=sequences, memory_bytes=memory.num_bytes if memory else None
    )
    return LengthPlan(
        length=length,
        bytes=total,
        bytes_by_pool=by_pool,
        bytes_per_token=total / length,
        next_token_bytes=sum(growth_bytes(group, length) for group in groups),
        shares={name: size / total for name, size in by_pool.items()},
        padded=padded(groups, length, ours),
        sequences=sequences,
        ratio_sequences=verdict.sequences if verdict else None,
        ratio_stranded_bytes=verdict.stranded_bytes if verdict else None,
    )
