"""What one rank of one pipeline stage can hold. A pure function of its layout and the question."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvtide.config import Options
from kvtide.errors import ConfigError
from kvtide.layout import Mirror, State, Window
from kvtide.planner.demand import SINK_PAGES, loads_at, loads_of
from kvtide.planner.fit import running_ramps
from kvtide.planner.lengths import LengthPlan, plan_length, shown_lengths
from kvtide.planner.padded import EqualPages, common_multiple, equal_pages
from kvtide.planner.split import (
    PREFIX_TOKENS,
    judge,
    judge_needs,
    recommend,
    recommend_for_needs,
)
from kvtide.sizing import least_pages
from kvtide.types import ceil_div

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtide.layout import LayerGroup, Layout
    from kvtide.planner.split import Memory, Split, Verdict
    from kvtide.planner.workload import Workload

GRANULE_BYTES = 2 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked about every stage. `concurrency` counts sequences of one rank."""

    max_tokens: int
    granule_bytes: int = GRANULE_BYTES
    memory: Memory | None = None
    workload: Workload | None = None
    concurrency: int | None = None
    pool_ratio: Mapping[str, float] | Sequence[float] | None = None
    needs: Mapping[str, int] = field(default_factory=dict[str, int])


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan:
    """One layer group. `padding_bytes` of each page align its buffers and hold nothing."""

    name: str
    lifetime: str
    layers: int
    bytes_per_token: float | None
    bytes_per_state: int | None
    window: int | None
    sinks: int | None
    interval_tokens: int | None
    look_ahead: int | None
    page_bytes: int
    padding_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPlan:
    """One pool. `slack_bytes`: most bytes of its last granule that no whole page fits into.

    `floor_pages`: fewest with which one sequence of `max_tokens` tokens can run; `floor_bytes`
    adds the sink page and rounds up to granules.
    """

    name: str
    groups: tuple[str, ...]
    page_bytes: int
    pages_per_granule: float
    granules_per_page: float
    slack_bytes: int
    floor_pages: int
    floor_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FloorPlan:
    """Whether one sequence of `max_tokens` tokens can run. `lacking_bytes`: what memory lacks for
    all floors together; `lacking`: what pools of a given split lack, by name.
    """

    max_tokens: int
    floor_bytes: int
    lacking_bytes: int
    lacking: dict[str, int]

    @property
    def is_met(self) -> bool:
        """Whether nothing is lacking."""
        return not self.lacking_bytes and not self.lacking


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """One rank of pipeline stage `stage`. `workload_bytes`: granules, in bytes, that the workload's
    running sequences need; None where it does not say how many run.
    """

    stage: int
    kv_bytes_per_token: float
    state_bytes_per_sequence: int
    groups: tuple[GroupPlan, ...]
    pools: tuple[PoolPlan, ...]
    floors: FloorPlan
    lengths: tuple[LengthPlan, ...]
    equal_pages: EqualPages | None
    large_page_bytes: int
    workload_bytes: int | None
    split: Split | None
    verdict: Verdict | None


def plan_stage(layout: Layout, question: Question, *, stage: int = 0) -> StagePlan:
    """Everything about one rank that caches what `layout` says. Raises ConfigError where the
    question names pools there are not, or asks for what cannot be.
    """
    ratio = _named_ratio(layout, question)
    _require_pools(layout, question.needs, "needs")
    groups = layout.groups
    growing = [g for g in groups if not isinstance(g.lifetime, Window | State)]
    pools = tuple(_pool_plan(group, question) for group in groups)
    split, verdict = _splits(layout, question, ratio)
    return StagePlan(
        stage=stage,
        kv_bytes_per_token=sum(group.bytes_per_token or 0 for group in growing),
        state_bytes_per_sequence=layout.bytes_per_state,
        groups=tuple(_group_plan(group) for group in groups),
        pools=pools,
        floors=_floor_plan(pools, question, ratio),
        lengths=tuple(
            plan_length(layout, length, question.memory, ratio)
            for length in shown_lengths(question.max_tokens)
        ),
        equal_pages=equal_pages(groups),
        large_page_bytes=common_multiple(groups),
        workload_bytes=_workload_bytes(layout, question),
        split=split,
        verdict=verdict,
    )


def _splits(
    layout: Layout, question: Question, ratio: Mapping[str, float] | None
) -> tuple[Split | None, Verdict | None]:
    memory, groups = question.memory, layout.groups
    if memory is None:
        return None, None
    if question.needs:
        split = recommend_for_needs(
            loads_at(layout, PREFIX_TOKENS, question.max_tokens), question.needs, memory
        )
        verdict = judge_needs(groups, ratio, memory, question.needs) if ratio else None
        return split, verdict
    if question.workload is None:
        return None, None
    loads = loads_of(layout, question.workload, question.max_tokens)
    split = recommend(loads, memory, question.concurrency)
    verdict = judge(groups, loads, ratio, memory, question.concurrency) if ratio else None
    return split, verdict


def _workload_bytes(layout: Layout, question: Question) -> int | None:
    if question.workload is None or question.concurrency is None:
        return None
    ramps = running_ramps(loads_of(layout, question.workload))
    granules = sum(r.granules(question.concurrency, question.granule_bytes) for r in ramps)
    return granules * question.granule_bytes


def _named_ratio(layout: Layout, question: Question) -> dict[str, float] | None:
    """Shares by name, in the order of the pools."""
    given, names = question.pool_ratio, [group.name for group in layout.groups]
    if given is None:
        return None
    if not isinstance(given, Mapping):
        if len(given) != len(names):
            raise ConfigError(
                f"pool_ratio has {len(given)} shares, but there are {len(names)} pools: "
                f"{', '.join(names)}; give one share each, in this order"
            )
        given = dict(zip(names, given, strict=True))
    _require_pools(layout, given, "pool_ratio")
    missing = [name for name in names if name not in given]
    if missing:
        raise ConfigError(f"pool_ratio says nothing of {', '.join(missing)}; give every share")
    return dict(Options(pool_ratio={name: given[name] for name in names}).pool_ratio or {})


def _require_pools(layout: Layout, given: Mapping[str, object], field_name: str) -> None:
    names = [group.name for group in layout.groups]
    odd = [name for name in given if name not in names]
    if odd:
        raise ConfigError(
            f"{field_name} names {', '.join(map(repr, odd))}; the pools are {', '.join(names)}"
        )


def _group_plan(group: LayerGroup) -> GroupPlan:
    lifetime = group.lifetime
    per_page = group.bytes_per_state or group.entries * sum(b.bytes for b in group.buffers) * len(
        group.layers
    )
    return GroupPlan(
        name=group.name,
        lifetime=type(lifetime).__name__.lower(),
        layers=len(group.layers),
        bytes_per_token=group.bytes_per_token,
        bytes_per_state=group.bytes_per_state,
        window=lifetime.tokens if isinstance(lifetime, Window) else None,
        sinks=lifetime.sinks if isinstance(lifetime, Window) else None,
        interval_tokens=lifetime.interval_tokens if isinstance(lifetime, State) else None,
        look_ahead=lifetime.look_ahead if isinstance(lifetime, Mirror) else None,
        page_bytes=group.page_bytes,
        padding_bytes=group.page_bytes - per_page,
    )


def _pool_plan(group: LayerGroup, question: Question) -> PoolPlan:
    granule, page = question.granule_bytes, group.page_bytes
    floor = least_pages(group, question.max_tokens)
    return PoolPlan(
        name=group.name,
        groups=(group.name,),
        page_bytes=page,
        pages_per_granule=granule / page,
        granules_per_page=page / granule,
        slack_bytes=granule - math.gcd(granule, page),
        floor_pages=floor,
        floor_bytes=ceil_div((SINK_PAGES + floor) * page, granule) * granule,
    )


def _floor_plan(
    pools: Sequence[PoolPlan], question: Question, ratio: Mapping[str, float] | None
) -> FloorPlan:
    need = sum(pool.floor_bytes for pool in pools)
    memory, lacking = question.memory, dict[str, int]()
    if memory is not None and ratio is not None:
        for pool in pools:
            lack = pool.floor_bytes - round(ratio[pool.name] * memory.num_bytes)
            if lack > 0:
                lacking[pool.name] = lack
    usable = memory.num_granules * memory.granule_bytes if memory else need
    return FloorPlan(
        max_tokens=question.max_tokens,
        floor_bytes=need,
        lacking_bytes=max(0, need - usable),
        lacking=lacking,
    )
