"""The planner's door: a configuration and a question in, a `CapacityPlan` out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypedDict, cast

from kvtide.errors import ConfigError
from kvtide.layout import Layout, Parallel, Speculative
from kvtide.layout.reading import read_fields
from kvtide.planner.source import longest_sequence, model_name
from kvtide.planner.split import Memory
from kvtide.planner.stage import GRANULE_BYTES, Question, StagePlan, plan_stage
from kvtide.types import ceil_div

if TYPE_CHECKING:
    from typing import Unpack

    from kvtide.planner.workload import Workload


class Settings(TypedDict, total=False):
    """Fields of `Options` as keyword arguments of `plan_capacity`."""

    memory: int | None
    granule_bytes: int
    workload: Workload | None
    pool_ratio: Mapping[str, float] | Sequence[float] | None
    needs: Mapping[str, int]
    parallel: Parallel
    block_tokens: int
    max_tokens: int | None
    kv_dtype: str | None
    index_dtype: str | None
    state_dtype: str | None
    draft_tokens: int
    draft_layers: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What to plan for. Sizes are bytes of one rank.

    `memory` is for all pools together; without it nothing is said of how many fit. `workload` or
    `needs` (bytes by pool) say what the pools have to hold; `pool_ratio` is a split to judge, by
    pool or in their order. `max_tokens` None: as long as the configuration says the model can go.
    The dtypes are those of `Layout.from_config`; `draft_tokens` above 0 adds the model's own
    multi-token prediction, that many tokens ahead, of `draft_layers` layers (None: as many as the
    configuration says).
    """

    memory: int | None = None
    granule_bytes: int = GRANULE_BYTES
    workload: Workload | None = None
    pool_ratio: Mapping[str, float] | Sequence[float] | None = None
    needs: Mapping[str, int] = field(default_factory=dict[str, int])
    parallel: Parallel = field(default_factory=Parallel)
    block_tokens: int = 16
    max_tokens: int | None = None
    kv_dtype: str | None = None
    index_dtype: str | None = None
    state_dtype: str | None = None
    draft_tokens: int = 0
    draft_layers: int | None = None

    def __post_init__(self) -> None:
        """Refuse sizes below 1 and questions that lack or contradict each other."""
        sizes = {
            "memory": self.memory,
            "granule_bytes": self.granule_bytes,
            "block_tokens": self.block_tokens,
            "max_tokens": self.max_tokens,
            **{f"needs[{name!r}]": need for name, need in self.needs.items()},
        }
        for name, size in sizes.items():
            if size is not None and size < 1:
                raise ConfigError(f"{name} is {size}; use 1 or more")
        if self.draft_tokens < 0:
            raise ConfigError(f"draft_tokens is {self.draft_tokens}; use 0 for no drafter")
        if self.draft_layers is not None and not self.draft_tokens:
            raise ConfigError(
                f"draft_layers is {self.draft_layers} and draft_tokens 0; say how many are drafted"
            )
        if self.memory is None and (self.needs or self.pool_ratio is not None):
            given = "needs" if self.needs else "pool_ratio"
            raise ConfigError(f"{given} is given without memory; say how many bytes are split")
        if self.needs and self.workload is not None:
            raise ConfigError("needs and workload both say what pools must hold; give one of them")
        if self.memory is not None and self.memory < self.granule_bytes:
            raise ConfigError(
                f"memory is {self.memory:,} bytes, less than one granule of "
                f"{self.granule_bytes:,}; give more memory or smaller granules"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthCapacity:
    """Sequences of `length` tokens that fit: on one rank of every stage (the stage that holds the
    fewest decides, and is named), and in all, over the attention-data-parallel copies.
    `ratio_sequences` are those that fit in a given split.
    """

    length: int
    sequences: int | None
    ratio_sequences: int | None
    stage: int
    total_sequences: int | None
    total_tokens: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityPlan:
    """The answer, one `StagePlan` a pipeline stage; `binding` is the stage that runs out first.

    `sequences` of the workload run on one rank at a time, `total_sequences` on all copies;
    `prefixes` and `total_prefixes` are cached beside them. None where memory, or the workload, was
    not given.
    """

    model: str
    block_tokens: int
    parallel: Parallel
    max_tokens: int
    memory_bytes: int | None
    granule_bytes: int
    workload: Workload | None
    needs: dict[str, int]
    stages: tuple[StagePlan, ...]
    binding: int
    lengths: tuple[LengthCapacity, ...]
    sequences: int | None
    prefixes: int | None

    @property
    def stage(self) -> StagePlan:
        """The stage that runs out first."""
        return self.stages[self.binding]

    @property
    def total_sequences(self) -> int | None:
        """Sequences of the workload that run at a time over all attention-data-parallel copies."""
        return None if self.sequences is None else self.sequences * self.parallel.attention_data

    @property
    def total_prefixes(self) -> int | None:
        """Prefixes cached beside them over all attention-data-parallel copies."""
        return None if self.prefixes is None else self.prefixes * self.parallel.attention_data

    @property
    def ratio_sequences(self) -> int | None:
        """Sequences of the workload that run at a time in the given split; None without either."""
        verdicts = [stage.verdict for stage in self.stages]
        return _least([verdict.sequences if verdict else None for verdict in verdicts])

    @property
    def fits(self) -> bool:
        """Whether one sequence of `max_tokens` tokens can run on every stage."""
        return all(stage.floors.is_met for stage in self.stages)

    def to_json(self) -> dict[str, Any]:
        """Plain data, ready for `json.dumps`; numbers that are whole are ints. The binding stage
        stands at the top, and `stages` lists all of them if there are several.
        """
        parallel = self.parallel
        data: dict[str, Any] = {
            "model": self.model,
            "block_tokens": self.block_tokens,
            "parallel": {
                "tensor": parallel.tensor,
                "pipeline": parallel.pipeline,
                "context": parallel.context,
                "attention_data": parallel.attention_data,
            },
            "max_tokens": self.max_tokens,
            "memory_bytes": self.memory_bytes,
            "granule_bytes": self.granule_bytes,
            "workload": _workload_json(self.workload),
            "needs": self.needs,
            "fits": self.fits,
            **_stage_json(self.stage),
            "capacity": {
                "binding_stage": self.binding,
                "sequences": self.sequences,
                "total_sequences": self.total_sequences,
                "ratio_sequences": self.ratio_sequences,
                "prefixes": self.prefixes,
                "total_prefixes": self.total_prefixes,
                "by_length": [asdict(length) for length in self.lengths],
            },
        }
        if len(self.stages) > 1:
            data["stages"] = [_stage_json(stage) for stage in self.stages]
        return cast("dict[str, Any]", _whole(data))


def plan_capacity(config: object, **settings: Unpack[Settings]) -> CapacityPlan:
    """Plan memory for a model: `config` as `Layout.from_config` takes it, settings as `Options`.

    Raises ConfigError where the configuration cannot be read, is not understood or contradicts the
    settings; its message names the field. Too little memory is an answer: see `CapacityPlan.fits`.
    """
    options = Options(**settings)
    fields = read_fields(config)
    max_tokens = options.max_tokens or longest_sequence(fields)
    layouts = [
        Layout.from_config(
            config,
            block_tokens=options.block_tokens,
            kv_dtype=options.kv_dtype,
            index_dtype=options.index_dtype,
            state_dtype=options.state_dtype,
            parallel=replace(options.parallel, stage=stage),
            speculative=Speculative(tokens=options.draft_tokens, layers=options.draft_layers)
            if options.draft_tokens
            else None,
            max_tokens=max_tokens,
        )
        for stage in range(options.parallel.pipeline)
    ]
    return plan_layouts(model_name(config, fields), layouts, max_tokens, options)


def plan_layouts(
    model: str, layouts: Sequence[Layout], max_tokens: int, options: Options
) -> CapacityPlan:
    """The same from layouts, one for a rank of every pipeline stage. Raises ConfigError."""
    workload = options.workload
    if workload is not None and workload.longest > max_tokens:
        raise ConfigError(
            f"the workload's longest sequence has {workload.longest:,} tokens, but max_tokens is "
            f"{max_tokens:,}; raise max_tokens, or leave such requests out"
        )
    question = _question(options, max_tokens)
    stages = tuple(_planned(layouts, question, stage) for stage in range(len(layouts)))
    binding = min(range(len(stages)), key=lambda at: _room(stages[at]))
    splits = [stage.split for stage in stages if stage.split is not None]
    return CapacityPlan(
        model=model,
        block_tokens=layouts[0].block_tokens,
        parallel=options.parallel,
        max_tokens=max_tokens,
        memory_bytes=options.memory,
        granule_bytes=options.granule_bytes,
        workload=workload,
        needs=dict(options.needs),
        stages=stages,
        binding=binding,
        lengths=_over_stages(stages, options.parallel.attention_data),
        sequences=_least([split.sequences for split in splits]),
        prefixes=_least([split.prefixes for split in splits]),
    )


def _planned(layouts: Sequence[Layout], question: Question, stage: int) -> StagePlan:
    try:
        return plan_stage(layouts[stage], question, stage=stage)
    except ConfigError as error:
        if len(layouts) == 1:
            raise
        raise ConfigError(f"on stage {stage} of {len(layouts)}: {error}") from error


def _question(options: Options, max_tokens: int) -> Question:
    workload = options.workload
    running = workload.concurrency if workload else None
    return Question(
        max_tokens=max_tokens,
        granule_bytes=options.granule_bytes,
        memory=Memory(num_bytes=options.memory, granule_bytes=options.granule_bytes)
        if options.memory is not None
        else None,
        workload=workload,
        concurrency=ceil_div(running, options.parallel.attention_data) if running else None,
        pool_ratio=options.pool_ratio,
        needs=options.needs,
    )


def _room(stage: StagePlan) -> tuple[float, ...]:
    """What is compared to find the stage that runs out first: the least is."""
    longest, split = stage.lengths[-1], stage.split
    if longest.sequences is None:
        return (-longest.bytes,)
    if split is None or split.sequences is None:
        return (longest.sequences, -longest.bytes)
    # Fewer prefixes bind; where none are counted, the bytes of a sequence decide between equals.
    return (split.sequences, split.prefixes or 0, -longest.bytes)


def _over_stages(stages: Sequence[StagePlan], copies: int) -> tuple[LengthCapacity, ...]:
    found: list[LengthCapacity] = []
    for at, one in enumerate(stages[0].lengths):
        rooms = [
            (length.sequences if length.sequences is not None else -length.bytes, stage.stage)
            for stage in stages
            for length in (stage.lengths[at],)
        ]
        least, stage = min(rooms)
        sequences = None if one.sequences is None else least
        found.append(
            LengthCapacity(
                length=one.length,
                sequences=sequences,
                ratio_sequences=_least([one.lengths[at].ratio_sequences for one in stages]),
                stage=stage,
                total_sequences=None if sequences is None else sequences * copies,
                total_tokens=None if sequences is None else sequences * copies * one.length,
            )
        )
    return tuple(found)


def _least(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return min(known) if known and len(known) == len(values) else None


def _stage_json(stage: StagePlan) -> dict[str, Any]:
    data = asdict(stage)
    data["floors"]["is_met"] = stage.floors.is_met
    if stage.split is not None:
        data["split"]["ratio"] = stage.split.ratio
    if stage.equal_pages is not None:
        data["equal_pages"]["page_bytes"] = stage.equal_pages.page_bytes
    return data


def _workload_json(workload: Workload | None) -> dict[str, Any] | None:
    if workload is None:
        return None
    return {
        "mean_input": workload.mean_input,
        "mean_output": workload.mean_output,
        "concurrency": workload.concurrency,
        "shared_prefix": workload.shared_prefix,
        "snapshots": workload.snapshots,
        "classes": len(workload.requests),
    }


def _whole(value: object) -> object:
    """`value` with floats that are whole as ints, and tuples as lists, all the way down."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {k: _whole(v) for k, v in cast("Mapping[str, object]", value).items()}
    if isinstance(value, list | tuple):
        return [_whole(v) for v in cast("Sequence[object]", value)]
    return value
