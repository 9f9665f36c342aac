"""`kvtide demo` on several ranks: one process each, started by torch's launcher on this machine."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from rich.console import Console
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher import api

from kvtide.cli.demo.progress import Progress
from kvtide.cli.demo.ranked import as_lines

if TYPE_CHECKING:
    from kvtide.cli.demo.command import Options
    from kvtide.cli.demo.ranked import Axis

STOPPED = 3
"""Exit status once a rank was lost or has failed."""

torch_launcher: Any = api  # its stubs leave most of it unknown


def run(
    options: Options, axis: Axis, num_ranks: int, *, out: Path, short: bool, as_json: bool
) -> int:
    """Serve the traffic on `num_ranks` ranks, write the numbers into `out`, print; returns the exit
    status: that of `kvtide demo`, and 3 if a rank was lost.
    """
    with TemporaryDirectory(prefix="kvtide-ranks-") as folder:
        task = {**asdict(options), "axis": axis, "short": short}
        (Path(folder) / "task.json").write_text(json.dumps(task))
        failed = _start(num_ranks, folder)
        if failed is not None:
            Progress(Console(stderr=True)).say(f"kvtide demo: {failed[1]}")
            return failed[0]
        report: dict[str, Any] = json.loads((Path(folder) / "report.json").read_text())
    out.mkdir(parents=True, exist_ok=True)
    (out / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        console = Console()
        for line in (*as_lines(report), f"Written: {out / 'report.json'}", report["terms"] or ""):
            console.print(line, markup=False, highlight=False)
    return 0 if report["outputs_identical"] else 1


def _start(num_ranks: int, folder: str) -> tuple[int, str] | None:
    """Run all ranks to their end; exit status and reason if one of them failed."""
    cores = len(os.sched_getaffinity(0))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // num_ranks)))
    for name in [name for name in logging.root.manager.loggerDict if "elastic" in name]:
        logging.getLogger(name).setLevel(logging.CRITICAL)  # who failed is said below, in one line
    config = torch_launcher.LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
    )
    try:
        torch_launcher.elastic_launch(config, sys.executable)(
            "-m", "kvtide.cli.demo.ranked", folder
        )
    except ChildFailedError as error:
        failures: dict[int, Any] = error.failures
        return _reason({rank: f.exitcode for rank, f in failures.items()}, Path(folder))
    return None


def _reason(exits: dict[int, int], folder: Path) -> tuple[int, str]:
    """Exit status and why: what a rank has said, or how one ended that could not say anything.

    What was said comes first: a rank that stood still was killed in the end, for want of an answer.
    """
    told: list[dict[str, Any]] = [
        json.loads(path.read_text()) for path in sorted(folder.glob("error-*.json"))
    ]
    for each in sorted(told, key=lambda each: each["status"]):  # what is refused before all
        return each["status"], each["message"]
    for rank, code in sorted(exits.items()):
        if code < 0 and code != -signal.SIGTERM:
            name = signal.Signals(-code).name
            return STOPPED, f"rank {rank} was ended by {name}; the other ranks have been stopped"
    rank, code = min(exits.items())
    return STOPPED, f"rank {rank} ended with status {code}; the other ranks have been stopped"
