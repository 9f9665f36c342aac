"""A name for everything that goes into a run, so that a result is found again, or is not."""

from __future__ import annotations

import hashlib
import json
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import kvtide

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvtide.sim.recipe import Recipe

_CHUNK = 1 << 20


def digest(recipe: Recipe) -> str:
    """SHA-256 over the settings, the content of every file they name, and kvtide's own code."""
    named = {str(path): _content(path, *_stamp(path)) for path in sorted(set(files_of(recipe)))}
    parts = {"recipe": recipe.to_json(), "files": named, "code": code()}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


@cache
def code() -> str:
    """SHA-256 over the sources that decide what a run gives: all but the command line."""
    root = Path(kvtide.__file__).parent
    paths = sorted(path.relative_to(root) for path in root.rglob("*.py"))
    found = hashlib.sha256()
    for path in paths:
        if path.parts[0] != "cli":
            found.update(f"{path.as_posix()}\n".encode() + (root / path).read_bytes())
    return found.hexdigest()


def files_of(recipe: Recipe) -> Iterator[Path]:
    """Files and folders a recipe names: model, hardware, traces, and a policy's own module."""
    folder = Path(recipe.config)
    model = folder / "config.json" if folder.is_dir() else folder  # beside it lie the weights
    yield from _existing([str(model), recipe.hardware])
    for spec in recipe.traces:
        yield from _existing(_readings(spec))
    module = recipe.policy.partition(":")[0] if ":" in recipe.policy else ""
    try:
        found = find_spec(module) if module else None
    except (ImportError, ValueError):
        found = None  # the run itself says what is wrong with it
    if found is not None and found.origin is not None:
        yield from _existing([found.origin])


def _readings(spec: str) -> list[str]:
    """What may be a path in a trace's spec: behind a format, before the options."""
    single = [part for one in spec.split(" then ") for part in one.split(" + ")]
    behind = [text for part in single for text in (part, part.partition(":")[2])]
    commas = [[at for at, letter in enumerate(text) if letter == ","] for text in behind]
    return [
        text[:stop].strip()
        for text, stops in zip(behind, commas, strict=True)
        for stop in (*stops, len(text))
    ]


def _existing(texts: list[str]) -> Iterator[Path]:
    for text in texts:
        path = Path(text)
        if text and path.is_dir():
            yield from (file for file in path.rglob("*") if file.is_file())
        elif text and path.is_file():
            yield path


def _stamp(path: Path) -> tuple[int, int]:
    """Size and time of change: what decides whether a file is read again."""
    status = path.stat()
    return status.st_size, status.st_mtime_ns


@cache
def _content(path: Path, size: int, changed: int) -> str:
    del size, changed
    found = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            found.update(chunk)
    return found.hexdigest()
