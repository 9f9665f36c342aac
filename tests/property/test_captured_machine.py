"""One captured step over pools that trade granules: whatever happens between and during replays,
every word it reads is the one that was written.

The device lags behind the host by up to three steps. A graph looks pages up in tables it was sent
when its step began, so a page that moves, or changes hands, before its fence shows at once.
"""

from __future__ import annotations

from collections import Counter
from typing import ClassVar

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tests.graphs import Captured

from kvtide import CapacityError, Sequence
from kvtide.sequence import Status

POOLS = ("full", "window_8", "state")


class CapturedMachine(RuleBasedStateMachine):
    """Sequences come, decode in random batches and go; capacity moves; the device is late."""

    seen: ClassVar[Counter[str]] = Counter()

    @initialize(granules=st.integers(21, 40), padding=st.sampled_from([0, 1, 5]))
    def build(self, granules: int, padding: int) -> None:
        self.rig = Captured(granules=granules, padding=padding, pool_ratio=None)
        self.kv, self.device = self.rig.kv, self.rig.twin.device
        self.fixed = self.rig.addresses()
        self.row = self.rig.padding.row if self.rig.padding else -1
        self.seqs: list[Sequence] = []

    def those(self, *statuses: Status) -> list[Sequence]:
        return [seq for seq in self.seqs if seq.status in statuses]

    @precondition(lambda self: len(self.seqs) < 10)
    @rule(num=st.integers(1, 3))
    def start(self, num: int) -> None:
        new = [self.kv.open([len(self.seqs), self.rig.num_started + i]) for i in range(num)]
        self.rig.num_started += num
        self.seqs += new if self.kv.admit(new) else []

    @precondition(lambda self: self.those(Status.ADMITTED))
    @rule(data=st.data(), steps=st.integers(1, 9), lag=st.integers(0, 3))
    def decode(self, data: st.DataObject, steps: int, lag: int) -> None:
        running = self.those(Status.ADMITTED)
        batch = [running[i] for i in data.draw(st.permutations(range(len(running))))][:4]
        for _ in range(steps):
            batch = [seq for seq in batch if seq.length < self.kv.max_tokens]
            try:
                self.rig.twin.step(batch)
            except CapacityError:
                self.seen["refused"] += 1
                break
            while self.rig.guard.num_in_flight > lag:
                self.device.run(1)
        self.seen["in flight"] += self.rig.guard.num_in_flight > 0

    @precondition(lambda self: len(self.device))
    @rule(part=st.floats(0, 1))
    def run_device(self, part: float) -> None:
        self.device.run(int(part * len(self.device)))

    @rule(pools=st.permutations(POOLS), granules=st.integers(1, 12))
    def move(self, pools: list[str], granules: int) -> None:
        before = self.kv.moved
        self.rig.move(pools[0], pools[1], granules)
        flying = "in flight" if self.rig.guard.num_in_flight else "quiesced"
        self.seen[f"moved {flying}"] += self.kv.moved[0] - before[0]
        self.seen[f"relocated {flying}"] += self.kv.moved[1] - before[1]

    @rule()
    def quiesce(self) -> None:
        flying = self.rig.guard.num_in_flight
        assert self.rig.guard.quiesce() == (flying == 0)

    @precondition(lambda self: self.seqs)
    @rule(data=st.data(), num=st.integers(1, 4))
    def close(self, data: st.DataObject, num: int) -> None:
        order = data.draw(st.permutations(range(len(self.seqs))))
        gone = [self.seqs[i] for i in order[:num]]
        self.kv.close(gone)
        self.seqs = [seq for seq in self.seqs if seq not in gone]

    @precondition(lambda self: self.those(Status.ADMITTED))
    @rule(data=st.data())
    def suspend(self, data: st.DataObject) -> None:
        self.kv.suspend([data.draw(st.sampled_from(self.those(Status.ADMITTED)))])

    @precondition(lambda self: self.those(Status.SUSPENDED))
    @rule()
    def resume(self) -> None:
        self.seen["resumed"] += bool(self.kv.resume(self.those(Status.SUSPENDED)))

    @invariant()
    def nothing_a_graph_relies_on_has_changed(self) -> None:
        if not hasattr(self, "rig"):
            return
        assert self.rig.addresses() == self.fixed
        assert self.rig.padding is None or self.rig.padding.row == self.row
        self.kv.check()

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        try:
            self.device.run()
            assert self.rig.guard.quiesce()
            self.kv.check()
            self.seen["checked"] += self.rig.twin.num_checked
        finally:
            self.kv.shut_down()


def test_a_captured_step_reads_what_was_written() -> None:
    machine = type("Machine", (CapturedMachine,), {"seen": Counter()})
    examples = max(40, settings.default.max_examples // 4)
    run_state_machine_as_test(
        machine, settings=settings(max_examples=examples, stateful_step_count=40)
    )
    seen = machine.seen
    assert seen["checked"], "no replay was ever checked"
    if settings.default.derandomize:  # other runs may happen to explore less
        missing = {
            "in flight", "moved quiesced", "moved in flight", "relocated quiesced", "resumed",
        } - {name for name in seen if seen[name]}  # fmt: skip
        assert not missing, missing
