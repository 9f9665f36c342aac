"""Requests drawn from published rates, burstiness and lengths of single clients (ServeGen)."""

from __future__ import annotations

import json
import re
import tarfile
from dataclasses import dataclass
from heapq import merge
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from kvtide.errors import ConfigError
from kvtide.sim.traces.files import Place, damage, number_of, open_bytes
from kvtide.sim.traces.idspace import IdSpace
from kvtide.sim.traces.tables import own_content

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from kvtide.sim.traces.request import TraceRequest
    from kvtide.types import IntArray

Floats = npt.NDArray[np.float64]

_MEMBER = re.compile(r"chunk-(\d+)-(trace\.csv|dataset\.json)$")
_COLUMNS = ("start", "rate", "cv", "form", "shape", "scale")
_WINDOW = 600.0
_PARTS = ("text_tokens", "image_tokens", "audio_tokens", "video_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class RateOptions:
    """Which part of the published days: `seconds` from second `begin` on, the `clients` with the
    highest rates (0: all), scaled so that all together send `rate` requests a second (0: as
    published).
    """

    seed: int = 0
    begin: float = 0.0
    seconds: float = 3600.0
    clients: int = 0
    rate: float = 0.0

    def __post_init__(self) -> None:
        if min(self.seed, self.begin, self.clients, self.rate) < 0 or not self.seconds > 0:
            raise ConfigError(f"rates: {self}; none may be negative, and seconds must be > 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Window:
    """`seconds` of one client: requests a second, and the form of the gaps between them."""

    start: float
    rate: float
    form: str
    shape: float
    place: Place


@dataclass(frozen=True, slots=True, kw_only=True)
class _Client:
    number: int
    seconds: float
    """Length of a window."""
    windows: list[_Window]
    place: Place
    lengths: dict[float, Mapping[str, str]]
    """From this second on: histograms by field, as text."""


def rates(path: Path, options: RateOptions) -> Iterator[TraceRequest]:
    """Draw the requests of all clients in a folder or tar of `chunk-N-trace.csv` (start second,
    rate, coefficient of variation, form and two parameters of the gaps) and `chunk-N-dataset.json`
    (histograms of lengths by start second).

    In each window a client sends its rate times the window's length; the gaps have the fitted
    form and are stretched to fill the window. Lengths of prompt and answer are drawn apart.
    """
    clients = _chosen(_clients(path), options)
    factor = _factor(path, clients, options)
    space = IdSpace()
    drawn = merge(*(_draw(client, factor, options) for client in clients), key=lambda item: item[0])
    for arrival, inputs, outputs, place in drawn:
        yield own_content(space, place, arrival - options.begin, inputs, outputs)


def _draw(
    client: _Client, factor: float, options: RateOptions
) -> Iterator[tuple[float, int, int, Place]]:
    end = options.begin + options.seconds
    for number, window in enumerate(client.windows):
        if window.start + client.seconds <= options.begin or window.start >= end:
            continue
        # A generator of its own: what a window has does not depend on the span that is asked for.
        rng = np.random.default_rng([options.seed, client.number, number])
        count = int(window.rate * factor * client.seconds + rng.random())
        if not count:
            continue
        times = window.start + client.seconds * _fractions(rng, window, count)
        inputs, outputs = _lengths(rng, client, window.start, count)
        for time, i, o in zip(times.tolist(), inputs.tolist(), outputs.tolist(), strict=True):
            if options.begin <= time < end:
                yield time, i, o, window.place


def _fractions(rng: np.random.Generator, window: _Window, count: int) -> Floats:
    """`count` ascending places in [0, 1) with gaps of the window's form."""
    if window.form == "Weibull":
        gaps = rng.weibull(window.shape, count + 1)
    else:
        gaps = rng.standard_gamma(window.shape, count + 1)
    # Very bursty fits give gaps that are 0 in floating point: keep their sum above it.
    ends = np.cumsum(np.maximum(gaps, 1e-300))
    return ends[:-1] / ends[-1]


def _lengths(
    rng: np.random.Generator, client: _Client, start: float, count: int
) -> tuple[IntArray, IntArray]:
    if not client.lengths:
        raise client.place.error(
            f"client {client.number} has rates but no lengths: chunk-{client.number}-dataset.json "
            "is not beside it"
        )
    at = max((s for s in client.lengths if s <= start), default=min(client.lengths))
    known = client.lengths[at]
    fields = ("input_tokens",) if "input_tokens" in known else _PARTS
    inputs = sum(_sample(rng, client, known, field, count) for field in fields)
    outputs = _sample(rng, client, known, "output_tokens", count)
    return np.maximum(1, np.asarray(inputs, np.int64)), outputs


def _sample(
    rng: np.random.Generator, client: _Client, known: Mapping[str, str], field: str, count: int
) -> IntArray:
    """`count` draws of the histogram "{length: share, ...}"; a missing part has no tokens."""
    text = known.get(field)
    if text is None and field in _PARTS and field != _PARTS[0]:
        return np.zeros(count, np.int64)
    try:
        pairs = np.array(re.split("[:,]", (text or "").strip("{} ")), np.float64).reshape(-1, 2)
    except ValueError as cause:
        raise client.place.error(
            f"client {client.number}: {field} must be a histogram "
            f'like "{{12: 0.5, 40: 0.5}}", got {(text or "nothing")[:60]}'
        ) from cause
    shares = np.cumsum(pairs[:, 1])
    return pairs[np.searchsorted(shares, rng.random(count) * shares[-1], "right"), 0].astype(
        np.int64
    )


def _factor(path: Path, clients: list[_Client], options: RateOptions) -> float:
    end = options.begin + options.seconds
    expected = sum(
        w.rate * max(0.0, min(end, w.start + c.seconds) - max(options.begin, w.start))
        for c in clients
        for w in c.windows
    )
    if not expected:
        raise ConfigError(
            f"trace {path}: no client sends anything from second {options.begin} to {end}; give "
            "another begin=... or seconds=..."
        )
    return options.rate * options.seconds / expected if options.rate else 1.0


def _chosen(clients: list[_Client], options: RateOptions) -> list[_Client]:
    if not options.clients:
        return clients
    ordered = sorted(clients, key=lambda c: (-sum(w.rate for w in c.windows), c.number))
    return sorted(ordered[: options.clients], key=lambda c: c.number)


def _clients(path: Path) -> list[_Client]:
    traces: dict[int, _Client] = {}
    histograms: dict[int, dict[float, Mapping[str, str]]] = {}
    for file, number, kind, content in _members(path):
        if kind == "trace.csv":
            traces[number] = _client(file, number, content)
        else:
            histograms[number] = _histograms(Place(file, 1), content)
    if not traces:
        raise ConfigError(f"trace {path}: has no chunk-N-trace.csv; is it a folder of ServeGen?")
    for number, client in traces.items():
        client.lengths.update(histograms.get(number, {}))
    return [traces[number] for number in sorted(traces)]


def _members(path: Path) -> Iterator[tuple[Path, int, str, str]]:
    """Files named chunk-N-...: where, N, the rest of the name, the text."""
    if path.is_dir():
        for file in sorted(path.rglob("chunk-*")):
            if found := _MEMBER.search(file.name):
                yield file, int(found[1]), found[2], file.read_text()
        return
    try:
        with open_bytes(path) as binary, tarfile.open(fileobj=binary, mode="r|") as tar:
            for member in tar:
                found, content = _MEMBER.search(member.name), tar.extractfile(member)
                if found and content:
                    yield path / member.name, int(found[1]), found[2], content.read().decode()
    except (tarfile.TarError, UnicodeDecodeError, *damage()) as cause:
        raise ConfigError(f"trace {path}: the tar is damaged or cut short ({cause})") from cause


def _client(file: Path, number: int, content: str) -> _Client:
    windows: list[_Window] = []
    starts: list[float] = []
    for line, text in enumerate(content.splitlines(), 1):
        place = Place(file, line)
        values = text.split(",")
        if len(values) != len(_COLUMNS):
            raise place.error(f"{len(values)} columns, expected {', '.join(_COLUMNS)}")
        row: dict[str, str] = dict(zip(_COLUMNS, values, strict=True))
        starts.append(number_of(place, row, "start"))
        if number_of(place, row, "rate") > 0:
            windows.append(_window(place, row))
    seconds = starts[1] - starts[0] if len(starts) > 1 else _WINDOW
    return _Client(
        number=number, seconds=seconds, windows=windows, place=Place(file, 1), lengths={}
    )


def _window(place: Place, row: Mapping[str, str]) -> _Window:
    shape = number_of(place, row, "shape")
    if row["form"] not in {"Gamma", "Weibull"} or shape <= 0:
        raise place.error(
            f"the gaps must be Gamma or Weibull with shape > 0, got {row['form']!r}, {shape}"
        )
    return _Window(
        start=number_of(place, row, "start"),
        rate=number_of(place, row, "rate"),
        form=row["form"],
        shape=shape,
        place=place,
    )


def _histograms(place: Place, content: str) -> dict[float, Mapping[str, str]]:
    try:
        found: Any = json.loads(content)
        return {float(start): cast("Mapping[str, str]", fields) for start, fields in found.items()}
    except (ValueError, AttributeError) as cause:
        raise place.error(f"must be an object of start second and histograms ({cause})") from cause
