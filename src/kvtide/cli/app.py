"""The subcommands: their options and what they need installed."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import kvtide
from kvtide.cli.plan import options as given  # noqa: TC001 (typer reads the annotations)
from kvtide.cli.replay import options as said  # noqa: TC001

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType


app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="KV-cache memory whose pools trade capacity while they serve.",
)


@app.command()
def version() -> None:
    """Print the version."""
    print(kvtide.__version__)


@app.command()
def demo(  # noqa: PLR0913 (a command line)
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
    tp: Annotated[int, typer.Option(help="Ranks that split every layer.", min=1)] = 1,
    pp: Annotated[int, typer.Option(help="Ranks that split the layers.", min=1)] = 1,
    adp: Annotated[int, typer.Option(help="Ranks that split the requests.", min=1)] = 1,
) -> None:
    """Serve traffic that changes its mind, with the start-up split fixed and then elastic.

    Every output token is compared with what transformers' own cache gives. With --tp, --pp or --adp
    the traffic is served by so many processes together, while their pools change. Exit status 1 if
    a token differs, 2 if the demo can not run, 3 if a rank was lost.
    """
    command = _subcommand("kvtide.cli.demo.command", needs=("torch", "transformers", "gguf"))
    options = command.Options(
        model=model, memory_bytes=int(memory * 2**20), granule_bytes=granule << 10
    )
    asked = [(axis, n) for axis, n in (("tp", tp), ("pp", pp), ("adp", adp)) if n > 1]
    if len(asked) > 1:
        raise typer.BadParameter("--tp, --pp and --adp exclude each other; give one of them")
    if asked:
        launch = import_module("kvtide.cli.demo.launch")
        status = launch.run(options, *asked[0], out=out, short=short, as_json=as_json)
    else:
        status = command.run(options, out=out, short=short, as_json=as_json)
    raise typer.Exit(status)


@app.command()
def plan(  # noqa: PLR0913 (a command line; what it means is in planner.Options)
    config: given.Config,
    *,
    memory: given.Memory = None,
    granule: given.Granule = "2MiB",
    workload: given.WorkloadFile = None,
    mean_input: given.MeanInput = None,
    mean_output: given.MeanOutput = None,
    concurrency: given.Concurrency = None,
    shared_prefix: given.SharedPrefix = None,
    pool_ratio: given.PoolRatio = None,
    need: given.Need = None,
    tp: given.Tensor = "1",
    pp: given.Pipeline = "1",
    cp: given.Context = "1",
    adp: given.AttentionData = "1",
    block_tokens: given.BlockTokens = "16",
    max_tokens: given.MaxTokens = None,
    kv_dtype: given.KvDtype = None,
    index_dtype: given.IndexDtype = None,
    state_dtype: given.StateDtype = None,
    draft_tokens: given.DraftTokens = "0",
    draft_layers: given.DraftLayers = None,
    as_json: given.AsJson = False,
    html: given.Html = None,
) -> None:
    """Plan memory for a model before it is launched: pools, splits, what fits, what is stranded.

    Sizes are bytes of one rank: GB = 1e9, GiB = 2**30. Exit status 1 if one sequence of max-tokens
    does not fit, 2 if the question makes no sense.
    """
    asked = dict(locals())  # every option by its name: nothing may be assigned above this line
    for name in ("as_json", "html"):
        del asked[name]
    asked["need"] = tuple(need or ())
    command = _subcommand("kvtide.cli.plan.command", needs=())
    raise typer.Exit(command.run(command.Asked(**asked), as_json=as_json, html=html))


@app.command()
def replay(  # noqa: PLR0913 (a command line; what it means is in sim.Recipe)
    config: said.Config = None,
    *,
    trace: said.Traces = None,
    memory: said.Memory = None,
    policy: said.Policies = None,
    hardware: said.Hardware = None,
    params: said.Params = None,
    active_params: said.ActiveParams = None,
    weight_dtype: said.WeightDtype = None,
    tp: said.Tensor = None,
    kv_dtype: said.KvDtype = None,
    block_tokens: said.BlockTokens = None,
    state_interval: said.StateInterval = None,
    granule: said.Granule = None,
    pool_ratio: said.PoolRatio = None,
    rate: said.Rate = None,
    requests: said.Requests = None,
    chunk_tokens: said.ChunkTokens = None,
    max_running: said.MaxRunning = None,
    max_tokens: said.MaxTokens = None,
    slo_ttft: said.SloTtft = None,
    slo_itl: said.SloItl = None,
    seed: said.Seed = None,
    sweep: said.Sweep = None,
    out: said.Out = Path("replay-output"),
    cores: said.Cores = None,
    ray: said.Ray = None,
    as_json: said.AsJson = False,
    html: said.Html = None,
    parquet: said.Parquet = None,
    download: said.Download = False,
) -> None:
    """Replay traffic through the real manager, on a virtual clock: what does a split cost?

    Policies side by side, on the same requests and memory. Exit status 2 if the question makes no
    sense.
    """
    asked = dict(locals())  # every option by its name: nothing may be assigned above this line
    kept = ("out", "cores", "ray", "as_json", "html", "parquet")
    output = {name: asked.pop(name) for name in kept}
    asked.pop("download")
    for name in ("trace", "policy", "sweep"):
        asked[name] = tuple(asked[name] or ())
    command = _subcommand("kvtide.cli.replay.command", needs=())
    status = command.run(command.Asked(**asked), command.Output(**output), download=download)
    raise typer.Exit(status)


def _subcommand(module: str, *, needs: Sequence[str]) -> ModuleType:
    """Import a subcommand, or leave with a word on what to install."""
    missing = [name for name in needs if find_spec(name) is None]
    if missing:
        sys.exit(f"kvtide: {', '.join(missing)} not installed; run: pip install 'kvtide[demo]'")
    return import_module(module)
