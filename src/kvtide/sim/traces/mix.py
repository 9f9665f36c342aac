"""Traces out of traces: cut, scaled, shifted, one after another, several at once."""

from __future__ import annotations

import math
from dataclasses import replace
from heapq import merge
from itertools import islice
from typing import TYPE_CHECKING

from kvtide.errors import ConfigError
from kvtide.sim.traces.idspace import IdSpace
from kvtide.sim.traces.request import NO_SOURCE, Source, Stream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import TypeAlias

    from kvtide.sim.traces.request import Trace, TraceRequest

    _Start: TypeAlias = Callable[[], Iterator[TraceRequest]]


def cut(
    trace: Trace, *, first: int | None = None, since: float = 0.0, until: float = math.inf
) -> Trace:
    """The requests that arrive in [since, until) seconds, at most the `first` of them; `since`
    becomes second 0.
    """
    if (first is not None and first < 1) or not 0 <= since < until:
        raise ConfigError(
            f"cut of {trace.name}: first={first}, since={since}, until={until} leaves nothing; "
            "give first >= 1 and 0 <= since < until"
        )

    def start() -> Iterator[TraceRequest]:
        return islice(_between(trace, since, until), first)

    return _derived(trace, start)


def scaled(trace: Trace, rate: float) -> Trace:
    """The same requests, arriving `rate` times as fast."""
    if not 0 < rate < math.inf:
        raise ConfigError(f"scale of {trace.name} must be a positive number, got {rate}")

    def start() -> Iterator[TraceRequest]:
        return (replace(r, arrival=r.arrival / rate) for r in trace)

    return _derived(trace, start)


def shifted(trace: Trace, seconds: float) -> Trace:
    """The same requests, `seconds` later."""
    if not 0 <= seconds < math.inf:
        raise ConfigError(
            f"shift of {trace.name} must be at least 0 s, got {seconds}; to drop what comes "
            "first, cut with since=..."
        )

    def start() -> Iterator[TraceRequest]:
        return (replace(r, arrival=r.arrival + seconds) for r in trace)

    return _derived(trace, start)


def overlay(traces: Sequence[Trace]) -> Trace:
    """All traces at once, each with tenants and contents of its own, sorted by arrival.

    Requests that arrive at the same moment keep the order of `traces`. Iterating raises
    ConfigError once the contents together need more token ids than there are.
    """

    def start() -> Iterator[TraceRequest]:
        space, parts = IdSpace(), _offsets(traces)
        moved = (_moved(t, space, offset) for t, offset in zip(traces, parts, strict=True))
        return merge(*moved, key=lambda request: request.arrival)

    return _joined(traces, " + ", start)


def concatenate(traces: Sequence[Trace], *, gap: float = 0.0) -> Trace:
    """One trace after another, each with tenants and contents of its own.

    Each begins `gap` seconds after the last arrival of the one before.
    """
    if not 0 <= gap < math.inf:
        raise ConfigError(f"gap between traces must be at least 0 s, got {gap}")

    def start() -> Iterator[TraceRequest]:
        space, begin = IdSpace(), 0.0
        for trace, offset in zip(traces, _offsets(traces), strict=True):
            last = begin
            for request in _moved(trace, space, offset):
                last = begin + request.arrival
                yield replace(request, arrival=last)
            begin = last + gap

    return _joined(traces, " then ", start)


def _between(trace: Trace, since: float, until: float) -> Iterator[TraceRequest]:
    for request in trace:
        if request.arrival >= until:
            return
        if request.arrival >= since:
            yield replace(request, arrival=request.arrival - since) if since else request


def _moved(trace: Trace, space: IdSpace, tenants: int) -> Iterator[TraceRequest]:
    """The requests of `trace` with ids in the common space and `tenants` before their own."""
    for request in trace:
        yield replace(
            request,
            runs=space.place(tenants, request.runs, request.block, f"trace {trace.name}"),
            tenant=request.tenant + tenants,
        )


def _offsets(traces: Sequence[Trace]) -> list[int]:
    """How many tenants come before those of each trace: a number only that trace has."""
    counts = [len(trace.tenants) for trace in traces]
    return [sum(counts[:i]) for i in range(len(traces))]


def _derived(trace: Trace, start: _Start) -> Trace:
    return Stream(name=trace.name, start=start, source=trace.source, tenants=trace.tenants)


def _joined(traces: Sequence[Trace], word: str, start: _Start) -> Trace:
    if not traces:
        raise ConfigError("a mix needs at least one trace, got none")
    sources = list(dict.fromkeys(t.source for t in traces if t.source != NO_SOURCE))
    source = Source(
        url=", ".join(s.url for s in sources),
        licence=", ".join(dict.fromkeys(s.licence for s in sources)),
        about="; ".join(s.about for s in sources),
    )
    return Stream(
        name=word.join(t.name for t in traces),
        start=start,
        source=source,
        tenants=_distinct([name for t in traces for name in t.tenants]),
    )


def _distinct(names: list[str]) -> tuple[str, ...]:
    """The names, those that came before with a number behind them."""
    found: list[str] = []
    for name in names:
        new = next(n for n in _numbered(name) if n not in found)
        found.append(new)
    return tuple(found)


def _numbered(name: str) -> Iterator[str]:
    yield name
    number = 2
    while True:
        yield f"{name}#{number}"
        number += 1
