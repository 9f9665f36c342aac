"""Sweeps: the grid, what is on disk when, resuming, and the same bytes every time."""

from __future__ import annotations

import json
import sys
import time
import types
from dataclasses import replace
from multiprocessing import active_children
from typing import TYPE_CHECKING, Any

import pytest

from kvtide.errors import ConfigError
from kvtide.sim.fingerprint import digest, files_of
from kvtide.sim.recipe import Recipe, seeded
from kvtide.sim.sweep import RESULTS, grid, on_cores, on_ray, sweep

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence
    from pathlib import Path

BASE = Recipe(config="none.json", traces=("synthetic",), memory_bytes=10**9)
BASE_LATER = replace(BASE, rate=64.0)
AXES = {"policy": ["static", "elastic"], "rate": [1.0, 2.0, 4.0]}


def work(recipe: Recipe) -> dict[str, Any]:
    """Made of the settings alone, so that one can tell whose result is whose."""
    if recipe.policy == "impossible":
        return {"error": "no such thing"}
    return {"run": {"policy": recipe.policy, "load": recipe.rate * recipe.memory_bytes}}


class Here:
    """A spread in this process that counts, goes backwards, and may break off."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.worked: list[Recipe] = []
        self._stop_after = stop_after

    def __call__(
        self, work: Callable[[Recipe], dict[str, Any]], recipes: Sequence[Recipe]
    ) -> Generator[tuple[int, dict[str, Any]]]:
        for number in reversed(range(len(recipes))):
            if len(self.worked) == self._stop_after:
                raise KeyboardInterrupt
            self.worked.append(recipes[number])
            yield number, work(recipes[number])


def found(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / RESULTS).read_text().splitlines()]


def test_the_last_axis_varies_fastest() -> None:
    points = [(point.policy, point.rate) for point in grid(BASE, AXES)]
    assert points == [(p, r) for p in ("static", "elastic") for r in (1.0, 2.0, 4.0)]


@pytest.mark.parametrize(
    ("axes", "says"),
    [({"colour": [1]}, "sweep over 'colour'; use one of config"), ({"rate": []}, "no values")],
)
def test_axes_that_are_none(axes: dict[str, list[Any]], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        grid(BASE, axes)


def test_results_come_in_the_order_of_the_grid(tmp_path: Path) -> None:
    recipes = grid(BASE, AXES)
    told: list[int] = []
    points = sweep(recipes, tmp_path, work=work, spread=Here(), progress=told.append)
    assert [point.run for point in points] == [work(recipe)["run"] for recipe in recipes]
    assert [line["run"] for line in found(tmp_path)] == [point.run for point in points]
    assert told == [0, 1, 2, 3, 4, 5, 6]


def test_a_sweep_that_breaks_off_goes_on_where_it_stopped(tmp_path: Path) -> None:
    recipes = grid(BASE, AXES)
    with pytest.raises(KeyboardInterrupt):
        sweep(recipes, tmp_path, work=work, spread=Here(stop_after=2))
    assert [line["recipe"]["rate"] for line in found(tmp_path)] == [4.0, 2.0]

    told: list[int] = []
    again = Here()
    points = sweep(recipes, tmp_path, work=work, spread=again, progress=told.append)
    assert len(again.worked) == 4
    assert told == [2, 3, 4, 5, 6]

    whole = sweep(recipes, tmp_path / "whole", work=work, spread=Here())
    assert points == whole
    fresh, resumed = (tmp_path / "whole" / RESULTS), (tmp_path / RESULTS)
    assert fresh.read_bytes() == resumed.read_bytes()

    third = Here()
    sweep(recipes, tmp_path, work=work, spread=third)
    assert third.worked == []


def test_a_point_is_on_disk_before_the_next_is_waited_for(tmp_path: Path) -> None:
    counts: list[int] = []

    def spread(
        work: Callable[[Recipe], dict[str, Any]], recipes: Sequence[Recipe]
    ) -> Generator[tuple[int, dict[str, Any]]]:
        for number, recipe in enumerate(recipes):
            counts.append(len(found(tmp_path)))
            yield number, work(recipe)

    sweep(grid(BASE, AXES), tmp_path, work=work, spread=spread)
    assert counts == [0, 1, 2, 3, 4, 5]


def test_a_line_cut_short_is_run_again(tmp_path: Path) -> None:
    recipes = grid(BASE, AXES)
    sweep(recipes, tmp_path, work=work, spread=Here())
    path = tmp_path / RESULTS
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    again = Here()
    sweep(recipes, tmp_path, work=work, spread=again)
    assert again.worked == recipes[-1:]
    assert path.read_bytes() == whole

    path.write_bytes(whole[:-20])
    with pytest.raises(KeyboardInterrupt):  # in the end the file is put in order: not here
        sweep([*recipes, BASE_LATER], tmp_path, work=work, spread=Here(stop_after=1))
    assert len(found(tmp_path)) == len(recipes)


def test_a_file_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / RESULTS).write_text('{"colour": "red"}\n')
    with pytest.raises(ConfigError, match=r"results.jsonl:1: no point of a sweep"):
        sweep(grid(BASE, AXES), tmp_path, work=work, spread=Here())
    assert (tmp_path / RESULTS).read_text() == '{"colour": "red"}\n'
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="give another --out"):
        sweep(grid(BASE, AXES), tmp_path / "file", work=work, spread=Here())


def test_points_of_other_sweeps_stay_in_the_folder(tmp_path: Path) -> None:
    sweep(grid(BASE, {"rate": [8.0]}), tmp_path, work=work, spread=Here())
    sweep(grid(BASE, AXES), tmp_path, work=work, spread=Here())
    assert [line["recipe"]["rate"] for line in found(tmp_path)] == [1.0, 2.0, 4.0] * 2 + [8.0]


def test_equal_points_are_run_once_and_impossible_ones_are_results(tmp_path: Path) -> None:
    recipes = grid(BASE, {"policy": ["static", "impossible", "static"]})
    here = Here()
    points = sweep(recipes, tmp_path, work=work, spread=here)
    assert len(here.worked) == 2
    assert [point.error for point in points] == [None, "no such thing", None]
    assert points[0] == points[2]
    assert points[1].run is None


def numberless(recipe: Recipe) -> dict[str, Any]:
    return {"run": {"ttft": [float("nan"), float("inf"), recipe.rate]}}


def test_numbers_that_are_none_are_null(tmp_path: Path) -> None:
    (point,) = sweep([BASE], tmp_path, work=numberless, spread=Here())
    assert point.run == {"ttft": [None, None, 1.0]}
    (again,) = sweep([BASE], tmp_path, work=numberless, spread=Here())
    assert again == point


def test_processes_do_the_same(tmp_path: Path) -> None:
    recipes = grid(BASE, AXES)
    points = sweep(recipes, tmp_path / "processes", work=len_of_policy, spread=on_cores(2))
    assert [point.run for point in points] == [len_of_policy(recipe)["run"] for recipe in recipes]


def len_of_policy(recipe: Recipe) -> dict[str, Any]:
    return {"run": {"length": len(recipe.policy), "rate": recipe.rate}}


def quick_or_endless(recipe: Recipe) -> dict[str, Any]:
    if recipe.rate != 1.0:
        time.sleep(600)
    return work(recipe)


def breaks_off(done: int) -> None:
    if done:
        raise KeyboardInterrupt


def test_breaking_off_waits_for_nobody(tmp_path: Path) -> None:
    recipes = grid(BASE, {"rate": [1.0, 2.0, 3.0, 4.0]})
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        sweep(recipes, tmp_path, work=quick_or_endless, spread=on_cores(2), progress=breaks_off)
    assert time.monotonic() - began < 60
    assert active_children() == []
    assert [line["recipe"]["rate"] for line in found(tmp_path)] == [1.0]


def broken(recipe: Recipe) -> dict[str, Any]:
    raise RuntimeError(f"bug at {recipe.rate}")


def test_a_bug_in_a_worker_is_no_result(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="bug at"):
        sweep(grid(BASE, AXES), tmp_path, work=broken, spread=on_cores(2))
    assert found(tmp_path) == []


class FakeRay(types.ModuleType):
    """What `on_ray` uses of ray, in this process; the last that was asked for is ready first."""

    def __init__(self) -> None:
        super().__init__("ray")
        self.__spec__ = types.SimpleNamespace()  # pyright: ignore
        self.addresses: list[str] = []

    def init(self, address: str, **_: Any) -> None:
        if address == "nowhere":
            raise ConnectionError("nobody there")
        self.addresses.append(address)

    def remote(self, work: Callable[[Any], Any]) -> Any:
        return types.SimpleNamespace(remote=lambda recipe: _Later(work, recipe))

    def wait(self, waiting: list[Any]) -> tuple[list[Any], list[Any]]:
        return waiting[-1:], waiting[:-1]

    def get(self, later: Any) -> Any:
        return later.work(later.recipe)


class _Later:
    def __init__(self, work: Callable[[Any], Any], recipe: Any) -> None:
        self.work, self.recipe = work, recipe


def test_a_cluster_does_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", fake)
    recipes = grid(BASE, AXES)
    points = sweep(recipes, tmp_path, work=work, spread=on_ray("head:6379"))
    assert [point.run for point in points] == [work(recipe)["run"] for recipe in recipes]
    assert fake.addresses == ["head:6379"]
    with pytest.raises(ConfigError, match="no Ray cluster answers at 'nowhere': nobody there"):
        on_ray("nowhere")


def test_without_ray_one_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtide.sim.sweep.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"ray is not installed; run: pip install"):
        on_ray("head:6379")


def test_a_digest_knows_settings_the_content_of_files_and_the_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, trace = tmp_path / "config.json", tmp_path / "a.jsonl"
    config.write_text("{}")
    trace.write_text("one")
    spec = f"mooncake:{trace},first=3 + synthetic"
    recipe = replace(BASE, config=str(tmp_path), traces=(spec,))
    assert list(files_of(recipe)) == [config, trace]
    first = digest(recipe)
    assert digest(replace(recipe)) == first
    assert digest(replace(recipe, rate=2.0)) != first
    trace.write_text("other")
    second = digest(recipe)
    assert second != first
    config.write_text('{"a": 1}')
    third = digest(recipe)
    assert third != second
    monkeypatch.setattr("kvtide.sim.fingerprint.code", lambda: "another kvtide")
    assert digest(recipe) != third


def test_a_digest_knows_the_module_of_a_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    module = tmp_path / "policy_of_a_test.py"
    module.write_text("def plan(facts): return ()\n")
    recipe = replace(BASE, policy="policy_of_a_test:plan")
    first = digest(recipe)
    module.write_text("def plan(facts): return [1]\n")
    assert digest(recipe) != first
    assert digest(replace(BASE, policy="no_such_module_there:plan")) != first


@pytest.mark.parametrize(
    ("spec", "seeds"),
    [
        ("synthetic", "synthetic:seed=7"),
        ("synthetic:rate=2;rate=4", "synthetic:rate=2,seed=7;rate=4"),
        ("synthetic:seed=3", "synthetic:seed=3"),
        ("mooncake:a.jsonl + synthetic:rate=2", "mooncake:a.jsonl + synthetic:rate=2,seed=7"),
        ("synthetic then a.jsonl", "synthetic:seed=7 then a.jsonl"),
    ],
)
def test_a_seed_is_given_to_synthetic_traces(spec: str, seeds: str) -> None:
    assert seeded(spec, 7) == seeds
    assert seeded(spec, None) == spec
