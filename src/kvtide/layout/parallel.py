"""How one model is spread over ranks, and what of it one rank caches. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from kvtide.errors import ConfigError
from kvtide.layout.lifetime import require_not_negative, require_positive


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """Sizes of four independent axes; a layout is what one rank of pipeline stage `stage` caches.

    `tensor` ranks split the heads of one attention; heads fewer than ranks are replicated, as are
    latents and indexer keys, which every head reads. `pipeline` stages split the layers: `stages`
    says how many each, by default as even as can be, the first stages taking one more. `context`
    ranks split the tokens of every block. `attention_data` copies of the attention each serve
    requests of their own: what TensorRT-LLM and SGLang start as tensor parallel 8 with attention
    data parallel 8 is `tensor=1, attention_data=8` here.
    """

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    attention_data: int = 1
    stage: int = 0
    stages: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        """Refuse sizes below 1, a stage there is not, and `stages` of another length."""
        for field in ("tensor", "pipeline", "context", "attention_data"):
            require_positive(field, getattr(self, field))
        require_not_negative("stage", self.stage)
        if self.stage >= self.pipeline:
            raise ConfigError(
                f"stage is {self.stage}, but pipeline has {self.pipeline} stages, counted from 0"
            )
        if self.stages is not None and len(self.stages) != self.pipeline:
            raise ConfigError(
                f"stages names {len(self.stages)} stages and pipeline is {self.pipeline}; "
                "give the number of layers of every stage"
            )

    @property
    def ranks(self) -> int:
        """Ranks in all."""
        return self.tensor * self.pipeline * self.context * self.attention_data

    def shard(self, field: str, count: int) -> int:
        """How many of `count` heads (or groups) one rank holds: a share, or a replicated one."""
        if count % self.tensor == 0:
            return count // self.tensor
        if self.tensor % count == 0:
            return 1
        raise ConfigError(
            f"{field} is {count}, which tensor = {self.tensor} ranks can neither split evenly nor "
            "hold one each of; use a size that divides it, or a multiple of it"
        )

    def split(self, field: str, count: int) -> int:
        """How many of `count` heads one rank holds where replicas are of no use."""
        if count % self.tensor:
            raise ConfigError(
                f"{field} is {count}, which tensor = {self.tensor} ranks cannot split evenly; "
                "use a size that divides it"
            )
        return count // self.tensor

    def layers(self, num_layers: int) -> range:
        """The layers of this stage."""
        counts = self.stages or _even(num_layers, self.pipeline)
        if sum(counts) != num_layers or min(counts) < 1:
            shown = counts if self.stages else f"{self.pipeline} even shares"
            raise ConfigError(
                f"stages are {shown}, {sum(counts)} layers in all, but the model has {num_layers};"
                " every stage needs at least one layer, and all together all of them"
            )
        start = sum(counts[: self.stage])
        return range(start, start + counts[self.stage])


def _even(num_layers: int, stages: int) -> tuple[int, ...]:
    """Layers per stage, at most one apart, the larger ones first."""
    share, rest = divmod(num_layers, stages)
    return tuple(share + (stage < rest) for stage in range(stages))


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculative:
    """A drafter whose caches live beside the model's: `tokens` drafted ahead of it each step.

    `draft` is the configuration of a model of its own (as `Layout.from_config` takes it), None
    the model's own multi-token prediction: `layers` of them, None as many as it says it has.
    """

    tokens: int
    draft: object | None = None
    layers: int | None = None

    def __post_init__(self) -> None:
        """Refuse a drafter that drafts nothing, and layers counted for a model that has its own."""
        require_positive("tokens", self.tokens)
        if self.layers is not None:
            require_positive("layers", self.layers)
            if self.draft is not None:
                raise ConfigError(
                    f"layers is {self.layers} and draft is given; its configuration says "
                    "how many layers it has"
                )
