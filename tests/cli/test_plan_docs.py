"""What the documents show is what the command prints, and their snippets run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvtide.cli.app import app

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "planner.md"
PROMPT = "$ kvtide "


def shown(document: Path) -> list[tuple[str, str]]:
    """`(command, output)` of every console block; the output is empty where none is shown, and a
    line of three dots in it stands for any lines.
    """
    blocks = re.findall(r"```console\n(.*?)```", document.read_text(), re.DOTALL)
    found = [block.partition("\n") for block in blocks if block.startswith(f"{PROMPT}plan")]
    return [(command.removeprefix(PROMPT), output) for command, _, output in found]


def run(command: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(ROOT)
    result = CliRunner().invoke(app, shlex.split(command))
    assert result.exit_code == 0, result.stderr
    return result.stdout


def test_the_worked_example_prints_what_the_document_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    (command, _), *_ = shown(DOCUMENT)
    (block,) = re.findall(r"```text\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    assert run(command, monkeypatch) == block
    assert "38,147 tokens of cache" in block


@pytest.mark.parametrize("name", ["docs/planner.md", "README.md"])
def test_commands_print_what_documents_show(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for command, output in shown(ROOT / name):
        if output:
            pattern = r"(?:.*\n)*?".join(map(re.escape, output.split("...\n")))
            assert re.fullmatch(pattern, run(command, monkeypatch)), output


def test_the_document_shows_an_output() -> None:
    assert any(output for _, output in shown(DOCUMENT))


def test_the_snippet_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    monkeypatch.chdir(ROOT)
    exec(compile(block, str(DOCUMENT), "exec"), {})
    sequences, prefixes, *ratio = capsys.readouterr().out.split()
    assert int(sequences) == 64
    assert int(prefixes) > 0
    assert "'window_128'" in ratio[0]
