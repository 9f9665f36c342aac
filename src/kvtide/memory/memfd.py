"""CPU twin of device memory: one memfd, real remapping, real faults at unbacked addresses."""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING, Self

import numpy as np

from kvtide.errors import DeviceError, UsageError
from kvtide.memory import linux
from kvtide.memory.books import (
    DEFAULT_GRANULE_BYTES,
    ArenaBooks,
    check_idle,
    check_reservation,
    check_sizes,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy.typing as npt

    from kvtide.types import IntArray


def runs(granules: IntArray, handles: IntArray) -> Iterator[tuple[int, int, int]]:
    """(granule, handle, count) of each stretch in which both go up by one; granules ascend."""
    if not len(granules):
        return
    breaks = np.flatnonzero((np.diff(granules) != 1) | (np.diff(handles) != 1)) + 1
    starts = np.concatenate(([0], breaks))
    counts = np.diff(np.concatenate((starts, [len(granules)])))
    yield from zip(
        granules[starts].tolist(), handles[starts].tolist(), counts.tolist(), strict=True
    )


class MemfdArena:
    """Address range over a memfd; see `Arena`. Neighbours are mapped by one system call.

    Handles that no arena shows keep their page tables at `parking`, where the whole file is mapped:
    carried from there and back, a granule costs microseconds, not a fault for each of its pages.
    """

    def __init__(
        self, fd: int, books: ArenaBooks, parking: int, shown: npt.NDArray[np.bool_]
    ) -> None:
        """Reserve the addresses; all but `books` stays the memory's, whose handles are marked in
        `shown` when mapped. DeviceError if the system refuses.
        """
        self._fd = fd
        self._parking = parking
        self._shown = shown
        self._books = books
        self._num_bytes = books.num_granules * books.granule_bytes
        self._base = linux.reserve(self._num_bytes)

    @property
    def base(self) -> int:
        """Address of byte 0; constant until `close`."""
        return self._base

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
        """Show the physical granule `handles[i]` at `granules[i]`; see `Arena.map`."""
        granules, handles = self._books.plan_map(granules, handles)
        self._shown[handles] = True
        self._remap(runs(granules, handles), apply=self._show, undo=self._hide)
        self._books.set_mapped(granules, handles)

    def unmap(self, granules: IntArray) -> None:
        """Make these granules fault on touch; see `Arena.unmap`."""
        granules, handles = self._books.plan_unmap(granules)
        self._remap(runs(granules, handles), apply=self._hide, undo=self._show)
        self._books.set_unmapped(granules, handles)

    def handles_at(self, granules: IntArray) -> IntArray:
        """Handles mapped at these granules; see `Arena.handles_at`."""
        return self._books.handles_at(granules)

    def copy(self, src: IntArray, dst: IntArray, num_bytes: int) -> None:
        """Copy n ranges of `num_bytes` between byte offsets; see `Arena.copy`."""
        src, dst = self._books.plan_copy(src, dst, num_bytes)
        for source, target in zip(
            (src + self._base).tolist(), (dst + self._base).tolist(), strict=True
        ):
            ctypes.memmove(target, source, num_bytes)

    def zero(self, at: IntArray, num_bytes: int) -> None:
        """Set n ranges of `num_bytes` to 0; see `Arena.zero`."""
        for address in (self._books.plan_zero(at, num_bytes) + self._base).tolist():
            ctypes.memset(address, 0, num_bytes)

    def buffer(self) -> memoryview:
        """All bytes of the reservation, without a copy; see `Arena.buffer`."""
        self._books.require_open()
        whole = (ctypes.c_ubyte * self._num_bytes).from_address(self._base)
        return memoryview(whole).cast("B")

    def check(self) -> None:
        """InvariantError if the books of this arena do not balance."""
        self._books.check()

    def close(self) -> None:
        """Give the address range back; its handles can be mapped elsewhere. Harmless twice."""
        if self._books.close():
            linux.release(self._base, self._num_bytes)

    def _show(self, granule: int, handle: int, count: int) -> None:
        at, parked, num_bytes = self._place(granule, handle, count)
        linux.map_file(at, num_bytes, fd=self._fd, offset=parked - self._parking)
        if not linux.carry(parked, at, num_bytes):
            linux.map_file(at, num_bytes, fd=self._fd, offset=parked - self._parking)

    def _hide(self, granule: int, handle: int, count: int) -> None:
        at, parked, num_bytes = self._place(granule, handle, count)
        if not linux.carry(at, parked, num_bytes):
            linux.map_file(parked, num_bytes, fd=self._fd, offset=parked - self._parking)
        linux.map_nothing(at, num_bytes)

    def _place(self, granule: int, handle: int, count: int) -> tuple[int, int, int]:
        """Address of the granules, address where their handles are parked, bytes."""
        size = self.granule_bytes
        return self._base + granule * size, self._parking + handle * size, count * size

    @staticmethod
    def _remap(
        todo: Iterator[tuple[int, int, int]],
        *,
        apply: Callable[[int, int, int], None],
        undo: Callable[[int, int, int], None],
    ) -> None:
        done: list[tuple[int, int, int]] = []
        for run in todo:
            try:
                apply(*run)
            except DeviceError:
                for earlier in reversed(done):
                    undo(*earlier)
                raise
            done.append(run)


class MemfdMemory:
    """Granules of one memfd; see `Memory`.

    Physical memory is used where bytes were written, and kept until `discard` or `close`.
    """

    def __init__(self, num_bytes: int, granule_bytes: int = DEFAULT_GRANULE_BYTES) -> None:
        """Create the file.

        ConfigError unless `granule_bytes` is a multiple of the OS page and one granule fits.
        """
        self._num_granules = check_sizes(num_bytes, granule_bytes, unit=linux.page_bytes())
        self._granule_bytes = granule_bytes
        self._bound = np.zeros(self._num_granules, dtype=np.bool_)
        self._shown = np.zeros(self._num_granules, dtype=np.bool_)
        self._arenas: list[MemfdArena] = []
        self._fd = linux.create_file("kvtide", self._num_granules * granule_bytes)
        self._parking = self._park()

    def _park(self) -> int:
        """Address at which the whole file is mapped for handles that no arena shows."""
        num_bytes = self._num_granules * self._granule_bytes
        try:
            address = linux.reserve(num_bytes)
            linux.map_file(address, num_bytes, fd=self._fd, offset=0)
        except BaseException:
            os.close(self._fd)
            raise
        return address

    @property
    def granule_bytes(self) -> int:
        """Bytes per granule."""
        return self._granule_bytes

    @property
    def num_granules(self) -> int:
        """How many granules exist."""
        return self._num_granules

    def reserve(self, num_granules: int) -> MemfdArena:
        """Reserve addresses for `num_granules` granules, more than exist if you like; maps none."""
        check_reservation(num_granules)
        if self._fd < 0:
            raise UsageError(
                f"this memory of {self._num_granules} granules is closed; create a new one"
            )
        books = ArenaBooks(num_granules, self._granule_bytes, self._bound)
        arena = MemfdArena(self._fd, books, self._parking, self._shown)
        self._arenas.append(arena)
        return arena

    def is_zero(self, handles: IntArray) -> npt.NDArray[np.bool_]:
        """Those that no arena showed since they exist or were discarded; see `Memory.is_zero`."""
        return ~self._shown[handles]

    def discard(self, handles: IntArray) -> None:
        """Punch these granules out of the file; see `Memory.discard`. They read as zeros next."""
        handles = check_idle(handles, self._bound)
        size = self._granule_bytes
        for _, handle, count in runs(handles, handles):
            linux.punch(self._fd, handle * size, count * size)
            self._shown[handle : handle + count] = False

    def close(self) -> None:
        """Close every arena and the file. Views of their buffers must not be touched afterwards."""
        while self._arenas:
            self._arenas.pop().close()
        if self._fd >= 0:
            linux.release(self._parking, self._num_granules * self._granule_bytes)
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        """Close at the end of the block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()
