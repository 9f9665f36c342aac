"""Configurations that cannot be read: the error names the field, the value and the cure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from tests.configs import DEEPSEEK_V4, GEMMA_3N, GLM_5, QWEN3_NEXT, config

from kvtide import ConfigError, Layout, Parallel, Speculative

if TYPE_CHECKING:
    from pathlib import Path

QWEN3 = config("qwen3", num_hidden_layers=4, head_dim=128)
NEMOTRON_H = config("nemotron_h", hybrid_override_pattern="M*", num_hidden_layers=2, head_dim=8)


def refusal(fields: object, **options: Any) -> str:
    given = {"block_tokens": 64, "kv_dtype": "bfloat16", **options}
    with pytest.raises(ConfigError) as caught:
        Layout.from_config(fields, **given)
    return str(caught.value)


def without(fields: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in names}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (without(QWEN3, "model_type"), ["model_type is missing"]),
        ({**QWEN3, "model_type": "qwen33"}, ["'qwen33'", "Layout.from_layers", "qwen3"]),
        (without(QWEN3, "head_dim"), ["head_dim is missing", "'qwen3'"]),
        (without(QWEN3, "num_key_value_heads"), ["num_key_value_heads is missing"]),
        (without(QWEN3, "num_hidden_layers"), ["num_hidden_layers is missing"]),
        ({**QWEN3, "head_dim": "128"}, ["head_dim", "'128'", "whole number"]),
        ({**QWEN3, "head_dim": True}, ["head_dim", "True", "whole number"]),
        ({**QWEN3, "head_dim": -1}, ["head_dim", "-1"]),
        ({**QWEN3, "head_dim": 0}, ["head_dim", "0", ">= 1"]),
        ({**QWEN3, "num_key_value_heads": 5}, ["num_key_value_heads", "5", "32"]),
        (
            {**QWEN3, "layer_types": ["full_attention"] * 3},
            ["layer_types", "3 entries", "4 layers"],
        ),
        ({**QWEN3, "layer_types": ["full_attention"] * 3 + ["x"]}, ["layer_types", "'x'"]),
        ({**QWEN3, "layer_types": "full"}, ["layer_types", "'full'", "list"]),
        ({**QWEN3, "layer_types": ["linear_attention"] * 4}, ["linear", "full"]),
        ({**QWEN3, "layer_types": ["sliding_attention"] * 4}, ["sliding_window is missing"]),
        ({**QWEN3, "sliding_window": 9}, ["use_sliding_window", "layer_types"]),
        ({**QWEN3, "sliding_window": 9, "use_sliding_window": 1}, ["use_sliding_window", "1"]),
        ({**QWEN3, "use_sliding_window": True}, ["sliding_window is missing"]),
        (
            {**QWEN3, "model_type": "qwen3_moe", "sliding_window": 9, "use_sliding_window": True},
            ["layer_types is missing"],
        ),
        (
            config("glm4", num_hidden_layers=2, head_dim=8, sliding_window=9),
            ["sliding_window", "9", "layer_types"],
        ),
        (config("gemma2", num_hidden_layers=2, head_dim=8), ["layer_types or sliding_window"]),
        (config("mistral", num_hidden_layers=2), ["layer_types or sliding_window"]),
        (without(GEMMA_3N, "num_kv_shared_layers"), ["num_kv_shared_layers is missing"]),
        (
            config("llama4_text", num_hidden_layers=2, head_dim=8),
            ["layer_types or attention_chunk_size"],
        ),
        (config("lfm2", num_hidden_layers=2, conv_L_cache=3), ["full_attn_idxs is missing"]),
        (
            config("qwen3_vl_text", num_hidden_layers=2, head_dim=8, attention_chunk_size=4),
            ["layer_types is missing"],
        ),
        (
            config("minimax_m2", num_hidden_layers=2, head_dim=8, sliding_window=9),
            ["sliding_window", "9", "null"],
        ),
        (
            without(config("starcoder2", num_hidden_layers=2), "num_key_value_heads"),
            ["num_key_value_heads is missing"],
        ),
        ({**QWEN3, "num_hidden_layers": 10**6}, ["num_hidden_layers", "1,000,000", "10,000"]),
        ({**QWEN3, "num_hidden_layers": 10**4000}, ["num_hidden_layers", "huge"]),
        ({**QWEN3, "head_dim": 10**30}, ["head_dim", "huge"]),
        ({**QWEN3, "per_layer_config": {"4": {}}}, ["per_layer_config", "'4'", "0 to 3"]),
        ({**QWEN3, "per_layer_config": {"-1": {}}}, ["per_layer_config", "'-1'"]),
        ({**QWEN3, "per_layer_config": {"1": 3}}, ["1 of per_layer_config", "3"]),
        ({**QWEN3, "per_layer_config": [{}]}, ["per_layer_config", "object"]),
        (
            config("deepseek_v2", num_hidden_layers=2, use_mla=False),
            ["use_mla", "false"],
        ),
        (
            {**DEEPSEEK_V4, "layer_types": ["sliding_attention"] * 43},
            ["layer_types", "compress_ratios", "contradict"],
        ),
        ({**DEEPSEEK_V4, "compress_ratios": [0] * 45}, ["compress_ratios", "45 entries"]),
        ({**QWEN3_NEXT, "mamba_ssm_dtype": "int64"}, ["mamba_ssm_dtype", "'int64'"]),
        (
            config("mistral_large4_text", num_hidden_layers=3, kv_source_layers=[0, 0, 1]),
            ["kv_source_layers", "1"],
        ),
        (
            config("mistral_large4_text", num_hidden_layers=2, kv_source_layers=[0, True]),
            ["kv_source_layers", "True"],
        ),
        ({**QWEN3, "is_encoder_decoder": True}, ["is_encoder_decoder"]),
        # GLM-4.5's class has no head_dim, and 4096 / 96 is none
        (
            config("glm4_moe", num_hidden_layers=46, num_attention_heads=96),
            ["head_dim is missing"],
        ),
        # Mistral divides, but not by this
        (
            config("mistral", num_hidden_layers=2, hidden_size=4097, sliding_window=None),
            ["head_dim is missing"],
        ),
        (without(GLM_5, "kv_lora_rank"), ["kv_lora_rank is missing"]),
        (without(GLM_5, "index_head_dim"), ["index_head_dim is missing"]),
        ({**GLM_5, "indexer_types": ["full"]}, ["indexer_types", "1 entries", "78 layers"]),
        ({**GLM_5, "indexer_types": ["none"] * 78}, ["indexer_types", "'none'", "shared"]),
        ({**GLM_5, "layer_types": ["linear_attention"] * 78}, ["layer_types", "linear"]),
        (without(QWEN3_NEXT, "full_attention_interval"), ["full_attention_interval is missing"]),
        (without(QWEN3_NEXT, "linear_key_head_dim"), ["linear_key_head_dim is missing"]),
        ({**NEMOTRON_H, "num_hidden_layers": 3}, ["num_hidden_layers", "3", "2 layers"]),
        (
            {**NEMOTRON_H, "hybrid_override_pattern": "Mx"},
            ["hybrid_override_pattern", "'x'", "M, *, -, E"],
        ),
        (without(DEEPSEEK_V4, "compress_ratios"), ["compress_ratios is missing"]),
        ({**DEEPSEEK_V4, "compress_ratios": [0, 4]}, ["compress_ratios", "2 entries"]),
        ({**DEEPSEEK_V4, "compress_ratios": [8] * 43}, ["compress_ratios", "8", "0, 4, 128"]),
        ({**GEMMA_3N, "num_kv_shared_layers": 35}, ["num_kv_shared_layers", "35"]),
        ({**GEMMA_3N, "num_kv_shared_layers": 33}, ["layer 4", "layer_types"]),
        (
            config("minimax_m1", num_hidden_layers=2, head_dim=8),
            ["attn_type_list is missing"],
        ),
        (
            config("minimax_m1", num_hidden_layers=2, head_dim=8, attn_type_list=[0, 2]),
            ["attn_type_list", "2", "0, 1"],
        ),
        (
            config(
                "kimi_linear",
                num_hidden_layers=3,
                linear_attn_config={"full_attn_layers": [3], "kda_layers": [1, 3]},
            ),
            ["full_attn_layers", "1 to 3"],
        ),
        (
            config(
                "kimi_linear",
                num_hidden_layers=2,
                linear_attn_config={"full_attn_layers": [True], "kda_layers": [{}]},
            ),
            ["full_attn_layers", "1 to 2"],
        ),
        (
            config(
                "nemotron-nas",
                num_hidden_layers=1,
                block_configs=[{"attention": {"n_heads_in_group": 5}}],
            ),
            ["n_heads_in_group", "5", "32"],
        ),
        (
            config(
                "nemotron-nas",
                num_hidden_layers=1,
                block_configs=[{"attention": {"n_heads_in_group": 8, "sparsify": [1]}}],
            ),
            ["sparsify", "block_configs[0]"],
        ),
    ],
)
def test_field_is_named(fields: dict[str, Any], words: list[str]) -> None:
    message = refusal(fields)
    assert [word for word in words if word not in message] == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv_dtype": None}, ["no dtype", "kv_dtype"]),
        ({"kv_dtype": "fp9"}, ["kv_dtype", "'fp9'", "bfloat16"]),
        ({"kv_dtype": "fp8_ds_mla"}, ["fp8_ds_mla", "latents", "fp8_ds_mla"]),
        ({"kv_dtype": "auto"}, ["no dtype", "kv_dtype"]),
        ({"index_dtype": "x"}, ["index_dtype", "'x'"]),
        ({"index_dtype": "int64"}, ["index_dtype", "'int64'"]),
        ({"state_dtype": "fp3"}, ["state_dtype", "'fp3'", "float32"]),
        ({"block_tokens": 0}, ["block_tokens", "0"]),
        ({"block_tokens": "16"}, ["block_tokens", "'16'", "whole"]),
        ({"block_tokens": 16.0}, ["block_tokens", "16.0", "whole"]),
        ({"block_tokens": True}, ["block_tokens", "True", "whole"]),
        ({"parallel": "tp4"}, ["parallel", "'tp4'", "Parallel"]),
        ({"speculative": 3}, ["speculative", "3", "Speculative"]),
        ({"parallel": Parallel(tensor=5)}, ["num_attention_heads", "32", "tensor = 5"]),
        ({"parallel": Parallel(pipeline=5)}, ["4", "layers", "stages"]),
        ({"parallel": Parallel(pipeline=2, stages=(1, 2))}, ["(1, 2)", "4"]),
        ({"parallel": Parallel(context=3)}, ["block_tokens", "64", "3 ranks"]),
        ({"speculative": Speculative(tokens=2)}, ["how many layers", "Speculative(layers=...)"]),
        ({"state_interval": -64}, ["interval_tokens", "-64"]),
        ({"state_interval": 0}, ["interval_tokens", "0"]),
    ],
)
def test_option_is_named(options: dict[str, Any], words: list[str]) -> None:
    state = {**QWEN3_NEXT, "num_hidden_layers": 4, "num_attention_heads": 32}
    message = refusal(state if "state_interval" in options else QWEN3, **options)
    assert [word for word in words if word not in message] == []


def test_what_the_model_computes_in_is_not_guessed() -> None:
    assert "dtype is missing" in refusal(QWEN3_NEXT, kv_dtype="fp8")


def test_the_dtype_of_the_configuration_is_named() -> None:
    assert "dtype is 'mx4'" in refusal({**QWEN3, "dtype": "mx4"}, kv_dtype=None)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({}, "does not say how many layers draft"),
        ({"num_nextn_predict_layers": 0}, "has no layers that draft"),
        ({"num_nextn_predict_layers": 1, "num_mtp_modules": 7}, "num_mtp_modules 7"),
        (
            {"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "M*"},
            "mtp_hybrid_override_pattern",
        ),
    ],
)
def test_drafters_of_its_own(said: dict[str, Any], words: str) -> None:
    assert words in refusal({**QWEN3, **said}, speculative=Speculative(tokens=2))


def test_searched_models_do_not_draft() -> None:
    fields = config(
        "nemotron-nas",
        num_hidden_layers=1,
        block_configs=[{"attention": {"n_heads_in_group": 8}}],
    )
    assert "draft=" in refusal(fields, speculative=Speculative(tokens=2, layers=1))


def test_a_drafter_is_named() -> None:
    assert "of the drafter" in refusal(
        QWEN3, speculative=Speculative(tokens=1, draft={"model_type": "qwen3"})
    ).replace("in the drafter", "of the drafter")


def test_blocks_must_hold_whole_entries() -> None:
    message = refusal(DEEPSEEK_V4, block_tokens=64)
    assert "block_tokens is 64" in message
    assert "multiple of 128" in message


def test_four_bit_needs_an_even_head() -> None:
    odd = config("qwen3", num_hidden_layers=1, head_dim=7)
    assert "7 elements" in refusal(odd, kv_dtype="int4")


def test_heads_that_ranks_can_neither_split_nor_copy() -> None:
    fields = config("qwen3", num_hidden_layers=1, head_dim=8, num_attention_heads=96)
    message = refusal({**fields, "num_key_value_heads": 4}, parallel=Parallel(tensor=6))
    assert "num_key_value_heads is 4" in message
    assert "tensor = 6" in message


def test_layers_that_share_must_be_on_one_stage() -> None:
    halves = Parallel(pipeline=2, stage=1)  # layers 18 to 34: the sources 18 and 19 are there
    both = Layout.from_config(GEMMA_3N, block_tokens=64, kv_dtype="bfloat16", parallel=halves)
    assert [g.layers for g in both.groups] == [(18,), (19,)]
    late = refusal(GEMMA_3N, parallel=Parallel(pipeline=2, stages=(25, 10), stage=1))
    assert "layer 25 reads the keys and values of layer 18" in late
    assert "stages" in late


def test_stage_that_caches_nothing() -> None:
    fields = {**NEMOTRON_H, "hybrid_override_pattern": "*-", "num_key_value_heads": 8}
    message = refusal(fields, parallel=Parallel(pipeline=2, stage=1))
    assert "stage 1" in message
    assert "cache nothing" in message


def test_drafters_with_states() -> None:
    message = refusal(QWEN3, speculative=Speculative(tokens=1, draft=QWEN3_NEXT))
    assert "StateSpec" in message


def test_files_that_are_none(tmp_path: Path) -> None:
    assert "cannot read" in refusal(tmp_path)
    broken = tmp_path / "config.json"
    broken.write_text("{")
    assert "no JSON" in refusal(broken)
    broken.write_text("[]")
    assert "holds a list" in refusal(broken)
    broken.write_bytes(b"\xff\xfe\x00")
    assert "no JSON" in refusal(broken)
    broken.write_text("[" * 100_000)
    assert "no JSON" in refusal(broken)
    assert "config is 3" in refusal(3)
    assert "config is <class" in refusal(dict)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tensor": 0}, "tensor"),
        ({"tensor": "2"}, "tensor is '2'"),
        ({"tensor": 2.0}, "tensor is 2.0"),
        ({"stage": 1}, "stage is 1"),
        ({"pipeline": 2, "stages": (4,)}, "1 stages"),
    ],
)
def test_parallel_is_checked(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Parallel(**options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tokens": 0}, "tokens"),
        ({"tokens": "2"}, "tokens is '2'"),
        ({"tokens": 1, "layers": 0}, "layers"),
        ({"tokens": 1, "layers": 1, "draft": {}}, "layers is 1"),
    ],
)
def test_speculative_is_checked(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Speculative(**options)
