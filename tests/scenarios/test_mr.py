"""Ranks decide alike: capacity, plans, victims, chunks; whatever is only so on one stops all."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from tests.ranks.groups import Group
from tests.tiny import full, state

from kvtide import ConfigError, KVManager, Layout, Move, NullMemory, Sequence
from kvtide.errors import DivergenceError
from kvtide.layout import with_groups_of
from kvtide.ranks import (
    Change,
    LocalHub,
    LocalTransport,
    Quota,
    Share,
    Terms,
    Turn,
    agree_pages,
    agree_quotas,
    agree_whether,
    side_by_side,
)

SCRIPT = """
import random
import numpy as np
from kvtide import KVManager, Layout, NullMemory, Options
from kvtide.layout import Buffer, FullSpec, StateSpec, WindowSpec

shape = dict(kv_heads=1, head_dim=8, dtype="float32")
layers = {0: FullSpec(**shape), 1: WindowSpec(window=8, **shape),
          2: StateSpec(buffers=(Buffer("s", (32,), "float32"),), interval_tokens=8)}
layout = Layout.from_layers(layers, block_tokens=4)
kv = KVManager(layout, NullMemory(90 * 256, 256), max_sequences=64, max_tokens=64,
               options=Options(mode=MODE))
rng = random.Random(3)

def serve(prompts):
    seqs = [kv.open(p) for p in prompts]
    if not kv.admit(seqs):
        print("no")
        return
    while any(s.computed < s.length for s in seqs):
        rest = [s for s in seqs if s.computed < s.length]
        batch = kv.batch(rest)
        if not kv.extend(batch, np.array([kv.chunk(s, 8) for s in rest])):
            print("full")
            break
        with kv.step(batch):
            pass
        kv.commit(batch)
    print([{n: t.rows[s.row].tolist() for n, t in kv.tables.items()} for s in seqs])
    kv.close(seqs)

for turn in range(25):  # batches of equal time
    serve([[rng.randrange(3)] * 8 + [rng.randrange(9) for _ in range(rng.randrange(1, 20))]
           for _ in range(2)])
    kv.check()
facts = kv.snapshot()
print(facts)
print(all(pool.evicted for pool in facts.pools.values()), facts.hit_tokens > 0)
"""


def moved(granules: int) -> Change:
    plan = (Move(donor="full", receiver="window_8", granules=granules, reason="test"),)
    return Change(plan=plan)


def granules(group: Group) -> list[list[int]]:
    for kv in group.kvs:
        kv.check()
    return [[pool.num_mapped for pool in kv.pools.values()] for kv in group.kvs]


def require_equal_exchanges(group: Group) -> None:
    """Every rank has begun and ended as many collectives as the others."""
    assert len({(t.num_started, t.num_finished) for t in group.transports}) == 1
    assert group.transports[0].num_started == group.hub.num_folds > 0


# -- at the start ----------------------------------------------------------------------------------


def test_mr_1_ranks_size_themselves_from_local_free_memory() -> None:
    """Pages of every pool are agreed, whatever their bytes; who has less later is found out."""
    hot, page_bytes, host_bytes = (2111, 2055), (10, 12), 120
    agreed: list[dict[str, int]] = [{}, {}]

    def work(transport: LocalTransport) -> None:
        rank = transport.rank
        mine = {"hot": hot[rank], "host": host_bytes // page_bytes[rank]}
        agreed[rank] = agree_pages(transport, mine)

    assert side_by_side(LocalHub(2), work) == [None, None]
    assert agreed == [{"hot": 2055, "host": 10}] * 2

    group = Group(Terms(axis="pipeline", every=1), dims=(8, 10), granules=(16, 16))
    own = group.pages()
    assert own[0] != own[1]
    assert group.equalise() == own[1]
    assert group.pages() == [own[1]] * 2
    for _ in range(3):
        group.boundary()
    group.kvs[1].resize({"full": 40})

    def go_on(rank: int) -> None:
        for _ in range(3):
            group.agreements[rank].boundary()

    raised = group.in_threads(go_on)
    assert [type(error) for error in raised] == [DivergenceError] * 2
    least, most = 1 + 40, 1 + own[1]["full"]
    assert f"pages of pool 'full': {{0: {most}, 1: {least}}}" in str(raised[0])


def agreed_host(*quotas: Quota, nodes: tuple[int, ...]) -> list[Share | BaseException | None]:
    """What each rank gets of a host tier, or the error it is given."""
    shares: list[Share | BaseException | None] = [None] * len(quotas)

    def work(transport: LocalTransport) -> None:
        rank = transport.rank
        found = agree_quotas(transport, {"host": quotas[rank]}, node=nodes[rank])
        shares[rank] = found["host"]

    raised = side_by_side(LocalHub(len(quotas)), work)
    return [share or error for share, error in zip(shares, raised, strict=True)]


def test_mr_2_host_tier_sized_per_node() -> None:
    """The quota is that of the machine with least, and ranks of one machine share what it has.

    In pages: what is pushed to the host, and matched there, waits for host tiers.
    """
    by_probe = [Quota(asked=8, free=free, is_shared=True) for free in (8, 2)]
    shrunk = Share(num_bytes=2, outcome="shrink")
    assert agreed_host(*by_probe, nodes=(1, 2)) == [shrunk] * 2
    assert agreed_host(*by_probe, nodes=(1, 1)) == [Share(num_bytes=1, outcome="shrink")] * 2
    enough = [Quota(asked=8, free=16, is_shared=True)] * 2
    assert agreed_host(*enough, nodes=(1, 1)) == [Share(num_bytes=8, outcome="keep")] * 2
    # Too little somewhere: all go without, or none begins.
    optional = [Quota(asked=8, free=n, least=4, optional=True) for n in (8, 2)]
    assert agreed_host(*optional, nodes=(1, 2)) == [Share(num_bytes=0, outcome="without")] * 2
    needed = [Quota(asked=8, free=n, least=4) for n in (8, 2)]
    refused = agreed_host(*needed, nodes=(1, 2))
    assert [type(error) for error in refused] == [ConfigError] * 2
    assert "rank 0 could have 8 of 8 asked and needs 4, rank 1 could have 2" in str(refused[0])


def test_mr_10_start_up_batch_possible_on_some_ranks_only() -> None:
    def can(*free: int) -> list[bool | BaseException | None]:
        answers: list[bool | None] = [None, None]

        def work(transport: LocalTransport) -> None:
            answers[transport.rank] = agree_whether(
                transport, "the warm-up batch", needed=3, available=free[transport.rank]
            )

        raised = side_by_side(LocalHub(2), work)
        return [e or a for a, e in zip(answers, raised, strict=True)]

    apart = can(4, 2)
    assert [type(error) for error in apart] == [ConfigError] * 2
    for error in apart:
        assert "rank 0 needs 3 and has 4, rank 1 needs 3 and has 2" in str(error)
    assert can(2, 2) == [False, False]
    assert can(4, 3) == [True, True]


# -- plans -----------------------------------------------------------------------------------------


def test_mr_3a_one_rank_rebalances_alone() -> None:
    """Tensor ranks: only rank 1 wants to. The leader decides, and has not."""
    group = Group(Terms(mode="leader", every=1))
    group.start(range(30))
    group.agreements[1].propose(moved(3))
    assert group.boundary() == [Turn()] * 2  # the first ballots are only on their way
    for _ in range(5):
        assert group.boundary() == [Turn(wanted=True)] * 2
    assert granules(group) == [[8, 8]] * 2
    require_equal_exchanges(group)


def test_mr_3b_one_independent_rank_rebalances_alone() -> None:
    """Attention data parallel: rank 0 wants to. Both pause at one step, each for its own target."""
    group = Group(Terms(axis="attention_data", every=1))
    group.start(range(30))
    group.agreements[0].propose(moved(3))
    group.boundary()
    assert group.boundary() == [Turn(changed=True), Turn()]
    assert granules(group) == [[5, 11], [8, 8]]
    group.agreements[0].propose(moved(1))
    group.agreements[1].propose(moved(4))
    group.boundary()
    assert group.boundary() == [Turn(changed=True)] * 2
    assert granules(group) == [[4, 12], [4, 12]]
    assert [agreement.facts().pauses for agreement in group.agreements] == [2, 2]
    require_equal_exchanges(group)


def test_mr_3c_the_leader_s_plan_is_carried_out_by_all() -> None:
    group = Group(Terms(mode="leader", every=1))
    seqs = group.start(range(30))
    group.agreements[0].propose(moved(3))
    assert group.until_over() == [Turn(changed=True)] * 2
    assert granules(group) == [[5, 11]] * 2
    for name in ("full", "window_8"):
        rows = [kv.tables[name].rows[s.row] for kv, s in zip(group.kvs, seqs, strict=True)]
        assert rows[0].tolist() == rows[1].tolist()
    group.boundary()  # which compares them too
    require_equal_exchanges(group)


def test_mr_4_draining_when_only_some_ranks_have_a_previous_batch() -> None:
    """Deferred while rank 0 has a step pending and rank 1 none; done once both have one."""
    group = Group(Terms(mode="leader", every=1))
    group.agreements[0].propose(moved(3))
    assert group.boundary((1, 0)) == [Turn()] * 2
    assert group.boundary((1, 0)) == [Turn()] * 2  # asked, and answered with these steps pending
    assert group.boundary((1, 1)) == [Turn(drain=True)] * 2
    assert granules(group) == [[8, 8]] * 2
    assert group.boundary((1, 1)) == [Turn(changed=True)] * 2
    assert granules(group) == [[5, 11]] * 2
    assert [agreement.facts().deferrals for agreement in group.agreements] == [1, 1]
    require_equal_exchanges(group)


# -- victims, matches and chunks -------------------------------------------------------------------


def run(mode: str, seed: str) -> str:
    env = {**os.environ, "PYTHONHASHSEED": seed}
    command = [sys.executable, "-c", f"MODE = {mode!r}\n{SCRIPT}"]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("mode", ["static", "elastic"])
def test_mr_6_victims_tie_broken_by_address_or_hash_order(mode: str) -> None:
    """Processes with different hash seeds evict the same pages, states and windows included."""
    first, *others = (run(mode, seed) for seed in ("1", "2", "4242"))
    assert first.endswith("True True\n"), "every pool has to evict, or this test shows nothing"
    for other in others:
        assert other == first


def cache(group: Group, tokens: range) -> None:
    """Serve a prompt on every rank and close it."""
    for kv, seq in zip(group.kvs, group.start(tokens), strict=True):
        kv.close([seq])


def evict(group: Group) -> None:
    """Admit, on every rank, a prompt for which two pages have to be evicted."""
    for kv in group.kvs:
        num_tokens = 4 * (kv.pools["full"].books.num_free + 2)
        seq = kv.open(range(9000, 9000 + num_tokens))
        assert kv.admit([seq])
        kv.close([seq])
        assert kv.snapshot().pools["full"].evicted > 0
        kv.check()


def test_mr_7_asynchronous_completions_change_eviction_on_one_rank() -> None:
    """A step is over at tick 3 on rank 0 and at tick 5 on rank 1; at tick 4 both need a victim.

    Its pages count as in flight on both until both have reached it. The offload of the report is a
    step here: either way pages come free at a time of the device's own.
    """
    group = Group(granules=(4, 4))  # pools of 31 pages
    prompts = [range(100 * i, 100 * i + 17) for i in range(4)]
    for prompt in prompts:
        cache(group, prompt)
    busy = group.start(range(7000, 7030))
    for kv, engine, seq in zip(group.kvs, group.engines, busy, strict=True):
        engine.step([seq], 1, in_flight=True)
        kv.close([seq])
    flying: list[list[int]] = []
    for tick in range(8):
        if tick in (3, 5):
            group.engines[(tick - 3) // 2].complete()
        if tick == 4:
            evict(group)
            hits = [[kv.open(prompt).hit for prompt in prompts] for kv in group.kvs]
            assert hits[0] == hits[1]
            assert min(hits[0]) < max(hits[0]) == 16
        flying.append([kv.num_in_flight for kv in group.kvs])
        group.boundary()  # raises if the books of the two differ in anything
    assert flying[4] == [1, 1]
    assert flying[7] == [0, 0]
    require_equal_exchanges(group)


def test_mr_8_existence_checked_on_one_context_parallel_rank_only() -> None:
    """A page is there on all ranks or on none: who has lost its shard alone stops the group.

    The shard on the host of the report waits for host tiers.
    """
    group = Group(Terms(axis="context", every=1))
    prompt = range(5)
    for kv, seq in zip(group.kvs, group.start(prompt), strict=True):
        kv.close([seq])
    assert [kv.open(prompt).hit for kv in group.kvs] == [4, 4]
    for _ in range(2):
        group.boundary()
    for kv in group.kvs:
        kv.reset()
    assert [kv.open(prompt).hit for kv in group.kvs] == [0, 0]
    for _ in range(2):
        group.boundary()
    for kv, seq in zip(group.kvs, group.start(prompt), strict=True):
        kv.close([seq])
    group.boundary()
    group.kvs[1].reset()

    def go_on(rank: int) -> None:
        for _ in range(3):
            group.agreements[rank].boundary()

    raised = group.in_threads(go_on)
    assert [type(error) for error in raised] == [DivergenceError] * 2
    assert "cached pages of pool 'full' from 0 to" in str(raised[0])


def chunks(kv: KVManager, prompt: list[int], budget: int) -> list[int]:
    """Serve a prompt in chunks of at most `budget` tokens; how many each had."""
    seq: Sequence = kv.open(prompt)
    assert kv.admit([seq])
    found: list[int] = []
    while seq.computed < seq.length:
        found.append(kv.chunk(seq, budget))
        batch = kv.batch([seq])
        assert kv.extend(batch, np.array(found[-1:]))
        with kv.step(batch):
            pass
        kv.commit(batch)
    kv.close([seq])
    kv.check()
    return found


def test_mr_9_chunk_boundaries_differ_on_a_stage_without_state_layers() -> None:
    """Both stages stop at the branch point, 12, though only the first has states.

    Of the 8 tokens after it the manager ends a chunk at the last boundary, 16, too: there a state
    serves whoever sends the same prompt again. So [12, 4, 4], not [12, 8].
    """
    whole = Layout.from_layers({0: state(interval=1024), 1: full()}, block_tokens=4)
    bare = [
        Layout.from_layers({0: state(interval=1024)}, block_tokens=4),
        Layout.from_layers({1: full()}, block_tokens=4),
    ]
    first = [*range(12), *range(100, 108)]
    second = [*range(12), *range(200, 208)]

    def planned(layout: Layout) -> list[list[int]]:
        kv = KVManager(layout, NullMemory(64 * 1024, 1024), max_tokens=64)
        return [chunks(kv, prompt, 16) for prompt in (first, second)]

    assert planned(bare[1]) == [[16, 4], [8]]  # alone, the stage without states goes astray
    stages = [with_groups_of(layout, whole) for layout in bare]
    assert [planned(layout) for layout in stages] == [[[16, 4], [12, 4, 4]]] * 2


class Ring:
    """Micro-batches in a pipeline: stage s is done with one s steps after the first stage is."""

    def __init__(self, group: Group, batches: list[list[Sequence]]) -> None:
        self.group = group
        self.batches = batches
        self.issued: list[int] = []
        """The step of each."""
        self.relays = [0] * len(group.engines)
        """Results passed on, by stage."""

    def issue(self, step: int) -> None:
        batch = self.batches[len(self.issued) % len(self.batches)]
        for engine, seq in zip(self.group.engines, batch, strict=True):
            engine.step([seq], 1, in_flight=True)
        self.issued.append(step)

    def relay(self, step: int) -> None:
        """What is due, whether there is new work or not; each verifies what its batch has read."""
        for stage, engine in enumerate(self.group.engines):
            due = [at for at in self.issued if at + stage < step]
            if len(due) > self.relays[stage]:
                engine.complete()
                self.relays[stage] += 1

    @property
    def in_flight(self) -> list[int]:
        return [engine.num_in_flight for engine in self.group.engines]


def test_mr_12_draining_a_pipeline_ring_for_a_rebalance() -> None:
    """Pages move at the first boundary at which both stages are known to be empty: not under the
    micro-batch that the second stage still reads. Drain steps relay what is due.
    """
    group = Group(Terms(axis="pipeline", every=1), dims=(8, 10), granules=(16, 20))
    sizes = group.equalise()
    fillers = [range(1000 * i, 1000 * i + 60) for i in range(1, 5)]
    filled = [group.start(filler) for filler in fillers]
    batches = [group.start(range(100 * i, 100 * i + 10)) for i in range(2)]
    for pair in filled:
        for kv, seq in zip(group.kvs, pair, strict=True):
            kv.close([seq])
    target = {"full": 20, "window_8": sizes["window_8"]}
    tables = [kv.tables["full"].rows[s.row] for kv, s in zip(group.kvs, batches[0], strict=True)]
    assert min(tables[1][:3]) > target["full"]  # pages that will have to move
    ring, told = Ring(group, batches), []
    for step in range(12):
        if step == 3:
            group.propose(Change(pages=target))
        ring.relay(step)
        flying = ring.in_flight
        first, second = group.boundary(flying)
        assert first == second
        told.append(("changed" if first.changed else "drain" if first.drain else "go", *flying))
        if not first.drain:
            ring.issue(step)
    assert told[3:7] == [
        ("go", 0, 1),
        ("drain", 0, 1),  # no new micro-batch; the second stage still reads one
        ("drain", 0, 0),  # said now
        ("changed", 0, 0),
    ]
    assert group.pages() == [target] * 2
    for step in range(12, 15):
        ring.relay(step)
    assert ring.relays == [len(ring.issued)] * 2
    for stage, engine in enumerate(group.engines):
        engine.verify([pair[stage] for pair in batches])
    assert tables[0].tolist() == tables[1].tolist()
    assert max(tables[0]) <= target["full"]
    require_equal_exchanges(group)
