"""Lengths without content: Azure's CSV, and any table of input, output and perhaps arrival.

Every prompt is its own: nothing is shared.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import numpy as np

from kvtide.errors import ConfigError
from kvtide.sim.traces.files import Place, count_of, json_lines, lines, number_of
from kvtide.sim.traces.idspace import IdSpace
from kvtide.sim.traces.order import Read, in_order
from kvtide.sim.traces.request import TraceRequest
from kvtide.types import ceil_div

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

BLOCK = 16
"""Tokens of one content id where a format has none: small, so that little id space is lost."""

INPUT = ("input", "input_tokens", "input_length", "input_toks", "num_prefill_tokens")
OUTPUT = ("output", "output_tokens", "output_length", "output_toks", "num_decode_tokens")
ARRIVAL = ("arrival", "arrival_time", "timestamp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Poisson:
    """Arrivals for a file that has none: `rate` requests a second, drawn with `seed`."""

    rate: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.rate < float("inf") or self.seed < 0:
            raise ConfigError(
                f"arrivals: rate={self.rate}, seed={self.seed}; give rate > 0 requests/s, seed >= 0"
            )


def azure(path: Path) -> Iterator[TraceRequest]:
    """Columns `TIMESTAMP` (ISO 8601), `ContextTokens`, `GeneratedTokens`."""
    return in_order(_azure(path))


def lengths(path: Path, options: Poisson) -> Iterator[TraceRequest]:
    """A CSV file or JSON lines with input and output tokens, and seconds of arrival or none.

    Columns go by the names in `INPUT`, `OUTPUT` and `ARRIVAL`; a CSV file without a header has
    them in this order.
    """
    return in_order(_lengths(path, options))


def own_content(
    space: IdSpace, place: Place, arrival: float, input_tokens: int, output_tokens: int
) -> TraceRequest:
    """A request whose prompt nobody else has."""
    count = ceil_div(input_tokens, BLOCK)
    first = space.fresh(count, BLOCK, f"{place.path}:{place.line}")
    return TraceRequest(
        arrival=arrival,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        runs=np.array([[first, count]], np.int64),
        block=BLOCK,
    )


def rows(path: Path) -> Iterator[tuple[Place, dict[str, str]]]:
    """The rows of a CSV file by the names of its first line, or of `input,output,arrival`."""
    names: list[str] = []
    for place, line in lines(path):
        values = [value.strip() for value in next(csv.reader([line]))]
        if not names:
            names = values
            if not all(_is_number(value) for value in values):
                continue
            names = [INPUT[0], OUTPUT[0], ARRIVAL[0]][: len(values)]
        if len(values) != len(names):
            raise place.error(f"{len(values)} columns, but {len(names)} names: {', '.join(names)}")
        yield place, dict(zip(names, values, strict=True))


def _azure(path: Path) -> Iterator[Read]:
    space = IdSpace()
    for place, row in rows(path):
        arrival = _timestamp(place, row.get("TIMESTAMP", ""))
        inputs = count_of(place, row, "ContextTokens", least=1)
        outputs = count_of(place, row, "GeneratedTokens")
        yield Read(place, own_content(space, place, arrival, inputs, outputs))


def _timestamp(place: Place, text: str) -> float:
    try:
        time = datetime.fromisoformat(text)
    except ValueError as cause:
        raise place.error(
            f"TIMESTAMP must be a time like 2023-11-16 18:17:03.97, got {text!r}"
        ) from cause
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()


def _lengths(path: Path, options: Poisson) -> Iterator[Read]:
    space, rng, now = IdSpace(), np.random.default_rng(options.seed), 0.0
    for place, record in _records(path):
        arrival = _name(ARRIVAL, record)
        now = now if arrival is None else number_of(place, record, arrival)
        inputs = count_of(place, record, _name(INPUT, record) or INPUT[0], least=1)
        outputs = count_of(place, record, _name(OUTPUT, record) or OUTPUT[0])
        yield Read(place, own_content(space, place, now, inputs, outputs))
        now += float(rng.exponential(1 / options.rate))


def _records(path: Path) -> Iterator[tuple[Place, Mapping[str, Any]]]:
    _, first = next(lines(path), (None, ""))
    return json_lines(path) if first.lstrip().startswith("{") else rows(path)


def _name(names: tuple[str, ...], record: Mapping[str, Any]) -> str | None:
    return next((name for name in names if name in record), None)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
