"""The engine on two ranks, in processes: the tokens of one rank, while capacity moves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from torch.distributed import destroy_process_group, init_process_group
from transformers import AutoConfig, AutoModelForCausalLM

from kvtide.engine import LLM
from kvtide.engine.parallel import DataRanks, TensorRanks
from kvtide.engine.parallel.pipeline import stage_configs
from kvtide.engine.parallel.shard import require_understood
from kvtide.errors import ConfigError, UsageError
from kvtide.torch import layout_from_model

from ..torch.tiny import tiny_model
from .processes import run_ranks
from .ranks_worker import ANSWER, build
from .small import SMALL, make_prompts, right

if TYPE_CHECKING:
    from pathlib import Path

Found = list[dict[str, Any]]
TRADING = ("tensor", "tensor, proposed", "tensor, one head", "data")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """All cases that end well, by rank: one start of the processes for all of them."""
    told = run_ranks("serving", tmp_path_factory.mktemp("ranks"))
    assert all(told)
    return [each for each in told if each is not None]


def whole_page_bytes(model: str) -> dict[str, int]:
    layout = layout_from_model(build(model), block_tokens=SMALL["block_tokens"])
    return {group.name: group.page_bytes for group in layout.groups}


@pytest.mark.parametrize(
    ("case", "model"),
    [
        ("tensor", "mixed"),
        ("tensor, proposed", "mixed"),
        ("tensor, one head", "one head"),
        ("pipeline", "mixed"),
        ("pipeline, tight", "full"),
        ("data", "mixed"),
    ],
)
def test_two_ranks_give_the_tokens_of_one(found: Found, case: str, model: str) -> None:
    answers = right(build(model), make_prompts(), ANSWER)
    for rank in found:
        assert rank[case]["answers"] == answers * 2
        assert rank[case]["generated"] == answers


@pytest.mark.parametrize("case", TRADING)
def test_granules_move_on_every_rank(found: Found, case: str) -> None:
    moved = [rank[case]["moved"] for rank in found]
    assert min(moved) > 0
    if case != "data":
        assert len(set(moved)) == 1


def test_what_is_proposed_is_done_on_all_ranks_or_on_none(found: Found) -> None:
    for case, count in (
        ("tensor, proposed", "commits"),
        ("pipeline", "commits"),
        ("data", "pauses"),
    ):
        told = [rank[case][count] for rank in found]
        assert told[0] == told[1] > 2
        assert found[0][case]["steps"] == found[1][case]["steps"]


def test_heads_are_split_where_ranks_divide_them(found: Found) -> None:
    for rank in found:
        whole = whole_page_bytes("mixed")
        assert rank["tensor"]["page_bytes"] == {name: n // 2 for name, n in whole.items()}
        assert rank["tensor, one head"]["page_bytes"] == whole_page_bytes("one head")


def test_stages_have_equal_pages_of_their_own_bytes(found: Found) -> None:
    first, second = (rank["pipeline"] for rank in found)
    assert first["pages"] == second["pages"]
    whole = whole_page_bytes("mixed")
    assert first["page_bytes"] != second["page_bytes"]
    assert whole == {n: first["page_bytes"][n] + second["page_bytes"][n] for n in whole}


def test_a_tight_pipeline_preempts(found: Found) -> None:
    assert found[0]["pipeline, tight"]["preempted"] > 0


def test_what_cannot_be_split_is_refused_on_all_ranks(found: Found) -> None:
    for rank in found:
        assert "without experts" in rank["refused: experts by tensors"]
        assert "recurrent states" in rank["refused: states by layers"]
        assert "other logits than the whole" in rank["refused: other logits"]
        assert "use fewer stages" in rank["refused: kinds apart"]
        assert all(rank[case].startswith("ConfigError") for case in rank if "refused" in case)


def test_who_fails_ends_the_others_with_the_reason(tmp_path: Path) -> None:
    other, killed = run_ranks("pipeline raised, tensor killed", tmp_path)
    assert killed is not None
    assert killed.keys() == {"pipeline raised"}
    assert killed["pipeline raised"]["error"] == "ValueError"
    assert other is not None
    raised = other["pipeline raised"]
    assert raised["error"] == "RankFailedError"
    assert raised["message"] == "rank 1 has stopped: ValueError: out of order"
    assert other["tensor killed"]["error"] == "RankLostError"
    assert "rank 1" in other["tensor killed"]["message"]


def test_a_killed_rank_ends_those_that_only_pause_with_it(tmp_path: Path) -> None:
    other, killed = run_ranks("data killed", tmp_path)
    assert killed is None
    assert other is not None
    assert other["data killed"]["error"] == "RankLostError"


def test_ranks_need_a_process_group() -> None:
    with pytest.raises(UsageError, match="init_process_group"):
        TensorRanks()


def test_norms_over_all_heads_and_fused_weights_are_refused_by_name() -> None:
    for family, told in (("minimax_m2", "experts"), ("glm4", "gate_up_proj"), ("gpt_oss", "sinks")):
        with pytest.raises(ConfigError, match=told):
            require_understood(tiny_model(family), 2)
    with pytest.raises(ConfigError, match="96 feed-forward units, which 5 ranks do not divide"):
        require_understood(build("mixed"), 5)


def test_more_stages_than_layers_are_refused() -> None:
    config = AutoConfig.for_model("qwen3", num_hidden_layers=2, hidden_size=32, vocab_size=64)
    with pytest.raises(ConfigError, match="every stage needs at least one layer"):
        stage_configs(AutoModelForCausalLM.from_config(config), 3)


def test_an_engine_takes_what_its_machine_has_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Less than asked, in whole granules, where less is left."""
    init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = tiny_model("qwen3")
        for left, granules in ((400 * 4096 + 17, 400), (1 << 30, (8 << 20) // 4096)):
            monkeypatch.setattr("kvtide.engine.parallel.group.free_host_bytes", lambda n=left: n)
            with LLM(model, ranks=DataRanks(), **SMALL) as llm:
                assert llm.kv.memory.num_granules == granules
    finally:
        destroy_process_group()
