"""The options of `kvtide plan`: their types, help and units."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

if TYPE_CHECKING:
    from typer.models import OptionInfo


def _option(help_text: str, metavar: str = "N") -> OptionInfo:
    """An option whose value the command reads itself: its errors are one line that names it."""
    return cast("OptionInfo", typer.Option(help=help_text, metavar=metavar))


Config = Annotated[Path, typer.Argument(help="A model's config.json, or its folder.")]
Memory = Annotated[str | None, _option("Bytes of one rank for all pools.", "60GB")]
Granule = Annotated[str, _option("Bytes that move at a time.", "SIZE")]
WorkloadFile = Annotated[
    Path | None,
    typer.Option(help="JSON object, or .jsonl of {input, output} a line.", metavar="FILE"),
]
MeanInput = Annotated[str | None, _option("Tokens of a prompt.")]
MeanOutput = Annotated[str | None, _option("Tokens of an answer.")]
Concurrency = Annotated[str | None, _option("Sequences that run at a time, in all.")]
SharedPrefix = Annotated[str | None, _option("First tokens that all prompts share.")]
PoolRatio = Annotated[
    str | None, _option("Split to judge, by pool or in their order.", "full=0.85,indexer=0.15")
]
Need = Annotated[
    list[str] | None, _option("Bytes a pool has to hold, instead of a workload.", "POOL=4GB")
]
Tensor = Annotated[str, _option("Tensor parallel ranks.")]
Pipeline = Annotated[str, _option("Pipeline stages.")]
Context = Annotated[str, _option("Context parallel ranks.")]
AttentionData = Annotated[str, _option("Copies of the attention, data parallel.")]
BlockTokens = Annotated[str, _option("Tokens of a block.")]
MaxTokens = Annotated[
    str | None, _option("Tokens of the longest sequence. (Default: what the model can.)")
]
KvDtype = Annotated[str | None, _option("Of keys, values, latents.", "DTYPE")]
IndexDtype = Annotated[str | None, _option("Of indexer keys.", "DTYPE")]
StateDtype = Annotated[str | None, _option("Of recurrent states.", "DTYPE")]
DraftTokens = Annotated[
    str, _option("Tokens drafted ahead by the model's own multi-token prediction.")
]
DraftLayers = Annotated[str | None, _option("Layers of it. (Default: as the model says.)")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
Html = Annotated[
    Path | None, typer.Option(help="Write a page with pictures as well.", metavar="FILE")
]
