"""`kvtide plan`: read what was asked, plan, print or write."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console

from kvtide.cli.plan.page import draw_page
from kvtide.cli.plan.text import report
from kvtide.cli.table import ASCII
from kvtide.cli.units import parse_bytes, parse_needs, parse_ratio, parse_whole
from kvtide.errors import ConfigError
from kvtide.layout import Parallel
from kvtide.planner import Request, Workload, plan_capacity, read_workload

if TYPE_CHECKING:
    from pathlib import Path

    from kvtide.planner import CapacityPlan, Settings

LACKING, REFUSED = 1, 2
"""Exit status if one longest sequence does not fit, and if the question makes no sense."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The command line as typed; None where an option was not given."""

    config: Path
    memory: str | None = None
    granule: str = "2MiB"
    workload: Path | None = None
    mean_input: str | None = None
    mean_output: str | None = None
    concurrency: str | None = None
    shared_prefix: str | None = None
    pool_ratio: str | None = None
    need: tuple[str, ...] = ()
    tp: str = "1"
    pp: str = "1"
    cp: str = "1"
    adp: str = "1"
    block_tokens: str = "16"
    max_tokens: str | None = None
    kv_dtype: str | None = None
    index_dtype: str | None = None
    state_dtype: str | None = None
    draft_tokens: str = "0"
    draft_layers: str | None = None


def run(asked: Asked, *, as_json: bool, html: Path | None) -> int:
    """Plan, print, write the page if one is wanted; returns the exit status."""
    try:
        plan = plan_capacity(asked.config, **settings_of(asked))
        if html is not None:
            write_page(plan, html)
    except ConfigError as error:
        print(f"kvtide plan: {' '.join(str(error).split())}", file=sys.stderr)
        return REFUSED
    if as_json:
        print(json.dumps(plan.to_json(), indent=2))
    else:
        show(plan, Console(highlight=False), html)
    return 0 if plan.fits else LACKING


def settings_of(asked: Asked) -> Settings:
    """What the planner is asked. Raises ConfigError naming the option."""
    settings: Settings = {
        "granule_bytes": parse_bytes("--granule", asked.granule),
        "workload": workload_of(asked),
        "needs": parse_needs(list(asked.need)),
        "parallel": Parallel(
            tensor=parse_whole("--tp", asked.tp),
            pipeline=parse_whole("--pp", asked.pp),
            context=parse_whole("--cp", asked.cp),
            attention_data=parse_whole("--adp", asked.adp),
        ),
        "block_tokens": parse_whole("--block-tokens", asked.block_tokens),
        "kv_dtype": asked.kv_dtype,
        "index_dtype": asked.index_dtype,
        "state_dtype": asked.state_dtype,
        "draft_tokens": parse_whole("--draft-tokens", asked.draft_tokens, at_least=0),
    }
    settings["draft_layers"] = _whole_or_none("--draft-layers", asked.draft_layers, 1)
    if asked.memory is not None:
        settings["memory"] = parse_bytes("--memory", asked.memory)
    if asked.pool_ratio is not None:
        settings["pool_ratio"] = parse_ratio(asked.pool_ratio)
    if asked.max_tokens is not None:
        settings["max_tokens"] = parse_whole("--max-tokens", asked.max_tokens)
    return settings


def workload_of(asked: Asked) -> Workload | None:
    """The workload of the file or of the options; None if neither says anything."""
    concurrency = _whole_or_none("--concurrency", asked.concurrency, 1)
    shared = _whole_or_none("--shared-prefix", asked.shared_prefix, 0)
    means = {"--mean-input": asked.mean_input, "--mean-output": asked.mean_output}
    given = [name for name, text in means.items() if text is not None]
    if asked.workload is not None:
        if given:
            raise ConfigError(f"{given[0]} and --workload are both given; give one of them")
        return read_workload(asked.workload, concurrency=concurrency, shared_prefix=shared)
    if asked.mean_input is None or asked.mean_output is None:
        others = {"--concurrency": concurrency, "--shared-prefix": shared}
        lonely = given + [name for name, value in others.items() if value is not None]
        if lonely:
            missing = [name for name, text in means.items() if text is None]
            raise ConfigError(f"{lonely[0]} is given without {' and '.join(missing)}; give all")
        return None
    request = Request(
        input_tokens=parse_whole("--mean-input", asked.mean_input),
        output_tokens=parse_whole("--mean-output", asked.mean_output, at_least=0),
    )
    return Workload(requests=(request,), concurrency=concurrency, shared_prefix=shared or 0)


def write_page(plan: CapacityPlan, path: Path) -> None:
    """Write the HTML page. Raises ConfigError if the file cannot be written."""
    try:
        path.write_text(draw_page(plan), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--html {path} cannot be written: {error.strerror}") from error


def show(plan: CapacityPlan, console: Console, html: Path | None) -> None:
    """Print the plan for people; plain text where the output is no terminal."""
    knows_all = console.encoding.startswith("utf")
    for line in report(plan):
        shown = (
            line if knows_all else str(line).translate(ASCII).encode("ascii", "replace").decode()
        )
        console.print(shown, soft_wrap=True, markup=False)
    if html is not None:
        console.print(f"\nWritten: {html}", soft_wrap=True, markup=False)


def _whole_or_none(option: str, text: str | None, at_least: int) -> int | None:
    return None if text is None else parse_whole(option, text, at_least=at_least)
