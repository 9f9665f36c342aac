"""The manager over memfd: random lives of sequences, capacity on the move, every byte checked.

`FakeEngine` verifies in each step that the pages hold what the sequences were promised; the model
here knows the tokens, which prefixes anyone has computed, and what a refusal must leave alone.
"""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import hypothesis.strategies as st
import numpy as np
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
from tests.property.manager_layouts import (
    BASES,
    BLOCK,
    CONTEXT,
    LAYOUTS,
    MAX_SEQUENCES,
    MAX_TOKENS,
    PROMPTS,
    SCOPES,
    least_granules,
)
from tests.property.naive_matches import NaiveMatches
from tests.tiny import GRANULE

from kvtide import (
    CapacityError,
    ConfigError,
    DeviceError,
    KVManager,
    Layout,
    MemfdMemory,
    Move,
    Options,
    Scope,
    Sequence,
    UsageError,
)
from kvtide.sequence import Status
from kvtide.testing.engine import FakeEngine
from kvtide.testing.faults import FaultyMemory

if TYPE_CHECKING:
    from collections.abc import Generator


class ManagerMachine(RuleBasedStateMachine):
    """One manager; `specs` and `mode` are set by the subclass under test."""

    specs: ClassVar[tuple[Any, ...]] = LAYOUTS["full"]
    context: ClassVar[int] = 1
    mode: ClassVar[str] = "elastic"
    seen: ClassVar[Counter[str]] = Counter()

    @initialize(spare=st.sampled_from([0, 1, 3, 12, 40]))
    def build(self, spare: int) -> None:
        layout = Layout.from_layers(
            dict(enumerate(self.specs)), block_tokens=BLOCK, context=self.context
        )
        num = least_granules(layout) + spare
        self.memory = FaultyMemory(MemfdMemory(num * GRANULE, GRANULE))
        self.refusal = 0
        self.kv = KVManager(
            layout,
            self.memory,
            max_sequences=MAX_SEQUENCES,
            max_tokens=MAX_TOKENS,
            options=Options(mode=self.mode),  # type: ignore[arg-type]
        )
        self.engine = FakeEngine(self.kv, vocabulary=3)
        self.model = NaiveMatches(BLOCK)
        self.has_state = any(group.is_state for group in layout.groups)
        self.all_full = len(layout.groups) == 1 and not self.has_state and "full" in self.kv.pools
        self.known: dict[Sequence, list[int]] = {}
        self.fresh: set[Sequence] = set()  # admitted since the last reset: they publish
        self.told: list[list[int]] = []
        self.moved = self.reset_in_flight = False

    # -- helpers -------------------------------------------------------------------------------

    @contextmanager
    def refusing(self) -> Generator[None]:
        """Within, the memory refuses the call that was drawn, if it comes to it."""
        self.memory.fail_at, self.refusal = self.refusal, 0
        try:
            yield
        finally:
            self.memory.fail_at = 0

    def those(self, *statuses: Status) -> list[Sequence]:
        return [seq for seq in self.known if seq.status in statuses]

    @property
    def running(self) -> list[Sequence]:
        return self.those(Status.ADMITTED)

    def some(self, data: st.DataObject, seqs: list[Sequence]) -> list[Sequence]:
        """One to three of `seqs`, each once."""
        order = data.draw(st.permutations(range(len(seqs))))
        return [seqs[i] for i in order[: data.draw(st.integers(1, 3))]]

    def holdings(self) -> dict[Sequence, tuple[Any, ...]]:
        """What every sequence has, in numbers: pages may have been renamed."""
        tables = self.kv.tables.values()
        return {
            s: (
                s.status,
                s.length,
                s.computed,
                s.capacity,
                *tuple(int((t.rows[s.row] >= 0).sum()) for t in tables if s.row >= 0),
            )
            for s in self.known
        }

    def used(self) -> dict[str, int]:
        return {name: pool.used for name, pool in self.kv.snapshot().pools.items()}

    def note_computed(self, seq: Sequence) -> None:
        if seq in self.fresh:
            self.model.computed(seq.scope, self.known[seq][: seq.computed])

    def leave(self, seq: Sequence) -> None:
        """The sequence is about to be closed or suspended: whole computed blocks get published."""
        if seq in self.fresh:
            self.model.published(seq.scope, self.known[seq][: seq.computed])
        self.fresh.discard(seq)
        self.told.append(self.known[seq])

    def can_grow(self, seq: Sequence) -> bool:
        return seq.computed < seq.length

    # -- the life of sequences -----------------------------------------------------------------

    def open_one(self, prompt: tuple[int, int, int], scope: Scope, priority: int) -> Sequence:
        """A prompt: the start of something known, and a few tokens more."""
        base, shared, seed = prompt
        known = [*self.told[-4:], *BASES]
        tail = np.random.default_rng(seed).integers(0, 3, 1 + seed % 9)
        tokens = [*known[base % len(known)][:shared], *tail.tolist()][:MAX_TOKENS]
        seq = self.kv.open(tokens, scope=scope, priority=priority)
        self.known[seq] = tokens
        assert (seq.status, seq.length, seq.computed) == (Status.OPEN, len(tokens), 0)
        assert seq.hit <= self.model.most(scope, tokens)
        evicted = sum(pool.evicted for pool in self.kv.snapshot().pools.values())
        if self.all_full and not evicted:
            assert seq.hit >= self.model.least(scope, tokens)
            self.seen["exact hits"] += seq.hit > 0
        self.seen["hits"] += seq.hit > 0
        return seq

    @precondition(lambda self: len(self.those(Status.OPEN, Status.SUSPENDED)) < 4)
    @rule(prompt=PROMPTS, scope=st.sampled_from(SCOPES), priority=st.integers(0, 1))
    def open(self, prompt: tuple[int, int, int], scope: Scope, priority: int) -> None:
        self.open_one(prompt, scope, priority)

    @precondition(lambda self: len(self.running) < MAX_SEQUENCES)
    @rule(
        prompts=st.lists(PROMPTS, min_size=1, max_size=3),
        scope=st.sampled_from(SCOPES),
        limit=st.sampled_from([4, 7, 64]),
        stay=st.booleans(),
        again=st.booleans(),
    )
    def serve(
        self, prompts: list[tuple[int, int, int]], scope: Scope, limit: int, stay: bool, again: bool
    ) -> None:
        """Requests from the prompt to a token or two, perhaps twice; most of them leave at once."""
        for prompt in prompts * (1 + again):
            seq = self.open_one(prompt, scope, 0)
            if self.admit_these([seq], limit):
                self.advance([seq], limit, steps=12)
            if not stay:
                self.close_these([seq])

    @precondition(lambda self: self.those(Status.OPEN, Status.SUSPENDED))
    @rule(data=st.data(), at_once=st.sampled_from([None, 1, 8]))
    def admit(self, data: st.DataObject, at_once: int | None) -> None:
        self.admit_these(self.some(data, self.those(Status.OPEN, Status.SUSPENDED)), at_once)

    def admit_these(self, seqs: list[Sequence], at_once: int | None) -> bool:
        counts = [s.length if at_once is None else min(at_once, s.length) for s in seqs]
        before = self.holdings()
        try:
            with self.refusing():
                answer = self.kv.admit(seqs, counts)
        except CapacityError:  # more at once than a window pool can ever hold
            assert max(counts) > BLOCK or self.short_of_ground
            answer = None
        except DeviceError:
            self.seen["faults"] += 1
            answer = None
        if answer:
            self.fresh |= set(seqs)
            for seq, count in zip(seqs, counts, strict=True):
                assert seq.capacity >= count
                assert seq.computed <= self.model.most(seq.scope, self.known[seq])
                assert seq.computed == seq.hit
        else:
            self.seen["refused"] += 1
            assert self.holdings() == before
            assert all(s.row == -1 for s in seqs)
        return bool(answer)

    @property
    def short_of_ground(self) -> bool:
        """A static split may have been changed by hand to less than a sequence needs."""
        return self.mode == "static" and self.moved

    @precondition(lambda self: any(self.can_grow(s) for s in self.running))
    @rule(
        data=st.data(),
        limit=st.sampled_from([1, 4, 7, 64]),
        steps=st.integers(1, 6),
        in_flight=st.booleans(),
    )
    def compute(self, data: st.DataObject, limit: int, steps: int, in_flight: bool) -> None:
        seqs = self.running if data.draw(st.booleans()) else self.some(data, self.running)
        self.advance(seqs, limit, steps=steps, in_flight=in_flight)

    def advance(
        self, seqs: list[Sequence], limit: int, *, steps: int, in_flight: bool = False
    ) -> None:
        """Some steps over some sequences, until one can not be granted, which changes nothing."""
        for _ in range(steps):
            going = [s for s in seqs if self.can_grow(s)]
            batch, counts = self.kv.batch(going), self.engine.chunks(going, limit)
            if not going or not self.granted(batch, counts):
                return
            ids = self.engine.step(batch, counts, in_flight=in_flight)
            self.seen["in flight"] += in_flight
            for seq, token in zip(going, ids.tolist(), strict=True):
                if token >= 0:
                    self.known[seq].append(token)
                self.note_computed(seq)

    def granted(self, batch: Any, counts: Any) -> bool:
        before = self.holdings()
        try:
            with self.refusing():
                answer = self.kv.extend(batch, counts)
        except CapacityError:
            answer = None
        except DeviceError:
            self.seen["faults"] += 1
            answer = None
        if not answer:
            self.seen["refused"] += 1
            assert self.holdings() == before
        return bool(answer)

    @precondition(lambda self: any(self.can_grow(s) for s in self.running))
    @rule(data=st.data(), drafts=st.integers(0, 5), in_flight=st.booleans())
    def speculate(self, data: st.DataObject, drafts: int, in_flight: bool) -> None:
        """Compute some known tokens and rejected drafts behind them; only a part of it counts."""
        seq = data.draw(st.sampled_from([s for s in self.running if self.can_grow(s)]))
        batch = self.kv.batch([seq])
        count = min(self.kv.chunk(seq, 6) + drafts, MAX_TOKENS - seq.computed)
        kept = data.draw(st.integers(0, min(count, seq.length - seq.computed)))
        if not self.granted(batch, count):
            return
        (token,) = self.engine.step(batch, count, accepted=[kept], in_flight=in_flight).tolist()
        if token >= 0:
            self.known[seq].append(token)
        assert seq.capacity == -(-seq.computed // BLOCK) * BLOCK
        self.note_computed(seq)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), run=st.booleans())
    def plan_and_drop(self, data: st.DataObject, run: bool) -> None:
        """A step is granted, perhaps run, and its sequences are gone before it can be committed."""
        seqs = self.some(data, self.running)
        batch, counts = self.kv.batch(seqs), self.engine.chunks(seqs, 4)
        if not self.granted(batch, counts):
            return
        if run:
            self.engine.run(batch, counts)
        gone = seqs[: data.draw(st.integers(0, len(seqs)))]
        self.suspend_these(gone)
        if data.draw(st.booleans()) and gone and self.kv.resume(gone, [1] * len(gone)):
            self.fresh |= set(gone)
        expected = {s: s.computed + int(c) for s, c in zip(seqs, counts, strict=True)}
        expected |= {s: s.computed for s in gone}
        if run:
            self.kv.commit(batch)
            assert {s: s.computed for s in seqs} == expected
            for seq in set(seqs) - set(gone):
                self.note_computed(seq)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), num=st.integers(0, 9))
    def trim(self, data: st.DataObject, num: int) -> None:
        if self.reset_in_flight and self.engine.num_in_flight:
            return  # cached pages became private: their new owner may overwrite what a step reads
        self.reset_in_flight = False
        seq = data.draw(st.sampled_from(self.running))
        before = seq.length, seq.computed, seq.capacity
        try:
            self.kv.trim(seq, num)
        except UsageError:  # nothing would be left, a state cannot rewind, a window has passed
            assert (seq.length, seq.computed, seq.capacity) == before
            assert num >= seq.length or num > seq.length - seq.computed
            return
        self.known[seq] = self.known[seq][: seq.length]
        assert seq.length == before[0] - num
        assert seq.computed == min(before[1], seq.length)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(self.running))
        child = self.engine.fork(seq)
        assert (child is None) == (len(self.running) == MAX_SEQUENCES)
        if child is not None:
            self.known[child] = list(self.known[seq])
            assert child.computed == seq.computed
            if seq in self.fresh:
                self.fresh.add(child)
            self.seen["forks"] += 1

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def suspend(self, data: st.DataObject) -> None:
        self.suspend_these(self.some(data, self.running))

    def suspend_these(self, seqs: list[Sequence]) -> None:
        for seq in seqs:
            self.leave(seq)
        self.kv.suspend(seqs)
        assert all((s.row, s.computed, s.capacity) == (-1, 0, 0) for s in seqs)

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        self.close_these(self.some(data, list(self.known)))

    def close_these(self, seqs: list[Sequence]) -> None:
        for seq in seqs:
            self.leave(seq)
        self.kv.close(seqs)
        self.kv.close(seqs)  # twice does nothing
        for seq in seqs:
            del self.known[seq]

    # -- capacity and time ---------------------------------------------------------------------

    @precondition(lambda self: len(self.kv.pools) > 1)
    @rule(data=st.data(), granules=st.integers(1, 6))
    def rebalance(self, data: st.DataObject, granules: int) -> None:
        donor, receiver = data.draw(st.permutations(list(self.kv.pools)))[:2]
        plan = (Move(donor=donor, receiver=receiver, granules=granules, reason="drawn"),)
        self.kv.rebalance(())
        owed = self.kv.snapshot().granules_pending  # by a budget, which comes first
        before = self.holdings()
        try:
            with self.refusing():
                moved = self.kv.rebalance(plan).moved
        except DeviceError:
            self.seen["faults"] += 1
            moved = 0
        assert 0 <= moved <= granules + owed
        assert self.holdings() == before
        self.moved = True  # or later, at some step
        self.seen["moves"] += moved > 0

    @rule(data=st.data(), settle=st.booleans())
    def budget(self, data: st.DataObject, settle: bool) -> None:
        """The whole tier shrinks or grows, by steps or at once; live sequences keep all they have.

        After a manual plan a static split may leave a pool too little: that is refused.
        """
        least, most = sum(self.kv._parts.least.values()), self.kv.memory.num_granules
        granules = data.draw(st.integers(least, most))
        before, held = self.kv.snapshot(), self.holdings()
        try:
            with self.refusing():
                progress = self.kv.set_budget(granules * GRANULE)
                if settle:
                    progress = self.kv.settle()
        except ConfigError:
            assert self.mode == "static"
            assert self.kv.snapshot() == before
            return
        except DeviceError:
            self.seen["faults"] += 1
            assert self.holdings() == held
            return
        assert self.holdings() == held
        facts = self.kv.snapshot()
        assert facts.budget_bytes == granules * GRANULE
        over = sum(pool.granules for pool in facts.pools.values()) - granules
        assert progress.pending == facts.granules_pending >= max(0, over)
        self.seen["shrunk"] += granules < most

    @rule(call=st.integers(1, 6))
    def refuse(self, call: int) -> None:
        """Memory will refuse a call within the next request for pages or capacity."""
        self.refusal = call

    @precondition(lambda self: self.mode == "elastic" and not self.engine.num_in_flight)
    @rule(data=st.data(), granules=st.integers(1, 6))
    def take_ground(self, data: st.DataObject, granules: int) -> None:
        """Granules go back to the budget: what lives on them has to move."""
        before = self.holdings()
        group = data.draw(st.integers(0, len(self.kv.pools) - 1))
        self.seen["given"] += self.kv._parts.mover.give(group, granules)
        assert self.holdings() == before

    @precondition(lambda self: self.engine.num_in_flight)
    @rule(num=st.integers(1, 3))
    def complete(self, num: int) -> None:
        self.engine.complete(num)

    @precondition(lambda self: self.told)
    @rule()
    def reset(self) -> None:
        self.kv.reset()
        self.model.reset()
        self.reset_in_flight |= self.engine.num_in_flight > 0
        self.fresh.clear()
        for pool in self.kv.snapshot().pools.values():
            assert pool.cached == 0

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def read_everything(self, data: st.DataObject) -> None:
        seqs = self.some(data, self.running)
        if self.granted(self.kv.batch(seqs), 0):
            self.engine.verify(seqs)

    # -- always --------------------------------------------------------------------------------

    @invariant()
    def books_balance(self) -> None:
        if not hasattr(self, "kv"):
            return
        self.kv.check()
        for seq, tokens in self.known.items():
            assert seq.tokens.tolist() == tokens
            assert seq.computed <= seq.length
            assert seq.computed <= seq.capacity or seq.status is not Status.ADMITTED
        self.seen["relocated"] += self.kv.snapshot().pages_relocated

    def teardown(self) -> None:
        if not hasattr(self, "kv"):
            return
        try:
            self.end()
        finally:
            self.kv.shut_down()

    def end(self) -> None:
        """Everything closed: nothing is used, and one longest sequence can have its way again."""
        self.engine.complete(self.engine.num_in_flight)
        self.kv.close(list(self.known))
        self.kv.rebalance(())
        self.kv.settle()
        assert self.kv.snapshot().granules_pending == 0  # a shrink ends when everybody has left
        self.kv.check()
        assert all(used == 0 for used in self.used().values())
        self.all_that_is_cached_can_go()
        if self.short_of_ground:
            return
        longest = self.kv.open([*BASES[3], *[3] * (MAX_TOKENS - 20)])
        assert self.kv.admit([longest], 1)
        self.engine.prefill([longest], limit=1)  # larger chunks may straddle one block more
        self.kv.close([longest])
        self.kv.check()
        assert all(used == 0 for used in self.used().values())

    def all_that_is_cached_can_go(self) -> None:
        for group in range(len(self.kv.pools)):
            self.kv._parts.prefixes.eviction.evict(group, 10**6)
            self.kv.check()
        assert [pool.cached for pool in self.kv.snapshot().pools.values()] == [0] * len(self.specs)
        assert self.kv.snapshot().cached_runs == 0


def machine(layout: str, mode: str) -> type[ManagerMachine]:
    own = {"specs": LAYOUTS[layout], "context": CONTEXT.get(layout, 1), "mode": mode}
    return type("Machine", (ManagerMachine,), {**own, "seen": Counter()})


@pytest.mark.parametrize("mode", ["elastic", "static"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_manager_agrees_with_the_model(layout: str, mode: str) -> None:
    under_test = machine(layout, mode)
    examples = max(40, settings.default.max_examples // 4)
    run_state_machine_as_test(
        under_test, settings=settings(max_examples=examples, stateful_step_count=40)
    )
    seen = under_test.seen
    if settings.default.derandomize:  # other runs may happen to explore less
        assert seen["hits"], "no prompt ever met a cached prefix"
        assert seen["refused"], "there always was enough memory"
