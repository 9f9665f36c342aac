"""Two stages of a pipeline, whose pages differ in bytes, serve the same and are resized the same:
page ids stay equal, every byte stays right, and memory that refuses leaves the stage as it was.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, ClassVar

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tests.tiny import GRANULE, full, state, window

from kvtide import KVManager, Layout, MemfdMemory, Options
from kvtide.errors import CapacityError, DeviceError
from kvtide.sequence import Sequence, Status
from kvtide.sizing import least_pages
from kvtide.testing.engine import FakeEngine
from kvtide.testing.faults import FaultyMemory

BLOCK, MAX_TOKENS, MOST = 4, 40, 60

STAGES: dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]] = {
    "full + window": ((full(48), window(8, dim=48)), (full(96), window(8, dim=24))),
    "full + state": ((full(20), state(500, interval=4)), (full(64), state(130, interval=4))),
    "straddling": ((full(52), window(9, dim=100)), (full(200), window(9, dim=30))),
}


class Stage:
    """One stage's manager and the stand-in for its part of the model."""

    def __init__(self, specs: tuple[Any, ...]) -> None:
        layout = Layout.from_layers(dict(enumerate(specs)), block_tokens=BLOCK)
        self.least = {g.name: least_pages(g, MAX_TOKENS) for g in layout.groups}
        size = sum(-(-g.page_bytes * (MOST * 2 // 3) // GRANULE) for g in layout.groups)
        self.memory = FaultyMemory(MemfdMemory((size + 1) * GRANULE, GRANULE))
        self.kv = KVManager(
            layout,
            self.memory,
            max_sequences=4,
            max_tokens=MAX_TOKENS,
            options=Options(mode="static"),
        )
        self.engine = FakeEngine(self.kv, vocabulary=3)
        self.live: list[Sequence] = []

    def serve(self, prompt: list[int], steps: int, *, stay: bool) -> list[list[int]]:
        """A request; the ids it was given, or nothing if there was no room."""
        seq, given = self.kv.open(prompt), []
        try:
            if len(self.live) == 4 or not self.kv.admit([seq], min(BLOCK, seq.length)):
                return []
            self.live.append(seq)
            while seq.computed < min(len(prompt) + steps, MAX_TOKENS - 1):
                given.append(self.engine.step([seq], self.engine.chunks([seq], BLOCK)).tolist())
        except CapacityError:
            stay = False
        if not stay:
            self.close(seq)
        return given

    def close(self, seq: Sequence) -> None:
        self.kv.close([seq])
        self.live = [s for s in self.live if s.status is Status.ADMITTED]


class StagesMachine(RuleBasedStateMachine):
    """The same calls on both stages, in lockstep."""

    specs: ClassVar[tuple[tuple[Any, ...], tuple[Any, ...]]]
    seen: ClassVar[Counter[str]] = Counter()

    @initialize(pages=st.integers(12, 30))
    def build(self, pages: int) -> None:
        self.teardown()
        self.stages = [Stage(specs) for specs in self.specs]
        wanted = {name: max(n, pages) for name, n in self.stages[0].least.items()}
        assert [s.kv.resize(wanted) for s in self.stages] == [wanted, wanted]

    @rule(
        base=st.integers(0, 3),
        length=st.integers(1, 30),
        tail=st.lists(st.integers(0, 2), max_size=4),
        steps=st.integers(0, 8),
        stay=st.booleans(),
    )
    def serve(self, base: int, length: int, tail: list[int], steps: int, stay: bool) -> None:
        prompt = [base] * length + tail
        first, second = (s.serve(prompt, steps, stay=stay) for s in self.stages)
        assert first == second
        self.seen["served"] += bool(first)

    @precondition(lambda self: self.stages[0].live)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        at = data.draw(st.integers(0, len(self.stages[0].live) - 1))
        for stage in self.stages:
            stage.close(stage.live[at])

    @rule(data=st.data())
    def resize(self, data: st.DataObject) -> None:
        """Each stage says what it can do; the least is done on both."""
        wanted = {
            name: data.draw(st.integers(least, MOST), label=name)
            for name, least in self.stages[0].least.items()
        }
        offers = [s.kv.resize(wanted, dry_run=True) for s in self.stages]
        agreed = {name: min(offer[name] for offer in offers) for name in wanted}
        for stage in self.stages:
            assert stage.kv.resize(agreed) == agreed
            assert {n: p.num_usable for n, p in stage.kv.pools.items()} == agreed
            stage.engine.verify(stage.live)
        self.seen["resized"] += 1
        self.seen["in the way"] += agreed != wanted

    @rule(data=st.data(), call=st.integers(1, 8))
    def refuse(self, data: st.DataObject, call: int) -> None:
        """Memory refuses in the middle: the sizes are as before, or, if it came later, as asked."""
        stage = self.stages[0]
        wanted = {n: data.draw(st.integers(k, MOST), label=n) for n, k in stage.least.items()}
        wanted = stage.kv.resize(wanted, dry_run=True)
        before = {n: p.num_usable for n, p in stage.kv.pools.items()}
        stage.memory.fail_at = call
        try:
            stage.kv.resize(wanted)
        except DeviceError:
            wanted = before
            self.seen["faults"] += 1
        finally:
            stage.memory.fail_at = 0
        assert {n: p.num_usable for n, p in stage.kv.pools.items()} == wanted
        stage.kv.check()
        stage.engine.verify(stage.live)
        self.build(12)  # the stages have parted: a group would have stopped

    @invariant()
    def stages_are_equal(self) -> None:
        first, second = self.stages
        for stage in self.stages:
            stage.kv.check()
        assert first.kv.peer.digest_names == second.kv.peer.digest_names
        told = [s.kv.peer.digest(0) for s in self.stages]
        assert told[0] == told[1], first.kv.peer.digest_names
        for name, table in first.kv.tables.items():
            assert (table.rows == second.kv.tables[name].rows).all()

    def teardown(self) -> None:
        for stage in getattr(self, "stages", ()):
            stage.kv.shut_down()


@pytest.mark.parametrize("layout", STAGES)
def test_stages_stay_equal_whatever_their_pages_weigh(layout: str) -> None:
    seen: Counter[str] = Counter()
    machine = type("Machine", (StagesMachine,), {"specs": STAGES[layout], "seen": seen})
    run_state_machine_as_test(machine, settings=settings(stateful_step_count=30, deadline=None))
    assert min(seen[what] for what in ("served", "resized", "in the way", "faults")) > 0, seen
