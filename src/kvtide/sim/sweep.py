"""A grid of runs over all cores, or over a cluster; what is finished is on disk at once.

from kvtide.sim.sweep import grid, sweep

points = grid(recipe, {"policy": ["static", "elastic"], "rate": [1.0, 2.0]})
results = sweep(points, Path("out"))

Results are lines of JSON in `out/results.jsonl`, each keyed by a digest of all that went into it. A
sweep that was interrupted goes on where it stopped; nothing is unpickled from disk.
"""

from __future__ import annotations

import json
import os
import signal
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import closing
from dataclasses import dataclass, fields, replace
from importlib import import_module
from importlib.util import find_spec
from itertools import product
from multiprocessing import active_children, get_context
from typing import TYPE_CHECKING, Any, Protocol, cast

from kvtide.errors import ConfigError
from kvtide.sim.fingerprint import digest
from kvtide.sim.recipe import Recipe, prepare

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence
    from pathlib import Path

RESULTS = "results.jsonl"


class Spread(Protocol):
    """Something that works through recipes, in any order and at once."""

    def __call__(
        self, work: Callable[[Recipe], dict[str, Any]], recipes: Sequence[Recipe]
    ) -> Generator[tuple[int, dict[str, Any]]]:
        """Pairs of a recipe's number and what `work` made of it, as they are finished."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One finished point: its recipe and its run, as `to_json` gives them, or why it has none."""

    key: str
    recipe: dict[str, Any]
    run: dict[str, Any] | None
    error: str | None

    def line(self) -> str:
        """The point as one line of JSON; numbers that are none are null."""
        return json.dumps(
            {"key": self.key, "recipe": self.recipe, "run": self.run, "error": self.error}
        )


def grid(base: Recipe, axes: Mapping[str, Sequence[Any]]) -> list[Recipe]:
    """Every combination, the last axis varying fastest. Raises ConfigError for an unknown field."""
    known = [field.name for field in fields(Recipe)]
    for name, values in axes.items():
        if name not in known:
            raise ConfigError(f"sweep over {name!r}; use one of {', '.join(known)}")
        if not values:
            raise ConfigError(f"sweep over {name} has no values; give at least one")
    combinations = product(*axes.values())
    return [replace(base, **dict(zip(axes, values, strict=True))) for values in combinations]


def sweep(
    recipes: Sequence[Recipe],
    folder: Path,
    *,
    work: Callable[[Recipe], dict[str, Any]] | None = None,
    spread: Spread | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> list[Point]:
    """The points of all recipes, in their order; those that `folder` has already are not run again.

    Each finished point is appended to `folder`/results.jsonl before the next is waited for; at the
    end the file is put in order, so that the same sweep leaves the same bytes. `progress` is told
    how many points are done by now. A point that a ConfigError ends is a result too. `work`
    (default: one run) is called in other processes by `spread` (default: one per core).
    """
    keys = [digest(recipe) for recipe in recipes]
    path = folder / RESULTS
    done = _read(path)
    missing = [number for number, key in enumerate(keys) if key not in done]
    missing = list({keys[number]: number for number in reversed(missing)}.values())[::-1]
    before = len(recipes) - len(missing)
    progress(before)
    if missing:
        todo = [recipes[number] for number in missing]
        with (
            path.open("a", encoding="utf-8") as file,
            closing((spread or on_cores())(work or run_one, todo)) as results,
        ):
            for count, (which, result) in enumerate(results, 1):
                point = _point(keys[missing[which]], todo[which], result)
                done[point.key] = point
                file.write(point.line() + "\n")
                file.flush()
                os.fsync(file.fileno())
                progress(before + count)
    _rewrite(path, done, keys)
    return [done[key] for key in keys]


def run_one(recipe: Recipe) -> dict[str, Any]:
    """One run as plain values: {"run": ...}, or {"error": ...} if the recipe is impossible."""
    try:
        return {"run": prepare(recipe).run(recipe.policy).to_json()}
    except ConfigError as error:
        return {"error": " ".join(str(error).split())}


def on_cores(processes: int | None = None) -> Spread:
    """Spread over processes of this machine, by default as many as it has cores."""

    def spread(
        work: Callable[[Recipe], dict[str, Any]], recipes: Sequence[Recipe]
    ) -> Generator[tuple[int, dict[str, Any]]]:
        count = min(processes or os.cpu_count() or 1, len(recipes))
        others = set(active_children())
        context = get_context("spawn")
        with ProcessPoolExecutor(count, context, initializer=_leave_interrupts) as pool:
            futures = {pool.submit(work, recipe): number for number, recipe in enumerate(recipes)}
            try:
                for future in as_completed(futures):
                    yield futures[future], future.result()
            except BaseException:  # interrupted or closed: nobody waits for what is half done
                for child in set(active_children()) - others:
                    child.terminate()  # the pool gives up what it had not begun
                raise

    return spread


def _leave_interrupts() -> None:
    """Ctrl-C reaches all processes of a terminal; the one that started the sweep ends the rest."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def on_ray(address: str) -> Spread:
    """Spread over a Ray cluster, whose machines see the same files under the same paths.

    Raises ConfigError if ray is not installed or nothing answers at `address`.
    """
    if find_spec("ray") is None:
        raise ConfigError("ray is not installed; run: pip install 'kvtide[ray]'")
    ray: Any = import_module("ray")
    try:
        ray.init(address=address, log_to_driver=False)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ConfigError(f"no Ray cluster answers at {address!r}: {error}") from error

    def spread(
        work: Callable[[Recipe], dict[str, Any]], recipes: Sequence[Recipe]
    ) -> Generator[tuple[int, dict[str, Any]]]:
        remote = ray.remote(work)
        waiting = {remote.remote(recipe): number for number, recipe in enumerate(recipes)}
        while waiting:
            ready, _ = ray.wait(list(waiting))
            for reference in ready:
                yield waiting.pop(reference), ray.get(reference)

    return spread


def _point(key: str, recipe: Recipe, result: dict[str, Any]) -> Point:
    """What a worker answered, through JSON and back: fresh and resumed points are the same."""
    plain = json.loads(json.dumps({"recipe": recipe.to_json(), **result}), parse_constant=_null)
    return Point(key=key, recipe=plain["recipe"], run=plain.get("run"), error=plain.get("error"))


def _null(_: str) -> None:
    """NaN and infinities: JSON has no word for them."""


def _read(path: Path) -> dict[str, Point]:
    """The finished points of a file; a last line that was cut short is cut off."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        data = path.read_bytes() if path.exists() else b""
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):
            os.truncate(path, len(whole))
    except OSError as error:
        raise ConfigError(f"{path} cannot be used: {error.strerror}; give another --out") from error
    points: dict[str, Point] = {}
    for number, line in enumerate(whole.decode("utf-8", "replace").splitlines(), 1):
        try:
            values = cast("dict[str, Any]", json.loads(line))
            points[values["key"]] = Point(**values)
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(
                f"{path}:{number}: no point of a sweep ({error}); give another --out or remove it"
            ) from error
    return points


def _rewrite(path: Path, done: dict[str, Point], keys: Sequence[str]) -> None:
    """The points of this sweep in its order, then others that were there, by key."""
    order = [*dict.fromkeys(keys), *sorted(done.keys() - set(keys))]
    fresh = path.with_suffix(".tmp")
    fresh.write_text("".join(done[key].line() + "\n" for key in order), encoding="utf-8")
    fresh.replace(path)
