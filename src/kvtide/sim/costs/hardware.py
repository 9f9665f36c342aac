"""Accelerators: peak rates from data sheets, and how much of them a serving engine gets."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields
from importlib import resources
from pathlib import Path
from typing import cast

from kvtide.errors import ConfigError

_RATES = ("flops", "bandwidth", "memory_bytes", "fp8_flops", "link_bandwidth")
_SHARES = ("compute_efficiency", "memory_efficiency", "link_efficiency")
_TIMES = ("step_seconds", "token_seconds", "link_seconds")
_OPTIONAL = ("fp8_flops", "link_bandwidth")
_REQUIRED = ("flops", "bandwidth", "memory_bytes")
_TEXTS = ("name", "sources")

PRESETS = "hardware.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One accelerator, and what an engine makes of it.

    `flops`: dense peak in bfloat16, FLOP/s; `fp8_flops` the same in float8 where there is one.
    `bandwidth` in bytes/s, `memory_bytes`. Efficiencies are shares of the peaks in (0, 1].
    `step_seconds` is spent in every step whatever it computes, `token_seconds` for every token it
    computes. Ranks that share layers exchange data at `link_bandwidth`, bytes/s one way, and spend
    `link_seconds` on each exchange besides. What is not measured keeps the defaults here.
    """

    name: str
    flops: float
    bandwidth: float
    memory_bytes: int
    fp8_flops: float | None = None
    compute_efficiency: float = 0.6
    memory_efficiency: float = 0.8
    link_efficiency: float = 0.7
    step_seconds: float = 0.002
    token_seconds: float = 0.0
    link_bandwidth: float | None = None
    link_seconds: float = 20e-6

    def __post_init__(self) -> None:
        """Refuse rates that are not positive, shares outside (0, 1] and negative times."""
        for field in _RATES:
            self._require(field, above=0.0)
        for field in _SHARES:
            self._require(field, above=0.0, most=1.0)
        for field in _TIMES:
            self._require(field, least=0.0)

    def flop_rate(self, dtype: str) -> float:
        """FLOP/s on operands of `dtype`; bfloat16's where there is no rate for float8."""
        peak = self.fp8_flops if dtype.startswith("float8") and self.fp8_flops else self.flops
        return peak * self.compute_efficiency

    @property
    def byte_rate(self) -> float:
        """Bytes/s of its memory."""
        return self.bandwidth * self.memory_efficiency

    def _require(
        self, field: str, *, above: float | None = None, least: float = 0.0, most: float = 1e30
    ) -> None:
        value: object = getattr(self, field)
        if value is None and field in _OPTIONAL:
            return
        number = float(value) if isinstance(value, int | float) else math.nan
        if isinstance(value, bool) or not (least <= number <= most) or number == above:
            wanted = f"above {above:g}" if above is not None else f"at least {least:g}"
            limit = f" and at most {most:g}" if most < 1e30 else ""
            raise ConfigError(
                f"{field} of hardware {self.name!r} is {value!r}; give a number {wanted}{limit}"
            )


def hardware(name_or_path: str | Path) -> Hardware:
    """An accelerator that kvtide knows by name, or one described in the JSON file at a path.

    The file holds one object with the fields of `Hardware`; `name` defaults to the file's, and
    `sources` may say where numbers are from. Raises ConfigError naming the field.
    """
    known = presets()
    if str(name_or_path) in known:
        return known[str(name_or_path)]
    path = Path(name_or_path)
    if path.suffix != ".json" and not path.exists():
        raise ConfigError(
            f"hardware is {str(name_or_path)!r}; known are {', '.join(known)}, or pass the path "
            "of a JSON file with flops, bandwidth and memory_bytes"
        )
    return _parsed(_load(path), path.stem, str(path))


def presets() -> dict[str, Hardware]:
    """The accelerators that kvtide knows, by name."""
    file = resources.files("kvtide.sim.costs").joinpath(PRESETS)
    entries = cast("dict[str, object]", json.loads(file.read_text(encoding="utf-8")))
    return {name: _parsed(values, name, PRESETS) for name, values in entries.items()}


def _load(path: Path) -> object:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"hardware: cannot read {path}: {error.strerror}; pass a JSON file"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"hardware: {path} is no JSON: {error}; correct the file") from error


def _parsed(values: object, name: str, where: str) -> Hardware:
    if not isinstance(values, dict):
        raise ConfigError(f"hardware: {where} holds {values!r}; it must be an object of fields")
    given = cast("dict[str, object]", values)
    known = [field.name for field in fields(Hardware)]
    for field in given:
        if field not in (*known, *_TEXTS):
            raise ConfigError(
                f"hardware: {where} has a field {field!r}; known are {', '.join(known)}, sources"
            )
    for field in _REQUIRED:
        if field not in given:
            raise ConfigError(f"{field} is missing in hardware {where}; add it")
    numbers = {field: value for field, value in given.items() if field not in _TEXTS}
    return Hardware(name=str(given.get("name", name)), **numbers)  # pyright: ignore[reportArgumentType]
