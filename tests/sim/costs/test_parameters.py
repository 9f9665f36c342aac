"""Parameters counted from configurations, against what is published and by hand."""

from __future__ import annotations

from typing import Any

import pytest
from tests.sim.costs.published import LLAMA_8B, SIZES, config_of

from kvtide.errors import ConfigError
from kvtide.layout import Layout
from kvtide.sim.costs import Experts, ModelCost


def cost_of(config: dict[str, Any], **given: Any) -> ModelCost:
    return ModelCost.from_config(config, Layout.from_config(config, block_tokens=128), **given)


@pytest.mark.parametrize("name", SIZES)
def test_totals_are_those_published(name: str) -> None:
    cost, published = cost_of(config_of(name)), SIZES[name]
    assert cost.total_params / 1e9 == pytest.approx(published.total, rel=published.tolerance)
    assert cost.active_params / 1e9 == pytest.approx(published.active, rel=published.tolerance)


def test_llama_by_hand() -> None:
    attention = 4096 * (32 + 8 + 8 + 32) * 128
    dense = 32 * (attention + 3 * 4096 * 14336)
    weights = cost_of(dict(LLAMA_8B)).weights
    assert weights.dense == dense
    assert weights.head == weights.embedding == 128256 * 4096
    assert weights.total == dense + 2 * 128256 * 4096
    assert weights.active == dense + 128256 * 4096


def test_a_tied_head_counts_once() -> None:
    tied = cost_of({**LLAMA_8B, "tie_word_embeddings": True})
    untied = cost_of(dict(LLAMA_8B))
    assert untied.total_params - tied.total_params == 128256 * 4096
    assert untied.active_params == tied.active_params


def test_bytes_follow_the_quantization() -> None:
    mxfp4 = cost_of(config_of("gpt-oss-20b"))
    assert (mxfp4.dense_bytes, mxfp4.expert_bytes, mxfp4.head_bytes) == (2, 0.53125, 2)
    fp8 = cost_of(config_of("DeepSeek-V3"))
    assert (fp8.dense_bytes, fp8.expert_bytes, fp8.head_bytes) == (1, 1, 2)
    assert fp8.compute_dtype == "float8_e4m3fn"
    int4 = cost_of(dict(LLAMA_8B), weight_dtype="int4")
    assert (int4.dense_bytes, int4.compute_dtype) == (0.5, "bfloat16")


def test_experts_touched() -> None:
    experts = Experts(num=4, active=1, params=10)
    assert experts.touched(0) == 0
    assert experts.touched(1) == pytest.approx(1)
    assert experts.touched(2) == pytest.approx(4 * (1 - 0.75**2))
    assert experts.touched(10_000) == pytest.approx(4)
    assert Experts(num=4, active=4, params=10).touched(1) == 4


def test_a_step_reads_the_experts_it_touches() -> None:
    cost = cost_of(config_of("gpt-oss-20b"))
    weights = cost.weights
    assert weights.experts is not None
    always = weights.dense * 2 + weights.head * 2
    assert cost.weight_bytes(0) == 0
    assert cost.weight_bytes(1) == pytest.approx(always + 4 * weights.experts.params * 0.53125)
    assert cost.weight_bytes(4096) == pytest.approx(always + 32 * weights.experts.params * 0.53125)


def test_published_totals_in_place_of_fields() -> None:
    config = {**config_of("gpt-oss-20b"), "intermediate_size": None}
    given = cost_of(config, params=20.9e9, active_params=3.6e9)
    assert given.total_params == pytest.approx(20.9e9)
    assert given.active_params == pytest.approx(3.6e9)
    counted = cost_of(config_of("gpt-oss-20b"))
    assert given.weight_bytes(8) == pytest.approx(counted.weight_bytes(8), rel=0.1)
    dense = cost_of(dict(LLAMA_8B), params=8.03e9)
    assert dense.total_params == dense.active_params == pytest.approx(8.03e9)


@pytest.mark.parametrize(
    ("change", "given", "named"),
    [
        ({"vocab_size": None}, {}, "vocab_size.*step costs.*params"),
        ({"intermediate_size": None}, {}, "intermediate_size.*params"),
        ({}, {"params": 0.0}, "params is 0"),
        ({}, {"params": 8e9, "active_params": 9e9}, "active_params is 9"),
        ({}, {"active_params": 9e9}, "active_params.*without params"),
        ({}, {"params": 8e9, "active_params": 1e9}, "num_experts"),
        ({}, {"weight_dtype": "int3"}, "weight_dtype is 'int3'"),
        ({}, {"ranks": 0}, "ranks"),
        ({"quantization_config": {"quant_method": "awq"}}, {}, "quant_method.*weight_dtype"),
        ({"model_type": "doge"}, {}, "doge.*params"),
    ],
)
def test_what_is_missing_or_wrong_is_named(
    change: dict[str, Any], given: dict[str, Any], named: str
) -> None:
    layout = Layout.from_config(dict(LLAMA_8B), block_tokens=16)
    with pytest.raises(ConfigError, match=named):
        ModelCost.from_config({**LLAMA_8B, **change}, layout, **given)


def test_more_active_than_experts_leave_is_refused() -> None:
    with pytest.raises(ConfigError, match="active_params is 3000000000"):
        cost_of(config_of("gpt-oss-20b"), params=90e9, active_params=3e9)


def test_ranks_share_layers_and_exchange_sums() -> None:
    config = dict(LLAMA_8B)
    one, two = cost_of(config), cost_of(config, ranks=2)
    assert two.linear_flops(10, 2) == one.linear_flops(10, 2) / 2
    assert two.weight_bytes(10) == one.weight_bytes(10) / 2
    assert two.reads[0].pair_flops == one.reads[0].pair_flops / 2
    assert (one.exchanges, one.link_bytes) == (0, 0)
    assert two.exchanges == 64
    assert two.link_bytes == 64 * 4096 * 2  # a ring of two sends half, twice
