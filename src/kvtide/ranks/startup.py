"""Before the first step: what every rank may have, settled so that all have the same.

Each rank says what it would like and what its machine has left; all see all of it and come to the
same end by a pure function. Nobody goes on alone: either all ranks begin, with equal numbers, or
all raise the same error, which has every rank's numbers.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from kvtide.errors import ConfigError, DivergenceError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvtide.layout import Layout
    from kvtide.ranks.member import Axis
    from kvtide.ranks.transport import Transport


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """Bytes of one tier that a rank asks for.

    Less than `least` is of no use: then all go without the tier if it is `optional` for all, else
    none begins. `free` is what is left of the tier on this rank's machine; `is_shared`: the ranks
    of one machine share it (host memory, a disk), rather than each having its own (a GPU).
    """

    asked: int
    free: int
    least: int = 1
    optional: bool = False
    is_shared: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What each rank gets of a tier, and how that came about: what all asked for, less because
    somewhere less was left, or none.
    """

    num_bytes: int
    outcome: Literal["keep", "shrink", "without"]


def settle(tier: str, nodes: Sequence[int], quotas: Sequence[Quota]) -> Share:
    """What each rank gets of a tier: the least that any could have. Pure.

    `nodes[i]` names the machine of rank i. Of a shared tier each rank of a machine could have an
    equal part of the least that any rank there has seen left. ConfigError, the same on all ranks,
    if that is too little for one that cannot go without.
    """
    ranks_on = Counter(nodes)
    seen: dict[int, int] = {}
    for node, quota in zip(nodes, quotas, strict=True):
        seen[node] = min(quota.free, seen.get(node, quota.free))
    could = [
        min(q.asked, seen[node] // ranks_on[node] if q.is_shared else q.free)
        for node, q in zip(nodes, quotas, strict=True)
    ]
    granted = min(could)
    if granted >= max(q.least for q in quotas):
        kept = granted == max(q.asked for q in quotas)
        return Share(num_bytes=granted, outcome="keep" if kept else "shrink")
    if all(q.optional for q in quotas):
        return Share(num_bytes=0, outcome="without")
    told = ", ".join(
        f"rank {i} could have {n:,} of {q.asked:,} asked and needs {q.least:,}"
        for i, (n, q) in enumerate(zip(could, quotas, strict=True))
    )
    raise ConfigError(
        f"tier {tier!r} is too small somewhere: {told}; give it more, or ask for less"
    )


def agree_quotas(
    transport: Transport,
    quotas: Mapping[str, Quota],
    *,
    fingerprint: int = 0,
    node: int | None = None,
    seconds: float = 60.0,
) -> dict[str, Share]:
    """Settle every tier among all ranks of a transport, which must name the same tiers.

    `fingerprint` says what else must be equal (`fingerprint_of`); DivergenceError if it is not.
    `node`: this machine, `node_id()` by default.
    """
    names = sorted(quotas)
    tiers = int.from_bytes(hashlib.sha256("\0".join(names).encode()).digest()[:7])
    words = [node_id() if node is None else node, fingerprint, tiers]
    for name in names:
        q = quotas[name]
        words += (q.asked, q.free, q.least, q.optional, q.is_shared)
    told = transport.gather(_padded(words), seconds)
    _require_alike("tiers", told[:, 2])
    _require_alike("layout or options (fingerprint)", told[:, 1])
    shares: dict[str, Share] = {}
    for i, name in enumerate(names):
        at = 3 + 5 * i
        rows: list[list[int]] = told[:, at : at + 5].tolist()
        every = [
            Quota(asked=a, free=f, least=n, optional=bool(o), is_shared=bool(s))
            for a, f, n, o, s in rows
        ]
        shares[name] = settle(name, told[:, 0].tolist(), every)
    return shares


def agree_pages(
    transport: Transport, pages: Mapping[str, int], *, seconds: float = 60.0
) -> dict[str, int]:
    """Pages of each pool that all ranks can have: the least of what each has. Give the result to
    `KVManager.resize`; from then on the ticks hold every rank to it.
    """
    told = transport.gather(_padded(list(pages.values())), seconds)
    return {name: int(told[:, i].min()) for i, name in enumerate(pages)}


def agree_whether(
    transport: Transport, what: str, *, needed: int, available: int, seconds: float = 60.0
) -> bool:
    """Whether all ranks have what is `needed` for `what` (a warm-up batch, say): True or False
    together. ConfigError on all, with every rank's numbers, if only some have.
    """
    told = transport.gather(np.array([needed, available], np.int64), seconds)
    can = told[:, 1] >= told[:, 0]
    if can.any() and not can.all():
        rows: list[list[int]] = told.tolist()
        each = ", ".join(f"rank {i} needs {n} and has {a}" for i, (n, a) in enumerate(rows))
        raise ConfigError(f"{what} is possible on some ranks only: {each}; make them equal")
    return bool(can.all())


def fingerprint_of(layout: Layout, axis: Axis, *more: object) -> int:
    """A number that is equal where ranks fit together: groups, lifetimes, blocks, page bytes (but
    for stages of a pipeline, which have layers of their own), and the texts of `more`.
    """
    parts: list[object] = [layout.block_tokens, *more]
    for group in layout.groups:
        parts += (group.name, group.lifetime, group.block_tokens)
        parts += () if axis == "pipeline" else (group.page_bytes,)
    text = "\0".join(map(repr, parts))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])


def node_id() -> int:
    """A number for this machine: its boot, which two containers on it share."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    return int.from_bytes(hashlib.sha256(boot.encode()).digest()[:7])


def free_host_bytes(root: Path = Path("/")) -> int:
    """Host memory that this process may still take: what the machine has available, and what its
    control groups (versions 1 and 2, every level above it too) leave.
    """
    free = _available(root / "proc/meminfo")
    for limit, used in _limits(root):
        free = min(free, max(0, limit - used))
    return free


def _available(meminfo: Path) -> int:
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    raise ConfigError(f"{meminfo} has no line MemAvailable; say how much memory is free")


def _limits(root: Path) -> list[tuple[int, int]]:
    """(limit, used) of the memory control groups this process is in."""
    found: list[tuple[int, int]] = []
    groups = root / "proc/self/cgroup"
    for line in groups.read_text().splitlines() if groups.exists() else ():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            base, limit, used = root / "sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
            limit, used = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        at = base / path.strip("/")
        for folder in (at, *at.parents):
            if folder == base.parent:
                break
            texts = [_text(folder / limit), _text(folder / used)]
            if all(text.isdigit() for text in texts):  # "max", or no such file: no limit
                found.append((int(texts[0]), int(texts[1])))
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _padded(words: list[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Long enough for ranks that have fewer to be compared at all."""
    most = 64
    if len(words) > most:
        raise ConfigError(f"{len(words)} numbers are to be agreed on at once, at most {most} can")
    return np.array([*words, *[0] * (most - len(words))], np.int64)


def _require_alike(what: str, values: np.ndarray[tuple[int], np.dtype[np.int64]]) -> None:
    if len(set(values.tolist())) > 1:
        by_rank = dict(enumerate(values.tolist()))
        raise DivergenceError(f"{what} differ between ranks: {by_rank}; start all with the same")
