"""The traffic, and the memory it is served from.

`docs/traces.md` says where the public traces are from and how a spec is read. `{T}` stands for the
folder that has `mooncake/conversation_trace.jsonl` and
`weka_agentic/all_710_sessions_rle.jsonl.gz`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from kvtide.sim.traces import open_trace
from kvtide.sim.traces.request import Stream

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvtide.sim.traces import Trace, TraceRequest


@dataclass(frozen=True, slots=True)
class Traffic:
    """`requests` of a spec, no longer than `longest` tokens; `gigabytes` of caches a model."""

    name: str
    about: str
    spec: str
    gigabytes: dict[str, int]
    block_tokens: int = 64
    requests: int = 300
    longest: int = 131_072

    def trace(self, folder: Path) -> Trace:
        """The first requests that fit."""
        base = open_trace(self.spec.replace("{T}", str(folder)))

        def start() -> Iterator[TraceRequest]:
            return islice((r for r in base if self._fits(r)), self.requests)

        return Stream(name=self.name, start=start, source=base.source, tenants=base.tenants)

    def _fits(self, request: TraceRequest) -> bool:
        return request.input_tokens + request.output_tokens <= self.longest


def _sizes(nemotron: int, qwen: int, kimi: int) -> dict[str, int]:
    return {"Nemotron-3-Nano": nemotron, "Qwen3-Next-80B": qwen, "Kimi-Linear-48B": kimi}


CONVERSATION = "{T}/mooncake/conversation_trace.jsonl"
CHATS = (
    "synthetic:rate=8,cv=2,prefixes=60,popularity=0.7,prefix_tokens=1500,prefix_cv=0.5,"
    "turns=1.5,think=20,first_input=300,input=200,output=120"
)
DOCUMENTS = (
    "synthetic:rate=1.5,cv=2,prefixes=120,popularity=0.8,prefix_tokens=12000,prefix_cv=0.6,"
    "turns=1,first_input=120,output=200,seed=3"
)
TALKS = (
    "synthetic:rate=2.5,cv=2,prefixes=0,turns=4,think=60,first_input=4000,input=600,output=150,"
    "seed=1"
)
AGENTS = "agent:{T}/weka_agentic/all_710_sessions_rle.jsonl.gz,pause=10,rate=0.3"

TRAFFIC = (
    Traffic(
        "conversation",
        "Mooncake's conversation trace",
        CONVERSATION,
        _sizes(20, 40, 20),
        requests=500,
    ),
    Traffic(
        "conversation-512",
        "the same in blocks of 512, the trace's own",
        CONVERSATION,
        _sizes(20, 40, 20),
        block_tokens=512,
    ),
    Traffic(
        "agents", "coding-agent sessions", AGENTS, _sizes(10, 20, 10), requests=200, longest=60_000
    ),
    Traffic("chats", "short chats behind 60 system prompts", CHATS, _sizes(8, 12, 8), requests=500),
    Traffic("documents", "short questions on 120 documents", DOCUMENTS, _sizes(8, 16, 8)),
    Traffic("talks", "conversations of 4 turns", TALKS, _sizes(10, 20, 10), requests=400),
    Traffic("chats, room", "the chats where little is evicted", CHATS, _sizes(40, 60, 40)),
    Traffic("documents, room", "the same of the questions", DOCUMENTS, _sizes(76, 76, 76)),
)
