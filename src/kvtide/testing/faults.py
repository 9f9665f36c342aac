"""Memory that refuses at a chosen moment: what is half done must be undone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtide.errors import DeviceError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from kvtide.memory import Arena, Memory
    from kvtide.types import IntArray


class FaultyMemory:
    """A memory whose call number `fail_at` (map, unmap, copy, zero and discard, counted together)
    raises DeviceError. Numbers start at 1; 0: none fails. Set it to arm it anew.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._fail_at = 0
        self.calls = 0
        """Calls since it was armed."""

    @property
    def granule_bytes(self) -> int:
        """Bytes per granule."""
        return self._memory.granule_bytes

    @property
    def num_granules(self) -> int:
        """How many granules exist."""
        return self._memory.num_granules

    @property
    def fail_at(self) -> int:
        """The call that fails."""
        return self._fail_at

    @fail_at.setter
    def fail_at(self, number: int) -> None:
        self._fail_at, self.calls = number, 0

    def reserve(self, num_granules: int) -> FaultyArena:
        """An arena whose calls are counted here."""
        return FaultyArena(self._memory.reserve(num_granules), self)

    def is_zero(self, handles: IntArray) -> npt.NDArray[np.bool_]:
        """As the memory itself."""
        return self._memory.is_zero(handles)

    def discard(self, handles: IntArray) -> None:
        """Counted, then as the memory itself."""
        self.count("discard")
        self._memory.discard(handles)

    def close(self) -> None:
        """Close the memory."""
        self._memory.close()

    def count(self, verb: str) -> None:
        """One more call; DeviceError if it is the one that fails."""
        self.calls += 1
        if self.calls == self._fail_at:
            raise DeviceError(12, f"{verb} failed: call {self.calls} was told to")


class FaultyArena:
    """An arena that counts its calls with its memory; see `Arena`."""

    def __init__(self, arena: Arena, memory: FaultyMemory) -> None:
        self._arena = arena
        self._memory = memory

    @property
    def base(self) -> int:
        """Address of byte 0."""
        return self._arena.base

    @property
    def num_granules(self) -> int:
        """Size of the reservation, in granules."""
        return self._arena.num_granules

    @property
    def granule_bytes(self) -> int:
        """Bytes per granule."""
        return self._arena.granule_bytes

    @property
    def num_mapped(self) -> int:
        """Granules mapped now."""
        return self._arena.num_mapped

    def map(self, granules: IntArray, handles: IntArray) -> None:
        """Counted, then as the arena itself."""
        self._memory.count("map")
        self._arena.map(granules, handles)

    def unmap(self, granules: IntArray) -> None:
        """Counted, then as the arena itself."""
        self._memory.count("unmap")
        self._arena.unmap(granules)

    def handles_at(self, granules: IntArray) -> IntArray:
        """As the arena itself."""
        return self._arena.handles_at(granules)

    def copy(self, src: IntArray, dst: IntArray, num_bytes: int) -> None:
        """Counted, then as the arena itself."""
        self._memory.count("copy")
        self._arena.copy(src, dst, num_bytes)

    def zero(self, at: IntArray, num_bytes: int) -> None:
        """Counted, then as the arena itself."""
        self._memory.count("zero")
        self._arena.zero(at, num_bytes)

    def buffer(self) -> memoryview:
        """As the arena itself."""
        return self._arena.buffer()

    def close(self) -> None:
        """As the arena itself."""
        self._arena.close()
