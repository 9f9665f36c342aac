"""One policy on one trace: the manager and the scheduler that serve, without bytes or a wall clock.

from kvtide.sim.lab import Setup, replay

run = replay(trace, Setup(layout=layout, clock=clock, memory_bytes=60 * 10**9), "elastic")
print(run.totals.hit_rate, run.latency.ttft)
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from kvtide.config import Options
from kvtide.engine.scheduler import SchedulerConfig
from kvtide.errors import ConfigError
from kvtide.manager import KVManager
from kvtide.memory import NullMemory
from kvtide.sim.driver import Driver
from kvtide.sim.policies import Ground, Policy, policy
from kvtide.sim.recorder import requests_of
from kvtide.sim.result import Objective, Requests, Run, Totals, latency_of
from kvtide.types import ceil_div

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from kvtide.layout import Layout
    from kvtide.sim.costs import Clock
    from kvtide.sim.traces import TraceRequest

GRANULE_BYTES = 2 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What is the same for all policies of a comparison.

    `layout` of one rank, `memory_bytes` for its pools, `clock` how long steps take. `pool_ratio`
    is the split at the start (None: as much to each pool as the longest sequence needs of it).
    `max_running` requests at once, `chunk_tokens` prompt tokens a step, `max_tokens` of the longest
    sequence. `check_every` steps all books are audited (0: never).
    """

    layout: Layout
    clock: Clock
    memory_bytes: int
    max_tokens: int
    granule_bytes: int = GRANULE_BYTES
    pool_ratio: Mapping[str, float] | None = None
    max_running: int = 256
    chunk_tokens: int = 8192
    objective: Objective = field(default_factory=Objective)
    check_every: int = 0

    def __post_init__(self) -> None:
        """Refuse memory that is no granule."""
        if self.memory_bytes < self.granule_bytes:
            raise ConfigError(
                f"memory_bytes is {self.memory_bytes}, less than one granule of "
                f"{self.granule_bytes}; give more memory"
            )


def replay(
    trace: Iterable[TraceRequest],
    setup: Setup,
    name: str = "elastic",
    *,
    progress: Callable[[int], None] = lambda _: None,
) -> Run:
    """Serve a trace under a policy. `progress` is told how many requests have ended.

    The same arguments give the same numbers, always. Raises ConfigError if the policy is unknown or
    the memory cannot hold one longest sequence in every pool.
    """
    chosen = policy(name)
    kv = _manager(trace, setup, chosen)
    ground = Ground(
        layout=kv.layout,
        num_granules=kv.memory.num_granules,
        granule_bytes=kv.memory.granule_bytes,
        max_tokens=setup.max_tokens,
    )
    limits = SchedulerConfig(
        max_running=setup.max_running,
        chunk_tokens=setup.chunk_tokens,
        max_length=setup.max_tokens,
    )
    driver = Driver(
        kv,
        setup.clock,
        limits,
        chosen.decide(ground),
        pays=chosen.pays,
        check_every=setup.check_every,
    )
    with kv:
        driver.run(trace, progress)
        return _run(driver, kv, setup, chosen)


def _manager(trace: Iterable[TraceRequest], setup: Setup, chosen: Policy) -> KVManager:
    layout = chosen.layout(setup.layout)
    granule = chosen.granule(layout, setup.granule_bytes)
    num_bytes = setup.memory_bytes
    if chosen.boundless:
        num_bytes = max(num_bytes, _bytes_for_all(trace, layout, setup))
    if num_bytes < granule * len(layout.groups):
        raise ConfigError(
            f"policy {chosen.name!r} needs granules of {granule:,} bytes, and memory_bytes is "
            f"{num_bytes:,}; give it more memory or leave it out"
        )
    ratio = setup.pool_ratio if layout is setup.layout else None
    return KVManager(
        layout,
        NullMemory(num_bytes // granule * granule, granule),
        max_sequences=setup.max_running,
        max_tokens=setup.max_tokens,
        options=Options(mode=chosen.mode, pool_ratio=ratio, events=None),
    )


def _bytes_for_all(trace: Iterable[TraceRequest], layout: Layout, setup: Setup) -> int:
    """Bytes in which nothing ever has to be evicted: every token of every request its own page."""
    blocks = requests = 0
    for request in trace:
        requests += 1
        blocks += ceil_div(request.input_tokens + request.output_tokens, layout.block_tokens)
    states = requests * 4 + blocks // max(1, _interval_blocks(layout))
    per_block = sum(group.page_bytes for group in layout.groups if not group.is_state)
    per_state = sum(group.page_bytes for group in layout.groups if group.is_state)
    slack = len(layout.groups) * 4 * setup.granule_bytes
    return blocks * per_block + states * per_state + slack


def _interval_blocks(layout: Layout) -> int:
    intervals = [getattr(group.lifetime, "interval_tokens", 0) for group in layout.groups]
    return max(intervals, default=0) // layout.block_tokens


def _run(driver: Driver, kv: KVManager, setup: Setup, chosen: Policy) -> Run:
    requests = requests_of(driver.lives)
    budget = kv.memory.num_granules * kv.memory.granule_bytes
    totals = _totals(driver, kv, requests, budget)
    return Run(
        policy=chosen.name,
        settings=_settings(setup, kv),
        pools=tuple(kv.pools),
        budget_bytes=budget,
        totals=totals,
        latency=latency_of(requests, setup.objective, driver.now),
        timeline=driver.sampler.timeline(),
        requests=requests,
    )


def _totals(driver: Driver, kv: KVManager, requests: Requests, budget: int) -> Totals:
    facts, work, done = kv.snapshot(), driver.work, ~requests.failed
    recomputed = int(requests.recomputed_tokens.sum())
    span = max(driver.now, 1e-9) * budget
    return Totals(
        requests=len(requests.arrival),
        failed=int(requests.failed.sum()),
        prompt_tokens=int(requests.input_tokens[done].sum()),
        output_tokens=int(requests.output_tokens.sum()),
        hit_tokens=int(requests.hit_tokens.sum()),
        recomputed_tokens=recomputed,
        computed_flops=work.flops,
        recomputed_flops=work.flops * recomputed / max(1, work.tokens),
        seconds=driver.now,
        steps=work.steps,
        preemptions=int(requests.preemptions.sum()),
        granules_moved=facts.granules_moved,
        pause_seconds=work.pause_seconds,
        longest_pause_seconds=work.longest_pause_seconds,
        stranded_share=driver.sampler.shares.stranded / span,
        dead_share=driver.sampler.shares.dead / span,
        evicted_pages={name: pool.evicted for name, pool in facts.pools.items()},
        refusals=dict(sorted(driver.scheduler.refusals.items())),
        evicted_for_others={name: pool.evicted_for_others for name, pool in facts.pools.items()},
    )


def _settings(setup: Setup, kv: KVManager) -> dict[str, Any]:
    return {
        "memory_bytes": setup.memory_bytes,
        "granule_bytes": kv.memory.granule_bytes,
        "block_tokens": kv.layout.block_tokens,
        "pool_ratio": None if setup.pool_ratio is None else dict(setup.pool_ratio),
        "max_running": setup.max_running,
        "chunk_tokens": setup.chunk_tokens,
        "max_tokens": setup.max_tokens,
        "hardware": setup.clock.hardware.name,
    }


def oracle_static(
    trace: Iterable[TraceRequest],
    setup: Setup,
    *,
    rounds: int = 3,
    progress: Callable[[int], None] = lambda _: None,
) -> Run:
    """The best fixed split in hindsight: `static` over a grid of splits that is refined `rounds`
    times around the best, by hit tokens. Splits below a pool's floor are passed over.
    """
    names = [group.name for group in setup.layout.groups]
    best: Run | None = None
    centre, width = np.full(len(names), 1 / len(names)), 1.0
    for _ in range(rounds):
        for shares in _around(centre, width):
            ratio = dict(zip(names, shares.tolist(), strict=True))
            try:
                run = replay(trace, replace(setup, pool_ratio=ratio), "static", progress=progress)
            except ConfigError:
                continue  # below a floor: no manager takes this split
            if best is None or run.totals.hit_tokens > best.totals.hit_tokens:
                best = run
        if best is None:
            raise ConfigError("no fixed split holds one longest sequence in every pool")
        ratio = best.settings["pool_ratio"]
        centre, width = np.array([ratio[name] for name in names]), width / 4
    assert best is not None
    return replace(best, policy="oracle-static")


def _around(centre: np.ndarray[Any, np.dtype[np.float64]], width: float) -> Iterable[Any]:
    """Splits near `centre`: each pool in turn given less and more, the others in proportion."""
    yield centre
    if len(centre) == 1:
        return
    pools = range(1) if len(centre) == 2 else range(len(centre))
    for pool in pools:
        for step in (-0.45, -0.3, -0.15, 0.15, 0.3, 0.45):
            share = centre[pool] + step * width
            if not 0.005 < share < 0.995:
                continue
            shares = centre * (1 - share) / (1 - centre[pool])
            shares[pool] = share
            yield shares / shares.sum()
