"""Compressed files, damaged files, and errors that name file, line and field."""

from __future__ import annotations

import gzip
import lzma
import sys
from pathlib import Path

import pytest
from tests.sim.traces.samples import all_of, write_lines

from kvtide import ConfigError
from kvtide.sim.traces import open_trace
from kvtide.sim.traces.files import Place, compression, count_of, json_object, lines, number_of

LINE = {"timestamp": 0, "input_length": 3, "output_length": 1, "hash_ids": [0]}
PLACE = Place(Path("f.jsonl"), 7)


@pytest.fixture
def sample(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "plain.jsonl", *[LINE] * 3)


def test_plain_gzip_and_xz_read_the_same(sample: Path, tmp_path: Path) -> None:
    content = sample.read_bytes()
    # The content decides, not the name.
    for name, packed in (("g", gzip.compress(content)), ("x", lzma.compress(content))):
        (tmp_path / name).write_bytes(packed)
        assert all_of(open_trace(str(tmp_path / name))) == all_of(open_trace(str(sample)))


def test_zstd_reads_the_same(sample: Path, tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard", reason="the package zstandard is not installed")
    packed = tmp_path / "z.jsonl.zst"
    packed.write_bytes(zstandard.ZstdCompressor().compress(sample.read_bytes()))
    assert all_of(open_trace(str(packed))) == all_of(open_trace(str(sample)))
    packed.write_bytes(packed.read_bytes()[:8] + b"damaged, damaged, damaged")
    with pytest.raises(ConfigError, match="damaged or cut short"):
        list(lines(packed))


def test_zstd_without_its_package_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    packed = tmp_path / "z.jsonl.zst"
    packed.write_bytes(b"\x28\xb5\x2f\xfd and more")
    with pytest.raises(ConfigError, match="pip install zstandard"):
        open_trace(str(packed))


@pytest.mark.parametrize("pack", [gzip.compress, lzma.compress], ids=["gzip", "xz"])
def test_a_file_cut_short_says_so(pack: object, tmp_path: Path) -> None:
    assert callable(pack)
    content = b"".join(b'{"a": %d}\n' % i for i in range(5000))
    packed = tmp_path / "cut"
    packed.write_bytes(pack(content)[:-40])
    with pytest.raises(ConfigError, match=r"cut:\d+: the file is damaged or cut short"):
        list(lines(packed))


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "b").write_bytes(b"\xff\xfe\xfd\n")
    with pytest.raises(ConfigError, match="b:1: the file is damaged"):
        list(lines(tmp_path / "b"))


def test_blank_lines_and_a_byte_order_mark_are_skipped_and_lines_counted(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(b"\xef\xbb\xbfone\n\n  \ntwo")
    assert [(p.line, t) for p, t in lines(tmp_path / "t")] == [(1, "one\n"), (4, "two")]


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        compression(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", r"f\.jsonl:7: not JSON"), ("[1]", r"f\.jsonl:7: a list; each line must be one object")],
)
def test_a_line_that_is_no_object(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        json_object(PLACE, text)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({}, r"f\.jsonl:7: n is missing; found nothing"),
        ({"m": 1}, "n is missing; found m"),
        ({"n": None}, "n is missing"),
        ({"n": "x"}, "n must be a number, got 'x'"),
        ({"n": [1]}, r"n must be a number, got \[1\]"),
        ({"n": True}, "n must be a number, got True"),
        ({"n": "nan"}, "n must be a number, got 'nan'"),
        ({"n": float("inf")}, "n must be a number, got inf"),
        ({"n": 1.5}, "n must be a whole number of at least 2, got 1.5"),
        ({"n": 1}, "n must be a whole number of at least 2, got 1"),
    ],
)
def test_a_field_that_is_no_count(record: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        count_of(PLACE, record, "n", least=2)


def test_counts_and_numbers_from_text() -> None:
    assert count_of(PLACE, {"n": "12"}, "n") == 12
    assert number_of(PLACE, {"n": " 1.5 "}, "n") == 1.5
