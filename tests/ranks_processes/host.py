"""Groups of real processes: a host that has imported torch once forks the ranks of each group.

    host = Host(folder)
    outcomes = host.run("serve", size=2, limit=60, commits=1000)

A rank runs one function of `cases`, writes what that returns and ends at once by `os._exit`: after
a failed collective gloo may abort a process that takes the long way. Nobody outlives its limit.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

_GRACE = 30.0
"""Seconds that the host itself may take beyond the limit of a group."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One group: `size` ranks run `case` with `params`; over when all but `victims` have ended.

    With `wakes` victims that were stopped go on then, and are waited for as well.
    """

    case: str
    size: int
    folder: str
    limit: float
    victims: list[int] = field(default_factory=list)
    wakes: bool = False
    params: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a rank ended: exit code (negative: the signal), what it told, what it complained of."""

    code: int
    told: dict[str, Any]
    stderr: str


class Host:
    """The test's side: asks the host process for one group after another."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._num_groups = 0
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "src"))),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",  # a host name that does not resolve is not our matter
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.ranks_processes.host"],
            cwd=ROOT,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    def run(
        self,
        case: str,
        size: int,
        *,
        limit: float = 90.0,
        victims: tuple[int, ...] = (),
        wakes: bool = False,
        **params: Any,
    ) -> list[Outcome]:
        """Every rank's outcome. A rank that the limit ended has code -9 and told nothing."""
        self._num_groups += 1
        folder = self._folder / f"group-{self._num_groups}"
        folder.mkdir()
        job = Job(
            case=case,
            size=size,
            folder=str(folder),
            limit=limit,
            victims=list(victims),
            wakes=wakes,
            params=params,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(asdict(job)) + "\n")
        ready, _, _ = select.select([self._process.stdout], [], [], limit + _GRACE)
        assert ready, f"the host of {case} has hung"
        codes = json.loads(self._process.stdout.readline())
        return [_outcome(folder, rank, code) for rank, code in enumerate(codes)]

    def close(self) -> None:
        """End the host; it has no children between two groups."""
        self._process.kill()
        self._process.communicate()


def _outcome(folder: Path, rank: int, code: int) -> Outcome:
    told = folder / f"told-{rank}"
    return Outcome(
        code=code,
        told=json.loads(told.read_text()) if told.exists() else {},
        stderr=(folder / f"stderr-{rank}").read_text(),
    )


def main() -> None:
    """The host's side: a line in is a group, a line out its exit codes."""
    # Imports torch, once for all ranks.
    from tests.ranks_processes.cases import CASES  # noqa: PLC0415

    for line in sys.stdin:
        job = Job(**json.loads(line))
        pids = [_fork(job, rank, CASES[job.case]) for rank in range(job.size)]
        print(json.dumps(_wait(pids, job)), flush=True)


def _fork(job: Job, rank: int, case: Any) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        complaints = os.open(f"{job.folder}/stderr-{rank}", os.O_CREAT | os.O_WRONLY)
        os.dup2(complaints, 1)
        os.dup2(complaints, 2)
        from tests.ranks_processes.group import Place  # noqa: PLC0415

        told = case(Place(Path(job.folder), rank, job.size), **job.params)
        written = Path(job.folder, f"telling-{rank}")
        written.write_text(json.dumps(told))
        written.rename(f"{job.folder}/told-{rank}")
        code = 0
    except BaseException:  # noqa: BLE001 - the test reads it
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _wait(pids: list[int], job: Job) -> list[int]:
    """Exit codes. Who has not ended within the limit, or is a victim, is killed."""
    codes: dict[int, int] = {}
    until = time.monotonic() + job.limit
    victims = {pids[rank] for rank in job.victims}
    _reap(set(pids) - victims, codes, until)
    if job.wakes:
        for pid in victims:
            os.kill(pid, signal.SIGCONT)
        _reap(victims, codes, until)
    for pid in set(pids) - set(codes):
        os.kill(pid, signal.SIGKILL)
        codes[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return [codes[pid] for pid in pids]


def _reap(awaited: set[int], codes: dict[int, int], until: float) -> None:
    """Wait for these processes, and note their exit codes."""
    while awaited - set(codes) and time.monotonic() < until:
        for pid in awaited - set(codes):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[pid] = os.waitstatus_to_exitcode(status)
        time.sleep(0.01)


if __name__ == "__main__":
    main()
