"""The demo's pure parts: traffic, sizes, pictures, numbers."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtide.cli.demo.picture import HEIGHT, WIDTH, Panel, PoolSample, draw_cells, draw_svg
from kvtide.cli.demo.sizing import group_bytes, memory_for, startup_ratio
from kvtide.cli.demo.traffic import make_traffic, num_distinct
from kvtide.config import Options
from kvtide.layout import FullSpec, Layout, StateSpec, WindowSpec
from kvtide.layout.spec import Buffer
from kvtide.manager import KVManager
from kvtide.memory import NullMemory

from .small import SIZE, Bytes

FULL = FullSpec(kv_heads=1, head_dim=16, dtype="float32")
WINDOW = WindowSpec(window=64, kv_heads=1, head_dim=16, dtype="float32")
STATE = StateSpec(buffers=(Buffer("recurrent", (8, 16), "float32"),), interval_tokens=64)


def test_traffic_is_the_same_every_time_and_as_long_as_announced() -> None:
    phases = make_traffic(Bytes(), SIZE)
    assert phases == make_traffic(Bytes(), SIZE)
    first, middle, last = phases
    assert [len(phase.jobs) for phase in phases] == [6, 6, 4]
    assert max(len(job.prompt) for phase in phases for job in phase.jobs) < SIZE.max_tokens
    assert {job.prompt[:48] for job in (*first.jobs, *last.jobs)} == {first.jobs[0].prompt[:48]}
    assert len({job.prompt[:300] for job in middle.jobs}) == SIZE.documents


def test_arrivals_never_go_back_in_time() -> None:
    for phase in make_traffic(Bytes(), SIZE):
        arrivals = [job.arrival for job in phase.jobs]
        assert arrivals == sorted(arrivals)


@given(st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=8))
def test_distinct_prefixes_are_counted_once(sequences: list[list[int]]) -> None:
    prefixes = {tuple(s[:n]) for s in sequences for n in range(1, len(s) + 1)}
    assert num_distinct(sequences) == len(prefixes)


@pytest.mark.parametrize(
    "layers",
    [{0: FULL}, {0: FULL, 1: WINDOW}, {0: FULL, 1: STATE, 2: STATE}],
    ids=["full", "window", "state"],
)
def test_the_split_just_holds_the_longest_sequence(layers: dict[int, FullSpec]) -> None:
    layout = Layout.from_layers(layers, block_tokens=16)
    ratio = startup_ratio(layout, 160)
    assert sum(ratio.values()) == pytest.approx(1.0)
    memory = memory_for(layout, ratio, 900, granule_bytes=4096)
    assert memory % 4096 == 0
    options = Options(mode="static", pool_ratio=ratio)
    kv = KVManager(layout, NullMemory(memory, 4096), max_tokens=900, options=options)
    kv.shut_down()


def test_a_window_needs_no_more_than_its_window() -> None:
    full, window = Layout.from_layers({0: FULL, 1: WINDOW}, block_tokens=16).groups
    assert group_bytes(full, 800) == 50 * full.page_bytes
    assert group_bytes(window, 800) == 4 * window.page_bytes


PANEL = Panel(
    title="a <panel>",
    samples=(
        PoolSample(step=0, pool="a", mapped_bytes=60, used_bytes=20, cached_bytes=10),
        PoolSample(step=0, pool="b", mapped_bytes=40, used_bytes=40, cached_bytes=0),
        PoolSample(step=1, pool="a", mapped_bytes=20, used_bytes=0, cached_bytes=20),
        PoolSample(step=1, pool="b", mapped_bytes=40, used_bytes=0, cached_bytes=0),
    ),
    budget_bytes=100,
    marks=((0, "one"), (1, "two")),
)


def test_stacks_are_what_the_samples_say() -> None:
    assert PANEL.pools == ("a", "b")
    assert PANEL.stacks() == [[20, 10, 30, 40, 0, 0], [0, 20, 0, 0, 0, 40]]


def test_the_svg_is_well_formed_and_stays_inside_its_frame() -> None:
    root = ElementTree.fromstring(draw_svg([PANEL, PANEL]))
    polygons = [e for e in root.iter() if e.tag.endswith("polygon")]
    assert len(polygons) == 2 * 6
    for polygon in polygons:
        for point in polygon.attrib["points"].split():
            x, y = map(float, point.split(","))
            assert 0 <= x <= WIDTH
            assert 0 <= y <= HEIGHT
    assert "a <panel>" in "".join(root.itertext())


def test_cells_show_pools_from_the_bottom_up() -> None:
    cells = draw_cells(PANEL, width=80, height=10)
    assert [len(row) for row in cells] == [2] * 10
    columns = ["".join(row[c][0] for row in reversed(cells)) for c in range(2)]
    assert columns == ["██▓░░░████", "▓▓░░░░    "]
    pools = [[row[c][1] for row in reversed(cells)] for c in range(2)]
    assert pools == [[0] * 6 + [1] * 4, [0] * 2 + [1] * 4 + [None] * 4]


def test_an_empty_panel_can_be_drawn() -> None:
    empty = Panel(title="nothing", samples=(), budget_bytes=1)
    assert "<svg" in draw_svg([empty])
    assert draw_cells(empty, width=5, height=2) == [[(" ", None)], [(" ", None)]]
