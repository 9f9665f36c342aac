"""Small disorder in a file is put right; a file that is not sorted at all is refused."""

from __future__ import annotations

from dataclasses import dataclass, replace
from heapq import heappop, heappush
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kvtide.sim.traces.files import Place
    from kvtide.sim.traces.request import TraceRequest

WINDOW = 1024
"""How many requests too late a line may be."""


@dataclass(frozen=True, slots=True)
class Read:
    """A request and the line it came from; its arrival is still as the file has it."""

    place: Place
    request: TraceRequest


def in_order(reads: Iterable[Read]) -> Iterator[TraceRequest]:
    """Sort by arrival within a window, and count time from the first request.

    Raises ConfigError for a line that comes more than `WINDOW` requests too late.
    """
    start: float | None = None
    for request in by_arrival(reads):
        start = request.arrival if start is None else start
        yield replace(request, arrival=request.arrival - start) if start else request


def by_arrival(reads: Iterable[Read]) -> Iterator[TraceRequest]:
    """The same without touching the times."""
    heap: list[tuple[float, int, Read]] = []
    last = float("-inf")
    for number, read in enumerate(reads):
        if read.request.arrival < last:
            raise read.place.error(
                f"arrives before a request more than {WINDOW} lines further up; sort the file by "
                "arrival"
            )
        heappush(heap, (read.request.arrival, number, read))
        if len(heap) > WINDOW:
            last, _, first = heappop(heap)
            yield first.request
    while heap:
        yield heappop(heap)[2].request
