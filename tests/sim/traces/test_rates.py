"""Requests drawn from rates, burstiness and lengths of single clients."""

from __future__ import annotations

import io
import json
import lzma
import tarfile
from typing import TYPE_CHECKING

import numpy as np
import pytest
from tests.sim.traces.samples import all_of

from kvtide import ConfigError
from kvtide.sim.traces import open_trace

if TYPE_CHECKING:
    from pathlib import Path

SMOOTH = "Gamma,100,1"
WILD = "Gamma,0.05,1"
LENGTHS = {"0": {"input_tokens": "{10: 0.5, 30: 0.5}", "output_tokens": "{7: 1.0}"}}


def client(
    folder: Path, number: int, *windows: tuple[float, str], lengths: object = LENGTHS
) -> None:
    """Windows of 600 s: (rate, form and its two parameters)."""
    text = [f"{600 * i},{rate},1,{form}\n" for i, (rate, form) in enumerate(windows)]
    folder.mkdir(exist_ok=True)
    (folder / f"chunk-{number}-trace.csv").write_text("".join(text))
    if lengths is not None:
        (folder / f"chunk-{number}-dataset.json").write_text(json.dumps(lengths))


def test_a_client_sends_its_rate_in_each_window(tmp_path: Path) -> None:
    client(tmp_path, 1, (0.5, SMOOTH), (0, ",0,0"), (1.5, SMOOTH))
    times = np.array([one.arrival for one in open_trace(str(tmp_path))])
    counts = np.histogram(times, [0, 600, 1200, 1800])[0]
    assert counts.tolist() == [300, 0, 900]
    assert (np.diff(times) >= 0).all()


@pytest.mark.parametrize(
    ("form", "low", "high"),
    [(SMOOTH, 0.05, 0.2), ("Gamma,1,1", 0.85, 1.15), ("Weibull,0.5,1", 1.7, 2.8), (WILD, 3.0, 5.5)],
)
def test_gaps_have_the_form_that_was_fitted(
    form: str, low: float, high: float, tmp_path: Path
) -> None:
    client(tmp_path, 1, (2.0, form))
    found = open_trace(str(tmp_path)).describe()
    assert found.requests == 1200
    assert low < found.arrival_cv < high


def test_lengths_follow_the_histograms_of_their_hour(tmp_path: Path) -> None:
    later = {**LENGTHS, "600": {"input_tokens": "{99: 2}", "output_tokens": "{1: 1, 3: 3}"}}
    client(tmp_path, 1, (1.0, SMOOTH), (1.0, SMOOTH), lengths=later)
    found = list(open_trace(str(tmp_path)))
    first, second = found[:600], found[600:]
    inputs = np.array([one.input_tokens for one in first])
    assert set(inputs.tolist()) == {10, 30}
    assert 250 < (inputs == 10).sum() < 350
    assert {one.output_tokens for one in first} == {7}
    assert {one.input_tokens for one in second} == {99}
    assert 400 < sum(one.output_tokens == 3 for one in second) < 500


def test_the_parts_of_a_multimodal_prompt_add_up(tmp_path: Path) -> None:
    parts = {"text_tokens": "{5: 1}", "image_tokens": "{100: 1}", "output_tokens": "{1: 1}"}
    client(tmp_path, 1, (0.1, SMOOTH), lengths={"0": parts})
    assert {one.input_tokens for one in open_trace(str(tmp_path))} == {105}


def test_a_packed_tar_reads_like_its_folder(tmp_path: Path) -> None:
    client(tmp_path / "d", 1, (0.3, SMOOTH))
    client(tmp_path / "d", 12, (0.2, WILD))
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        tar.add(tmp_path / "d", "language/d")
    (tmp_path / "d.tar.xz").write_bytes(lzma.compress(buffer.getvalue()))
    assert all_of(open_trace(str(tmp_path / "d.tar.xz"))) == all_of(open_trace(str(tmp_path / "d")))


def test_seeded_and_independent_of_the_span(tmp_path: Path) -> None:
    client(tmp_path, 1, (0.3, WILD), (0.4, WILD), (0.5, WILD))
    client(tmp_path, 2, (0.1, SMOOTH), (0.1, SMOOTH), (0.1, SMOOTH))
    everything = all_of(open_trace(f"{tmp_path},seed=5"))
    assert everything == all_of(open_trace(f"{tmp_path},seed=5"))
    assert everything != all_of(open_trace(f"{tmp_path},seed=6"))
    part = [one[0] for one in all_of(open_trace(f"{tmp_path},seed=5,begin=700,seconds=300"))]
    assert part == [one[0] - 700 for one in everything if 700 <= one[0] < 1000]


def test_a_rate_for_all_clients_together(tmp_path: Path) -> None:
    client(tmp_path, 1, (3.0, SMOOTH))
    client(tmp_path, 2, (1.0, SMOOTH))
    found = open_trace(f"{tmp_path},rate=0.4,seconds=600").describe()
    assert found.requests in {240, 241, 242}


def test_fractions_of_a_request_are_drawn(tmp_path: Path) -> None:
    """0.6 requests a window, 300 windows."""
    client(tmp_path, 1, *[(0.001, SMOOTH)] * 300)
    assert 150 < open_trace(f"{tmp_path},seconds=180000").describe().requests < 210


def test_the_busiest_clients(tmp_path: Path) -> None:
    for number, rate in ((1, 0.1), (2, 0.5), (3, 0.3)):
        client(tmp_path, number, (rate, SMOOTH))
    assert 470 <= open_trace(f"{tmp_path},clients=2").describe().requests <= 482


@pytest.mark.parametrize(
    ("windows", "lengths", "message"),
    [
        ([(1.0, "Pareto,1,1")], LENGTHS, r"trace\.csv:1: the gaps must be Gamma or Weibull"),
        ([(1.0, "Gamma,0,1")], LENGTHS, r"trace\.csv:1: the gaps must be .* shape > 0"),
        ([(1.0, SMOOTH), (1.0, "x")], LENGTHS, r"trace\.csv:2: 4 columns, expected start"),
        ([(1.0, "Gamma,x,1")], LENGTHS, r"trace\.csv:1: shape must be a number, got 'x'"),
        ([(1.0, SMOOTH)], None, "client 4 has rates but no lengths: chunk-4-dataset"),
        ([(1.0, SMOOTH)], [1], r"dataset\.json:1: must be an object of start second"),
        ([(1.0, SMOOTH)], {"x": {}}, r"dataset\.json:1: must be an object of start second"),
        ([(1.0, SMOOTH)], {"0": {}}, "text_tokens must be a histogram .* got nothing"),
        ([(1.0, SMOOTH)], {"0": {"input_tokens": "{1: x}"}}, "input_tokens must be a histogram"),
        ([(0.0, ",0,0")], LENGTHS, "no client sends anything from second 0.0 to 3600.0"),
    ],
)
def test_an_error_says_where(
    windows: list[tuple[float, str]], lengths: object, message: str, tmp_path: Path
) -> None:
    client(tmp_path, 4, *windows, lengths=lengths)
    with pytest.raises(ConfigError, match=message):
        list(open_trace(f"rates:{tmp_path}"))


def test_no_clients(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no chunk-N-trace"):
        list(open_trace(f"rates:{tmp_path}"))


def test_a_damaged_tar(tmp_path: Path) -> None:
    (tmp_path / "t.tar").write_bytes(b"no tar at all" * 100)
    with pytest.raises(ConfigError, match="the tar is damaged or cut short"):
        list(open_trace(f"rates:{tmp_path / 't.tar'}"))


@pytest.mark.parametrize("option", ["seed=-1", "begin=-1", "seconds=0", "clients=-1", "rate=-1"])
def test_options_out_of_range(option: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="none may be negative"):
        open_trace(f"rates:{tmp_path},{option}")
