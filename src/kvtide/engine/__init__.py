"""Reference engine: continuous batching of unmodified transformers models over kvtide's pools.

`LLM` and `load_model` need torch and transformers. They are imported when first asked for, so that
the scheduler can be used without.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from kvtide.engine.request import (
    Delta,
    FinishReason,
    Request,
    RequestId,
    RequestOutput,
    SamplingParams,
)
from kvtide.engine.scheduler import Scheduler, SchedulerConfig
from kvtide.engine.stats import StepStats, Stopwatch

if TYPE_CHECKING:
    from kvtide.engine.llm import LLM, EngineConfig
    from kvtide.engine.load import Loaded, ModelUnavailableError, load_model

__all__ = [
    "LLM",
    "Delta",
    "EngineConfig",
    "FinishReason",
    "Loaded",
    "ModelUnavailableError",
    "Request",
    "RequestId",
    "RequestOutput",
    "SamplingParams",
    "Scheduler",
    "SchedulerConfig",
    "StepStats",
    "Stopwatch",
    "load_model",
]

_HOMES = {
    "LLM": "kvtide.engine.llm",
    "EngineConfig": "kvtide.engine.llm",
    "Loaded": "kvtide.engine.load",
    "ModelUnavailableError": "kvtide.engine.load",
    "load_model": "kvtide.engine.load",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
