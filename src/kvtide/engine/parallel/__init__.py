"""The engine on several ranks: a model split by tensors, by layers, or by requests."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from kvtide.engine.parallel.alone import Alone, Place

if TYPE_CHECKING:
    from kvtide.engine.parallel.group import DataRanks, TensorRanks
    from kvtide.engine.parallel.pipeline import PipelineRanks

__all__ = ["Alone", "DataRanks", "PipelineRanks", "Place", "TensorRanks"]

_HOMES = {
    "DataRanks": "kvtide.engine.parallel.group",
    "PipelineRanks": "kvtide.engine.parallel.pipeline",
    "TensorRanks": "kvtide.engine.parallel.group",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
