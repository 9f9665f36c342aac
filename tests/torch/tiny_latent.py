"""Tiny configurations of the models with latents, indexers or folded entries."""

from __future__ import annotations

from typing import Any

from tests.torch.tiny_attention import EXPERTS, GROUPED

LATENT: dict[str, Any] = {
    **EXPERTS,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
# Many heads: with few, ReLU makes many index scores exactly 0, and which of equal scores is among
# the top 16 depends on the padding.
INDEXED: dict[str, Any] = {
    **LATENT,
    "num_hidden_layers": 3,
    "index_n_heads": 16,
    "index_head_dim": 16,
    "index_topk": 16,
}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}

LATENTS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {**LATENT, "topk_method": "greedy", "routed_scaling_factor": 1.0},
    "deepseek_v3": LATENT,
    "deepseek_v32": INDEXED,
    "deepseek_v4": {
        "num_key_value_heads": 1,
        "num_hidden_layers": 4,
        "head_dim": 16,
        "q_lora_rank": 32,
        "qk_rope_head_dim": 8,
        "o_groups": 2,
        "o_lora_rank": 16,
        "layer_types": [
            "sliding_attention",
            "compressed_sparse_attention",
            "heavily_compressed_attention",
            "compressed_sparse_attention",
        ],
        "compress_rates": {
            "compressed_sparse_attention": 4,
            "heavily_compressed_attention": 8,
        },
        "num_hash_layers": 1,
        "sliding_window": 16,
        "index_n_heads": 16,
        "index_head_dim": 16,
        "index_topk": 4,
        "moe_intermediate_size": 32,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "hc_mult": 2,
        "hc_sinkhorn_iters": 4,
    },
    "glm4_moe_lite": LATENT,
    "glm_moe_dsa": {**INDEXED, "indexer_types": ["full", "full", "shared"]},
    "minimax_m3_vl_text": {
        **GROUPED,
        "num_hidden_layers": 3,
        "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "dense_intermediate_size": 96,
        "shared_intermediate_size": 32,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rotary_dim": 8,
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_block_size": 4,
        "index_topk_blocks": 4,
        "index_local_blocks": 1,
    },
    "mistral4": {**LATENT, "head_dim": 24},
    "mistral_large4": {
        "text_config": {
            **INDEXED,
            "num_hidden_layers": 5,
            "index_topk_pattern": "FSFFF",
            "no_rope_layers": [1, 1, 1, 0, 0],
            "kv_source_layers": [0, 1, 0, 3, 3],
        },
        "vision_config": {"model_type": "pixtral", **VISION, "head_dim": 16},
    },
}
