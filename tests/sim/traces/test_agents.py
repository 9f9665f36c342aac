"""Agent sessions: starts, nesting, ids local to a session, shared tool definitions."""

from __future__ import annotations

import gzip
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.sim.traces.samples import all_of, plain, write_lines

from kvtide import ConfigError
from kvtide.sim.traces import open_trace

if TYPE_CHECKING:
    from pathlib import Path

    from kvtide.sim.traces import TraceRequest

BLOCK = 4


def call(t: float, tokens: int, runs: list[list[int]], **more: object) -> dict[str, object]:
    return {"t": t, "type": "n", "in": tokens, "out": 5, "hash_runs": runs, **more}


def session(*requests: dict[str, object], **more: object) -> dict[str, object]:
    return {
        "id": "s",
        "block_size": BLOCK,
        "hash_id_scope": "local",
        "tool_tokens": 5,
        "system_tokens": 3,
        "requests": list(requests),
        **more,
    }


def read(path: Path, options: str = "") -> list[TraceRequest]:
    return list(open_trace(f"agent:{path}{options}"))


def prompts(requests: list[TraceRequest]) -> list[list[int]]:
    return [one.prompt().tolist() for one in requests]


def test_a_session_by_hand(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "t", session(call(0.0, 9, [[1, 2]]), call(2.5, 16, [[1, 2], [7, 2]]))
    )
    first, second = open_trace(str(path))
    assert (first.arrival, first.input_tokens, first.output_tokens) == (0.0, 9, 5)
    assert (second.arrival, second.input_tokens, second.block) == (2.5, 16, BLOCK)
    one, two = prompts([first, second])
    assert one[:8] == two[:8]
    # The ninth token has no id: nobody else has it.
    assert one[8] not in two


def test_runs_and_lists_of_ids_are_the_same(tmp_path: Path) -> None:
    runs = session(call(0.0, 17, [[1, 2], [7, 2]]))
    ids = session({"t": 0.0, "in": 17, "out": 5, "hash_ids": [1, 2, 7, 8]})
    packed = tmp_path / "t.jsonl.gz"
    packed.write_bytes(gzip.compress(json.dumps(runs).encode()))
    assert all_of(open_trace(str(packed))) == all_of(
        open_trace(str(write_lines(tmp_path / "ids.jsonl", ids)))
    )


def test_sessions_share_nothing_though_their_ids_are_equal(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "t", *[session(call(0.0, 8, [[1, 2]]))] * 2)
    one, two = prompts(read(path))
    assert not set(one) & set(two)


def test_sessions_share_global_ids(tmp_path: Path) -> None:
    one = session(call(0.0, 8, [[1, 2]]), hash_id_scope="global")
    first, second = prompts(read(write_lines(tmp_path / "t", one, one)))
    assert first == second


def test_starts_are_a_seeded_poisson_process(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "t", *[session(call(0.0, 8, [[1, 2]]))] * 400)
    starts = [one.arrival for one in read(path, ",rate=0.5,seed=3")]
    assert starts[0] == 0.0
    assert starts == sorted(starts)
    gaps = np.diff(starts)
    assert gaps.mean() == pytest.approx(2.0, rel=0.1)
    assert gaps.std() == pytest.approx(2.0, rel=0.2)
    assert starts == [one.arrival for one in read(path, ",rate=0.5,seed=3")]
    assert starts != [one.arrival for one in read(path, ",rate=0.5,seed=4")]


def test_sessions_overlap_in_time(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "t", *[session(*[call(t, 8, [[1, 2]]) for t in range(0, 900, 100)])] * 5
    )
    times = [one.arrival for one in read(path, ",rate=0.01")]
    assert len(times) == 45
    assert times == sorted(times)
    starts = [t for t in times if any(abs(s - t - 100) < 1e-9 for s in times)]
    assert min(starts) == 0.0


def test_long_gaps_can_be_cut(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "t", session(*[call(t, 8, [[1, 2]]) for t in (1, 3, 500, 501)]))
    assert [one.arrival for one in read(path, ",pause=10")] == [0.0, 2.0, 12.0, 13.0]


def test_a_called_agent_counts_time_from_its_call(tmp_path: Path) -> None:
    nested = {
        "t": 10.0,
        "type": "subagent",
        "requests": [call(0.0, 8, [[5, 2]]), call(4, 8, [[1, 2]])],
    }
    path = write_lines(
        tmp_path / "t", session(call(0.0, 8, [[1, 2]]), nested, call(12, 8, [[1, 2]]))
    )
    found = read(path)
    assert [one.arrival for one in found] == [0.0, 10.0, 12.0, 14.0]
    first, inner, second, last = prompts(found)
    assert first == second == last != inner


def test_sessions_of_the_same_tools_share_them_if_asked(tmp_path: Path) -> None:
    """8 tokens of tools and system are the first 2 of 3 blocks."""
    path = write_lines(
        tmp_path / "t",
        session(call(0.0, 12, [[1, 3]])),
        session(call(0.0, 16, [[4, 4]]), call(0.0, 20, [[4, 5]])),
        session(call(0.0, 12, [[1, 3]]), tool_tokens=4, system_tokens=4),
        session(call(0.0, 8, [[1, 1], [3, 1]])),
    )
    found = read(path, ",tools=1")
    assert [int(r.runs[:, 1].sum()) for r in found] == [3, 4, 5, 3, 2]
    one, two, longer, other_tools, too_short = prompts(found)
    assert longer[:16] == two
    assert one[:8] == two[:8]
    assert not set(one[8:]) & set(two[8:])
    assert not set(one) & set(other_tools)
    assert not set(one) & set(too_short)
    apart = prompts(read(path))
    assert not set(apart[0]) & set(apart[1])


def test_a_folder_has_a_session_a_file(tmp_path: Path) -> None:
    for name in ("b", "a"):
        record = session(call(0.0, 8 if name == "a" else 4, [[1, 1]]))
        (tmp_path / f"{name}.json").write_text(json.dumps(record, indent=1))
    assert [one.input_tokens for one in open_trace(str(tmp_path))] == [8, 4]


def test_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the folder has no"):
        read(tmp_path)


def test_a_prompt_shorter_than_a_block_is_its_own(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "t", session(call(0.0, 3, []), call(1.0, 3, [])))
    first, second = prompts(read(path))
    assert len(first) == 3
    assert not set(first) & set(second)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (session(requests="x"), "requests must be a list of requests, got str"),
        (session(block_size=0), "block_size must be a whole number of at least 1"),
        (session(call("x", 8, [[1, 2]])), "t must be a number"),  # type: ignore[arg-type]
        (session(call(0, 0, [])), "in must be a whole number of at least 1"),
        (session(call(0, 8, [[1, 2]], out=-1)), "out must be a whole number of at least 0"),
        (session(call(0, 8, [[1, 3]])), "in = 8 tokens are 2 blocks of 4, .* has ids for 3"),
        (session(call(0, 8, [[1, 0]])), "hash_runs must be a list of"),
        (session(call(0, 8, [[1, 1, 1]])), "hash_runs must be a list of"),
        (session(call(0, 8, [1, 2])), "hash_runs must be a list of"),  # type: ignore[list-item]
        (session({"t": 0, "in": 8, "out": 1}), "hash_ids is missing"),
        (session(call(0, 8, [[1, 2]]), tool_tokens="many"), "tool_tokens must be a number"),
    ],
)
def test_an_error_names_file_line_and_field(
    bad: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = write_lines(tmp_path / "bad.jsonl", session(call(0.0, 8, [[1, 2]])), bad)
    with pytest.raises(ConfigError, match=rf"bad\.jsonl:2: {message}"):
        read(path)


@pytest.mark.parametrize("option", ["rate=0", "rate=inf", "pause=-1", "seed=-1"])
def test_options_out_of_range(option: str, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "t", session(call(0.0, 8, [[1, 2]])))
    with pytest.raises(ConfigError, match="give rate > 0"):
        open_trace(f"agent:{path},{option}")


def test_ids_beyond_int32_name_file_and_line(tmp_path: Path) -> None:
    """Ids are local, so only their number counts, not their size."""
    path = write_lines(tmp_path / "t", session(call(0.0, 8, [[2**40, 2]])))
    assert max(prompts(read(path))[0]) < 2**17
    huge = call(0.0, 2**31, [[0, 2**21]])
    path = write_lines(tmp_path / "huge", session(huge, block_size=1024))
    with pytest.raises(ConfigError, match=r"huge:1: content ids need token ids up to"):
        [plain(one) for one in read(path)]
