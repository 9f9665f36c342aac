"""The traffic: phases one after another, from public traces and from a seed.

`docs/traces.md` says where the traces are from and how a spec is read. `{T}` stands for the folder
that has `mooncake/conversation_trace.jsonl`, `azure/AzureLLMInferenceTrace_code.csv` and
`weka_agentic/all_710_sessions_rle.jsonl.gz`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING

from kvtide.sim.traces import concatenate, open_trace, scaled
from kvtide.sim.traces.request import Stream

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvtide.sim.traces import Trace, TraceRequest

LONGEST = 49_152
"""Longer prompts and answers are left out: one sequence must fit into 15 % of any memory here."""


@dataclass(frozen=True, slots=True)
class Phase:
    """So many requests of a spec, of `shortest` to `longest` prompt tokens."""

    name: str
    spec: str
    requests: int
    shortest: int = 0
    longest: int = LONGEST

    def trace(self, folder: Path, share: float) -> Trace:
        """The phase with `share` of its requests."""
        count = max(2, round(self.requests * share))
        base = open_trace(self.spec.replace("{T}", str(folder)))

        def start() -> Iterator[TraceRequest]:
            kept = (r for r in base if self.shortest <= r.input_tokens and self._fits(r))
            return islice(kept, count)

        return Stream(name=self.name, start=start, source=base.source, tenants=base.tenants)

    def _fits(self, request: TraceRequest) -> bool:
        return request.input_tokens + request.output_tokens <= self.longest


@dataclass(frozen=True, slots=True)
class Mixture:
    """Phases one after another, in blocks of `block_tokens`; `about`: a sentence for the tables."""

    name: str
    about: str
    phases: tuple[Phase, ...]
    block_tokens: int = 64

    def trace(self, folder: Path, rate: float = 1.0, share: float = 1.0) -> Trace:
        """All phases, arriving `rate` times as fast, with `share` of their requests."""
        parts = [phase.trace(folder, share) for phase in self.phases]
        return scaled(concatenate(parts, gap=1.0), rate)

    def bounds(self, share: float = 1.0) -> list[tuple[int, int]]:
        """First request of each phase and the one after its last."""
        counts = [max(2, round(phase.requests * share)) for phase in self.phases]
        ends = [sum(counts[: i + 1]) for i in range(len(counts))]
        return [(end - count, end) for end, count in zip(ends, counts, strict=True)]


CONVERSATION = "{T}/mooncake/conversation_trace.jsonl"
CODE = "{T}/azure/AzureLLMInferenceTrace_code.csv"
AGENTS = "agent:{T}/weka_agentic/all_710_sessions_rle.jsonl.gz"
SHORT = (
    "synthetic:rate=8,cv=2,prefixes=300,popularity=0.7,prefix_tokens=1500,prefix_cv=0.5,"
    "turns=1.5,think=20,first_input=300,input=200,output=120"
)
LONG = (
    "synthetic:rate=2.5,cv=2,prefixes=0,turns=4,think=60,first_input=9000,input=600,"
    "output=150,seed=1"
)

_MIXTURES = (
    Mixture(
        "day",
        "Mooncake conversation, then Azure code with conversation, then agent sessions",
        (
            Phase("conversation", CONVERSATION, 600),
            Phase("code", f"{CODE} + {CONVERSATION},since=1800", 600),
            Phase("agents", f"{AGENTS},pause=10,rate=0.6", 600),
        ),
    ),
    Mixture(
        "documents-chats",
        "few long prompts of Mooncake's conversation, then many short ones",
        (
            Phase("documents", f"{CONVERSATION},scale=2", 600, shortest=12_000),
            Phase("chats", f"{CONVERSATION},since=1200,scale=4", 800, longest=6_000),
        ),
    ),
    Mixture(
        "synthetic",
        "short prompts behind 300 popular prefixes, then long conversations, from a seed",
        (Phase("prefixes", SHORT, 800), Phase("long", LONG, 600)),
    ),
    Mixture(
        "stationary",
        "both of these at once, without a shift",
        (Phase("both", f"{SHORT},scale=0.4 + {LONG},scale=0.5", 900),),
    ),
)

ALIGNED = 512
"""Tokens in the blocks that Mooncake's traces name: whether parts are equal they do not say."""

MIXTURES = _MIXTURES + tuple(
    replace(mixture, name=f"{mixture.name}-512", block_tokens=ALIGNED)
    for mixture in _MIXTURES
    if mixture.name in ("day", "documents-chats")
)
