"""Mooncake and Bailian lines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from tests.sim.traces.samples import plain, write_lines

from kvtide import ConfigError
from kvtide.sim.traces import open_trace
from kvtide.sim.traces.order import WINDOW

if TYPE_CHECKING:
    from pathlib import Path

GOOD = {"timestamp": 500, "input_length": 1025, "output_length": 7, "hash_ids": [0, 4, 5]}


def read(path: Path) -> list[tuple[Any, ...]]:
    return [plain(one) for one in open_trace(f"mooncake:{path}")]


def line(**changes: object) -> dict[str, object]:
    return {**GOOD, **changes}


def test_mooncake_is_milliseconds_and_blocks_of_512(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "t", line(), line(timestamp=2000, hash_ids=[0, 1, 2]))
    first, second = open_trace(str(path))
    assert plain(first) == (0.0, 1025, 7, ((0, 1), (4, 2)), 512, 0)
    assert plain(second) == (1.5, 1025, 7, ((0, 3),), 512, 0)
    assert first.prompt()[:512].tolist() == second.prompt()[:512].tolist()
    assert first.prompt()[-1] == 5 * 512


def test_bailian_is_seconds_and_blocks_of_16(tmp_path: Path) -> None:
    chat = {"chat_id": 1, "parent_chat_id": -1, "type": "text", "turn": 1}
    short = {"input_length": 20, "output_length": 3, "hash_ids": [8, 9]}
    path = write_lines(
        tmp_path / "t", {**chat, **short, "timestamp": 1.5}, {**chat, **short, "timestamp": 2.25}
    )
    assert [plain(one) for one in open_trace(str(path))] == [
        (0.0, 20, 3, ((8, 2),), 16, 0),
        (0.75, 20, 3, ((8, 2),), 16, 0),
    ]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (line(timestamp="soon"), "timestamp must be a number, got 'soon'"),
        (line(input_length=0), "input_length must be a whole number of at least 1, got 0"),
        (line(output_length=-1), "output_length must be a whole number of at least 0, got -1"),
        (line(hash_ids=None), "hash_ids is missing"),
        (line(hash_ids=7), "hash_ids must be a list of ids from 0 on, got 7"),
        (line(hash_ids=[0, -1, 2]), r"hash_ids must be a list of ids from 0 on, got \[0, -1"),
        (line(hash_ids=[0.5, 1, 2]), "hash_ids must be a list of ids from 0 on"),
        (line(hash_ids=["a"]), "hash_ids must be a list of ids from 0 on"),
        (line(hash_ids=[[0, 1], [2, 3]]), "hash_ids must be a flat list"),
        (line(hash_ids=[2**70]), "hash_ids must be a list of ids from 0 on"),
        (line(hash_ids=[0, 1]), "hash_ids has 2 blocks of 512 tokens, but 1025 .* are 3 blocks"),
        (line(hash_ids=[0, 1, 2, 3]), "hash_ids has 4 blocks"),
        (line(hash_ids=[]), "hash_ids has 0 blocks"),
        (line(hash_ids=[0, 1, 2**22]), "hash_ids: content ids need token ids up to 2147484159"),
    ],
)
def test_an_error_names_file_line_and_field(
    bad: dict[str, object], message: str, tmp_path: Path
) -> None:
    path = write_lines(tmp_path / "bad.jsonl", GOOD, bad)
    with pytest.raises(ConfigError, match=rf"bad\.jsonl:2: {message}"):
        read(path)


def test_a_few_lines_late_are_put_in_order(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "t", *[line(timestamp=t) for t in (3000, 1000, 2000, 1000)])
    assert [one[0] for one in read(path)] == [0.0, 0.0, 1.0, 2.0]


def test_a_file_that_is_not_sorted_is_refused(tmp_path: Path) -> None:
    times = [*range(1000, 1000 + 2 * WINDOW), 0]
    path = write_lines(tmp_path / "t", *[line(timestamp=t) for t in times])
    with pytest.raises(ConfigError, match=rf"t:{len(times)}: arrives before .* sort the file"):
        read(path)


def test_an_iteration_reads_as_it_goes(tmp_path: Path) -> None:
    """A bad line far down does no harm to whoever stops before it."""
    path = write_lines(tmp_path / "t", *[GOOD] * (WINDOW + 2), "nonsense")
    assert plain(next(iter(open_trace(f"mooncake:{path}"))))[1] == 1025
    with pytest.raises(ConfigError, match=rf"t:{WINDOW + 3}: not JSON"):
        read(path)
