"""The split that makes all pools run out together, and what another split strands."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvtide.errors import ConfigError
from kvtide.planner.demand import prefix_bytes
from kvtide.planner.fit import (
    cached_ramps,
    limits_of,
    most_in_budget,
    running_ramps,
)
from kvtide.sizing import granules_by_share
from kvtide.types import ceil_div

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvtide.layout import LayerGroup
    from kvtide.planner.demand import Load

PREFIX_TOKENS = 2000
"""Length of the prefixes that stranded bytes are counted in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Memory of one rank for all its pools, in bytes and in granules that change hands."""

    num_bytes: int
    granule_bytes: int

    @property
    def num_granules(self) -> int:
        """Whole granules; the bytes after the last one serve nobody."""
        return self.num_bytes // self.granule_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolShare:
    """One pool of a recommended split, and the numbers it follows from.

    `live_bytes`: the sink page, the shared prefix and the running sequences. `prefix_bytes`: one
    cached prefix. Pages of a sequence and of a prefix are means over the workload.
    """

    name: str
    fixed_pages: int
    running_pages: float
    cached_pages: float
    live_bytes: int
    live_share: float
    prefix_bytes: float
    prefix_share: float
    granules: int
    bytes: int
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Pools that run out together: `sequences` run, and `prefixes` are cached beside them.

    `sequences` is the least of what was asked for and what fits beside the floors of pools that
    need less; `most_sequences` fit where pools may go below them. `limit` says what decided:
    "memory" if all that fit run, "concurrency" if the rest caches prefixes, "needs" if the needs of
    pools were given.
    """

    limit: str
    sequences: int | None
    most_sequences: int | None
    prefixes: int | None
    pools: tuple[PoolShare, ...]

    @property
    def ratio(self) -> dict[str, float]:
        """Shares by pool name, as a manager's `pool_ratio` takes them."""
        return {pool.name: pool.share for pool in self.pools}


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolVerdict:
    """One pool under a given split. `need_bytes` is None where nothing says how much it needs.

    `rounding_bytes`: what whole granules take away from the share, negative if they add to it.
    """

    name: str
    share: float
    bytes: int
    granules: int
    rounding_bytes: int
    need_bytes: int | None
    stranded_bytes: int
    is_short: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a given split strands: bytes left in the other pools when the first runs out.

    In tokens (rounded) and whole prefixes of `PREFIX_TOKENS`: what those bytes would hold if they
    belonged to the pools that ran out, at `bytes_per_token` of theirs; None if these keep nothing
    of a prefix.
    """

    sequences: int | None
    prefixes: int | None
    stranded_bytes: int
    stranded_tokens: int | None
    stranded_prefixes: int | None
    bytes_per_token: float | None
    pools: tuple[PoolVerdict, ...]


def recommend(loads: Sequence[Load], memory: Memory, concurrency: int | None) -> Split:
    """Granules for running sequences first: `concurrency` of them, or as many as fit. If memory is
    left, for as many cached prefixes as fit; the odd granules go where a prefix needs them most.
    No pool is below its floor, if memory has room for all floors.
    """
    granule, total = memory.granule_bytes, memory.num_granules
    anywhere = most_in_budget(running_ramps(without_floors(loads)), total, granule) or 0
    if sum(ramp.granules(0, granule) for ramp in running_ramps(loads)) > total:
        loads = without_floors(loads)
    running = running_ramps(loads)
    most = most_in_budget(running, total, granule) or 0
    is_roomy = concurrency is not None and most >= concurrency
    sequences = min(most, concurrency or most)
    ramps, count = running, sequences
    if is_roomy:
        ramps = cached_ramps(loads, sequences)
        count = most_in_budget(ramps, total, granule) or 0
    weights = [float(ramp.each) * ramp.page_bytes for ramp in ramps]
    if not any(weights):
        weights = [float(ramp.each) * ramp.page_bytes for ramp in running]
    granules = _fill([ramp.granules(count, granule) for ramp in ramps], weights, total)
    return Split(
        limit="concurrency" if is_roomy else "memory",
        sequences=sequences,
        most_sequences=anywhere,
        prefixes=count if is_roomy else None,
        pools=_pool_shares(loads, [ramp.bytes(sequences) for ramp in running], granules, memory),
    )


def recommend_for_needs(loads: Sequence[Load], needs: Mapping[str, int], memory: Memory) -> Split:
    """Every pool gets the bytes it is said to need, or its floor if that is more and all floors
    have room; the others share the rest, in the proportion of a cached prefix of `loads`.
    """
    granule, total = memory.granule_bytes, memory.num_granules
    live = [needs.get(load.name, 0) for load in loads]
    if sum(live) > memory.num_bytes:
        raise ConfigError(
            f"needs are {sum(live):,} bytes together, but memory is {memory.num_bytes:,}; "
            "give more memory or smaller needs"
        )
    least = [
        ceil_div(max(need, load.floor * load.page_bytes), granule)
        for load, need in zip(loads, live, strict=True)
    ]
    if sum(least) > total:
        least = [ceil_div(need, granule) for need in live]
    wants = [0.0 if load.name in needs else float(load.cached) * load.page_bytes for load in loads]
    weights = wants if any(wants) else [float(need) for need in live]
    granules = _fill(least, weights, total)
    return Split(
        limit="needs",
        sequences=None,
        most_sequences=None,
        prefixes=None,
        pools=_pool_shares(loads, live, granules, memory),
    )


def judge(
    groups: Sequence[LayerGroup],
    loads: Sequence[Load],
    ratio: Mapping[str, float],
    memory: Memory,
    concurrency: int | None,
) -> Verdict:
    """What is left in the pools of this split when the first of them runs out: of room for another
    running sequence, or, where `concurrency` of them fit, for another cached prefix beside them.
    """
    granule = memory.granule_bytes
    held = list(granules_by_share(ratio, memory.num_granules).values())
    ramps, prefixes = running_ramps(loads), None
    limits = limits_of(ramps, held, granule)
    sequences = count = min((limit for limit in limits if limit is not None), default=0)
    if concurrency is not None and sequences >= concurrency:
        sequences = concurrency
        ramps = cached_ramps(loads, sequences)
        limits = limits_of(ramps, held, granule)
        prefixes = count = min((limit for limit in limits if limit is not None), default=0)
    short = [limit is not None and limit <= count for limit in limits]
    needs = {load.name: ramp.bytes(count) for load, ramp in zip(loads, ramps, strict=True)}
    pools = _verdicts(
        ratio, memory, needs, {g.name for g, s in zip(groups, short, strict=True) if s}
    )
    return _verdict(groups, pools, sequences, prefixes)


def judge_needs(
    groups: Sequence[LayerGroup],
    ratio: Mapping[str, float],
    memory: Memory,
    needs: Mapping[str, int],
) -> Verdict:
    """What this split leaves in pools beyond their `needs`, given in bytes. Pools without a need
    take whatever they get, so they are short of it.
    """
    short = {
        name
        for name, share in ratio.items()
        if name not in needs or needs[name] > round(share * memory.num_bytes)
    }
    return _verdict(groups, _verdicts(ratio, memory, needs, short), None, None)


def _verdicts(
    ratio: Mapping[str, float], memory: Memory, needs: Mapping[str, int], short: set[str]
) -> tuple[PoolVerdict, ...]:
    granules = granules_by_share(ratio, memory.num_granules)
    verdicts: list[PoolVerdict] = []
    for name, share in ratio.items():
        given = round(share * memory.num_bytes)
        # Where no pool is short, what is left is spare and nobody misses it.
        is_stranded = bool(short) and name not in short
        verdicts.append(
            PoolVerdict(
                name=name,
                share=share,
                bytes=given,
                granules=granules[name],
                rounding_bytes=given - granules[name] * memory.granule_bytes,
                need_bytes=needs.get(name),
                stranded_bytes=max(0, given - needs[name]) if is_stranded else 0,
                is_short=name in short,
            )
        )
    return tuple(verdicts)


def _verdict(
    groups: Sequence[LayerGroup],
    pools: tuple[PoolVerdict, ...],
    sequences: int | None,
    prefixes: int | None,
) -> Verdict:
    stranded = sum(pool.stranded_bytes for pool in pools)
    short = {pool.name for pool in pools if pool.is_short}
    one = sum(prefix_bytes(group, PREFIX_TOKENS) for group in groups if group.name in short)
    return Verdict(
        sequences=sequences,
        prefixes=prefixes,
        stranded_bytes=stranded,
        stranded_tokens=round(stranded * PREFIX_TOKENS / one) if one else None,
        stranded_prefixes=int(stranded // one) if one else None,
        bytes_per_token=one / PREFIX_TOKENS if one else None,
        pools=pools,
    )


def without_floors(loads: Sequence[Load]) -> list[Load]:
    """The same loads, where a pool may be as small as what it holds."""
    return [replace(load, floor=0) for load in loads]


def _fill(least: Sequence[int], weights: Sequence[float], total: int) -> list[int]:
    """`least` granules each and the rest by weight; all by need if not even `least` fits."""
    rest = total - sum(least)
    if rest < 0:
        least, weights, rest = [0] * len(least), [float(granules) for granules in least], total
    parts = {str(i): weight / sum(weights) for i, weight in enumerate(weights)}
    extra = granules_by_share(parts, rest).values()
    return [granules + more for granules, more in zip(least, extra, strict=True)]


def _pool_shares(
    loads: Sequence[Load], live: Sequence[int], granules: Sequence[int], memory: Memory
) -> tuple[PoolShare, ...]:
    prefix = [float(load.cached * load.page_bytes) for load in loads]
    return tuple(
        PoolShare(
            name=load.name,
            fixed_pages=load.fixed,
            running_pages=float(load.running),
            cached_pages=float(load.cached),
            live_bytes=live[i],
            live_share=live[i] / max(1, sum(live)),
            prefix_bytes=prefix[i],
            prefix_share=prefix[i] / sum(prefix) if any(prefix) else 0.0,
            granules=granules[i],
            bytes=granules[i] * memory.granule_bytes,
            share=granules[i] / max(1, sum(granules)),
        )
        for i, load in enumerate(loads)
    )
