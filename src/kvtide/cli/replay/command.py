"""`kvtide replay`: read what was asked, run it, print or write."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from kvtide.cli.replay.asked import Asked, axes_of, policies_of, recipe_of
from kvtide.cli.replay.grid import draw_grid, lines_of
from kvtide.cli.replay.metrics import Comparison
from kvtide.cli.replay.page import draw_page, strict_json
from kvtide.cli.replay.parquet import require_parquet, write_parquet
from kvtide.cli.replay.progress import bar
from kvtide.cli.replay.text import report
from kvtide.cli.units import parse_whole, show, show_bytes
from kvtide.errors import ConfigError
from kvtide.sim.policies import policy as known_policy
from kvtide.sim.recipe import ORACLE, prepare
from kvtide.sim.sweep import RESULTS, grid, on_cores, on_ray, sweep
from kvtide.sim.traces.sources import download_text

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvtide.sim.recipe import Bench, Recipe
    from kvtide.sim.result import Run

REFUSED, INTERRUPTED = 2, 130
"""Exit status if the question makes no sense, and if someone pressed Ctrl-C."""

__all__ = ["Asked", "Output", "run"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """Where results go: files beside what is printed, and who works on a sweep."""

    as_json: bool = False
    html: Path | None = None
    parquet: Path | None = None
    out: Path = Path("replay-output")
    cores: str | None = None
    ray: str | None = None


def run(asked: Asked, output: Output, *, download: bool = False) -> int:
    """Run, print, write what is wanted; returns the exit status."""
    if download:
        print(download_text(), end="")
        return 0
    try:
        if asked.sweep:
            _sweep(asked, output)
        else:
            _compare(asked, output)
    except ConfigError as error:
        print(f"kvtide replay: {' '.join(str(error).split())}", file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        kept = f"; finished points are in {output.out / RESULTS}" if asked.sweep else ""
        print(f"kvtide replay: interrupted{kept}", file=sys.stderr)
        return INTERRUPTED
    return 0


def _compare(asked: Asked, output: Output) -> None:
    """Policies side by side."""
    recipe, policies = recipe_of(asked), policies_of(asked)
    _require_policies(policies)
    _require_folders(output)
    if output.parquet is not None:
        require_parquet()
    watching = Console(stderr=True)
    with bar(watching, "reading", None):
        bench = prepare(recipe)
    comparison = _comparison(recipe, bench, policies, watching)
    if output.html is not None:
        _write(output.html, draw_page(comparison))
    if output.parquet is not None:
        write_parquet(comparison.runs, output.parquet)
    if output.as_json:
        common = recipe.to_json()
        del common["policy"]  # every run has its own
        _print_json({"recipe": common, "runs": [one.to_json() for one in comparison.runs]})
    else:
        _show([*report(comparison)], output.html, output.parquet)


def _comparison(
    recipe: Recipe, bench: Bench, policies: Iterable[str], console: Console
) -> Comparison:
    runs: list[Run] = []
    for name in policies:
        total = None if name == ORACLE else bench.requests
        with bar(console, name, total) as advance:
            runs.append(bench.run(name, advance))
    return Comparison(
        model=_model(recipe),
        trace=bench.trace.name,
        settings=_settings(recipe, bench),
        runs=tuple(runs),
    )


def _sweep(asked: Asked, output: Output) -> None:
    """A grid of runs, each of which is kept when it is finished."""
    axes, recipe = axes_of(asked), recipe_of(asked)
    _require_policies(axes["policy"])
    _require_folders(output)
    if output.parquet is not None:
        raise ConfigError("--parquet holds requests of single runs; leave it out of a sweep")
    recipes = grid(recipe, axes)
    cores = None if output.cores is None else parse_whole("--cores", output.cores)
    spread = on_cores(cores) if output.ray is None else on_ray(output.ray)
    with bar(Console(stderr=True), "points", len(recipes)) as advance:
        points = sweep(recipes, output.out, spread=spread, progress=advance)
    if output.html is not None:
        _write(output.html, draw_grid(points, [*axes], _model(recipe)))
    if output.as_json:
        _print_json([json.loads(point.line()) for point in points])
    else:
        lines = [f"{_model(recipe)}: {len(points)} points", "", *lines_of(points, [*axes])]
        _show(lines, output.out / RESULTS, output.html)


def _require_policies(names: Iterable[str]) -> None:
    """An unknown policy is heard of before the others have run for minutes.

    Modules beside the user are found, as other commands find them.
    """
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))  # last: it hides nothing
    for name in names:
        if name != ORACLE:
            known_policy(name)


def _require_folders(output: Output) -> None:
    """So is a file that cannot be written."""
    for option, path in (("--html", output.html), ("--parquet", output.parquet)):
        if path is not None and not path.parent.is_dir():
            raise ConfigError(f"{option} {path} cannot be written: there is no such folder")


def _model(recipe: Recipe) -> str:
    path = Path(recipe.config).resolve()
    return path.parent.name if path.name == "config.json" else path.stem


def _settings(recipe: Recipe, bench: Bench) -> dict[str, str]:
    """What the runs had in common, by option, as people read it."""
    setup = bench.setup
    return {
        "memory": show_bytes(recipe.memory_bytes),
        "hardware": recipe.hardware,
        "tp": show(recipe.tensor),
        "rate": f"{recipe.rate:g}",
        "block-tokens": show(recipe.block_tokens),
        "granule": show_bytes(recipe.granule_bytes),
        "max-running": show(setup.max_running),
        "chunk-tokens": show(setup.chunk_tokens),
        "max-tokens": show(setup.max_tokens),
        "slo-ttft": f"{recipe.ttft:g} s",
        "slo-itl": f"{recipe.itl:g} s",
    }


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--html {path} cannot be written: {error.strerror}") from error


def _print_json(data: object) -> None:
    print(json.dumps(strict_json(data), indent=2, allow_nan=False))


def _show(lines: Iterable[str], *written: Path | None) -> None:
    console = Console(highlight=False)
    for line in lines:
        known = line.encode(console.encoding, "replace").decode(console.encoding)
        console.print(known, soft_wrap=True, markup=False)
    for path in written:
        if path is not None:
            console.print(f"\nWritten: {path}", soft_wrap=True, markup=False)
