"""Tiny configurations of the models that keep keys and values, full or in windows."""

from __future__ import annotations

from typing import Any

GROUPED: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 16}
EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 32,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
}
GEMMA: dict[str, Any] = {**GROUPED, "sliding_window": 16, "query_pre_attn_scalar": 16}
# One layer of each type, then layers that read the keys and values of the last of their type.
SHARING: dict[str, Any] = {
    **GROUPED,
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 3,
    "sliding_window": 16,
    "vocab_size_per_layer_input": 256,
    "hidden_size_per_layer_input": 8,
}

# Windows of 16 are outgrown by every test.
ATTENTION: dict[str, dict[str, Any]] = {
    "gemma": {**GROUPED, "num_hidden_layers": 2},
    "gemma2": {**GEMMA, "num_hidden_layers": 2},
    "gemma3_text": {**GEMMA, "num_hidden_layers": 6},
    "gemma3n_text": {
        **SHARING,
        "laurel_rank": 8,
        "intermediate_size": 96,
        "activation_sparsity_pattern": [0.5] + [0.0] * 5,
    },
    "gemma4_text": {**SHARING, "global_head_dim": 32},
    "gemma4_unified_text": {
        **GROUPED,
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 16,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
    },
    "glm": {**GROUPED, "num_hidden_layers": 2},
    "glm4": {**GROUPED, "num_hidden_layers": 2},
    "glm4_moe": {
        **GROUPED,
        **EXPERTS,
        "num_hidden_layers": 2,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
    },
    "gpt_oss": {
        **GROUPED,
        "num_hidden_layers": 4,
        "sliding_window": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    },
    "minimax_m2": {**GROUPED, "num_hidden_layers": 2, "num_local_experts": 8, "rotary_dim": 8},
    "ministral": {**GROUPED, "num_hidden_layers": 2, "sliding_window": 16},
    "ministral3": {**GROUPED, "num_hidden_layers": 2, "sliding_window": 16},
    "mistral": {**GROUPED, "num_hidden_layers": 2, "sliding_window": 16},
    "mixtral": {
        **GROUPED,
        "num_hidden_layers": 2,
        "sliding_window": None,
        "num_local_experts": 8,
    },
    "nemotron": {**GROUPED, "num_hidden_layers": 2},
    "qwen2": {**GROUPED, "num_hidden_layers": 2},
    "qwen2_moe": {
        **GROUPED,
        **EXPERTS,
        "num_hidden_layers": 2,
        "num_experts": 8,
        "shared_expert_intermediate_size": 32,
    },
    "qwen3": {**GROUPED, "num_hidden_layers": 3},
    "qwen3_moe": {**GROUPED, **EXPERTS, "num_hidden_layers": 2, "num_experts": 8},
    "vaultgemma": {**GEMMA, "num_hidden_layers": 2},
}
