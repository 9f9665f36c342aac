"""kvtide: the KV-cache memory manager. Several caches, one memory, capacity that moves while
serving.
"""

from kvtide.capacity import Holder, Progress
from kvtide.config import Options
from kvtide.errors import (
    CapacityError,
    ConfigError,
    DeviceError,
    InvariantError,
    KvError,
    StaleGraphError,
    UsageError,
)
from kvtide.guard import GraphGuard
from kvtide.layout import Layout, Parallel, Speculative
from kvtide.manager import KVManager, Step
from kvtide.media import Media
from kvtide.memory import MemfdMemory, NullMemory
from kvtide.rebalance import Move
from kvtide.sequence import Answer, Batch, Sequence
from kvtide.types import Origin, Scope

__all__ = [
    "Answer",
    "Batch",
    "CapacityError",
    "ConfigError",
    "DeviceError",
    "GraphGuard",
    "Holder",
    "InvariantError",
    "KVManager",
    "KvError",
    "Layout",
    "Media",
    "MemfdMemory",
    "Move",
    "NullMemory",
    "Options",
    "Origin",
    "Parallel",
    "Progress",
    "Scope",
    "Sequence",
    "Speculative",
    "StaleGraphError",
    "Step",
    "UsageError",
]

__version__ = "0.1.0"
