"""`kvtide demo`: serve one traffic twice, compare with transformers, show what moved."""

from __future__ import annotations

import json
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console
from transformers.utils.logging import disable_progress_bar

from kvtide.cli.demo.oracle import Oracle
from kvtide.cli.demo.picture import draw_svg
from kvtide.cli.demo.progress import Progress
from kvtide.cli.demo.report import Report, as_data, as_table, as_text, panels, verdict
from kvtide.cli.demo.sizing import memory_for, startup_ratio
from kvtide.cli.demo.traffic import FULL, SHORT, make_traffic
from kvtide.cli.demo.trial import run_trial
from kvtide.engine import load_model
from kvtide.engine.load import ModelUnavailableError
from kvtide.errors import ConfigError
from kvtide.torch import layout_from_model

if TYPE_CHECKING:
    from pathlib import Path

    from kvtide.cli.demo.traffic import Size
    from kvtide.cli.demo.trial import Trial
    from kvtide.engine import Loaded
    from kvtide.engine.llm import Settings
    from kvtide.engine.load import Tokenizer

BLOCK_TOKENS = 16
MAX_SEQUENCES = 8
MODES: tuple[tuple[str, Literal["static", "elastic"]], ...] = (
    ("kvtide, fixed split", "static"),
    ("kvtide, elastic", "elastic"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What to run it on; `memory_bytes` 0 asks for just enough for the fixed split."""

    model: str
    memory_bytes: int
    granule_bytes: int


def run(options: Options, *, out: Path, short: bool, as_json: bool) -> int:
    """Measure, write the files into `out`, print; returns the exit status."""
    errors = Console(stderr=True)
    progress = Progress(errors)
    if not errors.is_terminal:
        disable_progress_bar()
    try:
        progress.say(f"loading {options.model}")
        loaded = load_model(options.model, say=progress.say)
        report = measure(loaded, SHORT if short else FULL, options, progress=progress)
    except (ModelUnavailableError, ConfigError) as error:
        progress.say(f"kvtide demo: {error}")
        return 2
    files = write(report, out)
    if as_json:
        print(json.dumps(as_data(report), indent=2))
    else:
        show(report, Console(), files)
    return 0 if report.outputs_identical else 1


def measure(loaded: Loaded, size: Size, options: Options, *, progress: Progress) -> Report:
    """Run both trials and the reference."""
    phases = make_traffic(tokenizer_of(loaded), size)
    ratio, memory_bytes = sized(loaded, size, options)
    settings: Settings = {
        "memory_bytes": memory_bytes,
        "max_sequences": MAX_SEQUENCES,
        "max_tokens": size.max_tokens,
        "block_tokens": BLOCK_TOKENS,
        "granule_bytes": options.granule_bytes,
        "pool_ratio": ratio,
    }
    jobs = [job for phase in phases for job in phase.jobs]
    trials: list[Trial] = []
    for title, mode in MODES:
        with progress.bar(title, len(jobs)) as advance:
            trial = run_trial(
                loaded,
                phases,
                answer_tokens=size.answer_tokens,
                settings={**settings, "mode": mode},
                progress=advance,
            )
        trials.append(trial)
    started = perf_counter()
    with progress.bar("transformers' own cache", len(jobs)) as advance:
        reference = Oracle(loaded.model, size.answer_tokens).answer(jobs, advance)
    return Report(
        model=loaded.name,
        terms=loaded.terms,
        phases=phases,
        ratio=ratio,
        memory_bytes=memory_bytes,
        granule_bytes=options.granule_bytes,
        fixed=trials[0],
        elastic=trials[1],
        reference=reference,
        oracle_seconds=perf_counter() - started,
    )


def sized(loaded: Loaded, size: Size, options: Options) -> tuple[dict[str, float], int]:
    """The split at start-up, made for the first chats, and bytes of memory to split."""
    given: Any = loaded.model  # its dtype is read-only, which the stubs count as another type
    layout = layout_from_model(given, block_tokens=BLOCK_TOKENS, max_tokens=size.max_tokens)
    ratio = startup_ratio(layout, size.system_tokens)
    least = memory_for(layout, ratio, size.max_tokens, granule_bytes=options.granule_bytes)
    return ratio, options.memory_bytes or least


def tokenizer_of(loaded: Loaded) -> Tokenizer:
    """The tokenizer of the model, which the traffic's text needs."""
    if loaded.tokenizer is None:
        raise ConfigError(f"{loaded.name} came without a tokenizer; the demo's text needs one")
    return loaded.tokenizer


def write(report: Report, folder: Path) -> tuple[Path, Path]:
    """Write the picture and the numbers; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    picture, numbers = folder / "pools.svg", folder / "report.json"
    picture.write_text(draw_svg(panels(report)))
    numbers.write_text(json.dumps(as_data(report), indent=2) + "\n")
    return picture, numbers


def show(report: Report, console: Console, files: tuple[Path, ...]) -> None:
    """Print pictures, table and verdict."""
    for panel in panels(report):
        console.print(as_text(panel, width=max(20, console.width - 2)))
    console.print(as_table(report))
    for line in (verdict(report), f"Written: {', '.join(map(str, files))}", report.terms or ""):
        console.print(line, markup=False, highlight=False)
