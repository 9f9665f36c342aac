"""Tiny configurations of the models with recurrent states."""

from __future__ import annotations

from typing import Any

from tests.torch.tiny_attention import EXPERTS, GROUPED
from tests.torch.tiny_latent import INDEXED, LATENT

DELTA_NET: dict[str, Any] = {
    **GROUPED,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
DELTA_EXPERTS: dict[str, Any] = {
    **DELTA_NET,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 32,
}
KIMI: dict[str, Any] = {
    "linear_head_dim": 16,
    "linear_num_heads": 4,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "num_hidden_layers": 3,
}

STATES: dict[str, dict[str, Any]] = {
    "glm5_next": {
        "text_config": {
            **INDEXED,
            **KIMI,
            "layer_types": ["linear_attention", "indexed_attention", "indexed_attention"],
            "indexer_types": ["full", "full", "shared"],
            "qk_rope_head_dim": 0,
            "index_kpool": 4,
            "index_topk": 8,
            "hc_mult": 2,
            "hc_sinkhorn_iters": 4,
        },
        "vision_config": {
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 32,
            "out_hidden_size": 64,
            "projection_intermediate_size": 32,
            "num_heads": 2,
        },
    },
    "kimi_linear": {
        **LATENT,
        **KIMI,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
    "minimax": {
        **GROUPED,
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "block_size": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "nemotron_h": {
        **GROUPED,
        **EXPERTS,
        "layers_block_type": ["mamba", "moe", "attention", "mamba", "moe", "attention"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 2,
        "n_routed_experts": 8,
        "moe_shared_expert_intermediate_size": 32,
        "moe_latent_size": None,
    },
    "qwen3_next": DELTA_EXPERTS,
    "qwen3_5_text": DELTA_NET,
    "qwen3_5_moe_text": DELTA_EXPERTS,
    "qwen4_exp_text": {
        **DELTA_EXPERTS,
        "layer_types": [
            "linear_attention",
            "linear_attention",
            "indexed_attention",
            "indexed_attention",
        ],
        "ple_layer_ids": [2],  # counted from one
        "eos_token_id": 2,  # bounds the n-grams; no prompt has it
        "ple_embed_dim": 32,
        "ngram_size": 3,
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 500,
        "make_ngram_vocab_size_divisible_by": 8,
        "split_ngram_parts": 4,
        "hc_count": 2,
        "hc_lowrank": 16,
        "indexer_n_heads": 8,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
}
