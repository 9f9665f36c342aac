"""A plan in words, tables and bars, line by line. Pure: a plan in, lines out."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from rich.text import Text

from kvtide.cli.plan.reasons import split_lines, verdict_lines
from kvtide.cli.table import bar, legend, table
from kvtide.cli.units import show, show_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvtide.planner import CapacityPlan, GroupPlan, LengthPlan, StagePlan

BAR_WIDTH = 40

Line = str | Text


def report(plan: CapacityPlan) -> Iterator[Line]:
    """All lines, top to bottom."""
    is_first = True
    for section in (
        _head(plan),
        chain(_pools(plan.stage), _floors(plan)),
        _sequence(plan.stage),
        _capacity(plan),
        split_lines(plan),
        verdict_lines(plan),
        _one_page_size(plan),
    ):
        lines = list(section)
        if lines and not is_first:
            yield ""
        yield from lines
        is_first = False


def _head(plan: CapacityPlan) -> Iterator[Line]:
    axes = plan.parallel
    yield f"{plan.model}: what one rank caches, in blocks of {plan.block_tokens} tokens"
    yield (
        f"tensor {axes.tensor} x pipeline {axes.pipeline} x context {axes.context} x attention "
        f"data {axes.attention_data}; granules of {plan.granule_bytes:,} bytes; GB = 1e9 bytes"
    )
    if len(plan.stages) > 1:
        of = f"{len(plan.stages)}, counted from 0"
        yield f"stage {plan.binding} is shown, of {of}: it runs out first"


def _pools(stage: StagePlan) -> Iterator[Line]:
    yield "Layer groups, a pool each"
    columns: dict[str, list[str]] = {
        "pool": [group.name for group in stage.groups],
        "lifetime": [lifetime_of(group) for group in stage.groups],
        "layers": [show(group.layers) for group in stage.groups],
        "bytes/token": [show(group.bytes_per_token) for group in stage.groups],
        "bytes/state": [show(group.bytes_per_state) for group in stage.groups],
        "page bytes": [show(group.page_bytes) for group in stage.groups],
        "pages/granule": [_above_one(pool.pages_per_granule) for pool in stage.pools],
        "granules/page": [_above_one(pool.granules_per_page) for pool in stage.pools],
        "padding": [show(group.padding_bytes) for group in stage.groups],
        "slack": [show(pool.slack_bytes) for pool in stage.pools],
        "floor pages": [show(pool.floor_pages) for pool in stage.pools],
    }
    said = {name: cells for name, cells in columns.items() if set(cells) - {"-", "0"}}
    yield from table(tuple(said), list(zip(*said.values(), strict=True)), left=2)
    yield (
        f"  Every token adds {show(stage.kv_bytes_per_token)} bytes, however long the sequence. "
        f"States take {show(stage.state_bytes_per_sequence)} a sequence."
    )
    if "padding" in said:
        yield "  padding: bytes of a page that align its tensors"
    if "slack" in said:
        yield "  slack: at most so many bytes of a pool's last granule hold no whole page"


def lifetime_of(group: GroupPlan) -> str:
    """The lifetime in a word or two: "window 128 + 4", "mirror + 3"."""
    match group.lifetime:
        case "window":
            return f"window {group.window:,}" + (f" + {group.sinks}" if group.sinks else "")
        case "mirror":
            return f"mirror + {group.look_ahead}"
        case plain:
            return plain


def _above_one(value: float) -> str:
    """Of a number and its inverse people want to read the one that is not below 1."""
    return show(value) if value >= 1 else "-"


def _floors(plan: CapacityPlan) -> Iterator[Line]:
    floors = plan.stage.floors
    yield (
        f"  floor: what one sequence of {floors.max_tokens:,} tokens needs; {floors.floor_bytes:,} "
        "bytes in all, with sink pages and whole granules"
    )
    for stage in plan.stages:
        where = f"on stage {stage.stage} " if len(plan.stages) > 1 else ""
        lacks = stage.floors.lacking_bytes
        if lacks:
            needs = ", ".join(f"{pool.name} {pool.floor_bytes:,}" for pool in stage.pools)
            yield (
                f"DOES NOT FIT: memory {where}lacks {lacks:,} bytes for one such sequence "
                f"({needs}); give more memory or lower --max-tokens"
            )
        for name, bytes_short in stage.floors.lacking.items():
            yield (
                f"DOES NOT FIT: pool {name} {where}lacks {bytes_short:,} bytes of its floor in "
                "the given split; raise its share or lower --max-tokens"
            )


def _sequence(stage: StagePlan) -> Iterator[Line]:
    names = [pool.name for pool in stage.pools]
    yield "One running sequence, and the split that makes all pools run out together at its length"
    head = ("length", "bytes", "per token", "next adds")
    rows = [
        (
            f"{length.length:,}",
            f"{length.bytes:,}",
            show(length.bytes_per_token),
            show(length.next_token_bytes),
        )
        for length in stage.lengths
    ]
    first, *lines = table(head, rows, left=0)
    yield first
    for line, length in zip(lines, stage.lengths, strict=True):
        shares = " / ".join(f"{100 * length.shares[name]:.1f}" for name in names)
        text = Text(f"{line}  ").append_text(bar([length.shares[n] for n in names], BAR_WIDTH))
        yield text.append(f"  {shares} %")
    yield legend(names)


def _capacity(plan: CapacityPlan) -> Iterator[Line]:
    if plan.memory_bytes is None:
        return
    copies = plan.parallel.attention_data
    has_ratio = plan.stage.lengths[0].ratio_sequences is not None
    yield (
        f"Sequences that fit in {show_bytes(plan.memory_bytes)} a rank, if any pool may take any "
        "granule" + (", and in the given split" if has_ratio else "")
    )
    head = ["length", "sequences", "tokens"]
    head += ["stage"] if len(plan.stages) > 1 else []
    head += [f"in all {copies} copies"] if copies > 1 else []
    head += ["in the split", "stranded there"] if has_ratio else []
    rows: list[list[str]] = []
    for length, here in zip(plan.lengths, plan.stage.lengths, strict=True):
        row = [show(length.length), show(length.sequences)]
        row += [show((length.sequences or 0) * length.length)]
        row += [show(length.stage)] if len(plan.stages) > 1 else []
        row += [show(length.total_sequences)] if copies > 1 else []
        if has_ratio:
            row += [show(length.ratio_sequences), show_bytes(here.ratio_stranded_bytes or 0)]
        rows.append(row)
    yield from table(head, rows, left=0)


def _one_page_size(plan: CapacityPlan) -> Iterator[Line]:
    stage = plan.stage
    equal = stage.equal_pages
    yield "One page size for all layers instead (what is assumed: docs/planner.md)"
    if equal is None:
        yield "  equal pages: all layers keep every token and share one block table: no loss"
    else:
        groups = sum(kind.num_groups for kind in equal.kinds)
        blocks = ", ".join(f"{kind.name} {kind.block_tokens:,}" for kind in equal.kinds)
        yield (
            f"  equal pages: {groups} groups of {equal.layers_per_group} layers, pages of "
            f"{equal.page_bytes:,} bytes; tokens a block: {blocks}"
        )
    yield f"  common multiple: large pages of {stage.large_page_bytes:,} bytes"
    head = ("length", "pools", "equal pages", "more", "common multiple", "more")
    has_memory = plan.memory_bytes is not None
    fits = ("fit: pools", "equal pages", "multiple") if has_memory else ()
    rows = [
        (
            f"{one.length:,}",
            show_bytes(one.bytes),
            show_bytes(one.padded.equal_pages_bytes),
            _more(one, one.padded.equal_pages_bytes),
            show_bytes(one.padded.common_multiple_bytes),
            _more(one, one.padded.common_multiple_bytes),
            *(_fits(one) if has_memory else ()),
        )
        for one in stage.lengths
    ]
    yield from table((*head, *fits), rows, left=0)


def _fits(one: LengthPlan) -> tuple[str, str, str]:
    padded = one.padded
    return (
        show(one.sequences),
        show(padded.equal_pages_sequences),
        show(padded.common_multiple_sequences),
    )


def _more(one: LengthPlan, size: int) -> str:
    times = size / one.bytes
    return f"+{100 * (times - 1):.1f} %" if times < 10 else f"{times:,.0f} times"
