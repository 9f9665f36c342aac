"""The fake engine sees what it is there to see: every kind of wrong byte raises."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from tests.tiny import GRANULE, Rig, full, state, window

from kvtide import MemfdMemory, NullMemory, Options, Scope, UsageError
from kvtide.layout import Buffer, IndexerSpec, LatentSpec, Layout, StateSpec
from kvtide.manager import KVManager
from kvtide.testing.engine import FakeEngine, WrongBytesError
from kvtide.testing.stamps import NOTHING, label, prefix_hashes, stamps

if TYPE_CHECKING:
    from kvtide import Sequence


@pytest.fixture
def rig() -> Rig:
    return Rig(full(), window(8), state(), pages=[8, 8, 4], max_tokens=32)


def flip(rig: Rig, pool: str, seq: Sequence, *, block: int, byte: int) -> None:
    """Change one byte of a page that a sequence holds."""
    page = int(rig.kv.tables[pool].rows[seq.row, block])
    assert page > 0
    whole = np.frombuffer(rig.kv.pools[pool].arena.buffer(), np.uint8)
    whole[page * GRANULE + byte] ^= 1


@pytest.mark.parametrize(
    ("pool", "block", "byte"),
    [
        ("full", 0, 0),  # the first key
        ("full", 0, GRANULE - 1),  # the last value of a block
        ("full", 2, GRANULE // 2),  # the first value of the open block
        ("window_8", 1, GRANULE - 1),
        ("window_8", 2, 0),
        ("state", 0, 17),
    ],
)
def test_a_flipped_bit_is_found(rig: Rig, pool: str, block: int, byte: int) -> None:
    seq = rig.start(range(10), sample=True)
    rig.engine.verify([seq])
    flip(rig, pool, seq, block=block, byte=byte)
    with pytest.raises(WrongBytesError, match=rf"step \d+: sequence 0 .* of pool '{pool}'"):
        rig.engine.step([seq], 1)


def test_what_nobody_may_read_is_not_looked_at(rig: Rig) -> None:
    """Tokens the window has passed, and slots that are not computed yet, may hold anything."""
    seq = rig.start(range(11), sample=True)
    flip(rig, "window_8", seq, block=1, byte=0)  # token 4 of 11: the window reads from 4 on
    with pytest.raises(WrongBytesError):
        rig.engine.verify([seq])
    rig.engine.kv.close([seq])
    rig.kv.reset()
    seq = rig.start(range(12), sample=True)
    flip(rig, "window_8", seq, block=1, byte=0)  # token 4 of 12: not any more
    rig.engine.step([seq], 1)
    flip(rig, "full", seq, block=3, byte=GRANULE // 2 - 1)  # key of token 15, not computed
    rig.engine.step([seq], 1)


def test_a_row_that_still_names_a_stale_page_is_found(rig: Rig) -> None:
    seq = rig.start(range(12), sample=True)
    rows = rig.kv.tables["window_8"].rows
    rows[seq.row, 0] = rows[seq.row, 1]
    with pytest.raises(WrongBytesError, match="still names pages it has no right to"):
        rig.engine.verify([seq])


def test_a_row_without_a_page_is_found(rig: Rig) -> None:
    seq = rig.start(range(12), sample=True)
    rig.kv.tables["full"].rows[seq.row, 1] = -1
    with pytest.raises(WrongBytesError, match="has no page there"):
        rig.engine.verify([seq])


def test_a_write_to_a_shared_page_is_found(rig: Rig) -> None:
    seq = rig.start(range(10), sample=True)
    page = rig.kv.tables["full"].rows[seq.row, 2:3]
    rig.kv.pools["full"].books.share(page)
    with pytest.raises(WrongBytesError, match=r"writes to a page that others can see"):
        rig.engine.step([seq], 1)


def test_bytes_of_a_step_in_flight_must_stay(rig: Rig) -> None:
    seq = rig.start(range(10), sample=True)
    rig.engine.step([seq], 1, in_flight=True)
    rig.engine.step([seq], 1, in_flight=True)
    flip(rig, "full", seq, block=0, byte=0)
    with pytest.raises(WrongBytesError, match="step 3 in flight"):
        rig.engine.complete(2)


def test_a_page_reused_before_its_fence_is_found(rig: Rig) -> None:
    """With fences that lie, pages of a closed sequence come back too early."""
    seq = rig.start(range(28), sample=True)
    rig.engine.step([seq], 1, in_flight=True)
    fences = rig.kv._parts.fences
    fences.completed = fences.issued
    rig.kv.close([seq])
    rig.kv.reset()
    other = rig.kv.open(range(50, 80))
    assert rig.kv.admit([other])
    with pytest.raises(WrongBytesError, match=r"sequence 1 writes to page .* which step \d+ may"):
        rig.engine.prefill([other])


def test_completed_steps_are_forgotten(rig: Rig) -> None:
    seq = rig.start(range(28), sample=True)
    rig.engine.step([seq], 1, in_flight=True)
    assert rig.engine.num_in_flight == 1
    rig.kv.close([seq])
    rig.engine.complete()
    assert rig.engine.num_in_flight == 0
    rig.kv.reset()
    other = rig.start(range(50, 80))
    rig.engine.verify([other])


def test_what_is_sampled_depends_on_the_whole_prefix_only(rig: Rig) -> None:
    told = []
    for limit in (32, 3):  # in one chunk and in many
        seq = rig.start(range(9), limit=limit, sample=True)
        for _ in range(5):
            rig.engine.step([seq], 1)
        told.append(seq.tokens.tolist())
        rig.kv.close([seq])
    assert told[0] == told[1]
    other = rig.start([1, *range(1, 9)], sample=True)
    for _ in range(5):
        rig.engine.step([other], 1)
    assert other.tokens[9:].tolist() != told[0][9:]


def test_every_kind_of_buffer_is_stamped() -> None:
    """Several buffers a layer, several layers a group, two groups of one layer."""
    layers = {
        0: (LatentSpec(rank=12, rope_dim=3, dtype="float16"), IndexerSpec(dim=5, dtype="uint8")),
        1: (LatentSpec(rank=12, rope_dim=3, dtype="float16"), full(3)),
        2: StateSpec(
            buffers=(Buffer("conv", (3, 5), "bfloat16"), Buffer("ssm", (7,), "float64")),
            interval_tokens=4,
        ),
    }
    layout = Layout.from_layers(layers, block_tokens=4)
    memory = MemfdMemory(16 * GRANULE, GRANULE)
    kv = KVManager(layout, memory, max_sequences=4, max_tokens=16)
    engine = FakeEngine(kv)
    seq = kv.open(range(9))
    assert kv.admit([seq])
    engine.prefill([seq], sample=True)
    for group in layout.groups:
        page = int(kv.tables[group.name].rows[seq.row, 0])
        pool = kv.pools[group.name]
        whole = np.frombuffer(pool.arena.buffer(), np.uint8)
        for place in range(len(group.layers)):
            for buffer in group.buffers:
                at = page * pool.page_bytes + group.offset(place, buffer.name)
                whole[at] ^= 1
                with pytest.raises(WrongBytesError, match=buffer.name):
                    engine.verify([seq])
                whole[at] ^= 1
    engine.verify([seq])
    kv.shut_down()


def test_an_engine_needs_bytes() -> None:
    layout = Layout.from_layers({0: full()}, block_tokens=4)
    kv = KVManager(layout, NullMemory(1 << 16, 256), max_tokens=16, options=Options())
    with pytest.raises(UsageError, match="no bytes"):
        FakeEngine(kv)


def test_stamps_tell_prefixes_layers_and_places_apart() -> None:
    tokens = np.array([1, 2, 3, 2, 4], np.int32)
    hashes = prefix_hashes(tokens, label(Scope()))
    assert len(set(hashes.tolist())) == 5
    assert prefix_hashes(tokens[:3], label(Scope())).tolist() == hashes[:3].tolist()
    assert prefix_hashes(tokens[::-1].copy(), label(Scope()))[4] != hashes[4], "order counts"
    assert prefix_hashes(tokens, label(Scope(salt=b"x")))[0] != hashes[0], "the scope counts"
    one, two = (stamps(hashes, label("full", 0, name), 20) for name in ("key", "value"))
    assert one.shape == (5, 20)
    assert (one != two).any(axis=1).all()
    assert len({row.tobytes() for row in one}) == 5


def test_nothing_is_stamped_with_zeros() -> None:
    assert not stamps(np.array([NOTHING], np.uint64), label("state"), 9).any()
