"""The demo on two ranks: the tokens of one rank, and one line if a rank is lost."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from kvtide.cli.app import app
from kvtide.cli.demo.launch import _reason
from kvtide.cli.demo.ranked import as_lines

from .small import save_tiny

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
SECONDS = 200


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"))


def start(model: Path, out: Path, *options: str) -> subprocess.Popen[str]:
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    given = ("--short", "--granule", "4", "--model", str(model), "--out", str(out))
    return subprocess.Popen(
        [sys.executable, "-m", "kvtide", "demo", *given, *options],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def children(pid: int) -> Iterator[int]:
    for task in Path(f"/proc/{pid}/task").iterdir():
        yield from map(int, (task / "children").read_text().split())


def test_json_of_two_stages_is_all_there_is_on_stdout(model: Path, tmp_path: Path) -> None:
    with start(model, tmp_path, "--pp", "2", "--json") as process:
        out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, err
    report = json.loads(out)
    assert json.loads((tmp_path / "report.json").read_text()) == report
    assert report["outputs_identical"]
    assert (report["requests"], report["output_tokens"]) == (20, 160)
    first, second = report["ranks"]
    for name in ("steps", "ticks", "changes", "refused", "pages", "hit_tokens"):
        assert first[name] == second[name]
    assert first["changes"] > 2
    assert all(least < most for least, most in first["pages"].values())
    told = "\n".join(as_lines(report))
    for text in ("pipeline parallel", "rank 1", "changes made together", "All 160 output tokens"):
        assert text in told


def test_a_wrong_token_is_said(model: Path) -> None:
    rank = {
        "rank": 0,
        "requests": 1,
        "hit_tokens": 0,
        "steps": 1,
        "memory_bytes": 1 << 20,
        "pages": {"full": [1, 2]},
        "granules_moved": 0,
        "changes": 0,
        "refused": 0,
        "ticks": 1,
        "agreement_ms": {"p50": 1.0, "p99": 2.0},
        "seconds": 1.0,
    }
    report = {
        "ranks": [rank, {**rank, "rank": 1}],
        "outputs_identical": False,
        "different_tokens": 3,
        "output_tokens": 8,
        "smallest_logit_gap": 0.5,
        "model": model.name,
        "requests": 1,
        "axis": "adp",
    }
    assert "3 of 2 x 8 output tokens differ" in as_lines(report)[-1]


def test_a_killed_rank_is_one_line_and_status_3(model: Path, tmp_path: Path) -> None:
    with start(model, tmp_path, "--tp", "2") as process:
        assert process.stderr is not None
        assert process.stderr.readline() == f"loading {model} on 2 ranks\n"
        (victim,) = (
            child
            for child in children(process.pid)
            if "RANK=1" in Path(f"/proc/{child}/environ").read_text().split("\0")
        )
        os.kill(victim, signal.SIGKILL)
        out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 3
    assert out == ""
    lines = [line for line in err.splitlines() if "requests" not in line]
    (line,) = lines  # of the launcher, or of rank 0 if it noticed sooner
    assert re.match("kvtide demo: (rank 1 was ended by SIGKILL|rank 0: rank 1 )", line)


def test_what_a_rank_has_said_comes_before_how_another_one_ended(tmp_path: Path) -> None:
    """A rank that stands still is killed in the end: that is not why the group has stopped."""
    killed = {0: 3, 1: -signal.SIGKILL}
    assert _reason(killed, tmp_path) == (
        3,
        "rank 1 was ended by SIGKILL; the other ranks have been stopped",
    )
    said = {"status": 3, "message": "rank 0: rank 1 was not heard"}
    (tmp_path / "error-0.json").write_text(json.dumps(said))
    assert _reason(killed, tmp_path) == (3, "rank 0: rank 1 was not heard")


def test_axes_exclude_each_other() -> None:
    result = CliRunner().invoke(app, ["demo", "--tp", "2", "--pp", "2"])
    assert result.exit_code == 2
    assert "exclude each other" in result.stderr
