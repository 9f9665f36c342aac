"""Layouts read from configurations, against published numbers and arithmetic written out."""

from __future__ import annotations

from typing import Any

import pytest
from tests.configs import DEEPSEEK_V4, GEMMA_3N, GLM_5, GLM_53, QWEN3_NEXT, config, pools, read

FP32, BF16, FP8 = 4, 2, 1


def test_glm_5_as_published() -> None:
    # 78 layers of a latent of 512 + 64 bfloat16, and an index key of 128 bytes + 4 of scale
    layout = read(GLM_5)
    assert pools(layout) == {"latent": (78, 78 * 1152), "indexer": (78, 78 * 132)}
    assert layout.bytes_per_token == 78 * (1152 + 132) == 100_152


def test_index_pages_have_their_scales_behind_their_keys() -> None:
    indexer = read(GLM_5).group("indexer")
    assert indexer.page_bytes == 78 * 8448  # 64 x 128 of keys, then 64 x 4 of scales
    assert indexer.offset(0, "index_key") == 0
    assert indexer.offset(0, "index_scale") == 64 * 128
    four_bit = read(GLM_5, index_dtype="fp4").group("indexer")
    assert four_bit.page_bytes == 78 * 4352
    assert four_bit.bytes_per_token == 78 * (64 + 4)


@pytest.mark.parametrize(
    ("fields", "kilobytes"),
    [
        (config("deepseek_v3", num_hidden_layers=61), 70.272),
        (config("qwen2", num_hidden_layers=80, hidden_size=8192, num_attention_heads=64), 327.680),
        (
            config("llama", num_hidden_layers=126, hidden_size=16384, num_attention_heads=128),
            516.096,
        ),
    ],
    ids=["DeepSeek-V3", "Qwen-2.5-72B", "LLaMA-3.1-405B"],
)
def test_table_of_the_deepseek_v3_insights_paper(fields: dict[str, Any], kilobytes: float) -> None:
    """KV cache per token in bfloat16 (arXiv 2505.09343, table 1)."""
    assert read(fields).bytes_per_token == kilobytes * 1000


@pytest.mark.parametrize(
    ("num_tokens", "gib", "roles"),
    [
        (975_424, 43.67, ("latent", "indexer")),
        (1_462_784, 65.49, ("latent", "indexer")),
        (1_462_784, 54.52, ("latent",)),
    ],
)
def test_deepseek_v32_as_an_engine_logged_it(
    num_tokens: int, gib: float, roles: tuple[str, ...]
) -> None:
    """What SGLang allocated with and without the indexer's keys (pull request 11309)."""
    layout = read(config("deepseek_v32", num_hidden_layers=61), kv_dtype="fp8_ds_mla")
    total = num_tokens * sum(layout.group(role).bytes_per_token or 0 for role in roles)
    assert total / 2**30 == pytest.approx(gib, abs=0.006)


def test_deepseek_v4_at_a_million_tokens_as_published() -> None:
    """6.08 GiB (Flash) and 8.71 GiB (Pro) at 2^20 tokens (provide.ai/the-exact-kv-cache-usage-of-
    deepseek-v4), windows and states apart."""

    def grown(fields: dict[str, Any]) -> float:
        groups = read(fields, block_tokens=128).groups
        kept = [g for g in groups if g.name.startswith(("compressed", "indexer"))]
        return sum(g.bytes_per_token or 0 for g in kept) * 2**20 / 2**30

    assert grown(DEEPSEEK_V4) == pytest.approx(6.08, abs=0.005)
    pro = {"num_hidden_layers": 61, "compress_ratios": [128, *(30 * [4, 128])]}
    assert grown({**DEEPSEEK_V4, **pro}) == pytest.approx(8.71, abs=0.005)


def test_deepseek_v32_with_scales_inside_its_latents_as_published() -> None:
    # 512 float8 + 4 float32 scales + 64 bfloat16 of rotary key = 656
    layout = read(config("deepseek_v32", num_hidden_layers=61), kv_dtype="fp8_ds_mla")
    assert layout.group("latent").bytes_per_token == 61 * 656
    assert layout.bytes_per_token == 61 * (656 + 132) == 48_068


def test_indexers_that_are_shared_own_no_keys() -> None:
    # GLM-5.2: full for the first three layers, then every fourth: 3 + 75 // 4 = 21 of 78
    by_rule = read({**GLM_5, "index_topk_freq": 4, "index_skip_topk_offset": 3})
    assert pools(by_rule)["indexer"] == (21, 21 * 132)
    assert by_rule.group("indexer").layers[:5] == (0, 1, 2, 6, 10)
    listed = ["full" if i in (0, 5) else "shared" for i in range(78)]
    assert read({**GLM_5, "indexer_types": listed}).group("indexer").layers == (0, 5)
    pattern = "F" + 76 * "S" + "F"
    assert read({**GLM_5, "index_topk_pattern": pattern}).group("indexer").layers == (0, 77)


def test_worked_example_of_heads_at_fp16() -> None:
    # 2 x 32 layers x 8 heads x 128 x 2 bytes
    layout = read(config("llama", num_hidden_layers=32, head_dim=128), kv_dtype="float16")
    assert layout.bytes_per_token == 131_072


@pytest.mark.parametrize(
    ("kv_dtype", "bytes_per_head"),
    [
        ("bfloat16", 256),
        ("float32", 512),
        ("fp8", 128),
        ("int8", 128 + 4),
        ("int4", 64 + 4),
        ("nvfp4", 64 + 8),
    ],
)
def test_scales_are_in_the_page_of_what_they_scale(kv_dtype: str, bytes_per_head: int) -> None:
    layout = read(config("qwen3", num_hidden_layers=3, head_dim=128), kv_dtype=kv_dtype)
    assert layout.bytes_per_token == 3 * 2 * 8 * bytes_per_head
    assert len(layout.groups) == 1


def test_qwen3_next_state() -> None:
    # 36 of 48 layers: (2 x 16 x 128 + 32 x 128) channels x 4 inputs in bfloat16,
    # and 32 matrices of 128 x 128 in float32
    layout = read(QWEN3_NEXT)
    state = 8192 * 4 * BF16 + 32 * 128 * 128 * 4
    assert pools(layout) == {
        "state": (36, 36 * state),
        "full": (12, 12 * 2 * 2 * 256 * BF16),
    }
    assert layout.group("full").layers[:2] == (3, 7)


def test_state_dtype_is_its_own() -> None:
    fields = {**QWEN3_NEXT, "dtype": "bfloat16"}
    squeezed = read(fields, kv_dtype="fp8", state_dtype="bfloat16")
    state = 8192 * 4 * BF16 + 32 * 128 * 128 * BF16  # inputs stay as the model computes them
    assert squeezed.bytes_per_state == 36 * state
    assert squeezed.bytes_per_token == 12 * 2 * 2 * 256 * FP8
    said = read({**QWEN3_NEXT, "mamba_ssm_dtype": "fp16"})
    assert said.bytes_per_state == 36 * state
    wider = read(fields, kv_dtype="float32", state_dtype="bfloat16")
    assert wider.bytes_per_state == 36 * state


def test_nemotron_h_pattern() -> None:
    fields = config(
        "nemotron_h",
        hybrid_override_pattern="ME*M-*",
        num_attention_heads=32,
        num_key_value_heads=2,
        head_dim=128,
        mamba_num_heads=64,
        mamba_head_dim=64,
        ssm_state_size=128,
        n_groups=8,
        conv_kernel=4,
    )
    channels = 64 * 64 + 2 * 8 * 128
    state = channels * 4 * BF16 + 64 * 64 * 128 * 4
    layout = read(fields)
    assert pools(layout) == {"state": (2, 2 * state), "full": (2, 2 * 2 * 2 * 128 * BF16)}
    assert layout.group("state").layers == (0, 3)
    assert layout.group("full").layers == (2, 5)


def test_kimi_linear_layers_are_counted_from_one() -> None:
    fields = config(
        "kimi_linear",
        num_hidden_layers=4,
        linear_attn_config={
            "full_attn_layers": [4],
            "kda_layers": [1, 2, 3],
            "head_dim": 128,
            "num_heads": 32,
            "short_conv_kernel_size": 4,
        },
    )
    state = 3 * 32 * 128 * 4 * BF16 + 32 * 128 * 128 * 4
    layout = read(fields)
    assert pools(layout) == {"state": (3, 3 * state), "latent": (1, 1152)}
    assert layout.group("latent").layers == (3,)


def test_glm_53_index_keys_are_pooled_or_of_every_token() -> None:
    state = 3 * 64 * 128 * 4 * BF16 + 64 * 128 * 128 * 4
    pooled = pools(read(GLM_53))
    assert pooled == {
        "state": (3, 3 * state),
        "latent": (1, 512 * BF16),
        "indexer": (1, 132 / 4),
        "state_2": (1, 2 * 3 * 128 * FP32),  # the tokens of a pool begun
    }
    every = pools(read(GLM_53, index_dtype="bfloat16"))
    assert every == {
        "state": (3, 3 * state),
        "latent": (1, 512 * BF16),
        "indexer": (1, 257 * BF16),
    }


def test_minimax_01_lightning_state_is_in_the_models_dtype() -> None:
    fields = config("minimax_m1", num_hidden_layers=4, head_dim=128, attn_type_list=[0, 0, 0, 1])
    heads = fields["num_attention_heads"]
    assert pools(read(fields)) == {
        "state": (3, 3 * heads * 128 * 128 * BF16),
        "full": (1, 2 * 8 * 128 * BF16),
    }


def test_minimax_m3_index_keys() -> None:
    fields = config(
        "minimax_m3",
        num_hidden_layers=4,
        head_dim=128,
        sparse_attention_config={"sparse_attention_freq": [0, 0, 1, 1], "sparse_index_dim": 64},
    )
    assert pools(read(fields)) == {
        "full": (4, 4 * 2 * 8 * 128 * BF16),
        "indexer": (2, 2 * 64 * BF16),
    }


def test_deepseek_v4_flash() -> None:
    # 43 layers: 2 + 1 plain windows (the 44th ratio is the drafter's), 21 of ratio 4, 20 of 128
    layout = read(DEEPSEEK_V4, block_tokens=256)
    waiting, folded = 3 * 1024 + 3 * 256, 4 * 512 + 4 * 128  # tokens of the next entry, of the last
    sparse = (waiting + folded) * 2 * FP32
    assert pools(layout) == {
        "window_128": (43, 43 * 512 * BF16),  # one head, keys are values
        "compressed_4": (21, 21 * 512 * BF16 // 4),
        "indexer": (21, 21 * 132 // 4),
        "state": (21, 21 * sparse),
        "compressed_128": (20, 20 * 512 * BF16 // 128),
        "state_2": (20, 20 * 127 * 512 * 2 * FP32),
    }
    assert layout.group("compressed_128").page_bytes == 20 * 2 * 512 * BF16  # 2 entries a block
    assert [b.name for b in layout.group("window_128").buffers] == ["key"]
    # as transformers computes it; a folded token's gate has a float32 bias
    computed = pools(read(DEEPSEEK_V4, block_tokens=256, index_dtype="bfloat16"))
    assert computed["indexer"] == (21, 21 * 128 * BF16 // 4)
    assert computed["state"] == (21, 21 * (waiting * 2 * BF16 + folded * (BF16 + FP32)))
    assert computed["state_2"] == (20, 20 * 127 * 512 * 2 * BF16)


def test_deepseek_v4_with_scales_inside() -> None:
    # 448 float8, 64 bfloat16, 7 exponents for 64 elements each, 1 byte of padding
    layout = read(DEEPSEEK_V4, block_tokens=128, kv_dtype="fp8_ds_mla", index_dtype="fp8")
    assert pools(layout)["window_128"] == (43, 43 * 584)
    assert pools(layout)["compressed_4"] == (21, 21 * 584 // 4)


def test_gemma_3n_layers_that_share_own_nothing() -> None:
    # 35 layers, every fifth full, the last 15 read layers 18 and 19
    layout = read(GEMMA_3N)
    assert layout.group("full").layers == (4, 9, 14, 19)
    assert len(layout.group("window_512").layers) == 16


def test_gemma_4_full_layers_have_heads_of_their_own() -> None:
    fields = config(
        "gemma4_text",
        num_hidden_layers=6,
        num_attention_heads=16,
        head_dim=256,
        global_head_dim=512,
        num_global_key_value_heads=2,
        attention_k_eq_v=True,
        sliding_window=1024,
    )
    windows, full = 5 * 2 * 8 * 256 * BF16, 2 * 2 * 512 * BF16
    assert pools(read(fields)) == {"window_1024": (5, windows), "full": (1, full)}
    ignored = {**fields, "attention_k_eq_v": False}
    assert pools(read(ignored))["full"] == (1, 2 * 8 * 512 * BF16)
    per_layer = {k: v for k, v in fields.items() if "global" not in k}
    overrides = {"05": {"head_dim": 512, "num_key_value_heads": 2}}
    assert read({**per_layer, "per_layer_config": overrides}) == read(fields)


def test_mistral_large_4_layers() -> None:
    # layer 2 reads layer 0's latents but has an indexer; layer 3 reads layer 1's and has none
    fields = config(
        "mistral_large4_text",
        num_hidden_layers=5,
        index_head_dim=128,
        no_rope_layers=[1, 0, 1, 0, 1],
        kv_source_layers=[0, 1, 0, 1, 4],
        indexer_types=["full", "shared", "full", "shared", "full"],
    )
    layout = read(fields)
    assert {g.name: (g.layers, g.bytes_per_token) for g in layout.groups} == {
        "latent": ((0, 4), 2 * 1152),
        "indexer": ((0, 2, 4), 3 * 132),
        "latent_2": ((1,), 1024),
    }


def test_nemotron_nas_blocks() -> None:
    attention = [
        {"n_heads_in_group": 8},
        {"no_op": True},
        {"n_heads_in_group": 16, "replace_with_linear": False},
        {"replace_with_linear": True},
    ]
    fields = config(
        "nemotron-nas",
        num_hidden_layers=4,
        num_attention_heads=64,
        head_dim=128,
        block_configs=[{"attention": it} for it in attention],
    )
    token = 2 * 128 * BF16
    assert pools(read(fields)) == {"full": (1, 8 * token), "full_2": (1, 4 * token)}


def test_windows_and_chunks_and_short_convolutions() -> None:
    gpt_oss = config("gpt_oss", num_hidden_layers=4, head_dim=64, sliding_window=128)
    assert read(gpt_oss).group("window_128").layers == (0, 2)
    pattern = config("gemma3_text", num_hidden_layers=6, head_dim=8, sliding_window=32)
    assert read({**pattern, "sliding_window_pattern": 3}).group("full").layers == (2, 5)
    assert read(pattern).group("full").layers == (5,)
    assert [g.name for g in read(pattern, max_tokens=32).groups] == ["full"]
    qwen = config("qwen2", num_hidden_layers=4, sliding_window=16, use_sliding_window=False)
    assert [g.name for g in read(qwen).groups] == ["full"]
    some = {**qwen, "use_sliding_window": True, "max_window_layers": 3}
    assert read(some).group("window_16").layers == (3,)
    llama4 = config(
        "llama4_text",
        num_hidden_layers=2,
        head_dim=8,
        attention_chunk_size=64,
        layer_types=["chunked_attention", "full_attention"],
    )
    assert [g.name for g in read(llama4).groups] == ["window_64", "full"]
    lfm2 = config("lfm2", num_hidden_layers=2, conv_L_cache=3, layer_types=["conv", "attention"])
    assert pools(read(lfm2))["state"] == (1, 4096 * 3 * BF16)


def test_windows_are_not_read_into_what_is_not_said() -> None:
    mistral = config("mistral", num_hidden_layers=2)
    assert [g.name for g in read({**mistral, "sliding_window": None}).groups] == ["full"]
    assert [g.name for g in read({**mistral, "sliding_window": 64}).groups] == ["window_64"]
    qwen = config("qwen2", num_hidden_layers=4, sliding_window=16, use_sliding_window=True)
    moe = {**qwen, "model_type": "qwen2_moe", "max_window_layers": 3}
    assert read(moe).group("window_16").layers == (0, 2)
    assert [g.name for g in read({**qwen, "sliding_window": None}).groups] == ["full"]
    llama4 = config("llama4_text", num_hidden_layers=8, head_dim=8, attention_chunk_size=64)
    assert read({**llama4, "no_rope_layers": []}).group("full").layers == (3, 7)
    odd = {**llama4, "no_rope_layers": [0, 1, 1, 1, 1, 1, 1, 1]}
    assert read(odd).group("full").layers == (0,)
    lfm2 = config("lfm2", num_hidden_layers=4, conv_L_cache=3, full_attn_idxs=[2])
    assert read(lfm2).group("full").layers == (2,)
    assert read(lfm2).group("state").layers == (0, 1, 3)
    last = config(
        "gemma4_text", num_hidden_layers=7, head_dim=8, global_head_dim=8, sliding_window=16
    )
    assert read(last).group("full").layers == (5, 6)


def test_heads_that_are_null_are_as_many_as_query_heads() -> None:
    fields = config("mistral", num_hidden_layers=1, head_dim=8, sliding_window=None)
    assert read({**fields, "num_key_value_heads": None}).bytes_per_token == 2 * 32 * 8 * BF16
