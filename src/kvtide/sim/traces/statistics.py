"""What a trace is like: lengths, arrivals, and how much of its prompts has been seen before."""

from __future__ import annotations

from array import array
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvtide.sim.traces.prefixes import Prefixes
from kvtide.types import ceil_div

if TYPE_CHECKING:
    from kvtide.sim.traces.request import Trace, TraceRequest
    from kvtide.types import IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Tokens of all prompts, or of all answers."""

    total: int
    mean: float
    p50: float
    p90: float
    p99: float
    longest: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one tenant asked for, and how many of its prompt tokens it had sent before."""

    tenant: str
    requests: int
    input_tokens: int
    shared_tokens: int
    blocks: int
    shared_blocks: int

    @property
    def shared(self) -> float:
        """Prompt tokens that a cache without end would have had, of all prompt tokens."""
        return self.shared_tokens / max(1, self.input_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """A trace in numbers.

    `span` is the time in seconds from the first request to the last. `arrival_cv`: standard
    deviation of the gaps between arrivals over their mean; 1 for a Poisson process. `shared`:
    share of the prompt tokens that a cache without end would have had, at the trace's own blocks:
    whole blocks only, and never the last token of a prompt. `shared_blocks` is the same in blocks,
    of all blocks, those that the end of a prompt fills in part among them: papers state this one.
    """

    requests: int
    span: float
    arrival_cv: float
    input: Lengths
    output: Lengths
    shared: float
    shared_blocks: float
    tenants: tuple[Share, ...]

    def to_json(self) -> dict[str, Any]:
        """The same in types that `json` knows."""
        return asdict(self)


def statistics(trace: Trace) -> Statistics:
    """Read the whole trace once; keeps the lengths and a tree of its distinct content."""
    arrivals, inputs, outputs = array("d"), array("q"), array("q")
    counts = [_Count() for _ in trace.tenants]
    for request in trace:
        arrivals.append(request.arrival)
        inputs.append(request.input_tokens)
        outputs.append(request.output_tokens)
        counts[request.tenant].add(request)
    times = np.frombuffer(arrivals)
    shares = tuple(c.share(name) for c, name in zip(counts, trace.tenants, strict=True))
    return Statistics(
        requests=len(arrivals),
        span=float(times[-1] - times[0]) if len(times) else 0.0,
        arrival_cv=variation(np.diff(times)),
        input=_lengths(np.frombuffer(inputs, np.int64)),
        output=_lengths(np.frombuffer(outputs, np.int64)),
        shared=sum(s.shared_tokens for s in shares) / max(1, sum(s.input_tokens for s in shares)),
        shared_blocks=sum(s.shared_blocks for s in shares) / max(1, sum(s.blocks for s in shares)),
        tenants=shares,
    )


def variation(gaps: np.ndarray[Any, np.dtype[np.float64]]) -> float:
    """Coefficient of variation; 0 where there is nothing to vary."""
    mean = float(gaps.mean()) if len(gaps) else 0.0
    return float(gaps.std()) / mean if mean else 0.0


class _Count:
    """One tenant's part of the count."""

    def __init__(self) -> None:
        self._requests = self._input = self._shared = self._blocks = self._shared_blocks = 0
        self._prefixes: dict[int, Prefixes] = {}

    def add(self, request: TraceRequest) -> None:
        tokens, block = request.input_tokens, request.block
        prefixes = self._prefixes.setdefault(block, Prefixes())
        seen = prefixes.add(request.runs, tokens // block)
        # The last token of a prompt is always computed: its logits are wanted.
        seen = min(seen, max(0, tokens - 1) // block)
        self._requests += 1
        self._input += tokens
        self._shared += seen * block
        self._blocks += ceil_div(tokens, block)
        self._shared_blocks += seen

    def share(self, tenant: str) -> Share:
        return Share(
            tenant=tenant,
            requests=self._requests,
            input_tokens=self._input,
            shared_tokens=self._shared,
            blocks=self._blocks,
            shared_blocks=self._shared_blocks,
        )


def _lengths(values: IntArray) -> Lengths:
    if not len(values):
        return Lengths(total=0, mean=0.0, p50=0.0, p90=0.0, p99=0.0, longest=0)
    p50, p90, p99 = np.percentile(values, (50, 90, 99)).tolist()
    return Lengths(
        total=int(values.sum()),
        mean=float(values.mean()),
        p50=p50,
        p90=p90,
        p99=p99,
        longest=int(values.max()),
    )
