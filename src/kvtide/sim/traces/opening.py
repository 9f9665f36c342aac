"""From what a user writes to a trace: "mooncake:conversation.jsonl,first=1000 + synthetic"."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from kvtide.errors import ConfigError
from kvtide.sim.traces import mix
from kvtide.sim.traces.agents import AgentOptions, agents
from kvtide.sim.traces.blocks import bailian, mooncake
from kvtide.sim.traces.files import damage, lines, open_bytes
from kvtide.sim.traces.own import KEY, read_trace
from kvtide.sim.traces.rates import RateOptions, rates
from kvtide.sim.traces.request import Source, Stream
from kvtide.sim.traces.settings import names_of, pairs_of, refuse_others, settings
from kvtide.sim.traces.sources import source_of
from kvtide.sim.traces.synthetic import NAME as SYNTHETIC
from kvtide.sim.traces.synthetic import Phase, SyntheticOptions, synthetic
from kvtide.sim.traces.tables import INPUT, Poisson, azure, lengths

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvtide.sim.traces.request import Trace, TraceRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Which part of a trace and how fast: cut, then scaled, then shifted. `first` 0: all."""

    first: int = 0
    since: float = 0.0
    until: float = math.inf
    scale: float = 1.0
    shift: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _None:
    """No options."""


@dataclass(frozen=True, slots=True)
class _Format:
    """How a format is read, and the dataclass of its options."""

    read: Callable[[Path, Any], Iterator[TraceRequest]]
    options: type[Any] = _None


OWN = "kvtide"

_FORMATS: dict[str, _Format] = {
    "mooncake": _Format(lambda path, _: mooncake(path)),
    "bailian": _Format(lambda path, _: bailian(path)),
    "azure": _Format(lambda path, _: azure(path)),
    "agent": _Format(agents, AgentOptions),
    "rates": _Format(rates, RateOptions),
    "lengths": _Format(lengths, Poisson),
}
FORMATS = (*_FORMATS, OWN, SYNTHETIC)


def open_trace(spec: str) -> Trace:
    """The trace that `spec` names; the file is read as one iterates, apart from its first line.

    A trace is `path` (its format is seen from its content), `format:path` or `synthetic`, with
    options behind it: "agent:sessions.jsonl.gz,rate=0.1,first=500", "synthetic:rate=2,turns=4".
    Phases of `synthetic` are separated by ";", each overriding the one before. `A + B` overlays
    traces, `A then B` puts one after another ("+" binds closer). Options of every trace: first,
    since, until, scale, shift. Raises ConfigError for what cannot be opened.
    """
    parts = [
        _all_or_one(mix.overlay, [_single(one.strip()) for one in part.split(" + ")])
        for part in spec.split(" then ")
    ]
    return _all_or_one(mix.concatenate, parts)


def detect(path: Path) -> str:
    """The format of `path` by its content; raises ConfigError if it is none that is known."""
    if path.is_dir():
        return "rates" if next(path.rglob("chunk-*-trace.csv"), None) else "agent"
    if _is_tar(path):
        return "rates"
    place, line = next(lines(path), (None, ""))
    found = _of_json(line) if line.lstrip().startswith("{") else _of_table(line)
    if not found:
        where = f"{path}:{place.line}" if place else str(path)
        shown = line.strip()[:80] or "nothing"
        raise ConfigError(
            f"{where}: unknown format, found {shown!r}; write format:path with one of "
            f"{', '.join(FORMATS)}"
        )
    return found


def _all_or_one(join: Callable[[list[Trace]], Trace], traces: list[Trace]) -> Trace:
    return traces[0] if len(traces) == 1 else join(traces)


def _single(spec: str) -> Trace:
    name, colon, rest = spec.partition(":")
    if name == SYNTHETIC:
        return _synthetic(rest, spec)
    named = bool(colon) and name in FORMATS
    file, options = _split(rest if named else spec)
    path = Path(file)
    if not file or not path.exists():
        raise ConfigError(
            f"trace {spec!r}: there is no file or folder {file!r}; a trace is path, format:path "
            f"({', '.join(FORMATS)}) or {SYNTHETIC}"
        )
    kind = name if named else detect(path)
    pairs = pairs_of(options, f"trace {spec!r}")
    return _part(_read(kind, path, pairs, spec), pairs, spec)


def _split(text: str) -> tuple[str, str]:
    """Path and options: those are what looks like `,name=value` at the end."""
    found = re.fullmatch(r"(.*?)((?:,\s*[a-z_]+=[^,]*)*)", text, re.DOTALL)
    assert found, "the pattern matches everything"
    return found[1], found[2]


def _read(kind: str, path: Path, pairs: dict[str, str], spec: str) -> Trace:
    where = f"trace {spec!r}"
    if kind == OWN:
        refuse_others(pairs, names_of(Part), where)
        return read_trace(path)
    reader = _FORMATS[kind]
    refuse_others(pairs, names_of(Part) | names_of(reader.options), where)
    options = settings(reader.options, pairs, where)
    # Path.stem would take "v1.5-chat" apart at its version.
    name = re.sub(r"(\.(jsonl?|csv|tar|gz|xz|zst))+$", "", path.name) or str(path)
    return Stream(
        name=name,
        start=lambda: reader.read(path, options),
        source=source_of(kind),
        tenants=(name,),
    )


def _synthetic(text: str, spec: str) -> Trace:
    where = f"trace {spec!r}"
    texts = text.split(";")
    first = pairs_of(texts[0], where)
    general = names_of(Part) | names_of(SyntheticOptions)
    refuse_others(first, general | names_of(Phase), where)
    options = settings(SyntheticOptions, first, where)
    phases, pairs = [settings(Phase, first, where)], first
    for later in texts[1:]:
        more = pairs_of(later, where)
        refuse_others(more, names_of(Phase), f"{where}, a later phase")
        pairs = {**pairs, **more}
        phases.append(settings(Phase, pairs, where))
    trace = Stream(
        name=SYNTHETIC,
        start=lambda: synthetic(phases, options),
        source=Source(url="", licence="", about="made by kvtide's generator"),
        tenants=(SYNTHETIC,),
    )
    return _part(trace, first, spec)


def _part(trace: Trace, pairs: dict[str, str], spec: str) -> Trace:
    part = settings(Part, pairs, f"trace {spec!r}")
    if part != replace(part, first=0, since=0.0, until=math.inf):
        trace = mix.cut(trace, first=part.first or None, since=part.since, until=part.until)
    if part.scale != 1:
        trace = mix.scaled(trace, part.scale)
    return mix.shifted(trace, part.shift) if part.shift else trace


def _is_tar(path: Path) -> bool:
    try:
        with open_bytes(path) as file:
            return file.read(262)[257:] == b"ustar"
    except damage():
        return False  # damaged: reading it line by line says where


def _of_json(line: str) -> str:
    try:
        record = cast("dict[str, object]", json.loads(line))
    except ValueError:
        return ""
    for field, kind in ((KEY, OWN), ("requests", "agent"), ("chat_id", "bailian")):
        if field in record:
            return kind
    if "hash_ids" in record:
        return "mooncake"
    return "lengths" if any(name in record for name in INPUT) else ""


def _of_table(line: str) -> str:
    names = [name.strip() for name in line.split(",")]
    if "ContextTokens" in names:
        return "azure"
    if any(name in names for name in INPUT) or re.fullmatch(r"[\d.]+,[\d.]+(,.*)?", line.strip()):
        return "lengths"
    return ""
