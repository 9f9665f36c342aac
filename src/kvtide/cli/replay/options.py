"""The options of `kvtide replay`: their types, help and units."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

if TYPE_CHECKING:
    from typer.models import OptionInfo


def _option(help_text: str, metavar: str = "N") -> OptionInfo:
    """An option whose value the command reads itself: its errors are one line that names it."""
    return cast("OptionInfo", typer.Option(help=help_text, metavar=metavar))


Config = Annotated[
    Path | None, typer.Argument(help="A model's config.json, or its folder.", show_default=False)
]
Traces = Annotated[
    list[str] | None,
    _option(
        "Traffic: PATH, FORMAT:PATH or synthetic, options behind; several overlaid.",
        "SPEC",
    ),
]
Memory = Annotated[str | None, _option("Bytes of one rank for all pools.", "60GB")]
Policies = Annotated[
    list[str] | None,
    _option(
        "static, elastic, periodic, padded, lcm, infinite, oracle-static or module:function; "
        "several side by side. (Default: static and elastic.)",
        "NAME",
    ),
]
Hardware = Annotated[
    str | None, _option("Whose time: h100, a100-80g, h200, rtx4090 or a JSON file.", "NAME")
]
Params = Annotated[
    str | None, _option("Parameters of the model, if its config.json lacks fields.", "21B")
]
ActiveParams = Annotated[str | None, _option("Those that compute a token.", "3.6B")]
WeightDtype = Annotated[
    str | None, _option("Of linear layers. (Default: as config.json says.)", "DTYPE")
]
Tensor = Annotated[str | None, _option("Tensor parallel ranks. (Default: 1.)")]
KvDtype = Annotated[str | None, _option("Of keys, values, latents.", "DTYPE")]
BlockTokens = Annotated[str | None, _option("Tokens of a block. (Default: 16.)")]
StateInterval = Annotated[
    str | None, _option("Tokens between a prompt's last states. (Default: about 1024.)")
]
Granule = Annotated[str | None, _option("Bytes that move at a time. (Default: 2MiB.)", "SIZE")]
PoolRatio = Annotated[
    str | None,
    _option("Split at the start, by pool or in their order.", "full=0.85,indexer=0.15"),
]
Rate = Annotated[str | None, _option("Times as fast as recorded.", "2.0")]
Requests = Annotated[str | None, _option("Only the first so many.")]
ChunkTokens = Annotated[str | None, _option("Prompt tokens a step. (Default: 8192.)")]
MaxRunning = Annotated[str | None, _option("Requests at a time. (Default: 256.)")]
MaxTokens = Annotated[
    str | None, _option("Tokens of the longest sequence. (Default: of the longest request.)")
]
SloTtft = Annotated[str | None, _option("Goodput: first token within. (Default: 5.)", "SECONDS")]
SloItl = Annotated[
    str | None, _option("Goodput: mean time between tokens. (Default: 0.1.)", "SECONDS")
]
Seed = Annotated[str | None, _option("Of synthetic traffic.")]
Sweep = Annotated[
    list[str] | None,
    _option("A grid, such as memory=40GB,60GB or pool-ratio=0.8/0.2,0.5/0.5.", "NAME=V,V"),
]
Out = Annotated[Path, typer.Option(help="Folder of a sweep's results, to resume it.")]
Cores = Annotated[str | None, _option("Processes of a sweep. (Default: one per core.)")]
Ray = Annotated[str | None, _option("Ray cluster that runs the sweep.", "ADDRESS")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
Html = Annotated[
    Path | None, typer.Option(help="Write a page with pictures as well.", metavar="FILE")
]
Parquet = Annotated[
    Path | None, typer.Option(help="Write every request of every policy.", metavar="FILE")
]
Download = Annotated[
    bool, typer.Option("--download", help="Print where public traces can be had, and end.")
]
