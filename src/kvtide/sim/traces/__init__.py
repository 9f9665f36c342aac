"""Request traces: where they come from, how they are read, mixed and made."""

from kvtide.sim.traces.request import Source, Stream, Trace, TraceRequest, answer_token
from kvtide.sim.traces.statistics import Statistics, statistics

__all__ = [
    "Source",
    "Statistics",
    "Stream",
    "Trace",
    "TraceRequest",
    "answer_token",
    "statistics",
]
