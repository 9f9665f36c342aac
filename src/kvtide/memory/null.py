"""Memory without bytes: the same books and refusals, for simulation and control-plane tests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import numpy as np

from kvtide.errors import UsageError
from kvtide.memory.books import (
    DEFAULT_GRANULE_BYTES,
    ArenaBooks,
    check_idle,
    check_reservation,
    check_sizes,
)

if TYPE_CHECKING:
    import numpy.typing as npt

    from kvtide.types import IntArray


class NullArena:
    """Books of an address range; see `Arena`. Copying and zeroing only check their arguments."""

    def __init__(self, books: ArenaBooks) -> None:
        """Start with nothing mapped."""
        self._books = books

    @property
    def base(self) -> int:
        """Always 0: there are no bytes."""
        return 0

    @property
    def num_granules(self) -> int:
        """Size of the reservation, in granules."""
        return self._books.num_granules

    @property
    def granule_bytes(self) -> int:
        """Bytes per granule."""
        return self._books.granule_bytes

    @property
    def num_mapped(self) -> int:
        """Granules mapped now."""
        return self._books.num_mapped

    def map(self, granules: IntArray, handles: IntArray) -> None:
        """Record a map; see `Arena.map`."""
        self._books.set_mapped(*self._books.plan_map(granules, handles))

    def unmap(self, granules: IntArray) -> None:
        """Record an unmap; see `Arena.unmap`."""
        self._books.set_unmapped(*self._books.plan_unmap(granules))

    def handles_at(self, granules: IntArray) -> IntArray:
        """Handles mapped at these granules; see `Arena.handles_at`."""
        return self._books.handles_at(granules)

    def copy(self, src: IntArray, dst: IntArray, num_bytes: int) -> None:
        """Refuse what a real arena would refuse; see `Arena.copy`."""
        self._books.plan_copy(src, dst, num_bytes)

    def zero(self, at: IntArray, num_bytes: int) -> None:
        """Refuse what a real arena would refuse; see `Arena.zero`."""
        self._books.plan_zero(at, num_bytes)

    def buffer(self) -> memoryview:
        """Always UsageError: there are no bytes to show."""
        raise UsageError(
            f"a null arena of {self.num_granules} granules has no bytes; use MemfdMemory"
        )

    def check(self) -> None:
        """InvariantError if the books of this arena do not balance."""
        self._books.check()

    def close(self) -> None:
        """Forget all mappings. Harmless twice."""
        self._books.close()


class NullMemory:
    """Granules that exist only as numbers; see `Memory`. Any granule size from one byte will do."""

    def __init__(self, num_bytes: int, granule_bytes: int = DEFAULT_GRANULE_BYTES) -> None:
        """Count the granules. ConfigError if `granule_bytes` is not positive or not one fits."""
        self._num_granules = check_sizes(num_bytes, granule_bytes, unit=1)
        self._granule_bytes = granule_bytes
        self._bound = np.zeros(self._num_granules, dtype=np.bool_)
        self._arenas: list[NullArena] = []
        self._closed = False

    @property
    def granule_bytes(self) -> int:
        """Bytes per granule."""
        return self._granule_bytes

    @property
    def num_granules(self) -> int:
        """How many granules exist."""
        return self._num_granules

    def reserve(self, num_granules: int) -> NullArena:
        """Books for `num_granules` granules, more than exist if you like; maps none."""
        check_reservation(num_granules)
        if self._closed:
            raise UsageError(
                f"this memory of {self._num_granules} granules is closed; create a new one"
            )
        arena = NullArena(ArenaBooks(num_granules, self._granule_bytes, self._bound))
        self._arenas.append(arena)
        return arena

    def is_zero(self, handles: IntArray) -> npt.NDArray[np.bool_]:
        """False everywhere: what has no bytes takes the longer way; see `Memory.is_zero`."""
        return np.zeros(len(handles), np.bool_)

    def discard(self, handles: IntArray) -> None:
        """Only check the argument; see `Memory.discard`."""
        check_idle(handles, self._bound)

    def close(self) -> None:
        """Close every arena. Harmless twice."""
        while self._arenas:
            self._arenas.pop().close()
        self._closed = True

    def __enter__(self) -> Self:
        """Close at the end of the block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()
