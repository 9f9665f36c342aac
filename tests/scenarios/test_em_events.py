"""Events tell the truth, in its order: who only hears them knows what can be matched."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from kvtide import KVManager, NullMemory, Options, Scope
from kvtide.events import AllBlocksCleared, BlocksRemoved, BlocksStored, CapacityChanged
from kvtide.layout import Buffer, FullSpec, Layout, Spec, StateSpec, WindowSpec

if TYPE_CHECKING:
    from kvtide.events import Event

BLOCK = 4
FULL = FullSpec(kv_heads=1, head_dim=8, dtype="float32")
WINDOW = WindowSpec(window=8, kv_heads=1, head_dim=8, dtype="float32")
STATE = StateSpec(buffers=(Buffer("state", (64,), "float32"),), interval_tokens=16)


class Listener:
    """A router's view: which blocks of which prefix it believes to be cached, by layer group."""

    def __init__(self) -> None:
        self.blocks: set[tuple[str, Scope, bytes]] = set()
        self.granules: dict[str, int] = {}

    def __call__(self, event: Event) -> None:
        match event:
            case BlocksStored():
                new = self._keys(event)
                assert not new & self.blocks, "a block was stored twice"
                self.blocks |= new
            case BlocksRemoved():
                old = self._keys(event)
                assert old <= self.blocks, "a block was removed that was never stored"
                self.blocks -= old
            case AllBlocksCleared():
                self.blocks.clear()
            case CapacityChanged(pool=pool, before=before, granules=granules):
                assert self.granules.get(pool, 0) == before
                self.granules[pool] = granules

    @staticmethod
    def _keys(event: BlocksStored | BlocksRemoved) -> set[tuple[str, Scope, bytes]]:
        size, total = 4 * BLOCK, len(event.tokens) // (4 * BLOCK)
        first = total - event.num_blocks
        return {
            (event.group, event.scope, event.tokens[: (block + 1) * size])
            for block in range(first, total)
        }


def truth(kv: KVManager) -> set[tuple[str, Scope, bytes]]:
    """What the index really holds."""
    tree = kv._parts.prefixes.tree
    held: set[tuple[str, Scope, bytes]] = set()
    for node in tree.nodes():
        path = b"".join(run.tokens for run in node.path())
        for group, name in enumerate(kv.pools):
            pages = memoryview(node.pages[group]).cast("i")
            for block in range(node.num_blocks):
                if pages[block] >= 0:
                    end = (node.depth + block + 1) * 4 * BLOCK
                    held.add((name, tree.scope_of(node), path[:end]))
    return held


def serve(kv: KVManager, tokens: list[int], scope: Scope) -> None:
    seq = kv.open(tokens, scope=scope)
    assert kv.admit([seq], 1)
    while seq.computed < seq.length:
        num_new = kv.chunk(seq, 8)
        assert kv.extend([seq], num_new)
        with kv.step([seq]):
            pass
        kv.commit([seq])
    kv.close([seq])


LAYOUTS: dict[str, dict[int, Spec | tuple[Spec, ...]]] = {
    "full": {0: FULL},
    "full+window": {0: FULL, 1: WINDOW},
    "full+state": {0: FULL, 1: STATE},
    "state": {0: STATE},
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_em_1_a_listener_always_knows_what_is_cached(name: str) -> None:
    layout = Layout.from_layers(LAYOUTS[name], block_tokens=BLOCK, max_tokens=64)
    listener, rng = Listener(), random.Random(name)
    options = Options(events=listener)
    granules = 8 if name == "state" else 40
    kv = KVManager(
        layout, NullMemory(granules * 512, 512), max_sequences=4, max_tokens=64, options=options
    )
    for turn in range(80):
        stem = [[1] * 12, [1] * 8 + [2] * 9, [3] * 30][rng.randrange(3)]
        tail = [rng.randrange(9) for _ in range(rng.randrange(1, 20))]
        serve(kv, stem + tail, Scope(salt=rng.choice([b"", b"a"])))
        if turn == 50:
            kv.reset()
        assert listener.blocks == truth(kv)
        assert listener.granules == {n: p.granules for n, p in kv.snapshot().pools.items()}
    assert sum(pool.evicted for pool in kv.snapshot().pools.values()) > 0
    assert listener.blocks


def test_em_3_two_sequences_that_commit_the_same_block_store_it_once() -> None:
    layout = Layout.from_layers({0: FULL}, block_tokens=BLOCK, max_tokens=64)
    listener = Listener()
    memory = NullMemory(64 * 512, 512)
    kv = KVManager(layout, memory, max_sequences=4, max_tokens=64, options=Options(events=listener))
    pair = [kv.open([5] * 9), kv.open([5] * 9)]
    assert kv.admit(pair)
    assert kv.extend(pair, 9)
    with kv.step(pair):
        pass
    kv.commit(pair)
    kv.close(pair)
    assert len(listener.blocks) == 2  # the listener itself fails on a second store
