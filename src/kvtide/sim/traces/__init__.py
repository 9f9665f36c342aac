"""Request traces: where they come from, how they are read, mixed and made."""

from kvtide.sim.traces.mix import concatenate, cut, overlay, scaled, shifted
from kvtide.sim.traces.opening import FORMATS, open_trace
from kvtide.sim.traces.own import write_trace
from kvtide.sim.traces.request import Source, Stream, Trace, TraceRequest, answer_token
from kvtide.sim.traces.sources import PUBLIC, download_text
from kvtide.sim.traces.statistics import Statistics, statistics

__all__ = [
    "FORMATS",
    "PUBLIC",
    "Source",
    "Statistics",
    "Stream",
    "Trace",
    "TraceRequest",
    "answer_token",
    "concatenate",
    "cut",
    "download_text",
    "open_trace",
    "overlay",
    "scaled",
    "shifted",
    "statistics",
    "write_trace",
]
