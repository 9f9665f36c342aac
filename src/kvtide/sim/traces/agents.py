"""Agent sessions: JSON objects of one conversation each, content ids local to it, as lists
(`hash_ids`) or as runs (`hash_runs`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from kvtide.errors import ConfigError
from kvtide.sim.traces.blocks import array_of, runs_of
from kvtide.sim.traces.files import Place, count_of, json_lines, json_object, lines, number_of
from kvtide.sim.traces.idspace import IdSpace
from kvtide.sim.traces.request import TraceRequest
from kvtide.types import ceil_div

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Mapping
    from pathlib import Path

    from kvtide.types import IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentOptions:
    """What the file does not say.

    Sessions start as a Poisson process of `rate` sessions a second, drawn with `seed`; the first
    starts at 0. Gaps within a session longer than `pause` seconds are cut to that. With `tools`,
    sessions whose system and tool definitions have equal lengths share these tokens.
    """

    rate: float = 0.05
    seed: int = 0
    pause: float = float("inf")
    tools: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.rate < float("inf") or self.pause < 0 or self.seed < 0:
            raise ConfigError(
                f"agent sessions: rate={self.rate}, pause={self.pause}, seed={self.seed}; "
                "give rate > 0 sessions/s, pause >= 0 s, seed >= 0"
            )


def agents(path: Path, options: AgentOptions) -> Iterator[TraceRequest]:
    """All requests of all sessions by arrival; only sessions under way are in memory.

    `path`: JSON lines, a session a line, or a folder with a .json file for each session.
    """
    space = IdSpace()
    for arrival, call in _merged(_started(path, options)):
        yield TraceRequest(
            arrival=arrival,
            input_tokens=call.input_tokens,
            output_tokens=call.output_tokens,
            runs=call.place_in(space),
            block=call.block,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Head:
    """The leading ids [first, first + count) of an agent: its system and tool definitions."""

    key: Hashable
    first: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """One request at `time` s of its session; ids are those of `scope`."""

    time: float
    input_tokens: int
    output_tokens: int
    runs: IntArray
    block: int
    scope: Hashable
    place: Place
    head: _Head | None = None

    def place_in(self, space: IdSpace) -> IntArray:
        """The runs in the common space; tokens that no id covers become new content."""
        where = f"{self.place.path}:{self.place.line}"
        head, rest = self._parts()
        parts = [space.place(self.scope, rest, self.block, where)]
        if self.head and len(head):
            parts.insert(0, space.place(self.head.key, head, self.block, where))
        bare = self.input_tokens - int(self.runs[:, 1].sum()) * self.block
        if bare > 0:
            count = ceil_div(bare, self.block)
            parts.append(np.array([[space.fresh(count, self.block, where), count]], np.int64))
        return np.concatenate(parts)

    def _parts(self) -> tuple[IntArray, IntArray]:
        """The part of the runs that is the head, counted from its first id, and the rest."""
        if not self.head or not len(self.runs) or self.runs[0, 0] != self.head.first:
            return self.runs[:0], self.runs
        shared = min(self.head.count, int(self.runs[0, 1]))
        rest = self.runs.copy()
        rest[0] += (shared, -shared)
        return np.array([[0, shared]], np.int64), rest[rest[:, 1] > 0]


def _merged(sessions: Iterator[tuple[float, list[_Call]]]) -> Iterator[tuple[float, _Call]]:
    """Calls by time; a session is read when time has come to its start."""
    heap: list[tuple[float, int, int, float, list[_Call]]] = []
    for number, (start, calls) in enumerate(sessions):
        while heap and heap[0][0] <= start:
            yield _next_call(heap)
        if calls:
            heappush(heap, (start + calls[0].time, number, 0, start, calls))
    while heap:
        yield _next_call(heap)


def _next_call(heap: list[tuple[float, int, int, float, list[_Call]]]) -> tuple[float, _Call]:
    arrival, number, at, start, calls = heappop(heap)
    if at + 1 < len(calls):
        heappush(heap, (start + calls[at + 1].time, number, at + 1, start, calls))
    return arrival, calls[at]


def _started(path: Path, options: AgentOptions) -> Iterator[tuple[float, list[_Call]]]:
    rng, start = np.random.default_rng(options.seed), 0.0
    for number, (place, record) in enumerate(_records(path)):
        yield start, _session(place, record, number, options)
        start += float(rng.exponential(1 / options.rate))


def _records(path: Path) -> Iterator[tuple[Place, dict[str, Any]]]:
    if not path.is_dir():
        yield from json_lines(path)
        return
    files = sorted(path.glob("*.json*"))
    if not files:
        raise ConfigError(f"trace {path}: the folder has no .json files")
    for file in files:
        yield Place(file, 1), json_object(Place(file, 1), "".join(t for _, t in lines(file)))


def _session(
    place: Place, record: dict[str, Any], number: int, options: AgentOptions
) -> list[_Call]:
    scope = "global" if record.get("hash_id_scope") == "global" else number
    block = count_of(place, record, "block_size", least=1)
    calls = sorted(_calls(place, record, block, scope), key=lambda call: call.time)
    if not options.tools:
        calls = [replace(call, head=None) for call in calls]
    times = np.array([call.time for call in calls])
    gaps = np.minimum(np.diff(times, prepend=times[:1]), options.pause)
    return [replace(c, time=t) for c, t in zip(calls, np.cumsum(gaps).tolist(), strict=True)]


def _calls(
    place: Place, record: Mapping[str, Any], block: int, scope: Hashable, since: float = 0.0
) -> Iterator[_Call]:
    """The requests of an agent and of those that it called; nested times count from `since`."""
    requests = record.get("requests")
    if not isinstance(requests, list):
        raise place.error(f"requests must be a list of requests, got {type(requests).__name__}")
    head: _Head | None = None
    for request in cast("list[dict[str, Any]]", requests):
        time = since + number_of(place, request, "t")
        if "requests" in request:
            yield from _calls(place, request, block, scope, time)
            continue
        runs = _runs(place, request)
        head = head or _head(place, record, runs, block)
        yield _Call(
            time=time,
            input_tokens=_covered(place, request, runs, block),
            output_tokens=count_of(place, request, "out"),
            runs=runs,
            block=block,
            scope=scope,
            place=place,
            head=head,
        )


def _runs(place: Place, request: Mapping[str, Any]) -> IntArray:
    if "hash_runs" not in request:
        return runs_of(place, request, "hash_ids")
    runs = array_of(place, request, "hash_runs")
    runs = runs if len(runs) else runs.reshape(0, 2)
    if runs.ndim != 2 or runs.shape[1] != 2 or (runs[:, 1] < 1).any():
        raise place.error("hash_runs must be a list of [first id, count of at least 1]")
    return runs


def _covered(place: Place, request: Mapping[str, Any], runs: IntArray, block: int) -> int:
    """The input tokens of `request`; raises ConfigError if its ids stand for more."""
    tokens = count_of(place, request, "in", least=1)
    blocks = int(runs[:, 1].sum())
    if blocks > ceil_div(tokens, block):
        raise place.error(
            f"in = {tokens} tokens are {ceil_div(tokens, block)} blocks of {block}, but the "
            f"request at t = {request['t']} has ids for {blocks}"
        )
    return tokens


def _head(place: Place, record: Mapping[str, Any], runs: IntArray, block: int) -> _Head | None:
    """What the first request of an agent begins with, if its ids say that it is all there."""
    sizes = [
        count_of(place, record, f) if f in record else 0 for f in ("tool_tokens", "system_tokens")
    ]
    count = sum(sizes) // block
    if not count or not len(runs) or runs[0, 1] < count:
        return None
    return _Head(key=("tools", *sizes), first=int(runs[0, 0]), count=count)
