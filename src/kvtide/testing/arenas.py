"""Conformance suite for arenas: subclass `ArenaTests`, make a memory, let pytest collect it.

An arena without bytes subclasses `ArenaBooksTests`, the part that asks for books and refusals only.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import resource
import signal
import warnings
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvtide.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy.typing as npt

    from kvtide.memory import Arena, Memory
    from kvtide.types import IntArray

NUM_GRANULES = 8


def ids(*values: int) -> IntArray:
    """The given numbers as an int64 array [n]."""
    return np.array(values, dtype=np.int64)


def view(arena: Arena) -> npt.NDArray[np.uint8]:
    """Bytes of the whole reservation, without a copy; only mapped parts may be touched."""
    return np.frombuffer(arena.buffer(), dtype=np.uint8)


def granule(arena: Arena, index: int) -> npt.NDArray[np.uint8]:
    """Bytes of one mapped granule, without a copy."""
    return view(arena)[index * arena.granule_bytes : (index + 1) * arena.granule_bytes]


def stamp(arena: Arena, index: int, value: int) -> None:
    """Fill a mapped granule with bytes only `value` gives, each position another one."""
    granule(arena, index)[:] = _pattern(arena.granule_bytes, value)


def has_stamp(arena: Arena, index: int, value: int) -> bool:
    """Whether a mapped granule still holds what `stamp` wrote."""
    return bool((granule(arena, index) == _pattern(arena.granule_bytes, value)).all())


def fate(action: Callable[[], object]) -> str:
    """What comes of `action`: "fault", the name of the exception it raises, or "" if all is well.

    Tried in a forked child, which sees this process's memory and shares what a memfd backs.
    """
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        # Newer Pythons warn about forking beside threads; this child only acts and exits.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        faulthandler.disable()
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        try:
            action()
        except BaseException as error:  # noqa: BLE001 (the child reports it and ends here)
            os.write(writer, type(error).__name__.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        raised = pipe.read()
    _, status = os.waitpid(child, 0)
    faulted = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGSEGV
    return "fault" if faulted else raised


def read_faults(address: int) -> bool:
    """Whether reading one byte at `address` kills a process; tried in a forked child."""
    return fate(lambda: ctypes.c_ubyte.from_address(address).value) == "fault"


def refuses(arena: Arena, misuse: Callable[[], object], *numbers: int) -> None:
    """Assert that `misuse` is a UsageError that names `numbers`, and that no mapping changed."""
    before = _mappings(arena)
    with pytest.raises(UsageError) as caught:
        misuse()
    for number in numbers:
        assert str(number) in str(caught.value), f"{caught.value} does not name {number}"
    assert _mappings(arena) == before


class ArenaBooksTests(ABC):
    """What every arena promises, with bytes or without: books, refusals, an end."""

    @abstractmethod
    def make_memory(self, num_granules: int) -> Memory:
        """A fresh memory of that many granules, the smaller the better."""

    @pytest.fixture
    def memory(self) -> Iterator[Memory]:
        """A memory of NUM_GRANULES granules, closed after the test."""
        memory = self.make_memory(NUM_GRANULES)
        yield memory
        memory.close()

    @pytest.fixture
    def arena(self, memory: Memory) -> Arena:
        """An arena of the same size, nothing mapped."""
        return memory.reserve(NUM_GRANULES)

    def test_sizes_are_as_asked(self, memory: Memory) -> None:
        """Reservations may be larger than the memory: any pool may take all of it, and round up."""
        assert memory.num_granules == NUM_GRANULES
        arena = memory.reserve(NUM_GRANULES * 2)
        assert (arena.num_granules, arena.granule_bytes) == (NUM_GRANULES * 2, memory.granule_bytes)
        assert arena.num_mapped == 0

    @pytest.mark.parametrize("size", [0, -1])
    def test_an_empty_reservation_is_refused(self, memory: Memory, size: int) -> None:
        """A reservation of no granules is a mistake in the configuration."""
        with pytest.raises(ConfigError, match=f"got {size}"):
            memory.reserve(size)

    def test_base_never_changes(self, arena: Arena) -> None:
        """Captured graphs have the base baked in."""
        base = arena.base
        arena.map(ids(0, 1, 5), ids(3, 4, 0))
        assert arena.base == base
        arena.unmap(ids(0, 5))
        assert arena.base == base
        arena.map(ids(5), ids(3))
        assert arena.base == base

    def test_granules_need_not_be_neighbours(self, arena: Arena) -> None:
        """Any granule can show any handle, in any order."""
        arena.map(ids(6, 0, 3, 2), ids(1, 7, 4, 3))
        assert arena.num_mapped == 4
        assert arena.handles_at(ids(0, 2, 3, 6)).tolist() == [7, 3, 4, 1]
        arena.unmap(ids(3, 0))
        assert arena.handles_at(ids(6, 2)).tolist() == [1, 3]

    def test_an_empty_call_does_nothing(self, arena: Arena) -> None:
        """Callers need not ask first whether there is anything to do."""
        arena.map(ids(), ids())
        arena.unmap(ids())
        arena.copy(ids(), ids(), 1)
        arena.zero(ids(), 1)
        assert arena.num_mapped == 0

    def test_map_refuses_misuse_and_changes_nothing(self, arena: Arena) -> None:
        """Each error names the offending number; the good pairs beside it are not mapped either."""
        arena.map(ids(2), ids(5))
        refuses(arena, lambda: arena.map(ids(0, 2), ids(0, 1)), 2, 5)
        refuses(arena, lambda: arena.map(ids(0, 1), ids(0, 5)), 5)
        refuses(arena, lambda: arena.map(ids(0, 8), ids(0, 1)), 8)
        refuses(arena, lambda: arena.map(ids(0, -1), ids(0, 1)), -1)
        refuses(arena, lambda: arena.map(ids(0, 1), ids(0, 8)), 8)
        refuses(arena, lambda: arena.map(ids(0, 0), ids(0, 1)), 0)
        refuses(arena, lambda: arena.map(ids(0, 1), ids(3, 3)), 3)
        refuses(arena, lambda: arena.map(ids(0, 1, 3), ids(3, 4)), 3, 2)

    def test_unmap_refuses_misuse_and_changes_nothing(self, arena: Arena) -> None:
        """The mapped granule beside the wrong one stays mapped."""
        arena.map(ids(2, 3), ids(5, 6))
        refuses(arena, lambda: arena.unmap(ids(2, 4)), 4)
        refuses(arena, lambda: arena.unmap(ids(2, 9)), 9)
        refuses(arena, lambda: arena.unmap(ids(2, 2)), 2)
        refuses(arena, lambda: arena.handles_at(ids(2, 4)), 4)

    def test_a_handle_shows_in_one_arena_only(self, memory: Memory, arena: Arena) -> None:
        """Two pools that see the same bytes would overwrite each other."""
        other = memory.reserve(4)
        arena.map(ids(0), ids(5))
        refuses(other, lambda: other.map(ids(1), ids(5)), 5)
        arena.unmap(ids(0))
        other.map(ids(1), ids(5))
        refuses(arena, lambda: arena.map(ids(0), ids(5)), 5)

    def test_copy_and_zero_refuse_what_is_not_backed(self, arena: Arena) -> None:
        """Ranges that leave the arena, touch an unmapped granule, or overlap."""
        size = arena.granule_bytes
        arena.map(ids(0, 1, 3), ids(0, 1, 3))
        refuses(arena, lambda: arena.zero(ids(2 * size - 1), 2), 2 * size - 1)
        refuses(arena, lambda: arena.zero(ids(8 * size - 1), 2), 8 * size - 1)
        refuses(arena, lambda: arena.zero(ids(-1), 1), -1)
        refuses(arena, lambda: arena.zero(ids(0), 0), 0)
        refuses(arena, lambda: arena.copy(ids(0), ids(2 * size), 1), 2 * size)
        refuses(arena, lambda: arena.copy(ids(4 * size), ids(0), 1), 4 * size)
        refuses(arena, lambda: arena.copy(ids(0, 1), ids(8), 1), 2, 1)
        refuses(arena, lambda: arena.copy(ids(0, 0), ids(8, 11), 4), 8, 11)
        refuses(arena, lambda: arena.copy(ids(0, 64), ids(61, 3 * size), 4), 64)
        refuses(arena, lambda: arena.copy(ids(0, 64), ids(67, 3 * size), 4), 64)

    def test_close_releases_the_handles_and_is_harmless_twice(
        self, memory: Memory, arena: Arena
    ) -> None:
        """A closed arena refuses everything; its granules can be shown elsewhere."""
        arena.map(ids(0, 1), ids(5, 6))
        arena.close()
        arena.close()
        assert arena.num_mapped == 0
        with pytest.raises(UsageError, match="closed"):
            arena.map(ids(0), ids(0))
        memory.reserve(4).map(ids(0, 1), ids(5, 6))

    def test_closing_the_memory_closes_its_arenas(self, memory: Memory, arena: Arena) -> None:
        """Nothing can be mapped or reserved afterwards."""
        memory.close()
        memory.close()
        with pytest.raises(UsageError, match="closed"):
            arena.unmap(ids())
        with pytest.raises(UsageError, match="closed"):
            memory.reserve(1)


class ArenaTests(ArenaBooksTests):
    """What every arena with bytes promises, the books included."""

    def test_buffer_shows_the_whole_reservation_at_the_base(self, arena: Arena) -> None:
        """Views over it are made once; mapping changes what they show, not where they are."""
        whole = view(arena)
        assert whole.nbytes == arena.num_granules * arena.granule_bytes
        assert whole.ctypes.data == arena.base
        arena.map(ids(2), ids(0))
        stamp(arena, 2, 5)
        assert whole[2 * arena.granule_bytes] == granule(arena, 2)[0]

    def test_bytes_follow_the_handle(self, memory: Memory, arena: Arena) -> None:
        """A granule is handed over, not re-created: the receiver sees the donor's bytes."""
        other = memory.reserve(4)
        arena.map(ids(1, 2, 5), ids(3, 4, 0))
        for index, value in ((1, 11), (2, 12), (5, 15)):
            stamp(arena, index, value)
        arena.unmap(ids(2, 5))
        other.map(ids(0, 3), ids(0, 4))
        assert has_stamp(other, 0, 15)
        assert has_stamp(other, 3, 12)
        assert has_stamp(arena, 1, 11)
        stamp(other, 3, 99)
        other.unmap(ids(3))
        arena.map(ids(7), ids(4))
        assert has_stamp(arena, 7, 99)

    def test_unbacked_addresses_fault(self, arena: Arena) -> None:
        """Before the map, after the unmap, and beside a mapped granule; never inside one."""
        size = arena.granule_bytes
        assert read_faults(arena.base)
        arena.map(ids(1), ids(0))
        assert not read_faults(arena.base + size)
        assert not read_faults(arena.base + 2 * size - 1)
        assert read_faults(arena.base + size - 1)
        assert read_faults(arena.base + 2 * size)
        arena.unmap(ids(1))
        assert read_faults(arena.base + size)

    def test_copy_moves_bytes_across_granule_borders(self, arena: Arena) -> None:
        """Pages may straddle granules; one source may feed several destinations."""
        size = arena.granule_bytes
        arena.map(ids(0, 1, 2, 3), ids(6, 2, 4, 0))
        for index in range(4):
            stamp(arena, index, index)
        want = view(arena)[: 4 * size].copy()
        length = size // 2
        for source, target in (
            (size - 100, 2 * size - 50),
            (size - 100, 3 * size),
            (7, 2 * size + length),
        ):
            want[target : target + length] = want[source : source + length].copy()
        arena.copy(
            ids(size - 100, size - 100, 7), ids(2 * size - 50, 3 * size, 2 * size + length), length
        )
        assert (view(arena)[: 4 * size] == want).all()

    def test_zero_clears_the_ranges_and_nothing_else(self, arena: Arena) -> None:
        """A fresh state page reads as zero whatever its granule held before."""
        size = arena.granule_bytes
        arena.map(ids(0, 1), ids(6, 2))
        stamp(arena, 0, 1)
        stamp(arena, 1, 2)
        want = view(arena)[: 2 * size].copy()
        want[3:13] = 0
        want[size - 5 : size + 5] = 0
        arena.zero(ids(size - 5, 3), 10)
        assert (view(arena)[: 2 * size] == want).all()

    def test_what_is_called_zero_is(self, memory: Memory, arena: Arena) -> None:
        """Never used, used, and discarded: a memory may say no, but not yes in vain."""
        handles = ids(*range(NUM_GRANULES))
        for value in (0, 1, 2):
            zero = memory.is_zero(handles)
            arena.map(handles, handles)
            for index in np.flatnonzero(zero):
                assert not granule(arena, int(index)).any()
            assert not memory.is_zero(handles).any()
            for index in handles.tolist():
                stamp(arena, index, value)
            arena.unmap(handles)
            assert not memory.is_zero(handles).any()
            memory.discard(handles[::2])


def _pattern(num_bytes: int, value: int) -> npt.NDArray[np.uint8]:
    words = np.arange(num_bytes, dtype=np.uint64) * np.uint64(2654435761) + np.uint64(
        value * 40503 + 1
    )
    return (words >> np.uint64(7)).astype(np.uint8)


def _mappings(arena: Arena) -> list[int | None]:
    found: list[int | None] = []
    for index in range(arena.num_granules):
        try:
            found.append(int(arena.handles_at(ids(index))[0]))
        except UsageError:
            found.append(None)
    return found
