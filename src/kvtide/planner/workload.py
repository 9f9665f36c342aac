"""What a planner is told about traffic: requests of some lengths, how many run at a time, and what
they share.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, cast

from kvtide.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A class of requests: prompt and answer in tokens; `weight` is its part of the traffic."""

    input_tokens: int
    output_tokens: int
    weight: float = 1.0

    def __post_init__(self) -> None:
        """Refuse an empty prompt, a negative answer and weights that are not above 0."""
        _require("input", self.input_tokens, at_least=1)
        _require("output", self.output_tokens, at_least=0)
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise ConfigError(f"weight is {self.weight}; use a number above 0")

    @property
    def length(self) -> int:
        """Tokens of the sequence when it ends."""
        return self.input_tokens + self.output_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Traffic. `concurrency` sequences run at a time, over all attention-data-parallel copies; None
    asks for as many as fit. The first `shared_prefix` tokens are the same in all of them.
    `snapshots` of the state are kept for each running sequence beside the live one: 1 is the end of
    its prompt.
    """

    requests: tuple[Request, ...]
    concurrency: int | None = None
    shared_prefix: int = 0
    snapshots: int = 1

    def __post_init__(self) -> None:
        """Refuse traffic of nothing, and prefixes longer than every prompt."""
        if not self.requests:
            raise ConfigError("requests is empty; give at least one class of requests")
        if self.concurrency is not None:
            _require("concurrency", self.concurrency, at_least=1)
        _require("shared_prefix", self.shared_prefix, at_least=0)
        _require("snapshots", self.snapshots, at_least=0)
        longest = max(request.input_tokens for request in self.requests)
        if self.shared_prefix >= longest:
            raise ConfigError(
                f"shared_prefix is {self.shared_prefix}, but the longest prompt has {longest} "
                "tokens and its last is always computed again; use a smaller one"
            )

    @property
    def mean_input(self) -> float:
        """Tokens of a prompt, on average."""
        return float(self.mean(lambda request: request.input_tokens))

    @property
    def mean_output(self) -> float:
        """Tokens of an answer, on average."""
        return float(self.mean(lambda request: request.output_tokens))

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(request.length for request in self.requests)

    def mean(self, amount: Callable[[Request], int]) -> Fraction:
        """Weighted mean of `amount` over the requests, exact."""
        # Whole numbers are added much faster than fractions, and traces have many requests.
        weights = [
            int(w) if w.is_integer() else Fraction(w)
            for w in (float(request.weight) for request in self.requests)
        ]
        amounts = [w * amount(r) for w, r in zip(weights, self.requests, strict=True)]
        return Fraction(sum(amounts)) / sum(weights)


def read_workload(
    path: Path, *, concurrency: int | None = None, shared_prefix: int | None = None
) -> Workload:
    """Workload from a file; what is given here replaces what the file says.

    `.jsonl`: a request a line, `{"input": n, "output": m}`. Anything else: one JSON object with
    `mean_input` and `mean_output`, or `classes`, a list of objects with these two and `weight`; and
    optionally `concurrency`, `shared_prefix` and `snapshots`. Raises ConfigError naming file and
    line, or field.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"workload {path} cannot be read: {error}") from error
    common = _from_lines(path, text) if path.suffix == ".jsonl" else _from_object(path, text)
    if concurrency is not None:
        common["concurrency"] = concurrency
    if shared_prefix is not None:
        common["shared_prefix"] = shared_prefix
    return Workload(**common)


def _from_lines(path: Path, text: str) -> dict[str, Any]:
    counts: Counter[tuple[int, int]] = Counter()
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        where = f"workload {path}, line {number}"
        entry = _object(where, line)
        _only(where, entry, ("input", "output"))
        lengths = _whole(where, entry, "input", 1), _whole(where, entry, "output", 0)
        counts[lengths] += 1
    if not counts:
        raise ConfigError(
            f'workload {path} has no requests; give {{"input": n, "output": m}} a line'
        )
    requests = (
        Request(input_tokens=i, output_tokens=o, weight=float(n)) for (i, o), n in counts.items()
    )
    return {"requests": tuple(requests)}


_ONE = ("mean_input", "mean_output")
_COMMON = ("concurrency", "shared_prefix", "snapshots")


def _from_object(path: Path, text: str) -> dict[str, Any]:
    where = f"workload {path}"
    entry = _object(where, text)
    common: dict[str, Any] = {
        name: _whole(where, entry, name, name == "concurrency")
        for name in _COMMON
        if entry.get(name) is not None
    }
    if "classes" not in entry:
        _only(where, entry, (*_ONE, *_COMMON))
        return {**common, "requests": (_request(where, entry),)}
    _only(where, entry, ("classes", *_COMMON))
    classes: Any = entry["classes"]
    if not isinstance(classes, list) or not classes:
        raise ConfigError(f"{where}: classes must be a list of at least one object")
    requests: list[Request] = []
    for index, given in enumerate(cast("list[Any]", classes)):
        at = f"{where}, classes[{index}]"
        if not isinstance(given, dict):
            raise ConfigError(f"{at} is {given!r}; give an object with {' and '.join(_ONE)}")
        one = cast("dict[str, Any]", given)
        _only(at, one, (*_ONE, "weight"))
        requests.append(_request(at, one))
    return {**common, "requests": tuple(requests)}


def _request(where: str, entry: Mapping[str, Any]) -> Request:
    weight: Any = entry.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
        raise ConfigError(f"{where}: weight is {weight!r}; use a number above 0")
    return Request(
        input_tokens=_whole(where, entry, "mean_input", 1),
        output_tokens=_whole(where, entry, "mean_output", 0),
        weight=float(weight),
    )


def _object(where: str, text: str) -> dict[str, Any]:
    try:
        entry: Any = json.loads(text)
    except json.JSONDecodeError as error:
        place = f", line {error.lineno}" if "\n" in text.strip() else ""
        raise ConfigError(f"{where}{place}: {error.msg} at column {error.colno}") from error
    except (ValueError, RecursionError) as error:  # numbers and nesting beyond all measure
        raise ConfigError(f"{where}: {error}; give a JSON object") from error
    if not isinstance(entry, dict):
        raise ConfigError(f"{where} holds {type(entry).__name__}; give a JSON object")
    return cast("dict[str, Any]", entry)


def _only(where: str, entry: Mapping[str, Any], known: tuple[str, ...]) -> None:
    odd = [name for name in entry if name not in known]
    if odd:
        raise ConfigError(f"{where} has {', '.join(map(repr, odd))}; known are {', '.join(known)}")


def _whole(where: str, entry: Mapping[str, Any], name: str, at_least: int) -> int:
    value: Any = entry.get(name)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        said = "missing" if name not in entry else f"{value!r}"
        raise ConfigError(f"{where}: {name} is {said}; give a whole number >= {int(at_least)}")
    return value


def _require(name: str, value: int, *, at_least: int) -> None:
    if value < at_least:
        raise ConfigError(f"{name} is {value}; use {at_least} or more")
