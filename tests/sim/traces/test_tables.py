"""Lengths without content: Azure's table, and others."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import pytest
from tests.sim.traces.samples import write_lines

from kvtide import ConfigError
from kvtide.sim.traces import open_trace

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"


def rows(spec: object) -> list[tuple[float, int, int]]:
    return [(r.arrival, r.input_tokens, r.output_tokens) for r in open_trace(str(spec))]


@pytest.fixture
def far_east(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "UTC-9")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.usefixtures("far_east")
def test_azure_counts_time_from_its_first_request(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "t",
        AZURE,
        "2023-11-16 18:17:03.9799600,4808,10",
        "2023-11-16 18:17:04.4799600,17,8",
        "2023-11-16 18:18:03.9799600+00:00,3,0",
    )
    assert rows(path) == [(0.0, 4808, 10), (0.5, 17, 8), (60.0, 3, 0)]


def test_every_prompt_is_its_own(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "t", "input,output", *["40,1"] * 3)
    tokens = np.concatenate([one.prompt() for one in open_trace(str(path))])
    assert len(np.unique(tokens)) == 120
    assert open_trace(str(path)).describe().shared == 0.0


@pytest.mark.parametrize(
    "text",
    [
        ("arrival,input,output", "0.5,7,2", "2.5,9,0"),
        ("num_decode_tokens, num_prefill_tokens, arrival, pd_ratio", "2,7,0.5,1", "0,9,2.5,1"),
        ("7,2,0.5", "9,0,2.5"),
        ('{"input_toks": 7, "output_toks": 2, "arrival_time": 0.5}',
         '{"input_toks": 9, "output_toks": 0, "arrival_time": 2.5}'),
    ],
    ids=["named", "vattention", "bare", "json"],
)  # fmt: skip
def test_lengths_by_name_or_by_place(text: tuple[str, ...], tmp_path: Path) -> None:
    assert rows(write_lines(tmp_path / "t", *text)) == [(0.0, 7, 2), (2.0, 9, 0)]


def test_without_arrivals_they_are_a_seeded_poisson_process(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "t", *["7,2"] * 500)
    times = [row[0] for row in rows(f"{path},rate=4,seed=2")]
    assert times[0] == 0.0
    assert np.diff(times).mean() == pytest.approx(0.25, rel=0.1)
    assert np.diff(times).std() == pytest.approx(0.25, rel=0.2)
    assert times == [row[0] for row in rows(f"{path},rate=4,seed=2")]
    assert times != [row[0] for row in rows(f"{path},rate=4,seed=1")]


@pytest.mark.parametrize(
    ("head", "bad", "message"),
    [
        (AZURE, "yesterday,1,1", "TIMESTAMP must be a time like .*, got 'yesterday'"),
        (AZURE, "2023-11-16 18:17:03,0,1", "ContextTokens must be a whole number of at least 1"),
        (AZURE, "2023-11-16 18:17:03,1,-1", "GeneratedTokens must be a whole number"),
        (AZURE, "2023-11-16 18:17:03,1", "2 columns, but 3 names"),
        ("input,output", "x,1", "input must be a number, got 'x'"),
        ("input,output", "1,1.5", "output must be a whole number"),
        ("input,arrival", "1,1", "output is missing; found input, arrival"),
        ("input,output,arrival", "1,1,soon", "arrival must be a number, got 'soon'"),
    ],
)
def test_an_error_names_file_line_and_field(
    head: str, bad: str, message: str, tmp_path: Path
) -> None:
    path = write_lines(tmp_path / "bad.csv", head, bad)
    with pytest.raises(ConfigError, match=rf"bad\.csv:2: {message}"):
        rows(path)


@pytest.mark.parametrize("option", ["rate=0", "seed=-1"])
def test_options_out_of_range(option: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give rate > 0"):
        open_trace(f"{write_lines(tmp_path / 't', '1,1')},{option}")
