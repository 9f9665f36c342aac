"""What the documents show is what the command prints, and their snippets run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from typer.testing import CliRunner

from kvtide.cli.app import app
from kvtide.sim.policies import POLICIES

if TYPE_CHECKING:
    import pytest

ROOT = Path(__file__).parents[2]
README, DOCUMENT = ROOT / "README.md", ROOT / "docs" / "replay.md"
PROMPT = "$ kvtide "
SNIPPETS = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)


def replayed(document: Path) -> list[tuple[str, str]]:
    """`(command, output)` of every console block; a command goes on after a backslash."""
    blocks = re.findall(r"```console\n(.*?)```", document.read_text(), re.DOTALL)
    joined = [block.replace("\\\n", "") for block in blocks]
    found = [block.partition("\n") for block in joined if block.startswith(f"{PROMPT}replay")]
    return [(command.removeprefix(PROMPT), output) for command, _, output in found]


def run(command: str) -> str:
    result = CliRunner().invoke(app, shlex.split(command))
    assert result.exit_code == 0, result.stderr
    return result.stdout


def test_the_readme_prints_what_it_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    ((command, output),) = replayed(README)
    pattern = r"(?:.*\n)*?".join(map(re.escape, output.split("...\n")))
    assert re.fullmatch(pattern, run(command)), output


def test_the_first_command_writes_its_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    command = replayed(DOCUMENT)[0][0].replace("replay.html", str(tmp_path / "replay.html"))
    assert "static" in run(command)
    assert "</html>" in (tmp_path / "replay.html").read_text()


def test_all_policies_are_explained() -> None:
    explained = set(re.findall(r"^\| `([\w-]+)` \|", DOCUMENT.read_text(), re.MULTILINE))
    assert explained >= {*POLICIES, "oracle-static"}


def test_a_policy_of_ones_own_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine_of_the_document.py").write_text(SNIPPETS[0])
    monkeypatch.chdir(tmp_path)
    config = ROOT / "examples" / "configs" / "full-window.json"
    output = run(
        f"replay {config} --trace synthetic:requests=20 --memory 20GB "
        "--policy mine_of_the_document:plan"
    )
    assert "hit rate" in output


def test_from_python(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.chdir(ROOT)
    exec(compile(SNIPPETS[1], str(DOCUMENT), "exec"), {})
    hit_rate, *ttft = capsys.readouterr().out.split()
    assert 0 <= float(hit_rate) < 1
    assert len(ttft) == 3
