"""Why a split is recommended and what a given one strands: the arithmetic, written out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from kvtide.cli.table import STRANDED, cells_of, colour, shade, table
from kvtide.cli.units import show, show_bytes
from kvtide.planner import PREFIX_TOKENS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvtide.planner import CapacityPlan, Split, Verdict
    from kvtide.planner.split import PoolVerdict

BAR_WIDTH = 60


def split_lines(plan: CapacityPlan) -> Iterator[str]:
    """The recommended split and where its numbers come from."""
    stage, workload = plan.stage, plan.workload
    if workload is not None:
        yield _workload(plan)
    if stage.workload_bytes is not None:
        yield (
            f"  running sequences alone need {show_bytes(stage.workload_bytes)} a rank, "
            f"{stage.workload_bytes:,} bytes in granules"
        )
    split = stage.split
    if split is None:
        return
    ratio = ",".join(f"{pool.name}={pool.share:.7f}" for pool in split.pools)
    if split.limit == "needs":
        yield f"A split that strands nothing: --pool-ratio {ratio}"
        yield "  every need met, and the rest to the other pools"
        yield from _needs_table(split)
    else:
        yield f"The split that makes all pools run out together: --pool-ratio {ratio}"
        yield from _traffic_reason(split)
        yield from _share_table(split)


def verdict_lines(plan: CapacityPlan) -> Iterator[str | Text]:
    """What the given split strands."""
    verdict, memory = plan.stage.verdict, plan.memory_bytes
    if verdict is None or memory is None:
        return
    yield f"The given split of {memory:,} bytes"
    width = max(len(pool.name) for pool in verdict.pools)
    bars = cells_of([pool.share for pool in verdict.pools], BAR_WIDTH)
    for index, (pool, cells) in enumerate(zip(verdict.pools, bars, strict=True)):
        yield _pool_bar(index, pool, cells, width)
    yield from _stranded(plan, verdict)
    rounding = ", ".join(f"{pool.name} {-pool.rounding_bytes:+,}" for pool in verdict.pools)
    yield f"  Whole granules change the pools by {rounding} bytes; the shares above are exact."


def _workload(plan: CapacityPlan) -> str:
    workload = plan.workload
    assert workload is not None
    running = "as many as fit" if workload.concurrency is None else f"{workload.concurrency:,}"
    return (
        f"Workload: {show(workload.mean_input)} tokens in, {show(workload.mean_output)} out, "
        f"{workload.shared_prefix:,} of them the same in all; {running} run at a time"
        + (" over all copies" if plan.parallel.attention_data > 1 else "")
    )


def _needs_table(split: Split) -> Iterator[str]:
    rows = [
        (
            pool.name,
            show(pool.live_bytes) if pool.live_bytes else "the rest",
            show(pool.granules),
            show(pool.bytes),
            f"{100 * pool.share:.2f} %",
        )
        for pool in split.pools
    ]
    yield from table(("pool", "needed", "granules", "bytes", "share"), rows)


def _traffic_reason(split: Split) -> Iterator[str]:
    yield (
        f"  {show(split.sequences)} sequences run at a time (at most {show(split.most_sequences)} "
        "fit if no floor is kept); live = (once + sequences x running) pages x page bytes"
    )
    if split.limit == "concurrency":
        yield (
            f"  the rest keeps {show(split.prefixes)} prefixes of ended sequences, each of as many "
            "pages as cached says"
        )
    elif split.sequences == 0:
        yield "  not one fits: the shares are those of what they need"


def _share_table(split: Split) -> Iterator[str]:
    head = ("pool", "once", "running", "cached", "live bytes", "live", "prefix bytes", "prefix")
    rows = [
        (
            pool.name,
            show(pool.fixed_pages),
            show(pool.running_pages),
            show(pool.cached_pages),
            show(pool.live_bytes),
            f"{100 * pool.live_share:.2f} %",
            show(pool.prefix_bytes),
            f"{100 * pool.prefix_share:.2f} %",
            show(pool.granules),
            f"{100 * pool.share:.2f} %",
        )
        for pool in split.pools
    ]
    yield from table((*head, "granules", "share"), rows)


def _pool_bar(index: int, pool: PoolVerdict, cells: int, width: int) -> Text:
    """As long as the pool's share; what it strands is dotted."""
    wasted = round(cells * pool.stranded_bytes / pool.bytes) if pool.bytes else 0
    text = Text(f"  {pool.name.ljust(width)}  ")
    text.append(shade(index) * (cells - wasted), style=colour(index))
    text.append(STRANDED * wasted, style="red")
    words = f"  {pool.share:g} = {pool.bytes:,} bytes"
    if pool.need_bytes is not None:
        words += f", {pool.need_bytes:,} needed"
    if pool.stranded_bytes:
        words += f", {pool.stranded_bytes:,} stranded"
    return text.append(words + (", runs out" if pool.is_short else ""))


def _stranded(plan: CapacityPlan, verdict: Verdict) -> Iterator[str]:
    if verdict.sequences is not None:
        beside = f", beside {show(verdict.prefixes)} cached prefixes" if verdict.prefixes else ""
        yield f"  {show(plan.ratio_sequences)} sequences of the workload fit{beside}."
    if not verdict.stranded_bytes:
        yield "  Nothing is stranded."
        return
    yield f"  Stranded: {verdict.stranded_bytes:,} bytes ({show_bytes(verdict.stranded_bytes)})."
    names = [pool.name for pool in verdict.pools if pool.is_short]
    short = ", ".join(names)
    if verdict.bytes_per_token is None:
        yield f"  The pools that run out ({short}) keep nothing of a cached prefix."
        return
    each, stranded = verdict.bytes_per_token, verdict.stranded_bytes
    lifetimes = {group.lifetime for group in plan.stage.groups if group.name in names}
    if lifetimes <= {"full", "mirror"}:
        yield (
            f"  In what runs out ({short}), at {show(each)} bytes a token: {stranded:,} / "
            f"{show(each)} = {show(verdict.stranded_tokens)} tokens of cache,"
        )
    else:
        yield (
            f"  In what runs out ({short}), where a token of a prefix takes {show(each)} bytes on "
            f"average: {show(verdict.stranded_tokens)} tokens of cache,"
        )
    yield (
        f"  {show(verdict.stranded_prefixes)} prefixes of {PREFIX_TOKENS:,} tokens "
        f"({show(PREFIX_TOKENS * each)} bytes each)."
    )
