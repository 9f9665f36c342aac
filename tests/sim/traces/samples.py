"""Small traces and trace files, made by the tests."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
from hypothesis import strategies as st

from kvtide.sim.traces import Stream, Trace, TraceRequest

if TYPE_CHECKING:
    from pathlib import Path


def request(
    arrival: float,
    ids: list[int] | None = None,
    *,
    tokens: int | None = None,
    output: int = 1,
    block: int = 4,
    tenant: int = 0,
) -> TraceRequest:
    """A request whose prompt is made of `ids`, whole blocks unless `tokens` says less."""
    ids = [0] if ids is None else ids
    return TraceRequest(
        arrival=arrival,
        input_tokens=len(ids) * block if tokens is None else tokens,
        output_tokens=output,
        runs=np.array([[i, 1] for i in ids], np.int64).reshape(-1, 2),
        block=block,
        tenant=tenant,
    )


def trace(*requests: TraceRequest, name: str = "t", tenants: tuple[str, ...] = ("t",)) -> Trace:
    return Stream(name=name, start=lambda: iter(requests), tenants=tenants)


def plain(request: TraceRequest) -> tuple[Any, ...]:
    """Everything in a request, comparable."""
    runs = tuple(map(tuple, request.runs.tolist()))
    sizes = (request.input_tokens, request.output_tokens)
    return (request.arrival, *sizes, runs, request.block, request.tenant)


def all_of(given: Trace) -> list[tuple[Any, ...]]:
    return [plain(one) for one in given]


def write_lines(path: Path, *records: object) -> Path:
    """JSON lines; a string goes in as it is."""
    texts = [one if isinstance(one, str) else json.dumps(one) for one in records]
    path.write_text("".join(f"{text}\n" for text in texts))
    return path


@st.composite
def traces(draw: st.DrawFn, tenants: int = 1, blocks: tuple[int, ...] = (1, 2, 3, 4, 5)) -> Trace:
    """Sorted requests over small ids, blocks of these many tokens."""
    arrivals = draw(st.lists(st.integers(0, 50).map(lambda n: n / 4), max_size=12).map(sorted))
    requests = tuple(draw(_requests(arrival, tenants, blocks)) for arrival in arrivals)
    return trace(*requests, name="random", tenants=tuple(f"u{i}" for i in range(tenants)))


@st.composite
def _requests(
    draw: st.DrawFn, arrival: float, tenants: int, blocks: tuple[int, ...]
) -> TraceRequest:
    block = draw(st.sampled_from(blocks))
    ids = draw(st.lists(st.integers(0, 30), min_size=1, max_size=6))
    return request(
        arrival,
        ids,
        tokens=len(ids) * block - draw(st.integers(0, block - 1)),
        output=draw(st.integers(0, 9)),
        block=block,
        tenant=draw(st.integers(0, tenants - 1)),
    )
