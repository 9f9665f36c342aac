"""A plan as one HTML page that needs nothing else: no network, no script. Pure.

The page is well-formed XML too, so that anything can read it.
"""

from __future__ import annotations

import json
from html import escape
from typing import TYPE_CHECKING

from rich.text import Text

from kvtide.cli import charts
from kvtide.cli.charts import GIVEN, OURS, PLAIN, STRANDED, Row, Segment
from kvtide.cli.html import frame, table
from kvtide.cli.plan.text import lifetime_of, report
from kvtide.cli.units import show, show_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvtide.planner import CapacityPlan, LengthPlan, StagePlan

_SIZES = (
    "bytes a token",
    "bytes a state",
    "page bytes",
    "pages a granule",
    "granules a page",
    "slack",
)


def draw_page(plan: CapacityPlan) -> str:
    """The page as text."""
    parts = [part for section in _sections(plan) for part in section]
    return frame(f"{plan.model}: memory plan", parts)


def _sections(plan: CapacityPlan) -> Iterator[Iterator[str]]:
    yield _head(plan)
    yield _splits(plan)
    yield _lengths(plan.stage)
    yield _fits(plan)
    yield _pools(plan.stage)
    yield _configuration(plan)


def _head(plan: CapacityPlan) -> Iterator[str]:
    yield charts.hatch()
    yield f"<h1>{escape(plan.model)}</h1>"
    room = f"{show_bytes(plan.memory_bytes)} a rank, " if plan.memory_bytes else ""
    yield (
        f'<p class="faint">{room}ranks in all: {plan.parallel.ranks}, blocks of '
        f"{plan.block_tokens} tokens, sequences up to {plan.max_tokens:,} tokens. "
        "Bytes are those of one rank; GB = 1e9.</p>"
    )
    yield (
        f"<p>Every token adds {show(plan.stage.kv_bytes_per_token)} bytes; the states of a "
        f"sequence take {show(plan.stage.state_bytes_per_sequence)}.</p>"
    )
    if not plan.fits:
        yield '<p class="warn">One longest sequence does not fit: see the report below.</p>'


def _splits(plan: CapacityPlan) -> Iterator[str]:
    split, verdict = plan.stage.split, plan.stage.verdict
    rows: list[Row] = []
    if verdict is not None:
        for number, pool in enumerate(verdict.pools):
            used = Segment(
                value=pool.bytes - pool.stranded_bytes,
                kind=charts.pool(number),
                title=f"{pool.name}: {pool.bytes - pool.stranded_bytes:,} bytes",
            )
            lost = Segment(
                value=pool.stranded_bytes,
                kind=STRANDED,
                title=f"{pool.name}: {pool.stranded_bytes:,} bytes stranded",
            )
            note = f"{show_bytes(pool.bytes)}" + (
                f", {show_bytes(pool.stranded_bytes)} stranded" if pool.stranded_bytes else ""
            )
            rows.append(Row(label=f"given: {pool.name}", segments=(used, lost), note=note))
    if split is not None:
        for number, pool in enumerate(split.pools):
            part = Segment(
                value=pool.bytes,
                kind=charts.pool(number),
                title=f"{pool.name}: {pool.bytes:,} bytes",
            )
            note = f"{show_bytes(pool.bytes)}, {100 * pool.share:.2f} %"
            rows.append(Row(label=f"advised: {pool.name}", segments=(part,), note=note))
    if not rows:
        return
    yield "<h2>Pools</h2>"
    yield charts.bars(rows, "bytes of every pool, in the given and in the advised split")
    lost = bool(verdict and verdict.stranded_bytes)
    yield charts.legend([pool.name for pool in plan.stage.pools], has_stranded=lost)
    if verdict is not None and lost:
        yield (
            f'<p class="warn">Stranded: {verdict.stranded_bytes:,} bytes, room for '
            f"{show(verdict.stranded_tokens)} tokens of cache or "
            f"{show(verdict.stranded_prefixes)} prefixes of 2,000 tokens.</p>"
        )


def _lengths(stage: StagePlan) -> Iterator[str]:
    yield "<h2>The split that makes all pools run out together, by length</h2>"
    yield charts.bars([_share_row(one) for one in stage.lengths], "split by length of sequence")
    yield charts.legend([pool.name for pool in stage.pools], has_stranded=False)


def _share_row(one: LengthPlan) -> Row:
    segments = tuple(
        Segment(
            value=share,
            kind=charts.pool(number),
            title=f"{name}: {one.bytes_by_pool[name]:,} bytes, {100 * share:.2f} %",
        )
        for number, (name, share) in enumerate(one.shares.items())
    )
    note = f"{show_bytes(one.bytes)}, {show(one.bytes_per_token)} B a token"
    return Row(label=f"{one.length:,} tokens", segments=segments, note=note)


def _fits(plan: CapacityPlan) -> Iterator[str]:
    if plan.memory_bytes is None:
        return
    yield f"<h2>Sequences that fit in {show_bytes(plan.memory_bytes)}</h2>"
    for one, shown in zip(plan.stage.lengths, plan.lengths, strict=True):
        rows = [_count_row("any granule, any pool", shown.sequences, OURS)]
        if one.ratio_sequences is not None:
            rows.append(_count_row("in the given split", shown.ratio_sequences, GIVEN))
        rows.append(_count_row("equal pages", one.padded.equal_pages_sequences, PLAIN))
        rows.append(_count_row("common multiple", one.padded.common_multiple_sequences, PLAIN))
        total = shown.total_tokens
        yield f"<p>{one.length:,} tokens each ({show(total)} tokens in all)</p>"
        yield charts.bars(rows, f"sequences of {one.length} tokens that fit")


def _count_row(label: str, count: int | None, kind: str) -> Row:
    segment = Segment(value=count or 0, kind=kind, title=f"{label}: {show(count)} sequences")
    return Row(label=label, segments=(segment,), note=show(count))


def _pools(stage: StagePlan) -> Iterator[str]:
    yield "<h2>Layer groups and pools</h2>"
    head = ("pool", "lifetime", "layers", *_SIZES, "floor pages", "floor bytes")
    rows = [
        (
            group.name,
            lifetime_of(group),
            show(group.layers),
            show(group.bytes_per_token),
            show(group.bytes_per_state),
            show(group.page_bytes),
            show(pool.pages_per_granule, digits=4),
            show(pool.granules_per_page, digits=4),
            show(pool.slack_bytes),
            show(pool.floor_pages),
            show(pool.floor_bytes),
        )
        for group, pool in zip(stage.groups, stage.pools, strict=True)
    ]
    yield table(rows, head)


def _configuration(plan: CapacityPlan) -> Iterator[str]:
    data = plan.to_json()
    keys = ("model", "parallel", "block_tokens", "max_tokens", "memory_bytes", "granule_bytes")
    rows = [(key, json.dumps(data[key])) for key in (*keys, "workload", "needs")]
    yield "<h2>Configuration</h2>"
    yield table(rows, (), kind="words")
    text = "\n".join(line.plain if isinstance(line, Text) else line for line in report(plan))
    yield f"<details><summary>The whole report</summary><pre>{escape(text)}</pre></details>"
    numbers = escape(json.dumps(data, indent=1), quote=False)
    yield f"<details><summary>All numbers, as JSON</summary><pre>{numbers}</pre></details>"
