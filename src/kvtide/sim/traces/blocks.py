"""Block ids as their publishers number them: Mooncake and Bailian JSON lines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvtide.sim.traces.files import Place, count_of, json_lines, number_of
from kvtide.sim.traces.order import Read, in_order
from kvtide.sim.traces.request import TraceRequest, check_tokens
from kvtide.types import IntArray, ceil_div

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

MOONCAKE_BLOCK = 512
BAILIAN_BLOCK = 16


def mooncake(path: Path) -> Iterator[TraceRequest]:
    """Lines `timestamp` (ms), `input_length`, `output_length`, `hash_ids` of 512-token blocks."""
    return in_order(_reads(path, MOONCAKE_BLOCK, 1e-3))


def bailian(path: Path) -> Iterator[TraceRequest]:
    """The same with seconds and 16-token blocks; `chat_id` and `turn` say nothing that the block
    ids do not.
    """
    return in_order(_reads(path, BAILIAN_BLOCK, 1.0))


def _reads(path: Path, block: int, unit: float) -> Iterator[Read]:
    for place, record in json_lines(path):
        tokens = count_of(place, record, "input_length", least=1)
        runs = runs_of(place, record, "hash_ids")
        check_cover(place, "hash_ids", runs, tokens, block)
        yield Read(
            place,
            TraceRequest(
                arrival=number_of(place, record, "timestamp") * unit,
                input_tokens=tokens,
                output_tokens=count_of(place, record, "output_length"),
                runs=runs,
                block=block,
            ),
        )


def runs_of(place: Place, record: Mapping[str, Any], field: str) -> IntArray:
    """The list of ids `record[field]` as runs [k, 2] of (first, count)."""
    ids = array_of(place, record, field)
    if ids.ndim != 1:
        raise place.error(f"{field} must be a flat list of ids, got {_short(record[field])}")
    return compress(ids)


def array_of(place: Place, record: Mapping[str, Any], field: str) -> IntArray:
    """`record[field]`, nested lists of whole numbers from 0, as int64."""
    value = record.get(field)
    if value is None:
        raise place.error(f"{field} is missing; found {', '.join(record) or 'nothing'}")
    try:
        ids = np.asarray(value if len(value) else np.empty(0, np.int64))
    except (TypeError, ValueError, OverflowError):
        ids = np.empty(0)
    if ids.dtype.kind != "i" or (len(ids) and int(ids.min()) < 0):
        raise place.error(f"{field} must be a list of ids from 0 on, got {_short(value)}")
    return ids.astype(np.int64, copy=False)


def compress(ids: IntArray) -> IntArray:
    """Runs [k, 2] of successive ids."""
    if not len(ids):
        return np.empty((0, 2), np.int64)
    starts = np.concatenate(([0], np.flatnonzero(np.diff(ids) != 1) + 1))
    counts = np.diff(np.append(starts, len(ids)))
    return np.stack((ids[starts], counts), axis=1)


def check_cover(place: Place, field: str, runs: IntArray, tokens: int, block: int) -> None:
    """Raise ConfigError if `runs` are not the blocks of `tokens` tokens, or too large."""
    blocks, wanted = int(runs[:, 1].sum()), ceil_div(tokens, block)
    if blocks != wanted:
        raise place.error(
            f"{field} has {blocks} blocks of {block} tokens, but {tokens} input tokens are "
            f"{wanted} blocks"
        )
    check_tokens(int(runs.sum(axis=1).max()) * block, f"{place.path}:{place.line}: {field}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
