"""Configuration: what cannot work is refused at once, by name, with the numbers and the cure."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from tests.tiny import GRANULE, Rig, draft, full, state, window

from kvtide import CapacityError, ConfigError, KVManager, Layout, MemfdMemory, NullMemory, Options


def manager(*specs: Any, granules: int = 64, max_tokens: int = 16, **options: Any) -> KVManager:
    layout = Layout.from_layers(dict(enumerate(specs)), block_tokens=4)
    memory = NullMemory(granules * 256, 256)
    return KVManager(layout, memory, max_tokens=max_tokens, options=Options(**options))


def test_cv_1_pool_too_small_for_one_request() -> None:
    """A window pool of one page can not hold a window that straddles two: refused by name."""
    with pytest.raises(ConfigError, match="window_4") as caught:
        Rig(full(), window(4), pages=[8, 1], max_tokens=32, block_tokens=8)
    assert f"needs {3 * GRANULE:,}" in str(caught.value)  # two pages and the sink


def test_cv_1_a_request_that_never_fits_does_not_block_those_that_do() -> None:
    """40 tokens in a pool for 32 are an error at once; the small request behind is served."""
    rig = Rig(full(), window(4), pages=[4, 3], max_tokens=32, block_tokens=8)
    with pytest.raises(CapacityError, match="40 tokens, max_tokens is 32"):
        rig.kv.open(range(40))
    seq = rig.kv.open(range(30))
    with pytest.raises(CapacityError, match=r"window_4.* 4 pages .* 3; admit fewer"):
        rig.kv.admit([seq])  # all of it at once never fits the window pool
    assert rig.kv.admit([seq], 8)
    rig.engine.prefill([seq], limit=8)
    rig.kv.close([seq])
    rig.kv.close([rig.start(range(50, 55))])
    assert rig.idle()


@pytest.mark.parametrize(
    ("knobs", "says"),
    [
        ({"mode": "dynamic"}, "mode is 'dynamic'; use 'elastic', 'static' or 'dry_run'"),
        ({"ghost_ratio": math.nan}, "ghost_ratio is nan; use"),
        ({"ghost_ratio": math.inf}, "ghost_ratio is inf; use"),
        ({"ghost_ratio": -0.1}, "ghost_ratio is -0.1; use"),
        ({"ghost_ratio": 16.5}, "ghost_ratio is 16.5; use"),
        ({"floor_pages": {"full": -1}}, r"floor_pages\['full'\] is -1; use 0 or more"),
        ({"pool_ratio": {"full": math.nan}}, r"pool_ratio\['full'\] is nan; .* above 0"),
        ({"pool_ratio": {"full": math.inf}}, r"pool_ratio\['full'\] is inf; .* above 0"),
        ({"pool_ratio": {"full": 0.0}}, r"pool_ratio\['full'\] is 0.0; .* above 0"),
        ({"pool_ratio": {"full": -0.5}}, r"pool_ratio\['full'\] is -0.5; .* above 0"),
        ({"pool_ratio": {"full": 0.5, "w": 0.4}}, "pool_ratio sums to 0.9; make"),
    ],
)
def test_cv_2_nonsense_knobs(knobs: dict[str, Any], says: str) -> None:
    """Every knob has a closed range; outside it the field is named with its value and the cure."""
    with pytest.raises(ConfigError, match=says):
        Options(**knobs)


@pytest.mark.parametrize("knobs", [{"ghost_ratio": 0}, {"ghost_ratio": 16}, {"floor_pages": {}}])
def test_cv_2_the_ends_of_the_ranges_are_allowed(knobs: dict[str, Any]) -> None:
    """A closed range contains its ends."""
    manager(full(), **knobs).check()


@pytest.mark.parametrize("field", ["max_sequences", "max_tokens"])
@pytest.mark.parametrize("value", [0, -1])
def test_cv_2_sizes_are_positive(field: str, value: int) -> None:
    """Zero and negative sizes are named."""
    sizes: dict[str, int] = {"max_sequences": 4, "max_tokens": 16, field: value}
    layout = Layout.from_layers({0: full()}, block_tokens=4)
    with pytest.raises(ConfigError, match=f"{field} is {value}; use 1 or more"):
        KVManager(layout, NullMemory(1 << 16, 256), **sizes)


@pytest.mark.parametrize("max_tokens", [512, 511])
def test_cv_3_a_window_as_long_as_the_maximum_splits_a_pool(max_tokens: int) -> None:
    """Windows that no sequence can outgrow are full attention: one pool for all three layers."""
    layers = {0: full(), 1: window(32768), 2: window(512)}
    layout = Layout.from_layers(layers, block_tokens=4, max_tokens=max_tokens)
    assert [(g.name, g.layers) for g in layout.groups] == [("full", (0, 1, 2))]
    layout = Layout.from_layers(layers, block_tokens=4, max_tokens=513)
    assert [g.name for g in layout.groups] == ["full", "window_512"]


def test_cv_3_a_manager_told_less_than_its_layout_agrees() -> None:
    """A layout made for longer sequences: the manager treats the window as full and hits match."""
    rig = Rig(full(), window(16), pages=[8, 8], max_tokens=16)
    seq = rig.start(range(16))
    assert (rig.kv.tables["window_16"].rows[seq.row] > 0).all()
    rig.kv.close([seq])
    assert rig.lookup([*range(15), 99]) == 15


def test_cv_6_unsupported_combination_accepted() -> None:
    """States exist at block boundaries only, so sharing parts of blocks with them is refused."""
    with pytest.raises(ConfigError, match=r"partial_reuse is on, but pool 'state'.*turn .* off"):
        manager(full(), state(), partial_reuse=True)
    manager(full(), state()).check()
    manager(full(), window(), draft(), partial_reuse=True).check()


@pytest.mark.parametrize(
    ("knobs", "says"),
    [
        ({"pool_ratio": {"full": 1.0}}, r"1 shares for 2 pools; add \['window_8'\]"),
        ({"pool_ratio": {"full": 0.5, "wide": 0.5}}, r"pool_ratio names \['wide'\]; the pools are"),
        ({"floor_pages": {"wide": 1}}, r"floor_pages names \['wide'\]; the pools are"),
        ({"tables": {"wide": np.zeros((1, 1), np.int32)}}, r"tables names \['wide'\]; the pools"),
    ],
)
def test_cv_7_ratio_for_the_wrong_number_of_pools(knobs: dict[str, Any], says: str) -> None:
    """Shares, floors and tables are given by pool name; missing and unknown names are errors."""
    with pytest.raises(ConfigError, match=says):
        manager(full(), window(), **knobs)


@pytest.mark.parametrize("mode", ["elastic", "static"])
def test_cv_7_an_explicit_ratio_is_what_the_pools_start_with(mode: str) -> None:
    """The ratio given beats the automatic rule, and the snapshot reports the split."""
    kv = manager(full(), window(), mode=mode, pool_ratio={"full": 0.75, "window_8": 0.25})
    split = {name: pool.granules for name, pool in kv.snapshot().pools.items()}
    assert split == {"full": 48, "window_8": 16}


def test_cv_7_a_ratio_that_breaks_a_floor() -> None:
    """The floor is named with what it needs; so is the floor of one longest sequence."""
    ratio = {"full": 0.75, "window_8": 0.25}
    with pytest.raises(ConfigError, match=r"'window_8' 4,096 bytes.*floor of 20 pages.*5,376"):
        manager(full(), window(), pool_ratio=ratio, floor_pages={"window_8": 20})
    with pytest.raises(ConfigError, match="'full' 1,024 bytes, one sequence of max_tokens"):
        manager(full(), window(), pool_ratio={"full": 1 / 16, "window_8": 15 / 16})


def test_cv_7_floors_that_cannot_all_be_kept() -> None:
    """Floors beyond the memory are refused with what each pool needs."""
    with pytest.raises(ConfigError, match=r"and the floors.*full 7,936.*window_8 10,496"):
        manager(full(), window(), floor_pages={"full": 30, "window_8": 40})


@pytest.mark.parametrize("dims", [(8, 8), (3, 5), (11, 7), (49, 1)])
def test_cv_7_what_fits_at_all_fits_in_the_default_split(dims: tuple[int, int]) -> None:
    """The split nobody asked for never starves a pool: both modes need the same least memory."""

    def least(mode: str, max_tokens: int) -> int:
        specs = full(dims[0]), window(4 * max_tokens // 5, dim=dims[1])
        for granules in range(1, 200):
            try:
                manager(*specs, granules=granules, max_tokens=max_tokens, mode=mode)
            except ConfigError:
                continue
            return granules
        raise AssertionError("200 granules are not enough")

    for max_tokens in (8, 20, 49):
        assert least("static", max_tokens) == least("elastic", max_tokens)


def test_cv_8_a_refused_construction_leaves_the_memory_as_it_was() -> None:
    """Probes and mistakes cost nothing: the same memory and options serve the real instance."""
    memory = MemfdMemory(16 * GRANULE, GRANULE)
    layout = Layout.from_layers({0: full(), 1: window()}, block_tokens=4)
    wrong = Options(tables={"window_8": np.zeros((1, 1), np.int32)})
    for _ in range(3):
        with pytest.raises(ConfigError, match=r"int32\[1, 1\]; give int32\[8, 4\]"):
            KVManager(layout, memory, max_sequences=8, max_tokens=16, options=wrong)
    with KVManager(layout, memory, max_sequences=8, max_tokens=16) as kv:
        assert kv.snapshot().budget_bytes == 16 * GRANULE
        kv.check()
