"""The subcommands: their options and what they need installed."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

import kvtide

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

    from typer.models import OptionInfo

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="KV-cache memory whose pools trade capacity while they serve.",
)


def _option(help_text: str, metavar: str = "N") -> OptionInfo:
    """An option whose value the command reads itself: its errors are one line that names it."""
    return cast("OptionInfo", typer.Option(help=help_text, metavar=metavar))


@app.command()
def version() -> None:
    """Print the version."""
    print(kvtide.__version__)


@app.command()
def demo(
    *,
    short: Annotated[bool, typer.Option("--short", help="Less traffic.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
    model: Annotated[
        str, typer.Option(help="A folder, a .gguf file or a hub name.", metavar="PATH_OR_NAME")
    ] = "gemma-3-270m",
    memory: Annotated[
        float,
        typer.Option(
            help="MiB for all caches. [default: as much as the split needs]", show_default=False
        ),
    ] = 0.0,
    granule: Annotated[int, typer.Option(help="KiB that move at a time.")] = 128,
    out: Annotated[Path, typer.Option(help="Folder for picture and numbers.")] = Path(
        "demo-output"
    ),
) -> None:
    """Serve traffic that changes its mind, with the start-up split fixed and then elastic.

    Every output token is compared with what transformers' own cache gives. Exit status 1 if one
    differs, 2 if the demo can not run.
    """
    command = _subcommand("kvtide.cli.demo.command", needs=("torch", "transformers", "gguf"))
    options = command.Options(
        model=model, memory_bytes=int(memory * 2**20), granule_bytes=granule << 10
    )
    raise typer.Exit(command.run(options, out=out, short=short, as_json=as_json))


@app.command()
def plan(  # noqa: PLR0913 (a command line; what it means is in planner.Options)
    config: Annotated[Path, typer.Argument(help="A model's config.json, or its folder.")],
    *,
    memory: Annotated[str | None, _option("Bytes of one rank for all pools.", "60GB")] = None,
    granule: Annotated[str, _option("Bytes that move at a time.", "SIZE")] = "2MiB",
    workload: Annotated[
        Path | None,
        typer.Option(help="JSON object, or .jsonl of {input, output} a line.", metavar="FILE"),
    ] = None,
    mean_input: Annotated[str | None, _option("Tokens of a prompt.")] = None,
    mean_output: Annotated[str | None, _option("Tokens of an answer.")] = None,
    concurrency: Annotated[str | None, _option("Sequences that run at a time, in all.")] = None,
    shared_prefix: Annotated[str | None, _option("First tokens that all prompts share.")] = None,
    pool_ratio: Annotated[
        str | None, _option("Split to judge, by pool or in their order.", "full=0.85,indexer=0.15")
    ] = None,
    need: Annotated[
        list[str] | None,
        _option("Bytes a pool has to hold, instead of a workload.", "POOL=4GB"),
    ] = None,
    tp: Annotated[str, _option("Tensor parallel ranks.")] = "1",
    pp: Annotated[str, _option("Pipeline stages.")] = "1",
    cp: Annotated[str, _option("Context parallel ranks.")] = "1",
    adp: Annotated[str, _option("Copies of the attention, data parallel.")] = "1",
    block_tokens: Annotated[str, _option("Tokens of a block.")] = "16",
    max_tokens: Annotated[
        str | None, _option("Tokens of the longest sequence. [default: what the model can]")
    ] = None,
    kv_dtype: Annotated[str | None, _option("Of keys, values, latents.", "DTYPE")] = None,
    index_dtype: Annotated[str | None, _option("Of indexer keys.", "DTYPE")] = None,
    state_dtype: Annotated[str | None, _option("Of recurrent states.", "DTYPE")] = None,
    draft_tokens: Annotated[
        str, _option("Tokens drafted ahead by the model's own multi-token prediction.")
    ] = "0",
    draft_layers: Annotated[
        str | None, _option("Layers of it. [default: what the model says]")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
    html: Annotated[
        Path | None, typer.Option(help="Write a page with pictures as well.", metavar="FILE")
    ] = None,
) -> None:
    """Plan memory for a model before it is launched: pools, splits, what fits, what is stranded.

    Sizes are bytes of one rank: GB = 1e9, GiB = 2**30. Exit status 1 if one sequence of max-tokens
    does not fit, 2 if the question makes no sense.
    """
    command = _subcommand("kvtide.cli.plan.command", needs=())
    asked = command.Asked(
        config=config,
        memory=memory,
        granule=granule,
        workload=workload,
        mean_input=mean_input,
        mean_output=mean_output,
        concurrency=concurrency,
        shared_prefix=shared_prefix,
        pool_ratio=pool_ratio,
        need=tuple(need or ()),
        tp=tp,
        pp=pp,
        cp=cp,
        adp=adp,
        block_tokens=block_tokens,
        max_tokens=max_tokens,
        kv_dtype=kv_dtype,
        index_dtype=index_dtype,
        state_dtype=state_dtype,
        draft_tokens=draft_tokens,
        draft_layers=draft_layers,
    )
    raise typer.Exit(command.run(asked, as_json=as_json, html=html))


def _subcommand(module: str, *, needs: Sequence[str]) -> ModuleType:
    """Import a subcommand, or leave with a word on what to install."""
    missing = [name for name in needs if find_spec(name) is None]
    if missing:
        sys.exit(f"kvtide: {', '.join(missing)} not installed; run: pip install 'kvtide[demo]'")
    return import_module(module)
