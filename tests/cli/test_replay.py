"""`kvtide replay` from the command line: what it prints, what it refuses, and how."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from tests.cli.replay_runs import FIELDS
from tests.cli.replay_runs import run as made_run
from typer.testing import CliRunner, Result

from kvtide import ConfigError
from kvtide.cli.app import app
from kvtide.cli.replay import command
from kvtide.cli.replay.asked import Asked, axes_of, recipe_of
from kvtide.cli.replay.grid import draw_grid, lines_of
from kvtide.cli.replay.parquet import require_parquet, write_parquet
from kvtide.cli.replay.progress import bar
from kvtide.sim.sweep import RESULTS, Point

ROOT = Path(__file__).parents[2]
TRAFFIC = "synthetic:requests=20,seed=1"
GIVEN = ("--trace", TRAFFIC, "--memory", "24MiB", "--granule", "64KiB", "--chunk-tokens", "512")


@pytest.fixture
def config(tmp_path: Path) -> str:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(FIELDS))
    return str(tmp_path / "tiny")


def replay(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["replay", *arguments])


def test_two_policies_by_default_side_by_side(config: str) -> None:
    result = replay(config, *GIVEN)
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0].startswith("tiny on synthetic: 20 requests, ")
    assert lines[1].startswith("memory 25.166 MB, hardware h100, tp 1, rate 1, block-tokens 16")
    assert lines[3].split() == ["static", "elastic"]
    assert any(line.split()[:2] == ["hit", "rate"] for line in lines)
    assert lines[-1].startswith("The fixed split (window_64 ")
    assert result.stderr == ""


def test_json_is_all_there_is_on_stdout_and_always_the_same(config: str) -> None:
    policies = ("--policy", "elastic", "--policy", "infinite")
    first, again = (replay(config, *GIVEN, *policies, "--json") for _ in range(2))
    assert first.exit_code == 0, first.stderr
    assert first.stdout == again.stdout
    data = json.loads(first.stdout, parse_constant=pytest.fail)
    assert [one["policy"] for one in data["runs"]] == ["elastic", "infinite"]
    assert data["recipe"]["traces"] == [TRAFFIC]
    assert data["runs"][0]["totals"]["requests"] == 20
    assert data["runs"][1]["totals"]["hit_rate"] > 0
    assert first.stderr == ""


def test_every_option_reaches_the_lab(config: str) -> None:
    options = (
        *("--trace", "synthetic", "--policy", "static", "--hardware", "h200", "--tp", "2"),
        *("--memory", "32MiB", "--granule", "128KiB", "--block-tokens", "32", "--seed", "3"),
        *("--pool-ratio", "full=0.4,window_64=0.6", "--rate", "2.0", "--requests", "9"),
        *("--chunk-tokens", "256", "--max-running", "7", "--max-tokens", "90000"),
        *("--slo-ttft", "2.5", "--slo-itl", "0.05", "--kv-dtype", "float32", "--json"),
        *("--weight-dtype", "float8_e4m3fn", "--state-interval", "512"),
    )
    result = replay(config, *options)
    assert result.exit_code == 0, result.stderr
    data = json.loads(result.stdout)
    wanted = {
        "memory_bytes": 32 << 20,
        "granule_bytes": 128 << 10,
        "block_tokens": 32,
        "hardware": "h200",
        "tensor": 2,
        "pool_ratio": {"full": 0.4, "window_64": 0.6},
        "rate": 2.0,
        "requests": 9,
        "chunk_tokens": 256,
        "max_running": 7,
        "max_tokens": 90000,
        "ttft": 2.5,
        "itl": 0.05,
        "kv_dtype": "float32",
        "weight_dtype": "float8_e4m3fn",
        "state_interval": 512,
        "seed": 3,
    }
    assert {name: data["recipe"][name] for name in wanted} == wanted
    settings = data["runs"][0]["settings"]
    assert settings["pool_ratio"] == {"full": 0.4, "window_64": 0.6}
    assert settings["max_running"] == 7
    assert data["runs"][0]["totals"]["requests"] == 9


def test_shares_may_come_in_the_order_of_the_pools(config: str) -> None:
    given = ("--policy", "static", "--pool-ratio", "0.4,0.6", "--json")
    named = ("--policy", "static", "--pool-ratio", "window_64=0.4,full=0.6", "--json")
    first, second = (json.loads(replay(config, *GIVEN, *ratio).stdout) for ratio in (given, named))
    assert first["runs"] == second["runs"]


def test_the_page_is_written_beside_the_report(config: str, tmp_path: Path) -> None:
    out = tmp_path / "replay.html"
    result = replay(config, *GIVEN, "--html", str(out))
    assert result.exit_code == 0, result.stderr
    assert f"Written: {out}" in result.stdout
    assert out.read_text().startswith("<!DOCTYPE html>")
    assert "hit rate" in out.read_text()


def test_a_policy_of_ones_own(config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_policy_of_a_test.py").write_text("def plan(facts):\n    return ()\n")
    monkeypatch.syspath_prepend(tmp_path)
    result = replay(config, *GIVEN, "--policy", "own_policy_of_a_test:plan")
    assert result.exit_code == 0, result.stderr
    assert "own_policy_of_a_test:plan" in result.stdout


def test_a_policy_in_the_folder_one_is_in(config: str, tmp_path: Path) -> None:
    (tmp_path / "policy_beside_the_user.py").write_text("def plan(facts):\n    return ()\n")
    start = "from kvtide.cli import main; main()"  # as the installed command does, with -P
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}  # relative ones mean ROOT
    asked = [*GIVEN, "--policy", "policy_beside_the_user:plan"]
    for sweep in ([], ["--sweep", "rate=1,2", "--out", str(tmp_path / "out")]):
        arguments = [sys.executable, "-P", "-c", start, "replay", config, *asked, *sweep]
        done = subprocess.run(
            arguments, capture_output=True, check=False, text=True, cwd=tmp_path, env=environment
        )
        assert done.returncode == 0, done.stderr
        assert "policy_beside_the_user:plan" in done.stdout
        assert "cannot be imported" not in done.stdout


def test_download_names_sources_and_fetches_nothing() -> None:
    result = replay("--download")
    assert result.exit_code == 0
    assert "github.com/kvcache-ai/Mooncake" in result.stdout
    assert "kvtide fetches nothing by itself" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--memory", "lots"], "--memory is 'lots'; give bytes, such as 60GB"),
        (["--memory", "1kB"], "memory_bytes is 1000, less than one granule"),
        (["--trace", "no-such-file"], "there is no file or folder 'no-such-file'"),
        (["--trace", "synthetic:colour=red"], "no option colour"),
        (["--policy", "best"], "policy is 'best'; use one of static, elastic"),
        (["--policy", "no_such_module_there:plan"], "cannot be imported"),
        (["--hardware", "abacus"], "hardware is 'abacus'; known are"),
        (["--tp", "0"], "--tp is '0'"),
        (["--rate", "fast"], "--rate is 'fast'; give a number above 0"),
        (["--rate", "inf"], "--rate is 'inf'"),
        (["--slo-ttft", "-1"], "--slo-ttft is '-1'"),
        (["--requests", "x"], "--requests is 'x'"),
        (["--pool-ratio", "0.5,0.3,0.2"], "pool_ratio has 3 shares, but there are 2 pools"),
        (["--pool-ratio", "keys=0.5,full=0.5"], "keys"),
        (["--kv-dtype", "int3"], "int3"),
        (["--params", "many"], "--params is 'many'"),
        (["--html", "no/such/folder/a.html"], "--html no/such/folder/a.html cannot be written"),
        (["--parquet", "no/such/folder/a"], "--parquet no/such/folder/a cannot be written"),
        (["--html", "."], "--html . cannot be written: Is a directory"),
        (["--sweep", "policy=best"], "policy is 'best'; use one of static, elastic"),
        (["--sweep", "colour=red"], "--sweep has 'colour=red'; write NAME=VALUE,VALUE"),
        (["--sweep", "rate"], "--sweep has 'rate'"),
        (["--sweep", "rate=1,fast"], "--sweep rate is 'fast'"),
        (["--sweep", "rate=1", "--sweep", "rate=2"], "--sweep names rate twice"),
        (["--sweep", "policy=static,"], "--sweep policy has an empty value"),
        (["--sweep", "rate=1", "--parquet", "a.parquet"], "leave it out of a sweep"),
        (["--sweep", "rate=1", "--cores", "none"], "--cores is 'none'"),
    ],
)
def test_what_makes_no_sense_is_one_line_and_status_2(
    config: str, arguments: list[str], says: str
) -> None:
    given = dict(zip(GIVEN[::2], GIVEN[1::2], strict=True))
    given.pop(arguments[0], None)
    result = replay(config, *(part for pair in given.items() for part in pair), *arguments)
    refused(result, says)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--trace", "synthetic", "--memory", "1GB"], "no model is given"),
        (["none.json", "--memory", "1GB"], "--trace is not given; give FORMAT:PATH, or synthetic"),
        (["none.json", "--trace", "synthetic"], "--memory is not given"),
        (["none.json", "--trace", "synthetic", "--memory", "1GB"], "none.json"),
    ],
)
def test_what_has_to_be_said(arguments: list[str], says: str) -> None:
    refused(replay(*arguments), says)


def refused(result: Result, says: str) -> None:
    assert result.exit_code == 2, result.output
    assert says in result.stderr
    assert result.stderr.startswith("kvtide replay: ")
    assert len(result.stderr.splitlines()) == 1
    assert result.stdout == ""


def test_axes_in_the_order_given_policies_last() -> None:
    asked = Asked(
        config=Path("a.json"),
        trace=("synthetic",),
        policy=("static", "lcm"),
        sweep=("pool-ratio=0.8/0.2,full=0.5/window_64=0.5", "memory=1GB,2GB"),
    )
    assert axes_of(asked) == {
        "pool_ratio": [(0.8, 0.2), {"full": 0.5, "window_64": 0.5}],
        "memory_bytes": [10**9, 2 * 10**9],
        "policy": ["static", "lcm"],
    }
    assert list(axes_of(asked)) == ["pool_ratio", "memory_bytes", "policy"]
    assert recipe_of(asked).traces == ("synthetic",)
    assert axes_of(Asked()) == {}


def test_a_sweep_prints_its_grid_and_is_resumed(config: str, tmp_path: Path) -> None:
    out, page = tmp_path / "out", tmp_path / "sweep.html"
    swept = ("--sweep", "rate=1,4", "--sweep", "memory=1MiB,24MiB", "--policy", "elastic")
    arguments = (config, *GIVEN, *swept, "--out", str(out), "--cores", "2", "--html", str(page))
    result = replay(*arguments)
    assert result.exit_code == 0, result.stderr
    rows = [line.split() for line in result.stdout.splitlines()[2:7]]
    assert rows[0][:3] == ["rate", "memory", "policy"]
    assert [row[0] for row in rows[1:]] == ["1.0", "1.0", "4.0", "4.0"]
    assert rows[1][4:] == ["-"] * 7  # 1 MiB cannot hold the longest request
    assert rows[2][4].replace(".", "").isdigit()
    before = (out / RESULTS).read_bytes()
    assert len(before.splitlines()) == 4
    assert "Hit rate" in page.read_text()

    again = replay(*arguments)
    assert again.stdout == result.stdout
    assert (out / RESULTS).read_bytes() == before
    data = json.loads(replay(*arguments, "--json").stdout)
    assert [point["recipe"]["rate"] for point in data] == [1.0, 1.0, 4.0, 4.0]

    elsewhere = (
        *arguments[: arguments.index("--out")],
        "--out",
        str(tmp_path / "b"),
        "--cores",
        "1",
    )
    assert replay(*elsewhere).exit_code == 0
    assert (tmp_path / "b" / RESULTS).read_bytes() == before


def interrupted(*_: Any) -> None:
    raise KeyboardInterrupt


def test_ctrl_c_says_where_the_finished_points_are(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "sweep", lambda *_, **__: interrupted())
    result = replay(config, *GIVEN, "--sweep", "rate=1,2", "--out", str(tmp_path))
    assert result.exit_code == 130
    assert f"finished points are in {tmp_path / RESULTS}" in result.stderr
    monkeypatch.setattr(command, "prepare", interrupted)
    assert replay(config, *GIVEN).exit_code == 130


def test_a_cluster_is_asked_for_by_its_address(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cluster(address: str) -> Any:
        def spread(work: Any, recipes: Any) -> Any:
            for number, recipe in enumerate(recipes):
                asked.append((address, recipe.rate))
                yield number, work(recipe)

        return spread

    asked: list[tuple[str, float]] = []
    monkeypatch.setattr(command, "on_ray", cluster)
    swept = ("--sweep", "rate=1,2", "--policy", "elastic", "--out", str(tmp_path / "out"))
    result = replay(config, *GIVEN, *swept, "--ray", "head:6379")
    assert result.exit_code == 0, result.stderr
    assert asked == [("head:6379", 1.0), ("head:6379", 2.0)]


def points() -> list[Point]:
    data = made_run("static", hits=0.25).to_json()
    settings = {"memory_bytes": 10**9, "policy": "static", "pool_ratio": {"full": 0.5}}
    ran = Point(key="a", recipe=settings, run=data, error=None)
    other = settings | {"policy": "<lcm>", "pool_ratio": [0.5, 0.5]}
    return [ran, Point(key="b", recipe=other, run=None, error="too small & too late")]


def test_a_grid_to_the_letter() -> None:
    assert (
        "\n".join(lines_of(points(), ["memory_bytes", "pool_ratio", "policy"]))
        == """\
  memory    pool-ratio  policy  hit rate  TTFT p50  TTFT p99  ITL p99  goodput  preemptions  \
stranded
  1.000 GB  full=0.5    static    25.0 %   4.000 s   7.000 s  50.0 ms     0.06            0  \
   0.0 %
  1.000 GB  0.5/0.5     <lcm>          -         -         -        -        -            -  \
       -
  1.000 GB, 0.5/0.5, <lcm>: too small & too late"""
    )


def test_the_page_of_a_grid_is_well_formed() -> None:
    from xml.etree import ElementTree  # noqa: PLC0415

    page = draw_grid(points(), ["memory_bytes", "policy"], "tiny")
    text = " ".join(" ".join(ElementTree.fromstring(page).itertext()).split())
    assert "2 points over memory, policy" in text
    assert "1.000 GB, <lcm>: too small & too late" in text
    assert "2: 1.000 GB <lcm>" in text


def test_a_bar_appears_after_a_while_on_a_terminal_only() -> None:
    def shown(*, terminal: bool, wait: float) -> str:
        console = Console(file=io.StringIO(), force_terminal=terminal, width=80)
        with bar(console, "elastic", 10, patience=0.05) as advance:
            time.sleep(wait)
            advance(7)
            time.sleep(wait)
        return console.file.getvalue()  # pyright: ignore

    assert "7/10" in shown(terminal=True, wait=0.3)
    assert shown(terminal=True, wait=0.0) == ""
    assert shown(terminal=False, wait=0.1) == ""


def test_piped_output_is_plain(config: str) -> None:
    arguments = [sys.executable, "-m", "kvtide", "replay", config, *GIVEN]
    done = subprocess.run(arguments, capture_output=True, check=True, cwd=ROOT, env=os.environ)
    assert b"\x1b" not in done.stdout
    assert done.stderr == b""


def test_output_that_knows_few_characters_gets_others(tmp_path: Path) -> None:
    (tmp_path / "größe").mkdir()
    (tmp_path / "größe" / "config.json").write_text(json.dumps(FIELDS))
    arguments = [sys.executable, "-m", "kvtide", "replay", str(tmp_path / "größe"), *GIVEN]
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(arguments, capture_output=True, check=True, cwd=ROOT, env=environment)
    assert b"gr??e on synthetic: 20 requests" in done.stdout


def test_without_pyarrow_one_is_told_before_anything_runs(
    config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtide.cli.replay.parquet.find_spec", lambda _: None)
    monkeypatch.setattr(command, "prepare", lambda _: pytest.fail("something ran"))
    refused(replay(config, *GIVEN, "--parquet", "a.parquet"), "--parquet needs pyarrow")


def test_a_file_that_cannot_be_written_is_heard_of_before_anything_runs(
    config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "prepare", lambda _: pytest.fail("something ran"))
    monkeypatch.setattr(command, "sweep", lambda *_, **__: pytest.fail("something ran"))
    for sweep in ((), ("--sweep", "rate=1,2")):
        refused(replay(config, *GIVEN, *sweep, "--html", "no/folder/a.html"), "no such folder")


def test_every_request_is_a_row(tmp_path: Path) -> None:
    if importlib.util.find_spec("pyarrow") is None:
        pytest.skip("pyarrow is not installed (extra parquet)")
    from pyarrow import parquet  # noqa: PLC0415

    require_parquet()
    path = tmp_path / "requests.parquet"
    runs = [made_run("static", slow=2.0), made_run("elastic")]
    write_parquet(runs, path)
    table = parquet.read_table(path)
    assert table.column("policy").to_pylist() == ["static"] * 50 + ["elastic"] * 50
    first = np.concatenate([run.requests.first_token for run in runs])
    assert table.column("first_token").to_pylist() == first.tolist()
    with pytest.raises(ConfigError, match="cannot be written"):
        write_parquet(runs, tmp_path / "no" / "folder.parquet")
