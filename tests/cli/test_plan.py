"""`kvtide plan` from the command line: what it prints, what it refuses, and how."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from kvtide import ConfigError
from kvtide.cli.app import app
from kvtide.cli.table import cells_of, table
from kvtide.cli.units import parse_bytes, parse_needs, parse_ratio, show, show_bytes

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "examples" / "configs"
INDEXER = str(CONFIGS / "gqa-indexer.json")
WINDOW = str(CONFIGS / "full-window.json")
STATE = str(CONFIGS / "full-state.json")


def plan(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["plan", *arguments])


def test_the_worked_example_is_in_the_report() -> None:
    given = ["--memory", "60GB", "--pool-ratio", "0.85,0.15", "--need", "indexer=4GB"]
    result = plan(INDEXER, *given)
    assert result.exit_code == 0, result.stderr
    for text in (
        "0.85 = 51,000,000,000 bytes",
        "0.15 = 9,000,000,000 bytes, 4,000,000,000 needed, 5,000,000,000 stranded",
        "Stranded: 5,000,000,000 bytes",
        "5,000,000,000 / 131,072 = 38,147 tokens of cache",
        "19 prefixes of 2,000 tokens",
    ):
        assert text in result.stdout
    assert result.stderr == ""


def test_json_is_all_there_is_on_stdout() -> None:
    result = plan(INDEXER, "--memory", "60GB", "--json")
    assert result.exit_code == 0
    data = json.loads(result.stdout)
    assert data["kv_bytes_per_token"] == 139_264
    assert data["memory_bytes"] == 60_000_000_000
    assert result.stderr == ""


def test_every_option_reaches_the_planner(tmp_path: Path) -> None:
    traffic = tmp_path / "traffic.jsonl"
    traffic.write_text('{"input": 900, "output": 100}\n{"input": 2000, "output": 300}\n')
    result = plan(
        *(STATE, "--memory", "10GiB", "--granule", "4MiB", "--workload", str(traffic)),
        *("--concurrency", "8", "--shared-prefix", "64", "--pool-ratio", "state=0.5,full=0.5"),
        *("--tp", "2", "--pp", "2", "--cp", "2", "--adp", "2", "--block-tokens", "32"),
        *("--max-tokens", "8192", "--kv-dtype", "fp8", "--state-dtype", "bfloat16", "--json"),
    )
    assert result.exit_code == 0, result.stderr
    data = json.loads(result.stdout)
    assert data["memory_bytes"] == 10 << 30
    assert data["granule_bytes"] == 4 << 20
    assert data["parallel"] == {"tensor": 2, "pipeline": 2, "context": 2, "attention_data": 2}
    assert data["block_tokens"] == 32
    assert data["max_tokens"] == 8192
    assert data["workload"]["mean_input"] == 1450
    assert data["workload"]["concurrency"] == 8
    assert data["workload"]["shared_prefix"] == 64
    assert data["capacity"]["sequences"] == 4
    assert [pool["share"] for pool in data["verdict"]["pools"]] == [0.5, 0.5]
    assert len(data["stages"]) == 2
    # 3 of 6 layers, 1 of 2 heads of 256 for K and V, a byte each, half of the tokens.
    assert data["kv_bytes_per_token"] == 3 * 2 * 256 // 2


def test_draft_tokens_and_index_dtype_reach_the_planner(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(Path(INDEXER).read_text())
    drafts = ["--draft-tokens", "3", "--draft-layers", "1"]
    result = plan(str(tmp_path), *drafts, "--index-dtype", "fp8", "--json")
    assert result.exit_code == 0, result.stderr
    data = json.loads(result.stdout)
    assert data["model"] == tmp_path.name
    assert {group["look_ahead"] for group in data["groups"] if group["lifetime"] == "mirror"} == {3}
    index = next(group for group in data["groups"] if group["name"] == "indexer")
    assert index["bytes_per_token"] < 32 * 128 * 2


def test_people_read_what_fits_and_why() -> None:
    result = plan(
        *(WINDOW, "--memory", "20GB", "--mean-input", "2_000", "--mean-output", "300"),
        *("--concurrency", "64", "--shared-prefix", "500", "--pool-ratio", "0.5,0.5"),
    )
    assert result.exit_code == 0, result.stderr
    for text in (
        "window 128",
        "Sequences that fit in 20.000 GB a rank",
        "64 sequences run at a time (at most 416 fit if no floor is kept)",
        "--pool-ratio window_128=0.0678482,full=0.9321518",
        "equal pages: 2 groups of 12 layers",
        "beside 162 cached prefixes",
    ):
        assert text in result.stdout


def test_a_split_as_printed_can_be_given_back() -> None:
    traffic = ["--mean-input", "2000", "--mean-output", "300", "--concurrency", "64"]
    first = json.loads(plan(WINDOW, "--memory", "20GB", *traffic, "--json").stdout)
    printed = plan(WINDOW, "--memory", "20GB", *traffic).stdout
    ratio = printed.split("--pool-ratio ")[1].split()[0]
    again = plan(WINDOW, "--memory", "20GB", *traffic, "--pool-ratio", ratio, "--json")
    verdict = json.loads(again.stdout)["verdict"]
    assert verdict["sequences"] == first["split"]["sequences"] == 64
    assert verdict["prefixes"] >= first["split"]["prefixes"] - 1


def test_a_stage_and_copies_are_named() -> None:
    result = plan(STATE, "--pp", "2", "--adp", "2", "--memory", "10GB")
    assert result.exit_code == 0
    assert "is shown, of 2, counted from 0: it runs out first" in result.stdout
    assert "in all 2 copies" in result.stdout


def test_what_does_not_fit_is_said_and_is_status_1() -> None:
    result = plan(INDEXER, "--memory", "10GB")
    assert result.exit_code == 1
    assert "DOES NOT FIT: memory lacks" in result.stdout
    assert "full 17,181,966,336, indexer 1,075,838,976" in result.stdout
    split = plan(INDEXER, "--memory", "60GB", "--pool-ratio", "0.99,0.01")
    assert split.exit_code == 1
    assert "DOES NOT FIT: pool indexer lacks 475,838,976 bytes of its floor" in split.stdout
    assert json.loads(plan(INDEXER, "--memory", "10GB", "--json").stdout)["fits"] is False


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--memory", "60"], "memory is 60 bytes, less than one granule"),
        (["--memory", "lots"], "--memory is 'lots'; give bytes, such as 60GB"),
        (["--memory", "0GB"], "--memory is '0GB'"),
        (["--memory", "-1"], "--memory is '-1'"),
        (["--granule", "1.5"], "--granule is '1.5'"),
        (["--memory", "60GB", "--pool-ratio", "0.85;0.15"], "--pool-ratio has '0.85;0.15'; give"),
        (["--memory", "60GB", "--pool-ratio", "0.85,full=0.15"], "name every share, or none"),
        (["--memory", "60GB", "--pool-ratio", "full=0.5,full=0.5"], "names full twice"),
        (["--memory", "60GB", "--pool-ratio", "0.85,nan"], r"pool_ratio['indexer'] is nan"),
        (["--memory", "60GB", "--pool-ratio", "1"], "pool_ratio has 1 shares, but there are 2"),
        (["--pool-ratio", "0.85,0.15"], "pool_ratio is given without memory"),
        (["--memory", "60GB", "--need", "4GB"], "--need has '4GB'; write it as pool=value"),
        (["--memory", "60GB", "--need", "indexer=x"], "--need indexer is 'x'"),
        (["--memory", "60GB", "--need", "keys=4GB"], "needs names 'keys'; the pools are full"),
        (["--tp", "three"], "--tp is 'three'; give a whole number >= 1"),
        (["--tp", "0"], "--tp is '0'"),
        (["--cp", "9" * 5000], "--cp is '999"),
        (["--tp", "3"], "tensor = 3 ranks"),
        (["--pp", "33"], "every stage needs at least one layer"),
        (["--block-tokens", "1.5"], "--block-tokens is '1.5'"),
        (["--max-tokens", "no"], "--max-tokens is 'no'"),
        (["--kv-dtype", "int3"], "int3"),
        (["--draft-tokens", "x"], "--draft-tokens is 'x'"),
        (["--mean-input", "5"], "--mean-input is given without --mean-output"),
        (["--concurrency", "5"], "--concurrency is given without --mean-input and --mean-output"),
        (["--mean-input", "a", "--mean-output", "5"], "--mean-input is 'a'"),
        (["--mean-input", "200000", "--mean-output", "5"], "longest sequence has 200,005 tokens"),
        (["--workload", "none.json"], "workload none.json cannot be read"),
        (["--workload", "none.json", "--mean-input", "5"], "--mean-input and --workload are both"),
        (["--html", "no/such/folder/plan.html"], "--html no/such/folder/plan.html cannot be"),
    ],
)
def test_what_makes_no_sense_is_one_line_and_status_2(arguments: list[str], says: str) -> None:
    result = plan(INDEXER, *arguments)
    assert result.exit_code == 2, result.output
    assert says in result.stderr
    assert result.stderr.startswith("kvtide plan: ")
    assert len(result.stderr.splitlines()) == 1
    assert result.stdout == ""


def test_configurations_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "half.json").write_text('{"model_type": ')
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "other.json").write_text('{"model_type": "none_we_know", "n_positions": 5}')
    for name, says in (
        ("none.json", "none.json"),
        ("half.json", "half.json is no JSON"),
        ("list.json", "list.json holds a list"),
        ("other.json", "none_we_know"),
        (".", "config.json"),
    ):
        result = plan(str(tmp_path / name))
        assert (result.exit_code, result.stdout) == (2, "")
        assert says in result.stderr
        assert len(result.stderr.splitlines()) == 1


def test_piped_output_is_plain() -> None:
    command = [sys.executable, "-m", "kvtide", "plan", INDEXER, "--memory", "60GB"]
    done = subprocess.run(command, capture_output=True, check=True, cwd=ROOT)
    assert b"\x1b" not in done.stdout
    assert done.stderr == b""
    assert "█" in done.stdout.decode()


def test_output_that_knows_few_characters_gets_others() -> None:
    command = [sys.executable, "-m", "kvtide", "plan", INDEXER, "--memory", "60GB"]
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, check=True, cwd=ROOT, env=environment)
    assert "# full   = indexer" in done.stdout.decode("ascii")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("60GB", 60 * 10**9),
        ("56 GiB", 56 << 30),
        ("1.5MiB", 3 << 19),
        ("0.5kb", 500),
        ("4e9", 4 * 10**9),
        ("2_097_152", 1 << 21),
        ("2,097,152 B", 1 << 21),
        ("1TB", 10**12),
    ],
)
def test_sizes_as_people_write_them(text: str, size: int) -> None:
    assert parse_bytes("--memory", text) == size


@pytest.mark.parametrize(
    "text",
    ["", "GB", "1.2.3GB", "1GBit", "0.3B", "inf", "nan", "1e", "-5GB", "1e999999999", "9e30GB"],
)
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="--memory is"):
        parse_bytes("--memory", text)


def test_shares_and_needs() -> None:
    assert parse_ratio("full=0.85, indexer=0.15") == {"full": 0.85, "indexer": 0.15}
    assert parse_ratio("0.85, 0.15") == (0.85, 0.15)
    assert parse_needs(["indexer=4GB", "full = 1GiB"]) == {"indexer": 4 * 10**9, "full": 1 << 30}
    with pytest.raises(ConfigError, match="--need names full twice"):
        parse_needs(["full=1", "full=2"])


def test_numbers_as_people_read_them() -> None:
    assert [show(None), show(1234567), show(2.0), show(1234.567)] == [
        "-",
        "1,234,567",
        "2",
        "1,234.57",
    ]
    assert [show_bytes(n) for n in (999, 1500, 51 * 10**9, 3 * 10**12)] == [
        "999 B",
        "1.500 kB",
        "51.000 GB",
        "3.000 TB",
    ]


def test_bars_and_tables_line_up() -> None:
    assert cells_of([0.5, 0.25, 0.25], 8) == [4, 2, 2]
    assert sum(cells_of([1 / 3] * 3, 40)) == 40
    assert table(("a", "bb"), [("longer", "1"), ("x", "22")]) == [
        "  a       bb",
        "  longer   1",
        "  x       22",
    ]
