"""Text files, plain or compressed, read line by line; an error names file, line and field."""

from __future__ import annotations

import gzip
import importlib
import io
import json
import lzma
import sys
import zlib
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, cast

from kvtide.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

_MAGIC = {b"\x1f\x8b": "gzip", b"\xfd7zXZ\x00": "xz", b"\x28\xb5\x2f\xfd": "zstd"}


@dataclass(frozen=True, slots=True)
class Place:
    """A line of a file, for messages; lines count from 1."""

    path: Path
    line: int

    def error(self, message: str) -> ConfigError:
        """The error to raise about this line."""
        return ConfigError(f"{self.path}:{self.line}: {message}")


def compression(path: Path) -> str:
    """Give "gzip", "xz", "zstd" or "" (plain), by the first bytes; ConfigError if unreadable."""
    try:
        with path.open("rb") as file:
            head = file.read(6)
    except OSError as cause:
        raise ConfigError(f"trace {path}: cannot be read ({cause.strerror})") from cause
    return next((kind for magic, kind in _MAGIC.items() if head.startswith(magic)), "")


def open_bytes(path: Path) -> IO[bytes]:
    """The file's content, decompressed as it is read. Raises ConfigError if that cannot be."""
    match compression(path):
        case "gzip":
            return cast("IO[bytes]", gzip.open(path, "rb"))
        case "xz":
            return cast("IO[bytes]", lzma.open(path, "rb"))
        case "zstd":
            return _open_zstd(path)
        case _:
            return path.open("rb")


def _open_zstd(path: Path) -> IO[bytes]:
    try:
        zstandard: Any = importlib.import_module("zstandard")
    except ImportError as cause:
        raise ConfigError(
            f"trace {path}: is zstd-compressed, and the package zstandard is not installed; "
            "pip install zstandard, or decompress the file first (zstd -d)"
        ) from cause
    return cast("IO[bytes]", zstandard.open(path, "rb"))


def damage() -> tuple[type[Exception], ...]:
    """What reading a damaged or cut compressed file raises."""
    known = (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError)
    zstandard: Any = sys.modules.get("zstandard")
    return (*known, zstandard.ZstdError) if zstandard else known


def lines(path: Path) -> Iterator[tuple[Place, str]]:
    """Every line that is not blank, with its place."""
    number = 0
    try:
        with io.TextIOWrapper(open_bytes(path), encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                if not line.isspace():
                    yield Place(path, number), line
    except (*damage(), UnicodeDecodeError) as cause:
        raise Place(path, number + 1).error(
            f"the file is damaged or cut short from here on ({cause}); fetch it again"
        ) from cause


def json_lines(path: Path) -> Iterator[tuple[Place, dict[str, Any]]]:
    """Every line as a JSON object, with its place."""
    for place, line in lines(path):
        yield place, json_object(place, line)


def json_object(place: Place, text: str) -> dict[str, Any]:
    """`text` as a JSON object; raises ConfigError if it is none."""
    try:
        value = json.loads(text)
    except ValueError as cause:
        raise place.error(f"not JSON ({cause}); each line must be one object") from cause
    if not isinstance(value, dict):
        raise place.error(f"a {type(value).__name__}; each line must be one object {{...}}")
    return cast("dict[str, Any]", value)


def count_of(place: Place, record: Mapping[str, object], field: str, *, least: int = 0) -> int:
    """The whole number `record[field]`, at least `least`; "12" and 12.0 will do."""
    value = number_of(place, record, field)
    if value != int(value) or value < least:
        raise place.error(
            f"{field} must be a whole number of at least {least}, got {record[field]!r}"
        )
    return int(value)


def number_of(place: Place, record: Mapping[str, object], field: str) -> float:
    """The finite number `record[field]`."""
    value = record.get(field)
    if value is None:
        raise place.error(f"{field} is missing; found {', '.join(record) or 'nothing'}")
    try:
        number = float(cast("Any", value))
    except (TypeError, ValueError):
        number = float("nan")
    if isinstance(value, bool) or not abs(number) < float("inf"):
        raise place.error(f"{field} must be a number, got {value!r}")
    return number
