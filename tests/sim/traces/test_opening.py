"""From what a user writes to a trace."""

from __future__ import annotations

import gzip
import json
from typing import TYPE_CHECKING

import pytest
from tests.sim.traces.samples import all_of, write_lines

from kvtide import ConfigError
from kvtide.sim.traces import FORMATS, PUBLIC, download_text, open_trace, write_trace
from kvtide.sim.traces.opening import _FORMATS, Part, detect
from kvtide.sim.traces.settings import names_of
from kvtide.sim.traces.sources import source_of
from kvtide.sim.traces.synthetic import Phase, SyntheticOptions

if TYPE_CHECKING:
    from pathlib import Path

BLOCKS = {"timestamp": 0, "input_length": 3, "output_length": 1, "hash_ids": [0]}


@pytest.fixture
def lengths(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "l.csv", "arrival,input,output", "0,3,1", "1,4,1", "2,5,1")


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (json.dumps(BLOCKS), "mooncake"),
        (json.dumps({**BLOCKS, "chat_id": 1}), "bailian"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens", "azure"),
        (json.dumps({"id": "s", "block_size": 64, "requests": []}), "agent"),
        ("input_tokens, output_tokens", "lengths"),
        ("12,3", "lengths"),
        ("12.5,3,x", "lengths"),
        (json.dumps({"input_toks": 1}), "lengths"),
        (json.dumps({"kvtide_trace": 1}), "kvtide"),
    ],
)
def test_a_format_is_seen_from_the_first_line(line: str, found: str, tmp_path: Path) -> None:
    assert detect(write_lines(tmp_path / "t", "", line)) == found


@pytest.mark.parametrize("line", ['{"a": 1}', "a,b", "{", "", "[]"])
def test_what_is_no_trace_is_shown(line: str, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "t", line)
    with pytest.raises(ConfigError, match=r"unknown format, found .*; write format:path with one"):
        open_trace(str(path))


def test_name_and_tenant_are_the_file_without_its_endings(tmp_path: Path) -> None:
    found = open_trace(str(write_lines(tmp_path / "v1.5-chat.jsonl", BLOCKS)))
    assert (found.name, found.tenants) == ("v1.5-chat", ("v1.5-chat",))
    assert found.source.licence == "Apache-2.0"


def test_options_of_every_trace_cut_then_scale_then_shift(lengths: Path) -> None:
    def arrivals(options: str) -> list[float]:
        return [one.arrival for one in open_trace(f"{lengths}{options}")]

    assert arrivals("") == [0, 1, 2]
    assert arrivals(",first=2") == [0, 1]
    assert arrivals(",since=1") == [0, 1]
    assert arrivals(",until=2") == [0, 1]
    assert arrivals(",scale=2") == [0, 0.5, 1]
    assert arrivals(",shift=3") == [3, 4, 5]
    assert arrivals(", since=1, scale=2, shift=3") == [3, 3.5]


def test_plus_overlays_and_then_concatenates(lengths: Path) -> None:
    found = open_trace(f"{lengths} + lengths:{lengths},shift=0.5 then synthetic:requests=2")
    assert found.tenants == ("l", "l#2", "synthetic")
    assert [one.tenant for one in found] == [0, 1, 0, 1, 0, 1, 2, 2]
    assert [one.arrival for one in found][:6] == [0, 0.5, 1, 1.5, 2, 2.5]


def test_a_path_with_commas_and_colons_opens(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a,b:c=d.csv", "3,1")
    assert len(all_of(open_trace(f"{path},first=1"))) == 1
    assert len(all_of(open_trace(str(path)))) == 1


def test_a_written_mix_reads_back_the_same(lengths: Path, tmp_path: Path) -> None:
    mixed = open_trace(f"{lengths} + synthetic:requests=5")
    write_trace(mixed, tmp_path / "mix.jsonl.gz")
    back = open_trace(str(tmp_path / "mix.jsonl.gz"))
    assert all_of(back) == all_of(mixed)
    assert back.tenants == mixed.tenants == ("l", "synthetic")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (",sped=2", "no option sped; there are first, rate, scale, seed, shift, since, until"),
        (",first=x", "first must be a whole number, got 'x'"),
        (",first=1.5", "first must be a whole number, got '1.5'"),
        (",scale=fast", "scale must be a number, got 'fast'"),
        (",scale=nan", "scale must be a number, got 'nan'"),
        (",scale=0", "scale of l must be a positive number"),
        (",first=-1", "leaves nothing"),
        (",first=1,first=2", "'first=2' must be name=value, each name once"),
        (",pause=1", "no option pause"),
    ],
)
def test_wrong_options(options: str, message: str, lengths: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        open_trace(f"{lengths}{options}")


def test_wrong_options_of_other_kinds(tmp_path: Path) -> None:
    agent = write_lines(tmp_path / "a", {"block_size": 4, "requests": []})
    with pytest.raises(ConfigError, match="tools must be 1 or 0, got 'maybe'"):
        open_trace(f"{agent},tools=maybe")
    own = write_lines(tmp_path / "o", {"kvtide_trace": 1})
    with pytest.raises(ConfigError, match="no option rate"):
        open_trace(f"{own},rate=1")
    for spec in ("synthetic:sped=1", "synthetic:rate=1;requests=3", "synthetic:rate"):
        with pytest.raises(ConfigError, match=r"no option|must be name=value"):
            open_trace(spec)


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match=r"no file or folder 'nowhere\.jsonl'; a trace is path"):
        open_trace("mooncake:nowhere.jsonl")


@pytest.mark.parametrize("spec", ["", "azure:", " + synthetic", "synthetic then ", ",first=1"])
def test_an_empty_name_is_no_trace(spec: str) -> None:
    with pytest.raises(ConfigError, match="no file or folder ''"):
        open_trace(spec)


def test_a_cut_file_whose_format_is_not_named(tmp_path: Path) -> None:
    (tmp_path / "t.gz").write_bytes(gzip.compress(b"12,3\n" * 9)[:12])
    with pytest.raises(ConfigError, match=r"t\.gz:1: the file is damaged or cut short"):
        open_trace(str(tmp_path / "t.gz"))


def test_no_option_means_two_things() -> None:
    for reader in _FORMATS.values():
        assert not names_of(Part) & names_of(reader.options)
    assert not names_of(Part) & names_of(Phase)
    assert not names_of(Part) & names_of(SyntheticOptions)
    assert not names_of(Phase) & names_of(SyntheticOptions)


def test_every_public_trace_has_a_licence_an_address_and_a_format() -> None:
    text = download_text()
    for public in PUBLIC:
        assert public.format in FORMATS
        assert public.source.url.startswith("https://")
        for said in (public.name, public.source.licence, public.source.url, public.get):
            assert said in text
    assert {public.format for public in PUBLIC} == set(_FORMATS)
    assert all(source_of(name).licence for name in _FORMATS)
    assert "fetches nothing" in text
