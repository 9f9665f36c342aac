"""The two protocols: physical granules of one tier, and address ranges that show them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from kvtide.types import IntArray


class Arena(Protocol):
    """A reserved address range whose base never changes while granules come and go under it.

    Granules are numbered 0..num_granules-1 from the base. A mapped granule shows the bytes of one
    physical granule of the arena's memory; touching any other address faults. Every verb is all or
    nothing: after an error the arena is as it was. Not thread-safe.
    """

    @property
    def base(self) -> int:
        """Address of byte 0; constant until `close`. 0 if there are no bytes."""
        ...

    @property
    def num_granules(self) -> int:
        """Size of the reservation, in granules."""
        ...

    @property
    def granule_bytes(self) -> int:
        """Bytes per granule, as in the memory."""
        ...

    @property
    def num_mapped(self) -> int:
        """Granules mapped now."""
        ...

    def map(self, granules: IntArray, handles: IntArray) -> None:
        """Show the physical granule `handles[i]` at `granules[i]`, with the bytes it already has.

        Both are int64 [n], in any order. UsageError if a granule is mapped, a handle is mapped
        here or in another arena, or either is out of range or named twice. DeviceError if the
        system refuses.
        """
        ...

    def unmap(self, granules: IntArray) -> None:
        """Make these granules (int64 [n]) fault on touch; their bytes stay with their handles.

        The caller makes sure that nothing still reads them (the fence). UsageError if one is not
        mapped, out of range or named twice.
        """
        ...

    def handles_at(self, granules: IntArray) -> IntArray:
        """Handles mapped at these granules, int64 [n], a copy. UsageError as for `unmap`."""
        ...

    def copy(self, src: IntArray, dst: IntArray, num_bytes: int) -> None:
        """Copy n ranges of `num_bytes` from byte offsets `src` to `dst` (int64 [n]) in this arena.

        A source may be read several times. UsageError if a range leaves the arena or touches an
        unmapped granule, or if a destination overlaps another destination or any source.
        """
        ...

    def zero(self, at: IntArray, num_bytes: int) -> None:
        """Set n ranges of `num_bytes` at byte offsets `at` (int64 [n]) to 0.

        UsageError as for `copy`.
        """
        ...

    def buffer(self) -> memoryview:
        """All bytes of the reservation, without a copy; format "B", writable.

        Only mapped parts may be touched, and none after `close`: the others fault.
        UsageError if the arena has no bytes.
        """
        ...

    def close(self) -> None:
        """Unmap everything and give the address range back. A second call does nothing."""
        ...


class Memory(Protocol):
    """The physical granules of one tier, named by handles 0..num_granules-1.

    A handle is mapped in at most one arena at a time. Who may use which handle is the budget's
    business; a memory only refuses to show one in two places.
    """

    @property
    def granule_bytes(self) -> int:
        """Bytes per granule: the smallest piece that can be mapped."""
        ...

    @property
    def num_granules(self) -> int:
        """How many granules exist."""
        ...

    def reserve(self, num_granules: int) -> Arena:
        """Reserve addresses for `num_granules` granules; maps none. ConfigError if not positive."""
        ...

    def is_zero(self, handles: IntArray) -> npt.NDArray[np.bool_]:
        """Which of these granules are known to be all zeros, bool [n]: nobody could write to them
        since they exist or were discarded. False where the memory does not know.
        """
        ...

    def discard(self, handles: IntArray) -> None:
        """Give the physical memory of these unmapped granules back to the system; bytes are lost.

        They may be mapped again at any time and then show zeros or new memory's bytes.
        UsageError if one is mapped.
        """
        ...

    def close(self) -> None:
        """Close every arena, then release the physical memory. A second call does nothing."""
        ...
