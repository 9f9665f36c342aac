"""kvtide's own trace file: a header line, then a JSON object a request."""

from __future__ import annotations

import gzip
import io
import json
import lzma
from contextlib import contextmanager
from dataclasses import asdict
from typing import IO, TYPE_CHECKING, Any, cast

from kvtide.errors import ConfigError
from kvtide.sim.traces.blocks import array_of, check_cover
from kvtide.sim.traces.files import Place, count_of, json_lines, number_of
from kvtide.sim.traces.order import Read, by_arrival
from kvtide.sim.traces.request import NO_SOURCE, Source, Stream, TraceRequest

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping
    from pathlib import Path

    from kvtide.sim.traces.request import Trace
    from kvtide.types import IntArray

VERSION = 1
KEY = "kvtide_trace"


def write_trace(trace: Trace, path: Path) -> int:
    """Write `trace` as kvtide's own format, compressed if `path` ends in .gz or .xz; answer the
    number of requests. The file appears when it is whole. Equal traces give equal bytes.
    """
    part = path.with_name(path.name + ".part")
    number = 0
    try:
        with _open_to_write(part, path.suffix) as binary, io.TextIOWrapper(binary) as file:
            block = 0
            for number, request in enumerate(trace, 1):
                if number == 1:
                    block = request.block
                    file.write(_line(_header(trace, block)))
                file.write(_line(_record(request, block)))
            if not number:
                file.write(_line(_header(trace, 1)))
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    return number


def read_trace(path: Path) -> Trace:
    """A file of `write_trace` as a trace; only the header is read now."""
    place, header = _read_header(path)
    names = header.get("tenants", ["all"])
    if not isinstance(names, list) or not names:
        raise place.error(f"tenants must be a list of at least one name, got {names!r}")
    tenants = tuple(str(name) for name in cast("list[object]", names))

    def start() -> Iterator[TraceRequest]:
        return by_arrival(_reads(path, len(tenants)))

    return Stream(
        name=str(header.get("name", path.stem)),
        start=start,
        source=_source(place, header),
        tenants=tenants,
    )


def _read_header(path: Path) -> tuple[Place, dict[str, Any]]:
    nothing: tuple[Place, dict[str, Any]] = (Place(path, 1), {})
    place, header = next(json_lines(path), nothing)
    if header.get(KEY) != VERSION:
        raise place.error(
            f"{KEY} must be {VERSION}, got {header.get(KEY)!r}: not a trace of kvtide, or one of "
            "another version"
        )
    return place, header


def _source(place: Place, header: Mapping[str, Any]) -> Source:
    given = header.get("source")
    if given is None:
        return NO_SOURCE
    try:
        return Source(**{name: str(value) for name, value in given.items()})
    except (AttributeError, TypeError) as cause:
        raise place.error(
            f"source must be an object with url, licence and about, got {given!r}"
        ) from cause


def _reads(path: Path, tenants: int) -> Iterator[Read]:
    records = json_lines(path)
    place, header = next(records)
    block = count_of(place, header, "block", least=1)
    for place, record in records:
        yield Read(place, _request(place, record, block, tenants))


def _request(place: Place, record: Mapping[str, Any], block: int, tenants: int) -> TraceRequest:
    tokens = count_of(place, record, "input", least=1)
    block = count_of(place, record, "block", least=1) if "block" in record else block
    tenant = count_of(place, record, "tenant") if "tenant" in record else 0
    arrival = number_of(place, record, "arrival")
    if arrival < 0:
        raise place.error(f"arrival must be at least 0 s, got {arrival}; shift the trace")
    if tenant >= tenants:
        raise place.error(
            f"tenant = {tenant}, but the header names {tenants}; add a name to its tenants"
        )
    runs = _runs(place, record)
    check_cover(place, "runs", runs, tokens, block)
    return TraceRequest(
        arrival=arrival,
        input_tokens=tokens,
        output_tokens=count_of(place, record, "output"),
        runs=runs,
        block=block,
        tenant=tenant,
    )


def _runs(place: Place, record: Mapping[str, Any]) -> IntArray:
    runs = array_of(place, record, "runs")
    if runs.ndim != 2 or runs.shape[1] != 2 or (runs[:, 1] < 1).any():
        raise place.error("runs must be a list of [first id, count of at least 1]")
    return runs


def _header(trace: Trace, block: int) -> dict[str, Any]:
    return {
        KEY: VERSION,
        "name": trace.name,
        "block": block,
        "tenants": list(trace.tenants),
        "source": asdict(trace.source),
    }


def _record(request: TraceRequest, block: int) -> dict[str, Any]:
    record: dict[str, Any] = {
        "arrival": request.arrival,
        "input": request.input_tokens,
        "output": request.output_tokens,
        "runs": request.runs.tolist(),
    }
    if request.tenant:
        record["tenant"] = request.tenant
    if request.block != block:
        record["block"] = request.block
    return record


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(record, separators=(",", ":")) + "\n"


@contextmanager
def _open_to_write(path: Path, suffix: str) -> Generator[IO[bytes]]:
    try:
        raw = path.open("wb")
    except OSError as cause:
        raise ConfigError(f"trace {path}: cannot be written ({cause.strerror})") from cause
    with raw:
        if suffix == ".gz":
            # No name and no time in the file: equal traces are equal files.
            with gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as packed:
                yield cast("IO[bytes]", packed)
        elif suffix == ".xz":
            with lzma.open(raw, "wb") as packed:
                yield cast("IO[bytes]", packed)
        else:
            yield raw
