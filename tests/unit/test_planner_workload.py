"""Workloads: what files may say, what is refused, and where the error points."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING, Any

import pytest

from kvtide import ConfigError
from kvtide.planner import Request, Workload, read_workload

if TYPE_CHECKING:
    from pathlib import Path

ONE = Request(input_tokens=2000, output_tokens=300)


def written(folder: Path, text: str, name: str = "traffic.json") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_an_object_of_means(tmp_path: Path) -> None:
    text = '{"mean_input": 2000, "mean_output": 300.0, "concurrency": 64, "shared_prefix": 500}'
    assert read_workload(written(tmp_path, text)) == Workload(
        requests=(ONE,), concurrency=64, shared_prefix=500
    )


def test_classes_have_weights_and_means_are_weighted(tmp_path: Path) -> None:
    text = """{"snapshots": 2, "classes": [
        {"weight": 3, "mean_input": 2000, "mean_output": 300},
        {"mean_input": 8000, "mean_output": 100}]}"""
    workload = read_workload(written(tmp_path, text))
    assert workload.mean_input == (3 * 2000 + 8000) / 4
    assert workload.mean_output == (3 * 300 + 100) / 4
    assert workload.longest == 8100
    assert (workload.snapshots, workload.concurrency) == (2, None)


def test_lines_are_counted_each(tmp_path: Path) -> None:
    lines = '{"input": 10, "output": 2}\n\n{"input": 40, "output": 0}\n{"input": 10, "output": 2}\n'
    workload = read_workload(written(tmp_path, lines, "trace.jsonl"), concurrency=4)
    assert {(r.input_tokens, r.output_tokens, r.weight) for r in workload.requests} == {
        (10, 2, 2.0),
        (40, 0, 1.0),
    }
    assert workload.mean(lambda request: request.length) == Fraction(12 + 12 + 40, 3)
    assert workload.concurrency == 4


def test_what_is_given_beside_the_file_replaces_what_it_says(tmp_path: Path) -> None:
    text = '{"mean_input": 9, "mean_output": 1, "concurrency": 64, "shared_prefix": 5}'
    workload = read_workload(written(tmp_path, text), concurrency=2, shared_prefix=0)
    assert (workload.concurrency, workload.shared_prefix) == (2, 0)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"mean_input": 1,\n "mean_output": }', r"traffic\.json, line 2: Expecting value at col"),
        ("[1]", "holds list; give a JSON object"),
        ('{"mean_input": 1}', "mean_output is missing; give a whole number >= 0"),
        ('{"mean_input": 0, "mean_output": 1}', "mean_input is 0; give a whole number >= 1"),
        ('{"mean_input": 1.5, "mean_output": 1}', "mean_input is 1.5; give a whole number"),
        ('{"mean_input": true, "mean_output": 1}', "mean_input is True; give a whole number"),
        ('{"input": 1, "mean_output": 1}', "has 'input'; known are mean_input, mean_output"),
        ('{"mean_input": 1, "mean_output": 1, "concurrency": 0}', "concurrency is 0; .* >= 1"),
        ('{"mean_input": 5, "mean_output": 1, "shared_prefix": 5}', "shared_prefix is 5, but the"),
        ('{"classes": []}', "classes must be a list of at least one object"),
        ('{"classes": [3]}', r"classes\[0\] is 3; give an object with mean_input and mean_output"),
        (
            '{"classes": [{"mean_input": 1, "mean_output": 1, "weight": 0}]}',
            r"classes\[0\]: weight is 0; use a number above 0",
        ),
        ('{"classes": [], "mean_input": 1}', "has 'mean_input'; known are classes"),
    ],
)
def test_objects_that_make_no_sense_are_refused(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read_workload(written(tmp_path, text))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"input": 1, "output": 1}\n{"input": 1 "output": 1}', "line 2: Expecting ',' delimiter"),
        ('\n\n{"input": 1}', "line 3: output is missing; give a whole number >= 0"),
        ('{"input": 1, "output": -1}', "line 1: output is -1"),
        ('{"input": 1, "output": 1, "time": 3}', "line 1 has 'time'; known are input, output"),
        ("7", "line 1 holds int"),
        ('{"input": ' + "9" * 5000 + "}", "line 1: Exceeds the limit"),
        ("[" * 100_000, "line 1: "),
        ("\n", "has no requests"),
    ],
)
def test_lines_that_make_no_sense_are_named(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read_workload(written(tmp_path, text, "trace.jsonl"))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.json cannot be read"):
        read_workload(tmp_path / "none.json")
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"bytes\.json cannot be read"):
        read_workload(tmp_path / "bytes.json")


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"requests": ()}, "requests is empty"),
        ({"concurrency": 0}, "concurrency is 0; use 1 or more"),
        ({"shared_prefix": -1}, "shared_prefix is -1; use 0 or more"),
        ({"snapshots": -1}, "snapshots is -1; use 0 or more"),
    ],
)
def test_workloads_of_nothing_are_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Workload(**{"requests": (ONE,), **fields})


@pytest.mark.parametrize("fields", [{"input_tokens": 0}, {"output_tokens": -1}, {"weight": 0.0}])
def test_requests_of_nothing_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Request(**{"input_tokens": 1, "output_tokens": 1, **fields})
