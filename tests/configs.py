"""Small configurations, with the fields that decide what is cached and no others."""

from __future__ import annotations

from typing import Any

from kvtide import Layout


def config(model_type: str, **fields: Any) -> dict[str, Any]:
    """A configuration of this type; sizes that a test does not care about are filled in."""
    sizes = {"num_attention_heads": 32, "hidden_size": 4096}
    heads = {"num_key_value_heads": 8}
    latents = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128}
    return {"model_type": model_type, **sizes, **(latents if _is_latent(model_type) else heads)} | (
        fields
    )


def _is_latent(model_type: str) -> bool:
    return model_type.startswith(
        ("deepseek_v2", "deepseek_v3", "glm_moe_dsa", "kimi", "mistral4", "mistral_large4")
    )


GLM_5 = config("glm_moe_dsa", num_hidden_layers=78, num_attention_heads=64)
QWEN3_NEXT = config(
    "qwen3_next",
    num_hidden_layers=48,
    num_attention_heads=16,
    num_key_value_heads=2,
    head_dim=256,
    full_attention_interval=4,
    linear_num_key_heads=16,
    linear_num_value_heads=32,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    linear_conv_kernel_dim=4,
)
GEMMA_3N = config(
    "gemma3n_text",
    num_hidden_layers=35,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=256,
    sliding_window=512,
    num_kv_shared_layers=15,
)
DEEPSEEK_V4 = config(
    "deepseek_v4",
    num_hidden_layers=43,
    num_attention_heads=64,
    head_dim=512,
    index_head_dim=128,
    sliding_window=128,
    compress_ratios=[0, 0, *(20 * [4, 128]), 4, 0],
    num_nextn_predict_layers=1,
    qk_rope_head_dim=64,
)
GLM_53 = config(
    "glm5_next_text",
    num_hidden_layers=4,
    kv_lora_rank=512,
    qk_rope_head_dim=0,
    index_head_dim=128,
    index_kpool=4,
    layer_types=[*(3 * ["linear_attention"]), "indexed_attention"],
    linear_num_heads=64,
    linear_head_dim=128,
    linear_conv_kernel_dim=4,
)


def read(fields: dict[str, Any], **options: Any) -> Layout:
    return Layout.from_config(fields, **{"block_tokens": 64, "kv_dtype": "bfloat16", **options})


def pools(layout: Layout) -> dict[str, tuple[int, float | None]]:
    """Layers and bytes (per token, or of a state) of every group."""
    return {
        g.name: (len(g.layers), g.bytes_per_state if g.is_state else g.bytes_per_token)
        for g in layout.groups
    }
