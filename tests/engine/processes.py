"""Starts `ranks_worker` once per rank and waits for what the ranks have found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SECONDS = 240
"""Much more than any case takes, also on a machine that is busy with something else."""


def run_ranks(case: str, folder: Path, size: int = 2) -> list[dict[str, Any] | None]:
    """What each rank has found, by rank; None of one that ended without a word."""
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "OMP_NUM_THREADS": "1",
    }
    with ExitStack() as stack:
        processes: list[subprocess.Popen[bytes]] = []
        for rank in range(size):
            log = stack.enter_context((folder / f"{rank}.log").open("w"))
            command = [
                sys.executable,
                "-m",
                "tests.engine.ranks_worker",
                case,
                str(rank),
                str(size),
            ]
            processes.append(
                subprocess.Popen(
                    [*command, folder], cwd=ROOT, env=environment, stdout=log, stderr=log
                )
            )
        try:
            for process in processes:
                process.wait(SECONDS)
        finally:
            for process in processes:
                process.kill()
                process.wait()
    return [_found(folder, rank) for rank in range(size)]


def _found(folder: Path, rank: int) -> dict[str, Any] | None:
    path = folder / f"{rank}.json"
    print(f"rank {rank}:", (folder / f"{rank}.log").read_text())
    return json.loads(path.read_text()) if path.exists() else None
