"""kvtide's own trace file: what is written reads back."""

from __future__ import annotations

import gzip
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.sim.traces.samples import all_of, request, trace, traces, write_lines

from kvtide import ConfigError
from kvtide.sim.traces import Source, Stream, Trace, open_trace, write_trace

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvtide.sim.traces import TraceRequest

HEAD = {"kvtide_trace": 1, "name": "n", "block": 4, "tenants": ["a", "b"]}
LINE = {"arrival": 0.5, "input": 7, "output": 2, "runs": [[3, 2]]}


@given(traces(tenants=3), st.sampled_from(["t.jsonl", "t.jsonl.gz", "t.jsonl.xz"]))
def test_what_is_written_reads_back(given: Trace, name: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        assert write_trace(given, path) == len(all_of(given))
        back = open_trace(str(path))
        assert all_of(back) == all_of(given) == all_of(back)
        assert (back.name, back.tenants) == (given.name, given.tenants)


def test_the_source_is_kept_and_equal_traces_are_equal_bytes(tmp_path: Path) -> None:
    source = Source(url="https://example.org", licence="MIT", about="x")
    given = Stream(name="n", start=lambda: iter([request(0.25)]), source=source)
    write_trace(given, tmp_path / "one.gz")
    write_trace(given, tmp_path / "two.gz")
    assert (tmp_path / "one.gz").read_bytes() == (tmp_path / "two.gz").read_bytes()
    assert open_trace(str(tmp_path / "one.gz")).source == source
    # Bytes 4 to 8 of a gzip file are the time when it was written.
    assert (tmp_path / "one.gz").read_bytes()[4:8] == bytes(4)


def test_the_format_by_hand(tmp_path: Path) -> None:
    lines = [{**LINE, "tenant": 1}, {**LINE, "arrival": 1, "block": 5, "runs": [[8, 1], [1, 1]]}]
    path = write_lines(tmp_path / "t", HEAD, *lines)
    found = open_trace(str(path))
    assert all_of(found) == [
        (0.5, 7, 2, ((3, 2),), 4, 1),
        (1.0, 7, 2, ((8, 1), (1, 1)), 5, 0),
    ]
    assert found.tenants == ("a", "b")
    packed = tmp_path / "again.jsonl.gz"
    write_trace(found, packed)
    second = json.loads(gzip.decompress(packed.read_bytes()).splitlines()[1])
    assert second == {**LINE, "tenant": 1}


def test_a_failure_leaves_no_file_behind(tmp_path: Path) -> None:
    def broken() -> Iterator[TraceRequest]:
        yield request(0.0)
        raise ConfigError("broken")

    with pytest.raises(ConfigError, match="broken"):
        write_trace(Stream(name="n", start=broken), tmp_path / "t.jsonl")
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        write_trace(trace(request(0.0)), tmp_path / "nowhere" / "t.jsonl")


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({**LINE, "arrival": -1}, "arrival must be at least 0 s, got -1.0"),
        ({**LINE, "tenant": 2}, "tenant = 2, but the header names 2"),
        ({**LINE, "tenant": -1}, "tenant must be a whole number of at least 0"),
        ({**LINE, "input": 0}, "input must be a whole number of at least 1"),
        ({**LINE, "output": None}, "output is missing"),
        ({**LINE, "block": 0}, "block must be a whole number of at least 1"),
        ({**LINE, "runs": [3, 2]}, "runs must be a list of"),
        ({**LINE, "runs": [[3, 0]]}, "runs must be a list of"),
        ({**LINE, "runs": []}, "runs must be a list of"),
        ({**LINE, "runs": [[3, 1]]}, "runs has 1 blocks of 4 tokens, but 7 input tokens are 2"),
        ({**LINE, "runs": [[2**30, 2]]}, "runs: content ids need token ids up to"),
    ],
)
def test_an_error_names_file_line_and_field(
    bad: dict[str, object], message: str, tmp_path: Path
) -> None:
    path = write_lines(tmp_path / "bad.jsonl", HEAD, LINE, bad)
    with pytest.raises(ConfigError, match=rf"bad\.jsonl:3: {message}"):
        all_of(open_trace(str(path)))


@pytest.mark.parametrize(
    ("head", "message"),
    [
        ({**HEAD, "kvtide_trace": 2}, "kvtide_trace must be 1, got 2"),
        (LINE, "kvtide_trace must be 1, got None"),
        ({**HEAD, "tenants": []}, "tenants must be a list of at least one name"),
        ({**HEAD, "tenants": "a"}, "tenants must be a list of at least one name"),
        ({**HEAD, "source": 3}, "source must be an object"),
        ({**HEAD, "source": {"home": "x"}}, "source must be an object"),
        ({**HEAD, "block": None}, "block is missing"),
    ],
)
def test_a_bad_header(head: dict[str, object], message: str, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "bad.jsonl", head, LINE)
    with pytest.raises(ConfigError, match=rf"bad\.jsonl:1: {message}"):
        all_of(open_trace(f"kvtide:{path}"))


def test_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("")
    with pytest.raises(ConfigError, match="kvtide_trace must be 1, got None"):
        open_trace(f"kvtide:{tmp_path / 't'}")
