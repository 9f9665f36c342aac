"""Layouts read from configurations: drafters, ranks, and where configurations come from."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from tests.configs import GLM_5, GLM_53, QWEN3_NEXT, config, pools, read

from kvtide import Layout, Parallel, Speculative

if TYPE_CHECKING:
    from pathlib import Path

FP32, BF16, FP8 = 4, 2, 1


def test_drafters() -> None:
    own = read({**GLM_5, "num_nextn_predict_layers": 1}, speculative=Speculative(tokens=3))
    assert pools(own) == {
        "latent": (78, 78 * 1152),
        "indexer": (78, 78 * 132),
        "mirror": (1, 1152),
        "mirror_indexer": (1, 132),
    }
    assert own.group("mirror").layers == (78,)
    assert own.group("mirror").lifetime.look_ahead == 3  # type: ignore[union-attr]
    small = config("llama", num_hidden_layers=2, head_dim=64, num_key_value_heads=2)
    apart = read(GLM_5, speculative=Speculative(tokens=2, draft=small))
    assert pools(apart)["mirror"] == (2, 2 * 2 * 2 * 64 * BF16)
    # a format for latents is none for the drafter's heads
    squeezed = read(GLM_5, kv_dtype="fp8_ds_mla", speculative=Speculative(tokens=2, draft=small))
    assert pools(squeezed)["mirror"] == (2, 2 * 2 * 2 * 64 * FP8)


def test_drafting_layers_by_pattern() -> None:
    fields = config(
        "nemotron_h", hybrid_override_pattern="*-", head_dim=8, num_nextn_predict_layers=2
    )
    token = 2 * 8 * 8 * BF16
    for pattern, layers in (("*E", 2), ("*E*-", 4)):
        given = {**fields, "mtp_hybrid_override_pattern": pattern}
        assert pools(read(given, speculative=Speculative(tokens=1)))["mirror"] == (
            layers,
            layers * token,
        )


def test_glm_53_drafts_with_pooled_index_keys() -> None:
    fields = {**GLM_53, "num_nextn_predict_layers": 1}
    layout = read(fields, speculative=Speculative(tokens=3))
    assert pools(layout)["mirror"] == (1, 512 * BF16)
    assert pools(layout)["mirror_indexer"] == (1, 132 / 4)


def test_one_rank_of_many() -> None:
    heads = config("qwen3", num_hidden_layers=6, num_key_value_heads=4, head_dim=128)
    whole = read(heads).bytes_per_token
    assert read(heads, parallel=Parallel(tensor=4)).bytes_per_token == whole / 4
    # 8 ranks, 4 heads: each on two ranks
    assert read(heads, parallel=Parallel(tensor=8)).bytes_per_token == whole / 4
    stages = [
        read(heads, parallel=Parallel(pipeline=4, stage=stage)).group("full").layers
        for stage in range(4)
    ]
    assert stages == [(0, 1), (2, 3), (4,), (5,)]
    uneven = Parallel(pipeline=2, stages=(5, 1), stage=1)
    assert read(heads, parallel=uneven).group("full").layers == (5,)
    shared = read(heads, parallel=Parallel(context=4))
    assert shared.bytes_per_token == whole / 4
    assert shared.group("full").page_bytes == read(heads).group("full").page_bytes / 4
    assert read(heads, parallel=Parallel(attention_data=8)) == read(heads)
    # latents and index keys are read by every head
    assert read(GLM_5, parallel=Parallel(tensor=8)).bytes_per_token == 100_152
    half = read(QWEN3_NEXT, parallel=Parallel(tensor=2))
    assert half.bytes_per_state == read(QWEN3_NEXT).bytes_per_state / 2


def test_drafters_are_on_the_last_stage() -> None:
    fields = {**GLM_5, "num_nextn_predict_layers": 1}
    for stage, has_mirror in ((0, False), (1, True)):
        layout = read(
            fields,
            parallel=Parallel(pipeline=2, stage=stage),
            speculative=Speculative(tokens=1),
        )
        assert ("mirror" in pools(layout)) is has_mirror


def test_composite_configurations_are_read_for_their_text(tmp_path: Path) -> None:
    text = {**config("qwen3_vl_text", num_hidden_layers=3, head_dim=128), "dtype": "bfloat16"}
    whole = {"model_type": "qwen3_vl", "text_config": text, "vision_config": {"depth": 9}}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(whole))
    inner = Layout.from_config(text, block_tokens=16)
    assert Layout.from_config(whole, block_tokens=16) == inner
    assert Layout.from_config(file, block_tokens=16) == inner
    assert Layout.from_config(str(tmp_path), block_tokens=16) == inner


def test_deepseeks_own_names() -> None:
    native = {
        "n_layers": 61,
        "n_heads": 128,
        "dim": 7168,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "index_head_dim": 128,
        "dtype": "fp8",
    }
    assert read(native) == read(config("deepseek_v32", num_hidden_layers=61))
