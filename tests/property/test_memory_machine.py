"""Budget and arenas against a naive model: a dict of mappings and the stamp each handle carries."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvtide.errors import UsageError
from kvtide.memory import Budget, MemfdMemory, linux
from kvtide.testing.arenas import has_stamp, ids, stamp

NUM_HANDLES = 12
ARENA_SIZES = (5, 12, 16)
Place = tuple[int, int]


class MemoryMachine(RuleBasedStateMachine):
    """Handles are taken, mapped in one of three arenas, stamped, handed over, given back."""

    @initialize()
    def build(self) -> None:
        size = linux.page_bytes()
        self.memory = MemfdMemory(NUM_HANDLES * size, size)
        self.budget = Budget(self.memory)
        self.arenas = [self.memory.reserve(n) for n in ARENA_SIZES]
        self.bases = [arena.base for arena in self.arenas]
        self.taken: set[int] = set()
        self.shown: dict[Place, int] = {}
        self.stamps: dict[int, int] = {}
        self.next_stamp = 0

    def free_places(self, arena: int) -> list[int]:
        return [i for i in range(ARENA_SIZES[arena]) if (arena, i) not in self.shown]

    def used_places(self, arena: int) -> list[int]:
        return [i for a, i in self.shown if a == arena]

    @rule(n=st.integers(0, NUM_HANDLES))
    def take(self, n: int) -> None:
        got = self.budget.take(n)
        assert (got is None) == (len(self.taken) + n > NUM_HANDLES)
        handles = set() if got is None else set(got.tolist())
        assert not handles & self.taken
        self.taken |= handles

    @rule(data=st.data())
    def give_unmapped(self, data: st.DataObject) -> None:
        idle = sorted(self.taken - set(self.shown.values()))
        handles = data.draw(st.lists(st.sampled_from(idle), unique=True)) if idle else []
        self.budget.give(ids(*handles))
        self.taken -= set(handles)

    @rule(data=st.data(), arena=st.integers(0, len(ARENA_SIZES) - 1))
    def map(self, data: st.DataObject, arena: int) -> None:
        idle = sorted(self.taken - set(self.shown.values()))
        room = self.free_places(arena)
        n = data.draw(st.integers(0, min(len(idle), len(room))))
        handles = data.draw(st.permutations(idle))[:n]
        places = data.draw(st.permutations(room))[:n]
        self.arenas[arena].map(ids(*places), ids(*handles))
        self.shown.update({(arena, i): handle for i, handle in zip(places, handles, strict=True)})

    @rule(data=st.data(), arena=st.integers(0, len(ARENA_SIZES) - 1))
    def unmap(self, data: st.DataObject, arena: int) -> None:
        used = self.used_places(arena)
        places = data.draw(st.lists(st.sampled_from(used), unique=True)) if used else []
        self.arenas[arena].unmap(ids(*places))
        for place in places:
            del self.shown[arena, place]

    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        if self.shown:
            arena, place = data.draw(st.sampled_from(sorted(self.shown)))
            self.next_stamp += 1
            stamp(self.arenas[arena], place, self.next_stamp)
            self.stamps[self.shown[arena, place]] = self.next_stamp

    @rule(data=st.data(), arena=st.integers(0, len(ARENA_SIZES) - 1))
    def copy(self, data: st.DataObject, arena: int) -> None:
        used = [i for i in self.used_places(arena) if self.shown[arena, i] in self.stamps]
        if len(used) > 1:
            source, target = data.draw(st.permutations(used))[:2]
            size = self.memory.granule_bytes
            self.arenas[arena].copy(ids(source * size), ids(target * size), size)
            self.stamps[self.shown[arena, target]] = self.stamps[self.shown[arena, source]]

    @rule(data=st.data(), arena=st.integers(0, len(ARENA_SIZES) - 1))
    def zero(self, data: st.DataObject, arena: int) -> None:
        used = self.used_places(arena)
        if used:
            place = data.draw(st.sampled_from(used))
            size = self.memory.granule_bytes
            self.arenas[arena].zero(ids(place * size), size)
            self.stamps.pop(self.shown[arena, place], None)
            assert not np.frombuffer(self.arenas[arena].buffer(), np.uint8)[
                place * size : (place + 1) * size
            ].any()

    @rule(data=st.data(), arena=st.integers(0, len(ARENA_SIZES) - 1))
    def misuse_is_refused(self, data: st.DataObject, arena: int) -> None:
        """One bad pair among good ones: everything is refused, and the invariants see no change."""
        idle = sorted(self.taken - set(self.shown.values()))
        room = self.free_places(arena)
        good = list(zip(room[:1], idle[:1], strict=False))
        bad = [(ARENA_SIZES[arena], 0), (-1, 0), (0, NUM_HANDLES)]
        bad += [(place, handle) for place in room[1:2] for handle in self.shown.values()]
        bad += [(place, handle) for place in self.used_places(arena) for handle in idle[1:2]]
        pairs = [*good, data.draw(st.sampled_from(bad))]
        with pytest.raises(UsageError):
            self.arenas[arena].map(ids(*(p for p, _ in pairs)), ids(*(h for _, h in pairs)))
        with pytest.raises(UsageError):
            self.arenas[arena].unmap(
                ids(*self.used_places(arena), *self.free_places(arena)[:1], -1)
            )

    @rule(arena=st.integers(0, len(ARENA_SIZES) - 1))
    def close_and_reserve_again(self, arena: int) -> None:
        self.arenas[arena].close()
        self.arenas[arena] = self.memory.reserve(ARENA_SIZES[arena])
        self.bases[arena] = self.arenas[arena].base
        self.shown = {place: handle for place, handle in self.shown.items() if place[0] != arena}

    @invariant()
    def books_balance(self) -> None:
        self.budget.check()
        assert self.budget.num_free == NUM_HANDLES - len(self.taken)
        for index, arena in enumerate(self.arenas):
            arena.check()
            assert arena.base == self.bases[index]
            places = self.used_places(index)
            assert arena.num_mapped == len(places)
            assert arena.handles_at(ids(*places)).tolist() == [self.shown[index, i] for i in places]

    @invariant()
    def bytes_are_what_was_written(self) -> None:
        for (arena, place), handle in self.shown.items():
            if handle in self.stamps:
                assert has_stamp(self.arenas[arena], place, self.stamps[handle])

    def teardown(self) -> None:
        self.memory.close()


TestMemoryMachine = MemoryMachine.TestCase
