"""Against the published files, where the folder with them is named by KVTIDE_TRACES."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path

import pytest
from tests.sim.traces.test_synthetic import CONVERSATION

from kvtide.sim.traces import open_trace


def published(pattern: str) -> Path:
    folder = os.environ.get("KVTIDE_TRACES")
    if not folder:
        pytest.skip("KVTIDE_TRACES does not name a folder with the published traces")
    found = next(iter(sorted(Path(folder).rglob(pattern))), None)
    if found is None:
        pytest.skip(f"no {pattern} in {folder} (KVTIDE_TRACES)")
    return found


def test_mooncake_conversation() -> None:
    found = open_trace(str(published("conversation_trace.jsonl"))).describe()
    assert found.requests == 12_031
    assert round(found.input.mean) == 12_035
    assert round(found.output.mean) == 343
    assert round(found.span) == 3_537
    # 36.6 % of its blocks; 37.3 % of its tokens, as half of the last blocks are empty.
    assert round(found.shared_blocks, 3) == 0.366
    assert round(found.shared, 3) == 0.373
    assert round(found.arrival_cv, 2) == CONVERSATION["arrival_cv"]
    assert (found.input.p50, round(found.input.p90)) == (CONVERSATION["p50"], CONVERSATION["p90"])


def test_every_conversation_prompt_is_tokens() -> None:
    longest = 0
    for one in open_trace(str(published("conversation_trace.jsonl"))):
        prompt = one.prompt()
        assert len(prompt) == one.input_tokens
        assert int(prompt.min()) >= 0
        longest = max(longest, len(prompt))
    assert longest == 126_195


@pytest.mark.parametrize(
    ("kind", "requests", "inputs", "outputs"),
    [("code", 8_819, 2_048, 28), ("conv", 19_366, 1_155, 211)],
)
def test_azure(kind: str, requests: int, inputs: int, outputs: int) -> None:
    found = open_trace(str(published(f"AzureLLMInferenceTrace_{kind}.csv"))).describe()
    assert found.requests == requests
    assert (round(found.input.mean), round(found.output.mean)) == (inputs, outputs)
    assert found.shared == 0.0


def test_agent_sessions() -> None:
    found = open_trace(str(published("all_710_sessions_rle.jsonl.gz"))).describe()
    assert found.requests == 49_334
    assert round(found.input.mean) == 122_379
    assert found.input.total == 6_037_445_403
    assert round(found.shared, 2) == 0.96


def test_agent_sessions_stream_in_little_memory() -> None:
    """Tracing makes it ten times slower: a tenth of the trace, 0.6 billion tokens."""
    spec = f"{published('all_710_sessions_rle.jsonl.gz')},first=5000"
    tracemalloc.start()
    tokens = sum(one.input_tokens for one in open_trace(spec))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert tokens > 400_000_000
    assert peak < 30 * 2**20


def test_agent_sessions_of_the_same_tools_share_a_little_more() -> None:
    path = published("all_710_sessions_rle.jsonl.gz")
    apart = open_trace(f"{path},first=8000").describe()
    together = open_trace(f"{path},first=8000,tools=1").describe()
    assert apart.shared < together.shared < apart.shared + 0.01


def test_agents_chat_and_code_at_once_fit_int32() -> None:
    spec = " + ".join(
        f"{published(name)},first=9000"
        for name in ("all_710_sessions*", "conversation_trace*", "AzureLLM*code.csv")
    )
    found = open_trace(spec).describe()
    assert [share.requests for share in found.tenants] == [9000, 9000, 8819]
    assert found.tenants[2].shared == 0.0


def test_rates_of_servegen() -> None:
    path = published("reason_deepseek-r1_all73.tar.xz")
    found = open_trace(f"{path},begin=36000,seconds=600").describe()
    again = open_trace(f"{path},begin=36000,seconds=600").describe()
    assert found == again
    assert found.requests > 1000
    assert found.output.mean > 500


def test_lengths_of_vattention_and_of_a_measured_run() -> None:
    long = open_trace(str(published("arxiv_long_offline.csv"))).describe()
    assert (long.requests, long.input.longest) == (427, 192_786)
    measured = open_trace(str(published("RTX4090*/requests.jsonl"))).describe()
    assert measured.requests == 300
    assert round(measured.span, 1) == 29.1
