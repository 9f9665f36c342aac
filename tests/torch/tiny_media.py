"""Tiny configurations of the classes that wrap a text model with encoders of other media.

They are used without media: what their text models cache is the same with and without.
"""

from __future__ import annotations

from typing import Any

from tests.torch.tiny_attention import EXPERTS, GROUPED
from tests.torch.tiny_latent import LATENT, LATENTS
from tests.torch.tiny_state import STATES

PATCHES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
EARS: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
DEEP: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "out_hidden_size": 64,
    "num_heads": 2,
}
TEXT: dict[str, Any] = {**GROUPED, "num_hidden_layers": 2}
SECTIONS: dict[str, Any] = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "mrope_section": [2, 3, 3],
    }
}
HALF: dict[str, Any] = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "mrope_section": [1, 1, 2],
        "partial_rotary_factor": 0.5,
    }
}
SPARSE: dict[str, Any] = {**EXPERTS, "num_experts": 8, "decoder_sparse_step": 1}
WINDOWED: dict[str, Any] = {
    **TEXT,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 16,
}
MEDIA: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_ocr2": (
        "DeepseekOcr2ForConditionalGeneration",
        {
            "text_config": {
                **TEXT,
                **EXPERTS,
                "n_routed_experts": 8,
                "n_group": None,
                "topk_group": None,
                "mlp_layer_types": ["dense", "sparse"],
            },
            "vision_config": {
                "sam_config": {
                    **PATCHES,
                    "output_channels": 8,
                    "mlp_dim": 32,
                    "global_attn_indexes": [0],
                    "downsample_channels": [8, 8],
                },
                "encoder_config": {**EARS, "vocab_size": 8, "num_key_value_heads": 2},
            },
        },
    ),
    "deepseek_vl": (
        "DeepseekVLForConditionalGeneration",
        {"text_config": {"model_type": "llama", **TEXT}, "vision_config": PATCHES},
    ),
    "deepseek_vl_hybrid": (
        "DeepseekVLHybridForConditionalGeneration",
        {
            "text_config": {"model_type": "llama", **TEXT},
            "vision_config": PATCHES,
            "high_res_vision_config": {
                **PATCHES,
                "output_channels": 8,
                "mlp_dim": 32,
                "global_attn_indexes": [0],
            },
        },
    ),
    "gemma3": (
        "Gemma3ForConditionalGeneration",
        {
            "text_config": {**WINDOWED, "query_pre_attn_scalar": 16},
            "vision_config": {"model_type": "siglip_vision_model", **PATCHES},
        },
    ),
    "gemma4": (
        "Gemma4ForConditionalGeneration",
        {
            "text_config": {**WINDOWED, "hidden_size_per_layer_input": 0, "pad_token_id": 0},
            "vision_config": PATCHES,
        },
    ),
    "gemma4_unified": (
        "Gemma4UnifiedForConditionalGeneration",
        {
            "text_config": {**WINDOWED, "pad_token_id": 0},
            "vision_config": {
                "patch_size": 2,
                "pooling_kernel_size": 2,
                "mm_embed_dim": 8,
                "mm_posemb_size": 8,
                "output_proj_dims": 8,
            },
        },
    ),
    "glm4v": (
        "Glm4vForConditionalGeneration",
        {"text_config": TEXT | HALF, "vision_config": DEEP},
    ),
    "glm4v_moe": (
        "Glm4vMoeForConditionalGeneration",
        {
            "text_config": TEXT | EXPERTS | HALF | {"n_routed_experts": 8},
            "vision_config": DEEP,
        },
    ),
    "glm46v": (
        "Glm46VForConditionalGeneration",
        {
            "text_config": {"model_type": "glm4v_text", **TEXT, **HALF},
            "vision_config": {"model_type": "glm4v_vision", **DEEP},
        },
    ),
    "glm_ocr": (
        "GlmOcrForConditionalGeneration",
        {"text_config": TEXT | SECTIONS, "vision_config": DEEP},
    ),
    "glmga": (
        "Glm46VForConditionalGeneration",
        {
            "text_config": {"model_type": "glm4v_text", **TEXT, **HALF},
            "vision_config": {"model_type": "glm4v_vision", **DEEP},
        },
    ),
    "kimi_k25": (
        "Kimi_K25ForConditionalGeneration",
        {"text_config": {"model_type": "deepseek_v3", **LATENT}, "vision_config": DEEP},
    ),
    "minimax_m3_vl": (
        "MiniMaxM3SparseForConditionalGeneration",
        {
            "text_config": LATENTS["minimax_m3_vl_text"],
            "vision_config": PATCHES,
            "projector_hidden_size": 32,
        },
    ),
    "mistral3": (
        "Mistral3ForConditionalGeneration",
        {
            "text_config": {"model_type": "mistral", **TEXT, "sliding_window": 16},
            "vision_config": {"model_type": "pixtral", **PATCHES, "head_dim": 16},
        },
    ),
    "nemotron_h_omni": (
        "NemotronH_Omni_Reasoning_V3",
        {
            "text_config": {"model_type": "nemotron_h", **STATES["nemotron_h"]},
            "projector_hidden_size": 32,
            "vision_hidden_size": 32,
            "vision_config": {"model_type": "radio", **PATCHES, "video_temporal_patch_size": 2},
            "audio_config": EARS
            | {"projection_hidden_size": 32, "projection_bias": False, "sampling_rate": 16_000},
        },
    ),
    "qwen2_5_omni_thinker": (
        "Qwen2_5OmniThinkerForConditionalGeneration",
        {
            "text_config": TEXT | SECTIONS,
            "vision_config": DEEP,
            "audio_config": {"d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2},
            "vision_start_token_id": 300,  # else only its talker's configuration has it
        },
    ),
    "qwen3_omni_moe_thinker": (
        "Qwen3OmniMoeThinkerForConditionalGeneration",
        {
            "text_config": TEXT | SPARSE | SECTIONS,
            "vision_config": DEEP,
            "audio_config": {"d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2},
            "vision_start_token_id": 300,  # else only its talker's configuration has it
        },
    ),
    "qwen2_vl": (
        "Qwen2VLForConditionalGeneration",
        {"text_config": TEXT | SECTIONS, "vision_config": {"depth": 1, "embed_dim": 32}},
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VLForConditionalGeneration",
        {"text_config": TEXT | SECTIONS, "vision_config": DEEP},
    ),
    "qwen3_vl": (
        "Qwen3VLForConditionalGeneration",
        {"text_config": TEXT | SECTIONS, "vision_config": DEEP},
    ),
    "qwen3_vl_moe": (
        "Qwen3VLMoeForConditionalGeneration",
        {"text_config": TEXT | SPARSE | SECTIONS, "vision_config": DEEP},
    ),
    "qwen3_5": (
        "Qwen3_5ForConditionalGeneration",
        {"text_config": STATES["qwen3_5_text"], "vision_config": DEEP},
    ),
    "qwen3_5_moe": (
        "Qwen3_5MoeForConditionalGeneration",
        {"text_config": STATES["qwen3_5_moe_text"], "vision_config": DEEP},
    ),
    "qwen4_exp": (
        "Qwen4ExpForConditionalGeneration",
        {"text_config": STATES["qwen4_exp_text"], "vision_config": DEEP},
    ),
    "qwen2_audio": (
        "Qwen2AudioForConditionalGeneration",
        {"text_config": {"model_type": "qwen2", **TEXT}, "audio_config": EARS},
    ),
    "qwen3_asr": (
        "Qwen3ASRForConditionalGeneration",
        {"text_config": {"model_type": "qwen3", **TEXT}, "audio_config": EARS},
    ),
    "voxtral": (
        "VoxtralForConditionalGeneration",
        {"text_config": {"model_type": "llama", **TEXT}, "audio_config": EARS},
    ),
    "glmasr": (
        "GlmAsrForConditionalGeneration",
        {"text_config": {"model_type": "llama", **TEXT}, "audio_config": EARS},
    ),
}
