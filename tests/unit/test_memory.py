"""Both arenas pass the shipped suite; beyond it: sizes, batching, rollback and the budget."""

from __future__ import annotations

import errno
import os
import resource
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvtide.errors import ConfigError, DeviceError, InvariantError, UsageError
from kvtide.memory import Budget, MemfdMemory, NullMemory, linux
from kvtide.testing.arenas import ArenaBooksTests, ArenaTests, has_stamp, ids, read_faults, stamp

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvtide.memory import Memory

OS_PAGE = linux.page_bytes()


class TestMemfdArena(ArenaTests):
    def make_memory(self, num_granules: int) -> Memory:
        return MemfdMemory(num_granules * OS_PAGE, OS_PAGE)


class TestMemfdArenaOfLargeGranules(ArenaTests):
    def make_memory(self, num_granules: int) -> Memory:
        return MemfdMemory(num_granules * 3 * OS_PAGE, 3 * OS_PAGE)


class TestMemfdArenaWhereTablesCannotBeCarried(ArenaTests):
    """Older kernels refuse: everything works as before, only slower."""

    @pytest.fixture(autouse=True)
    def refuse(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(linux, "carry", lambda source, target, num_bytes: False)

    def make_memory(self, num_granules: int) -> Memory:
        return MemfdMemory(num_granules * OS_PAGE, OS_PAGE)


class TestNullArena(ArenaBooksTests):
    def make_memory(self, num_granules: int) -> Memory:
        return NullMemory(num_granules * 100, 100)


@pytest.fixture
def memory() -> Iterator[MemfdMemory]:
    with MemfdMemory(8 * OS_PAGE, OS_PAGE) as memory:
        yield memory


class TestSizes:
    @pytest.mark.parametrize("granule_bytes", [0, -OS_PAGE, OS_PAGE - 1, OS_PAGE + 1])
    def test_memfd_granules_are_multiples_of_the_os_page(self, granule_bytes: int) -> None:
        with pytest.raises(
            ConfigError, match=rf"granule_bytes .*{OS_PAGE}, got {granule_bytes}; use {OS_PAGE}"
        ):
            MemfdMemory(8 * OS_PAGE, granule_bytes)

    @pytest.mark.parametrize("make", [MemfdMemory, NullMemory])
    @pytest.mark.parametrize("num_bytes", [0, -1, OS_PAGE - 1])
    def test_at_least_one_granule_must_fit(
        self, make: type[MemfdMemory | NullMemory], num_bytes: int
    ) -> None:
        with pytest.raises(
            ConfigError, match=f"num_bytes .*{OS_PAGE} bytes, got {num_bytes}; raise num_bytes"
        ):
            make(num_bytes, OS_PAGE)

    def test_null_granules_must_be_positive(self) -> None:
        with pytest.raises(ConfigError, match=r"granule_bytes .* got 0"):
            NullMemory(100, 0)

    @pytest.mark.parametrize("make", [MemfdMemory, NullMemory])
    def test_a_rest_smaller_than_a_granule_is_not_used(
        self, make: type[MemfdMemory | NullMemory]
    ) -> None:
        with make(3 * OS_PAGE - 1, OS_PAGE) as memory:
            assert memory.num_granules == 2

    def test_default_granule_is_what_cuda_maps(self) -> None:
        with MemfdMemory(5 << 20) as twin, NullMemory(5 << 20) as null:
            assert twin.granule_bytes == null.granule_bytes == 2 << 20
            assert twin.num_granules == null.num_granules == 2


class TestNull:
    def test_it_has_no_address_and_no_bytes(self) -> None:
        arena = NullMemory(100, 10).reserve(3)
        assert arena.base == 0
        with pytest.raises(UsageError, match="3 granules has no bytes"):
            arena.buffer()

    def test_it_simulates_memory_nobody_has(self) -> None:
        arena = NullMemory(1 << 50, 1 << 40).reserve(1024)
        arena.map(np.arange(1024), np.arange(1024))
        arena.copy(ids(0), ids(1 << 45), 1 << 44)
        assert arena.num_mapped == 1024
        arena.check()


class SystemCalls:
    """Counts maps and unmaps, and refuses one of them if asked to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, int]] = []
        self.refuse_at = -1
        self._show, self._hide = linux.map_file, linux.map_nothing
        monkeypatch.setattr(linux, "map_file", self.map_file)
        monkeypatch.setattr(linux, "map_nothing", self.map_nothing)

    def map_file(self, address: int, num_bytes: int, *, fd: int, offset: int) -> None:
        self._count("map", num_bytes)
        self._show(address, num_bytes, fd=fd, offset=offset)

    def map_nothing(self, address: int, num_bytes: int) -> None:
        self._count("unmap", num_bytes)
        self._hide(address, num_bytes)

    def _count(self, verb: str, num_bytes: int) -> None:
        if len(self.calls) == self.refuse_at:
            self.refuse_at = -1
            raise DeviceError(errno.ENOMEM, "refused by the test")
        self.calls.append((verb, num_bytes // OS_PAGE))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> SystemCalls:
    return SystemCalls(monkeypatch)


class TestBatching:
    def test_neighbours_in_address_and_file_are_one_call(
        self, memory: MemfdMemory, calls: SystemCalls
    ) -> None:
        arena = memory.reserve(8)
        arena.map(ids(3, 1, 2, 0), ids(7, 5, 6, 4))
        assert calls.calls == [("map", 4)]

    def test_a_break_in_either_is_another_call(
        self, memory: MemfdMemory, calls: SystemCalls
    ) -> None:
        arena = memory.reserve(8)
        arena.map(ids(0, 1, 2, 3, 5), ids(0, 1, 5, 6, 7))
        assert calls.calls == [("map", 2), ("map", 2), ("map", 1)]

    def test_unmap_batches_too(self, memory: MemfdMemory, calls: SystemCalls) -> None:
        arena = memory.reserve(8)
        arena.map(np.arange(6), np.arange(6))
        arena.unmap(ids(4, 2, 1))
        assert calls.calls == [("map", 6), ("unmap", 2), ("unmap", 1)]


class TestCarrying:
    def test_a_granule_that_changes_arenas_brings_its_pages_along(self) -> None:
        size = 2 << 20
        with MemfdMemory(4 * size, size) as memory:
            one, other = memory.reserve(4), memory.reserve(4)
            one.map(ids(0, 1), ids(2, 3))
            stamp(one, 1, 5)
            one.unmap(ids(1))
            other.map(ids(3), ids(3))
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            other.zero(ids(3 * size), size)
            faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        assert faults < 16  # a first touch of its pages costs size / OS_PAGE faults, or / 16 of it

    def test_bases_are_aligned_so_that_whole_tables_move(self, memory: MemfdMemory) -> None:
        assert [memory.reserve(n).base % (2 << 20) for n in (1, 3, 700)] == [0, 0, 0]

    def test_a_granule_keeps_its_bytes_while_no_arena_shows_it(self, memory: MemfdMemory) -> None:
        arena = memory.reserve(8)
        for turn in range(3):  # carried, parked, carried again
            arena.map(ids(turn), ids(5))
            assert turn == 0 or has_stamp(arena, turn, 7)
            stamp(arena, turn, 7)
            arena.unmap(ids(turn))
            assert read_faults(arena.base + turn * OS_PAGE)


class TestRefusedByTheSystem:
    def test_a_map_refused_half_way_is_undone(
        self, memory: MemfdMemory, calls: SystemCalls
    ) -> None:
        arena = memory.reserve(8)
        calls.refuse_at = 2
        with pytest.raises(DeviceError):
            arena.map(ids(0, 2, 4), ids(0, 1, 2))
        assert arena.num_mapped == 0
        assert all(read_faults(arena.base + granule * OS_PAGE) for granule in (0, 2, 4))
        arena.map(ids(0, 2, 4), ids(0, 1, 2))

    def test_an_unmap_refused_half_way_is_undone(
        self, memory: MemfdMemory, calls: SystemCalls
    ) -> None:
        arena = memory.reserve(8)
        arena.map(ids(0, 2), ids(5, 6))
        stamp(arena, 0, 1)
        calls.refuse_at = 3
        with pytest.raises(DeviceError):
            arena.unmap(ids(0, 2))
        assert has_stamp(arena, 0, 1)
        assert arena.handles_at(ids(0, 2)).tolist() == [5, 6]

    def test_the_error_says_what_failed_and_what_to_do(self) -> None:
        with pytest.raises(
            DeviceError, match=r"mmap of \d+ bytes failed: .*; raise vm\.max_map_count"
        ):
            linux.reserve(1 << 60)

    def test_a_file_the_system_cannot_hold_is_refused_and_closed(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: list[int] = []

        def ftruncate(fd: int, num_bytes: int) -> None:
            asked.append(fd)
            raise OSError(errno.EFBIG, f"{num_bytes} is too much")

        monkeypatch.setattr(os, "ftruncate", ftruncate)
        with pytest.raises(
            DeviceError, match=rf"ftruncate to {4 * OS_PAGE} bytes .*lower num_bytes"
        ):
            MemfdMemory(4 * OS_PAGE, OS_PAGE)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(asked[0])

    def test_a_system_without_memfd_is_told_what_to_use(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delattr(os, "memfd_create")
        with pytest.raises(DeviceError, match="use NullMemory"):
            MemfdMemory(4 * OS_PAGE, OS_PAGE)


class TestBudget:
    def test_take_is_all_or_nothing(self, memory: MemfdMemory) -> None:
        budget = Budget(memory)
        first = budget.take(5)
        assert first is not None
        assert budget.take(4) is None
        assert budget.num_free == 3
        rest = budget.take(3)
        assert rest is not None
        assert sorted([*first, *rest]) == list(range(8))
        assert budget.num_granules == 8
        budget.check()

    def test_nothing_can_be_taken_at_any_time(self, memory: MemfdMemory) -> None:
        budget = Budget(memory)
        budget.take(8)
        nothing = budget.take(0)
        assert nothing is not None
        assert nothing.tolist() == []

    def test_a_negative_number_is_refused(self, memory: MemfdMemory) -> None:
        with pytest.raises(UsageError, match="-1"):
            Budget(memory).take(-1)

    def test_granules_given_last_are_taken_first(self, memory: MemfdMemory) -> None:
        budget = Budget(memory)
        budget.take(4)
        budget.give(ids(1, 3))
        again = budget.take(2)
        assert again is not None
        assert again.tolist() == [1, 3]

    @pytest.mark.parametrize(
        ("handles", "named"), [([0, 5], 5), ([0, 8], 8), ([0, -1], -1), ([1, 1], 1)]
    )
    def test_give_refuses_misuse_and_changes_nothing(
        self, memory: MemfdMemory, handles: list[int], named: int
    ) -> None:
        budget = Budget(memory)
        budget.take(3)
        with pytest.raises(UsageError, match=str(named)):
            budget.give(ids(*handles))
        assert budget.num_free == 5
        budget.check()

    def test_giving_twice_is_refused(self, memory: MemfdMemory) -> None:
        budget = Budget(memory)
        handles = budget.take(2)
        assert handles is not None
        budget.give(handles)
        with pytest.raises(UsageError, match=r"handle 0 is not taken \(8 of 8 are free\)"):
            budget.give(handles)

    def test_check_finds_a_lost_granule(self, memory: MemfdMemory) -> None:
        budget = Budget(memory)
        budget.take(2)
        budget._is_taken[0] = False
        with pytest.raises(InvariantError, match="6 untaken \\+ 1 taken != 8"):
            budget.check()

    def test_check_finds_a_granule_that_is_free_twice(self, memory: MemfdMemory) -> None:
        budget = Budget(memory)
        budget._stack[0] = budget._stack[1]
        with pytest.raises(InvariantError, match="listed twice"):
            budget.check()


class TestArenaCheck:
    def test_it_finds_a_wrong_count(self, memory: MemfdMemory) -> None:
        arena = memory.reserve(4)
        arena.map(ids(0, 1), ids(0, 1))
        arena.check()
        arena._books.num_mapped = 1
        with pytest.raises(InvariantError, match="num_mapped is 1, but 2"):
            arena.check()

    def test_it_finds_a_handle_shown_without_its_flag(self, memory: MemfdMemory) -> None:
        arena = memory.reserve(4)
        arena.map(ids(0, 1), ids(0, 1))
        memory._bound[1] = False
        with pytest.raises(InvariantError, match="flagged as bound"):
            arena.check()
