"""Everything one run is made from, as plain values: written down, compared, sent to a process."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from kvtide.errors import ConfigError
from kvtide.layout import Layout, Parallel
from kvtide.sim.costs import Clock, ModelCost, hardware
from kvtide.sim.lab import GRANULE_BYTES, Setup, oracle_static, replay
from kvtide.sim.result import Objective
from kvtide.sim.traces import cut, open_trace, overlay, scaled

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvtide.sim.result import Run
    from kvtide.sim.traces import Trace

ORACLE = "oracle-static"
SYNTHETIC = "synthetic"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One run: a model, traffic, memory and a policy, in types that JSON knows.

    `config` is the path of a config.json or its folder, `traces` are specs as `open_trace` takes
    them; several are overlaid. `rate` times as fast as recorded; `requests`: only the first so
    many. `pool_ratio` by pool or in their order. `tensor` ranks share every layer, and sizes are
    those of one rank. The last states of a prompt stand `state_interval` tokens apart (None: about
    1,024), earlier ones further. `max_tokens` of the longest sequence (None: of the longest
    request). `ttft` and `itl` are the limits of goodput in seconds. `seed` is that of `synthetic`
    traces whose spec has none. `params` and `active_params` are the model's published totals (None:
    counted from the fields of its configuration), `weight_dtype` is that of its linear layers
    (None: as there).
    """

    config: str
    traces: tuple[str, ...]
    memory_bytes: int
    policy: str = "elastic"
    pool_ratio: Mapping[str, float] | tuple[float, ...] | None = None
    hardware: str = "h100"
    params: float | None = None
    active_params: float | None = None
    weight_dtype: str | None = None
    tensor: int = 1
    kv_dtype: str | None = None
    block_tokens: int = 16
    state_interval: int | None = None
    granule_bytes: int = GRANULE_BYTES
    rate: float = 1.0
    requests: int | None = None
    max_running: int = 256
    chunk_tokens: int = 8192
    max_tokens: int | None = None
    ttft: float = 5.0
    itl: float = 0.1
    seed: int | None = None

    def to_json(self) -> dict[str, Any]:
        """All fields by name."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """A recipe made ready: what all policies have in common. `requests` is how many there are."""

    trace: Trace
    setup: Setup
    requests: int

    def run(self, policy: str, progress: Callable[[int], None] = lambda _: None) -> Run:
        """One policy on it; `progress` is told how many requests have ended."""
        if policy == ORACLE:
            return oracle_static(self.trace, self.setup, progress=progress)
        return replay(self.trace, self.setup, policy, progress=progress)


def prepare(recipe: Recipe) -> Bench:
    """Read the configuration, the hardware and the trace. Raises ConfigError naming the field."""
    layout = Layout.from_config(
        recipe.config,
        block_tokens=recipe.block_tokens,
        kv_dtype=recipe.kv_dtype,
        state_interval=recipe.state_interval,
        parallel=Parallel(tensor=recipe.tensor),
    )
    model = ModelCost.from_config(
        recipe.config,
        layout,
        params=recipe.params,
        active_params=recipe.active_params,
        weight_dtype=recipe.weight_dtype,
        ranks=recipe.tensor,
    )
    trace = traffic(recipe)
    requests, longest = _size(trace)
    setup = Setup(
        layout=layout,
        clock=Clock(model, hardware(recipe.hardware)),
        memory_bytes=recipe.memory_bytes,
        max_tokens=recipe.max_tokens or longest,
        granule_bytes=recipe.granule_bytes,
        pool_ratio=_ratio(recipe, layout),
        max_running=recipe.max_running,
        chunk_tokens=recipe.chunk_tokens,
        objective=Objective(ttft=recipe.ttft, itl=recipe.itl),
    )
    return Bench(trace=trace, setup=setup, requests=requests)


def traffic(recipe: Recipe) -> Trace:
    """The requests of a recipe: its traces, at its rate, the first so many."""
    if not recipe.traces:
        raise ConfigError("traces is empty; name at least one")
    traces = [open_trace(seeded(spec, recipe.seed)) for spec in recipe.traces]
    trace = traces[0] if len(traces) == 1 else overlay(traces)
    if recipe.rate != 1.0:
        trace = scaled(trace, recipe.rate)
    return trace if recipe.requests is None else cut(trace, first=recipe.requests)


def seeded(spec: str, seed: int | None) -> str:
    """The spec with `seed` behind every `synthetic` of it that names none."""
    if seed is None:
        return spec
    parts = re.split(r"( \+ | then )", spec)
    return "".join(_seeded(part, seed) for part in parts)


def _seeded(part: str, seed: int) -> str:
    first, semicolon, later = part.partition(";")
    name, _, options = first.strip().partition(":")
    if name != SYNTHETIC or re.search(r"(^|,)\s*seed=", options):
        return part
    comma = "," if options else ""
    return f"{name}:{options}{comma}seed={seed}{semicolon}{later}"


def _size(trace: Trace) -> tuple[int, int]:
    """Requests, and tokens of the longest of them with its answer and one more to come."""
    count = longest = 0
    for request in trace:
        count += 1
        longest = max(longest, request.input_tokens + request.output_tokens)
    if not count:
        raise ConfigError(f"trace {trace.name} has no request; give one that has")
    return count, longest + 1


def _ratio(recipe: Recipe, layout: Layout) -> Mapping[str, float] | None:
    """Shares by name; ConfigError if they are not as many as there are pools."""
    given, names = recipe.pool_ratio, [group.name for group in layout.groups]
    if not isinstance(given, tuple | list):
        return given
    if len(given) != len(names):
        raise ConfigError(
            f"pool_ratio has {len(given)} shares, but there are {len(names)} pools: "
            f"{', '.join(names)}; give one share a pool"
        )
    return dict(zip(names, given, strict=True))
