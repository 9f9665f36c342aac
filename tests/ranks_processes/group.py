"""How the ranks of a test group find each other, and what they tell of themselves."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from kvtide.ranks import Agreement, Terms
from kvtide.torch.ranks import DistributedTransport

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks_processes.service import Service

    from kvtide.ranks import Change

dist: Any = torch.distributed

DEADLINE = 60.0
"""Of groups in which nobody is lost: a busy machine must not end them."""


@dataclass(frozen=True)
class Place:
    """Which rank of how many this process is, and the folder that all of them see."""

    folder: Path
    rank: int
    size: int

    def join(self) -> None:
        """Make the process group over a file, which nobody's death takes away."""
        dist.init_process_group(
            "gloo",
            init_method=f"file://{self.folder}/store",
            rank=self.rank,
            world_size=self.size,
        )

    def join_by_rank_0(self) -> None:
        """Make the process group over a store that rank 0 serves, as `tcp://` and `env://` do."""
        told, port = self.folder / "port", 0
        while self.rank and not port:
            port = int(told.read_text()) if told.exists() else 0
            time.sleep(0.01)
        store = dist.TCPStore(
            "127.0.0.1",
            port,
            self.size,
            is_master=not self.rank,
            timeout=timedelta(seconds=DEADLINE),
            wait_for_workers=False,
        )
        if not self.rank:
            written = self.folder / "writing"
            written.write_text(str(store.port))
            written.rename(told)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.size)


def agreement(service: Service, *, allow: Any = None, **terms: Any) -> Agreement:
    """This rank's end of a new agreement among all ranks."""
    terms.setdefault("every", 1)
    terms.setdefault("deadline", DEADLINE)
    return Agreement(service.kv, DistributedTransport(), Terms(**terms), allow=allow)


def turn_to(group: Agreement, change: Change | None = None, in_flight: int = 0) -> str:
    """Propose, and go from boundary to boundary until it is made or given up: the refusal, if so.

    For groups in which every rank does the same, with nothing to serve in between.
    """
    if change is not None:
        group.propose(change)
    while True:
        turn = group.boundary(in_flight)
        if turn.changed or turn.refused is not None:
            return turn.refused or ""


def story(service: Service, group: Agreement) -> dict[str, Any]:
    """What is compared between ranks, after the books and all bytes were audited."""
    service.audit()
    facts = service.kv.snapshot()
    return {
        "digests": service.digests(),
        "finished": service.finished,
        "opened": service.num_opened,
        "waits": service.num_waits,
        "pages": service.pages(),
        "granules": {name: pool.granules for name, pool in facts.pools.items()},
        "trades": sorted(service.trades),
        "relocated": service.kv.moved[1],
        "evicted": sum(pool.evicted for pool in facts.pools.values()),
        "facts": asdict(group.facts()),
    }
