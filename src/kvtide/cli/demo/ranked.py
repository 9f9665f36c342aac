"""One rank of `kvtide demo --tp, --pp or --adp`: serves its part, and rank 0 reports.

    torchrun ... -m kvtide.cli.demo.ranked FOLDER

FOLDER has task.json; report.json is written there, or error-RANK.json.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from itertools import cycle, permutations
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from rich.console import Console
from transformers.utils.logging import disable_progress_bar

from kvtide.cli.demo.command import BLOCK_TOKENS, MAX_SEQUENCES, Options, sized, tokenizer_of
from kvtide.cli.demo.oracle import Oracle
from kvtide.cli.demo.progress import Progress
from kvtide.cli.demo.report import count_different
from kvtide.cli.demo.traffic import FULL, SHORT, make_traffic
from kvtide.cli.demo.trial import run_trial
from kvtide.cli.table import table
from kvtide.engine import load_model
from kvtide.engine.load import ModelUnavailableError
from kvtide.engine.parallel import DataRanks, PipelineRanks, TensorRanks
from kvtide.errors import ConfigError, RanksError
from kvtide.ranks import Change
from kvtide.rebalance import Move

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvtide.cli.demo.traffic import Job, Phase, Size
    from kvtide.cli.demo.trial import Trial
    from kvtide.engine import Loaded
    from kvtide.engine.llm import Settings
    from kvtide.manager import KVManager

Axis = Literal["tp", "pp", "adp"]
KINDS = {"tp": TensorRanks, "pp": PipelineRanks, "adp": DataRanks}
TITLES = {"tp": "tensor parallel", "pp": "pipeline parallel", "adp": "attention data parallel"}
FORCED = 6
"""Steps from one proposed change to the next, where pools do not trade by themselves."""

dist: Any = torch.distributed


def main(folder: Path) -> int:
    """Serve; the exit status."""
    task: dict[str, Any] = json.loads((folder / "task.json").read_text())
    axis: Axis = task.pop("axis")
    size = SHORT if task.pop("short") else FULL
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    progress = Progress(Console(stderr=True, quiet=rank > 0))
    logging.getLogger("kvtide.ranks").setLevel(logging.ERROR)  # refusals are counted, and reported
    disable_progress_bar()
    try:
        report = serve(axis, size, Options(**task), progress)
    except (ModelUnavailableError, ConfigError, RanksError) as error:
        status = 3 if isinstance(error, RanksError) else 2
        told = {"status": status, "message": f"rank {rank}: {error}" if status == 3 else str(error)}
        (folder / f"error-{rank}.json").write_text(json.dumps(told))
        return status
    if report is not None:
        (folder / "report.json").write_text(json.dumps(report))
    return 0


def serve(axis: Axis, size: Size, options: Options, progress: Progress) -> dict[str, Any] | None:
    """Serve the traffic with the others, compare with one rank; the report, on rank 0."""
    place = KINDS[axis]()
    progress.say(f"loading {options.model} on {place.size} ranks")
    loaded = load_model(options.model, say=progress.say)
    phases = make_traffic(tokenizer_of(loaded), size)
    place.split(loaded.model)
    trial, pages = _trial(loaded, phases, size, options, place=place, progress=progress)
    outputs = place.collect({output.request_id: output for output in trial.outputs})
    answers = [outputs[request_id].token_ids for request_id in sorted(outputs)]
    told: list[Any] = place.link.gather(({**_facts(trial, place), "pages": pages}, answers))
    dist.destroy_process_group()
    if place.rank:
        return None
    del loaded
    torch.set_num_threads(len(os.sched_getaffinity(0)))  # the other ranks have ended
    whole = load_model(options.model)
    jobs: list[Job] = [job for phase in phases for job in phase.jobs]
    with progress.bar("one rank, transformers' own cache", len(jobs)) as advance:
        right = Oracle(whole.model, size.answer_tokens).answer(jobs, advance)
    wrong = sum(
        count_different(got, want)
        for _, each in told
        for got, want in zip(each, right.answers, strict=True)
    )
    return {
        "outputs_identical": wrong == 0,
        "axis": axis,
        "ranks": [facts for facts, _ in told],
        "requests": len(jobs),
        "output_tokens": sum(map(len, right.answers)),
        "different_tokens": wrong,
        "smallest_logit_gap": right.smallest_gap,
        "memory_bytes": [facts["memory_bytes"] for facts, _ in told],
        "granule_bytes": options.granule_bytes,
        "model": whole.name,
        "terms": whole.terms,
    }


def _trial(
    loaded: Loaded,
    phases: tuple[Phase, ...],
    size: Size,
    options: Options,
    *,
    place: Any,  # noqa: ANN401 (one of three kinds)
    progress: Progress,
) -> tuple[Trial, dict[str, list[int]]]:
    """Serve all phases from elastic pools of this rank's part of the model; what came of it, and
    least and most pages of each pool.
    """
    ratio, memory_bytes = sized(loaded, size, options)
    settings: Settings = {
        "memory_bytes": memory_bytes,
        "max_sequences": MAX_SEQUENCES,
        "max_tokens": size.max_tokens,
        "block_tokens": BLOCK_TOKENS,
        "granule_bytes": options.granule_bytes,
        "pool_ratio": ratio,
    }
    num_jobs = sum(len(phase.jobs) for phase in phases)
    with progress.bar(f"{place.size} ranks, {place.axis}", num_jobs) as advance:
        conductor = _Conductor(place, advance)
        trial = run_trial(
            loaded,
            phases,
            answer_tokens=size.answer_tokens,
            settings=settings,
            progress=conductor.step,
            ranks=place,
        )
    return trial, conductor.pages


class _Conductor:
    """Counts steps, sees how large pools are, and every few steps proposes a change, in all
    directions by turns. Tensor parallel pools trade by themselves, on all ranks alike.
    """

    def __init__(self, place: Any, advance: Callable[[int], None]) -> None:  # noqa: ANN401
        self._place, self._advance = place, advance
        self._steps = 0
        self._directions: Iterator[tuple[str, str]] | None = None
        self.pages: dict[str, list[int]] = {}
        """Pages each pool had, least and most."""

    def step(self, ended: int) -> None:
        """After each step, in which so many requests ended."""
        self._advance(ended)
        self._steps += 1
        kv: KVManager = self._place.agreement.kv
        for name, pool in kv.pools.items():
            least, most = self.pages.get(name, (pool.num_usable, 0))
            self.pages[name] = [min(least, pool.num_usable), max(most, pool.num_usable)]
        if self._proposes() and self._steps % FORCED == 0:
            self._directions = self._directions or cycle(permutations(kv.pools, 2))
            in_pages = self._place.axis == "pipeline"
            change = _change(kv, *next(self._directions), in_pages=in_pages)
            if change is not None:
                self._place.agreement.propose(change)

    def _proposes(self) -> bool:
        if self._place.axis == "pipeline":
            return self._place.rank == 0
        return self._place.axis == "attention_data"


def _change(kv: KVManager, donor: str, receiver: str, *, in_pages: bool) -> Change | None:
    """Half of what the donor's live pages leave goes to the receiver; None if that is nothing."""
    gives, takes = (kv.snapshot().pools[name] for name in (donor, receiver))
    pages = (gives.pages - gives.used - 1) // 2
    size = kv.memory.granule_bytes
    if in_pages and pages:
        more = pages * gives.page_bytes // takes.page_bytes
        return Change(pages={donor: gives.pages - 1 - pages, receiver: takes.pages - 1 + more})
    granules = pages * gives.page_bytes // size
    if in_pages or not granules:
        return None
    move = Move(donor=donor, receiver=receiver, granules=granules, reason="proposed by the demo")
    return Change(plan=(move,))


def _facts(trial: Trial, place: Any) -> dict[str, Any]:  # noqa: ANN401
    """What this rank tells of itself."""
    facts = place.agreement.facts()
    pauses = np.array([step.pause_ms for step in trial.steps])
    return {
        "rank": place.rank,
        "steps": facts.steps,
        "requests": len(trial.outputs),
        "hit_tokens": trial.hit_tokens,
        "granules_moved": trial.end.granules_moved,
        "changes": facts.commits + facts.pauses,
        "refused": facts.aborts,
        "ticks": facts.ticks,
        "agreement_ms": {
            "p50": round(1000 * facts.seconds_p50, 3),
            "p99": round(1000 * facts.seconds_p99, 3),
        },
        "pause_ms_p99": round(float(np.percentile(pauses, 99)), 3),
        "page_bytes": {name: pool.page_bytes for name, pool in trial.end.pools.items()},
        "memory_bytes": trial.end.budget_bytes,
        "seconds": round(trial.seconds, 2),
    }


def as_lines(report: dict[str, Any]) -> list[str]:
    """The report for people: a column for each rank."""
    ranks: list[dict[str, Any]] = report["ranks"]
    rows = [
        ("requests answered", [f"{r['requests']}" for r in ranks]),
        ("prompt tokens hit", [f"{r['hit_tokens']:,}" for r in ranks]),
        ("steps", [f"{r['steps']:,}" for r in ranks]),
        ("memory, MiB", [f"{r['memory_bytes'] / 2**20:.1f}" for r in ranks]),
        *(
            (f"pages of {name}, least to most", [_span(r["pages"][name]) for r in ranks])
            for name in ranks[0]["pages"]
        ),
        ("granules moved", [f"{r['granules_moved']:,}" for r in ranks]),
        ("changes made together", [f"{r['changes']:,}" for r in ranks]),
        ("changes given up together", [f"{r['refused']:,}" for r in ranks]),
        ("ticks", [f"{r['ticks']:,}" for r in ranks]),
        ("agreement per tick, p50 / p99, ms", [_milliseconds(r["agreement_ms"]) for r in ranks]),
        ("seconds", [f"{r['seconds']:.1f}" for r in ranks]),
    ]
    head = ["", *(f"rank {r['rank']}" for r in ranks)]
    title = f"{report['model']}: {report['requests']} requests, {TITLES[report['axis']]}"
    return [title, *table(head, [[name, *cells] for name, cells in rows]), _verdict(report)]


def _span(ends: list[int]) -> str:
    return f"{ends[0]:,} to {ends[1]:,}"


def _milliseconds(found: dict[str, float]) -> str:
    return f"{found['p50']:.2f} / {found['p99']:.2f}"


def _verdict(report: dict[str, Any]) -> str:
    total, gap = report["output_tokens"], report["smallest_logit_gap"]
    if report["outputs_identical"]:
        return (
            f"All {total:,} output tokens equal those of one rank with transformers' own cache "
            f"(smallest gap between the two best logits: {gap:.1e})."
        )
    return (
        f"{report['different_tokens']:,} of {len(report['ranks'])} x {total:,} output tokens "
        "differ from those of one rank with transformers' own cache (smallest gap between the two "
        f"best logits: {gap:.1e}; below about 1e-4 rounding alone can turn a token over)."
    )


if __name__ == "__main__":
    status = main(Path(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # gloo's threads abort a process now and then while the interpreter ends
