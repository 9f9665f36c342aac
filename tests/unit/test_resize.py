"""Pools given numbers of pages: exactly those, all of them or none, and nobody loses a byte."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from tests.ranks.groups import Group
from tests.tiny import GRANULE, full, window

from kvtide import DeviceError, KVManager, Layout, MemfdMemory, Options, UsageError
from kvtide.testing.engine import FakeEngine
from kvtide.testing.faults import FaultyMemory

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvtide import Sequence


class Served:
    """Two pools of 127 pages, 16 to a granule; every other sequence closed."""

    def __init__(self, dim: int = 8, **options: Any) -> None:
        options = {"mode": "static", "pool_ratio": {"full": 0.5, "window_8": 0.5}, **options}
        layout = Layout.from_layers({0: full(dim), 1: window(8, dim=dim)}, block_tokens=4)
        self.memory = FaultyMemory(MemfdMemory(16 * GRANULE, GRANULE))
        self.kv = KVManager(layout, self.memory, max_tokens=64, options=Options(**options))
        self.engine = FakeEngine(self.kv)
        seqs: list[Sequence] = []
        for i in range(10):
            seqs.append(self.kv.open(range(100 * i, 100 * i + 30)))
            assert self.kv.admit(seqs[-1:])
            self.engine.prefill(seqs[-1:], sample=True)
        self.kv.close(seqs[:7])
        self.live = seqs[7:]

    def pages(self) -> dict[str, int]:
        self.kv.check()
        self.engine.verify(self.live)
        return {name: pool.num_usable for name, pool in self.kv.pools.items()}


BEFORE = {"full": 127, "window_8": 127}
AFTER = {"full": 30, "window_8": 200}


def test_pools_have_exactly_these_pages_and_live_ones_move_down() -> None:
    served = Served()
    full_rows = [served.kv.tables["full"].rows[seq.row] for seq in served.live]
    assert max(int(row.max()) for row in full_rows) > 30
    assert served.kv.resize(AFTER) == AFTER
    assert served.pages() == AFTER
    assert max(int(row.max()) for row in full_rows) <= 30
    served.engine.step(served.live, 1)
    assert served.kv.resize(BEFORE) == BEFORE
    assert served.pages() == BEFORE


def test_a_dry_run_and_an_answer_of_less_change_nothing() -> None:
    served = Served()
    epoch = served.kv.epoch
    assert served.kv.resize(AFTER, dry_run=True) == AFTER
    much = {"full": 30, "window_8": 240}
    for dry_run in (True, False):
        granted = served.kv.resize(much, dry_run=dry_run)
        assert granted["full"] == 30
        assert 200 < granted["window_8"] < 240
    live = sum(-(-seq.length // 4) for seq in served.live)
    granted = served.kv.resize({"full": 16})
    assert 16 < live <= granted["full"] < live + 4
    assert (served.pages(), served.kv.epoch) == (BEFORE, epoch)
    assert served.kv.resize(granted) == granted  # what was answered can be had


@pytest.mark.parametrize("dims", [(8, 8), (8, 16), (8, 24)])
def test_the_same_page_ids_stay_whatever_the_bytes_of_a_page(dims: tuple[int, int]) -> None:
    group = Group(dims=dims, granules=(16, 16 * dims[1] // 8))
    sizes = group.equalise()
    for i in range(6):
        for kv, seq in zip(group.kvs, group.start(range(100 * i, 100 * i + 30)), strict=True):
            if i % 2:
                kv.close([seq])
    target = {"full": 40, "window_8": sizes["window_8"]}
    assert [kv.resize(target) for kv in group.kvs] == [target] * 2
    assert group.pages() == [target] * 2
    first, second = ([t.rows.tolist() for t in kv.tables.values()] for kv in group.kvs)
    assert first == second


def test_steps_in_flight_are_in_the_way_until_their_fences_pass() -> None:
    served = Served()
    served.engine.step(served.live, 1, in_flight=True)
    with pytest.raises(UsageError, match="1 steps are in flight"):
        served.kv.resize(AFTER)
    served.engine.complete()  # nobody has asked the fence since
    assert served.kv.resize(AFTER) == AFTER
    assert served.pages() == AFTER


@pytest.mark.parametrize("target", [AFTER, {"full": 200, "window_8": 30}])
def test_each_refused_call_leaves_the_sizes_as_they_were(target: Mapping[str, int]) -> None:
    counted = Served()
    counted.memory.fail_at = 0
    counted.kv.resize(target)
    calls = counted.memory.calls
    assert calls >= 3
    for number in range(1, calls + 1):
        served = Served()
        served.memory.fail_at = number
        with pytest.raises(DeviceError):
            served.kv.resize(target)
        served.memory.fail_at = 0
        assert served.pages() == BEFORE
        served.engine.step(served.live, 1)
        assert served.kv.resize(target) == target
        assert served.pages() == target
        served.kv.shut_down()


@pytest.mark.parametrize(
    ("pages", "says"),
    [
        ({"fool": 30}, "pool 'fool' is unknown"),
        ({"full": 15}, "need 16"),
    ],
)
def test_sizes_that_can_never_be_had_are_misuse(pages: dict[str, int], says: str) -> None:
    served = Served()
    with pytest.raises(UsageError, match=says):
        served.kv.resize(pages)
    assert served.pages() == BEFORE


def test_elastic_pools_have_no_sizes_of_their_own() -> None:
    with pytest.raises(UsageError, match="use mode='static'"):
        Served(mode="elastic").kv.resize(AFTER)
