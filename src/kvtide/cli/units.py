"""Numbers as people write them on the command line, and as they read them."""

from __future__ import annotations

import re
from decimal import Decimal

from kvtide.errors import ConfigError

UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
}
"""Bytes per unit: powers of ten, and of two where there is an i."""

_MOST, _DIGITS = 1 << 62, 18
"""What a number here may be at most: more than any memory, and no trouble to compute with."""

_SIZE = re.compile(r"\s*([0-9][0-9_,.]*(?:e[0-9]+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_bytes(option: str, text: str) -> int:
    """Bytes of "60GB", "1.5 GiB" or "4e9"; ConfigError naming `option` if it is none."""
    found = _SIZE.fullmatch(text)
    unit = UNITS.get(found[2].lower()) if found else None
    try:
        size = Decimal(re.sub("[_,]", "", found[1])) * unit if found and unit else Decimal(0)
    except ArithmeticError:
        size = Decimal(0)
    if not 1 <= size <= _MOST or size != int(size):
        raise ConfigError(
            f"{option} is {text!r}; give bytes, such as 60GB (GB = 1e9) or 56GiB (GiB = 2**30)"
        )
    return int(size)


def parse_whole(option: str, text: str, *, at_least: int = 1) -> int:
    """A whole number; ConfigError naming `option` if it is none, or too small."""
    plain = text.replace("_", "").replace(",", "").strip()
    if not plain.isdecimal() or len(plain) > _DIGITS or int(plain) < at_least:
        raise ConfigError(f"{option} is {text!r}; give a whole number >= {at_least}")
    return int(plain)


def parse_positive(option: str, text: str) -> float:
    """A number above 0; ConfigError naming `option` if it is none."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ConfigError(f"{option} is {text!r}; give a number above 0, such as 2.0")
    return value


def parse_ratio(text: str) -> dict[str, float] | tuple[float, ...]:
    """Shares by pool, "full=0.85,indexer=0.15", or in the order of the pools, "0.85,0.15"."""
    parts = [part.strip() for part in text.split(",")]
    if all("=" in part for part in parts):
        named = [_pair("--pool-ratio", part) for part in parts]
        _require_once("--pool-ratio", named)
        return {name: _share(share) for name, share in named}
    if any("=" in part for part in parts):
        raise ConfigError(f"--pool-ratio is {text!r}; name every share, or none of them")
    return tuple(_share(part) for part in parts)


def parse_needs(given: list[str]) -> dict[str, int]:
    """Bytes by pool of "indexer=4GB" and the like."""
    named = [_pair("--need", part) for part in given]
    needs = {name: parse_bytes(f"--need {name}", size) for name, size in named}
    _require_once("--need", named)
    return needs


def show_bytes(size: float) -> str:
    """Bytes to three figures after the point in the largest unit of ten they fill: "51.000 GB"."""
    for unit, name in ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if size >= unit:
            return f"{size / unit:,.3f} {name}"
    return f"{size:,.0f} B"


def show(value: float | None, *, digits: int = 2) -> str:
    """A number with thousands apart, fractions only where there are any; "-" for None."""
    if value is None:
        return "-"
    if float(value).is_integer():
        return f"{int(value):,}"
    return f"{value:,.{digits}f}"


def _pair(option: str, text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name.strip() and equals and value.strip()):
        raise ConfigError(f"{option} has {text!r}; write it as pool=value")
    return name.strip(), value.strip()


def _share(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise ConfigError(
            f"--pool-ratio has {text!r}; give shares that sum to 1, such as 0.85,0.15"
        ) from error


def _require_once(option: str, named: list[tuple[str, str]]) -> None:
    names = [name for name, _ in named]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"{option} names {', '.join(twice)} twice; name every pool once")
