"""Budget and arenas against a naive model: a dict of mappings and the stamp each handle carries."""

from __future__ import annotations

from collections import Counter
from typing import ClassVar

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvtide.errors import UsageError
from kvtide.memory import Budget, MemfdMemory, linux
from kvtide.testing.arenas import has_stamp, ids, stamp

NUM_HANDLES = 12
ARENA_SIZES = (6, 14)
ZEROED = -1


class MemoryMachine(RuleBasedStateMachine):
    """Handles are taken, mapped in one of two arenas, stamped, handed over, given back."""

    seen: ClassVar[Counter[str]] = Counter()

    @initialize()
    def build(self) -> None:
        size = linux.page_bytes()
        self.memory = MemfdMemory(NUM_HANDLES * size, size)
        self.budget = Budget(self.memory)
        self.arenas = [self.memory.reserve(n) for n in ARENA_SIZES]
        self.bases = [arena.base for arena in self.arenas]
        self.taken: set[int] = set()
        self.shown: dict[tuple[int, int], int] = {}
        self.stamps: dict[int, int] = {}
        self.next_stamp = 0
        self.take(NUM_HANDLES // 2)

    def idle(self) -> list[int]:
        return sorted(self.taken - set(self.shown.values()))

    def room(self, arena: int) -> list[int]:
        return [i for i in range(ARENA_SIZES[arena]) if (arena, i) not in self.shown]

    def used(self, arena: int) -> list[int]:
        return sorted(i for a, i in self.shown if a == arena)

    def draw_arena(self, data: st.DataObject, *, min_used: int) -> int:
        arenas = [a for a in range(len(ARENA_SIZES)) if len(self.used(a)) >= min_used]
        return data.draw(st.sampled_from(arenas))

    @rule(n=st.integers(0, NUM_HANDLES))
    def take(self, n: int) -> None:
        got = self.budget.take(n)
        assert (got is None) == (len(self.taken) + n > NUM_HANDLES)
        handles = set() if got is None else set(got.tolist())
        assert not handles & self.taken
        self.taken |= handles

    @precondition(lambda self: self.idle())
    @rule(data=st.data())
    def give(self, data: st.DataObject) -> None:
        handles = data.draw(st.lists(st.sampled_from(self.idle()), unique=True, min_size=1))
        self.budget.give(ids(*handles))
        self.taken -= set(handles)
        with pytest.raises(UsageError):
            self.budget.give(ids(*self.idle(), handles[0]))

    @precondition(lambda self: self.idle() and self.room(0))
    @rule(data=st.data(), arena=st.sampled_from(range(len(ARENA_SIZES))))
    def map(self, data: st.DataObject, arena: int) -> None:
        places = data.draw(st.permutations(self.room(arena)))
        handles = data.draw(st.permutations(self.idle()))
        n = data.draw(st.integers(1, min(len(places), len(handles))))
        self.arenas[arena].map(ids(*places[:n]), ids(*handles[:n]))
        for place, handle in zip(places[:n], handles[:n], strict=True):
            self.shown[arena, place] = handle
            if handle not in self.stamps:
                self.write(arena, place)

    def write(self, arena: int, place: int) -> None:
        self.next_stamp += 1
        stamp(self.arenas[arena], place, self.next_stamp)
        self.stamps[self.shown[arena, place]] = self.next_stamp

    @precondition(lambda self: self.shown)
    @rule(data=st.data())
    def unmap(self, data: st.DataObject) -> None:
        arena = self.draw_arena(data, min_used=1)
        used = st.sampled_from(self.used(arena))
        places = data.draw(st.lists(used, unique=True, min_size=1))
        self.arenas[arena].unmap(ids(*places))
        for place in places:
            del self.shown[arena, place]

    @precondition(lambda self: len(self.used(0)) > 1 or len(self.used(1)) > 1)
    @rule(data=st.data())
    def copy(self, data: st.DataObject) -> None:
        arena = self.draw_arena(data, min_used=2)
        source, target = data.draw(st.permutations(self.used(arena)))[:2]
        size = self.memory.granule_bytes
        self.arenas[arena].copy(ids(source * size), ids(target * size), size)
        shown = self.shown
        self.stamps[shown[arena, target]] = self.stamps[shown[arena, source]]

    @precondition(lambda self: self.shown)
    @rule(data=st.data())
    def zero(self, data: st.DataObject) -> None:
        arena = self.draw_arena(data, min_used=1)
        place = data.draw(st.sampled_from(self.used(arena)))
        size = self.memory.granule_bytes
        self.arenas[arena].zero(ids(place * size), size)
        self.stamps[self.shown[arena, place]] = ZEROED

    @precondition(lambda self: self.shown)
    @rule(data=st.data())
    def rewrite(self, data: st.DataObject) -> None:
        self.write(*data.draw(st.sampled_from(sorted(self.shown))))

    @rule(data=st.data(), arena=st.sampled_from(range(len(ARENA_SIZES))))
    def misuse_is_refused(self, data: st.DataObject, arena: int) -> None:
        """One bad pair beside a good one: both are refused, and the invariants see no change."""
        room, idle = self.room(arena), self.idle()
        bad = [(ARENA_SIZES[arena], 0), (-1, 0), (0, NUM_HANDLES)]
        bad += [(place, handle) for place in room[1:2] for handle in self.shown.values()]
        bad += [(place, handle) for place in self.used(arena) for handle in idle[1:2]]
        pairs = [*zip(room[:1], idle[:1], strict=False), data.draw(st.sampled_from(bad))]
        with pytest.raises(UsageError):
            self.arenas[arena].map(ids(*(p for p, _ in pairs)), ids(*(h for _, h in pairs)))
        with pytest.raises(UsageError):
            self.arenas[arena].unmap(ids(*self.used(arena), *(room[:1] or [-1])))

    @rule(arena=st.sampled_from(range(len(ARENA_SIZES))))
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
            places = self.used(index)
            assert arena.num_mapped == len(places)
            assert arena.handles_at(ids(*places)).tolist() == [self.shown[index, i] for i in places]

    @invariant()
    def bytes_are_what_was_written(self) -> None:
        for (arena, place), handle in self.shown.items():
            self.seen["granules read"] += 1
            if self.stamps[handle] == ZEROED:
                size = self.memory.granule_bytes
                whole = np.frombuffer(self.arenas[arena].buffer(), np.uint8)
                assert not whole[place * size : (place + 1) * size].any()
            else:
                assert has_stamp(self.arenas[arena], place, self.stamps[handle])

    def teardown(self) -> None:
        if hasattr(self, "memory"):
            self.memory.close()


def test_memory_agrees_with_the_model() -> None:
    MemoryMachine.seen.clear()
    run_state_machine_as_test(MemoryMachine)
    assert MemoryMachine.seen["granules read"] > 1000, "the machine hardly ever maps anything"
