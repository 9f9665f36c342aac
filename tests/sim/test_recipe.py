"""A recipe made ready: what reaches the lab, and what is read of the traffic."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from tests.cli.replay_runs import FIELDS

from kvtide.errors import ConfigError
from kvtide.sim.recipe import Recipe, prepare
from kvtide.sim.result import Objective

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model, and traffic of three requests at 0, 10 and 20 seconds."""
    (tmp_path / "config.json").write_text(json.dumps(FIELDS))
    lengths = [(100, 20), (300, 7), (50, 60)]
    lines = [
        {"timestamp": 10_000 * n, "input_length": i, "output_length": o, "hash_ids": [n]}
        for n, (i, o) in enumerate(lengths)
    ]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def recipe(folder: Path, **fields: Any) -> Recipe:
    given: dict[str, Any] = {
        "config": str(folder),
        "traces": (f"mooncake:{folder / 't.jsonl'}",),
        "memory_bytes": 24 << 20,
        "granule_bytes": 64 << 10,
    }
    return Recipe(**(given | fields))


def test_the_longest_request_decides_how_long_sequences_get(folder: Path) -> None:
    bench = prepare(recipe(folder))
    assert (bench.requests, bench.setup.max_tokens) == (3, 308)
    assert prepare(recipe(folder, requests=1)).setup.max_tokens == 121
    assert prepare(recipe(folder, max_tokens=4000)).setup.max_tokens == 4000


def test_a_rate_makes_requests_come_faster(folder: Path) -> None:
    arrivals = [request.arrival for request in prepare(recipe(folder, rate=4.0)).trace]
    assert arrivals == [0.0, 2.5, 5.0]


def test_several_traces_come_at_once(folder: Path) -> None:
    (trace,) = recipe(folder).traces
    bench = prepare(recipe(folder, traces=(trace, trace), requests=5))
    assert [request.arrival for request in bench.trace] == [0.0, 0.0, 10.0, 10.0, 20.0]


def test_every_setting_reaches_the_lab(folder: Path) -> None:
    setup = prepare(
        recipe(folder, ttft=1.5, itl=0.2, chunk_tokens=99, max_running=3, pool_ratio=(0.3, 0.7))
    ).setup
    assert setup.objective == Objective(ttft=1.5, itl=0.2)
    assert (setup.chunk_tokens, setup.max_running) == (99, 3)
    assert setup.pool_ratio == {"window_64": 0.3, "full": 0.7}
    assert setup.granule_bytes == 64 << 10


def test_the_best_fixed_split_is_searched_for(folder: Path) -> None:
    bench = prepare(recipe(folder))
    run = bench.run("oracle-static")
    assert run.policy == "oracle-static"
    assert sum(run.settings["pool_ratio"].values()) == pytest.approx(1.0)


def test_traffic_there_has_to_be(folder: Path) -> None:
    (folder / "t.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match="has no request; give one that has"):
        prepare(recipe(folder))
    with pytest.raises(ConfigError, match="traces is empty"):
        prepare(recipe(folder, traces=()))
