"""Bytes at addresses that never move: arenas, granules under them, the budget that shares those."""

from kvtide.memory.arena import Arena, Memory
from kvtide.memory.books import DEFAULT_GRANULE_BYTES
from kvtide.memory.budget import Budget
from kvtide.memory.memfd import MemfdArena, MemfdMemory
from kvtide.memory.null import NullArena, NullMemory

__all__ = [
    "DEFAULT_GRANULE_BYTES",
    "Arena",
    "Budget",
    "MemfdArena",
    "MemfdMemory",
    "Memory",
    "NullArena",
    "NullMemory",
]
