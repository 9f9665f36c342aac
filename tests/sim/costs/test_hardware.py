"""Hardware by name and from files."""

from __future__ import annotations

import json
from importlib import resources
from typing import TYPE_CHECKING, Any

import pytest

from kvtide.errors import ConfigError
from kvtide.sim.costs import Hardware, hardware

if TYPE_CHECKING:
    from pathlib import Path

NAMES = ("a100-80g", "h100", "h200", "rtx4090", "rtx-pro-6000")
GOOD: dict[str, Any] = {"flops": 1e14, "bandwidth": 1e12, "memory_bytes": 10**10}


@pytest.mark.parametrize("name", NAMES)
def test_presets_have_a_source_for_every_peak(name: str) -> None:
    chip = hardware(name)
    assert chip.name == name
    entry = json.loads(resources.files("kvtide.sim.costs").joinpath("hardware.json").read_text())
    measured = ("compute_efficiency", "memory_efficiency", "link_efficiency", "link_seconds")
    peaks = {field for field in entry[name] if field not in (*measured, "step_seconds", "sources")}
    assert peaks <= entry[name]["sources"].keys()
    assert {"flops", "bandwidth", "memory_bytes"} <= peaks


def test_rates() -> None:
    chip = Hardware(
        name="x", flops=100.0, bandwidth=50.0, memory_bytes=1, fp8_flops=200.0,
        compute_efficiency=0.5, memory_efficiency=0.8,
    )  # fmt: skip
    assert chip.flop_rate("bfloat16") == 50
    assert chip.flop_rate("float8_e4m3fn") == 100
    assert chip.byte_rate == 40
    assert hardware("a100-80g").flop_rate("float8_e4m3fn") == hardware("a100-80g").flop_rate(
        "bfloat16"
    )


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({**GOOD, "step_seconds": 0.001, "sources": {"flops": "measured"}}))
    chip = hardware(file)
    assert (chip.name, chip.flops, chip.step_seconds) == ("mine", 1e14, 0.001)
    assert hardware(str(file)) == chip


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"flops": None}, "flops"),
        ({"flops": 0}, "flops"),
        ({"flops": "fast"}, "flops"),
        ({"bandwidth": -1.0}, "bandwidth"),
        ({"bandwidth": True}, "bandwidth"),
        ({"memory_bytes": float("nan")}, "memory_bytes"),
        ({"fp8_flops": 0}, "fp8_flops"),
        ({"compute_efficiency": 1.5}, "compute_efficiency"),
        ({"memory_efficiency": 0.0}, "memory_efficiency"),
        ({"step_seconds": -0.1}, "step_seconds"),
        ({"link_bandwidth": -3}, "link_bandwidth"),
        ({"speed": 3}, "speed"),
    ],
)
def test_bad_fields_are_named(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({**GOOD, **change}))
    with pytest.raises(ConfigError, match=named):
        hardware(file)


@pytest.mark.parametrize("field", GOOD)
def test_missing_fields_are_named(tmp_path: Path, field: str) -> None:
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({key: value for key, value in GOOD.items() if key != field}))
    with pytest.raises(ConfigError, match=f"{field} is missing"):
        hardware(file)


def test_bad_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"known are a100-80g, h100.*path"):
        hardware("h300")
    with pytest.raises(ConfigError, match="cannot read"):
        hardware(tmp_path / "absent.json")
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    with pytest.raises(ConfigError, match="no JSON"):
        hardware(broken)
    broken.write_text("[1]")
    with pytest.raises(ConfigError, match="must be an object"):
        hardware(broken)
