"""Tiny models of many types, made by transformers' own classes: no two of their sizes are the same.

3 experts of 24, 32 hidden, 4 heads, 2 key heads of 8, 48 between, 40 words; one has 12 experts, for 10 comes behind 9.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, PreTrainedModel

TEXT = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {
    "moe_intermediate_size": 24,
    "num_experts": 3,
    "num_local_experts": 3,
    "n_routed_experts": 3,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
}
LATENT = {"kv_lora_rank": 12, "q_lora_rank": 20, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 10}
VISION = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2}
PATCHES = {"image_size": 28, "patch_size": 14}
QWEN_VISION = {"embed_dim": 16, "hidden_size": 32, "depth": 2, "num_heads": 2, "mlp_ratio": 2, "patch_size": 14}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}}

DENSE: dict[str, dict[str, Any]] = {
    "bert": {**TEXT, "num_key_value_heads": None},
    "bloom": {"vocab_size": 40, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "cohere2": TEXT,
    "falcon": {
        **{k: v for k, v in TEXT.items() if k != "head_dim"},
        "new_decoder_architecture": True,
        "num_kv_heads": 2,
    },
    "gemma2": TEXT,
    "glm4": TEXT,
    "gpt2": {"vocab_size": 40, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "gpt_neox": TEXT,
    "marian": {
        "vocab_size": 40,
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "pad_token_id": 0,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "decoder_start_token_id": 1,
        "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 56,
        "max_position_embeddings": 64,
        "scale_embedding": True,
    },
    "olmo2": TEXT,
    "opt": {**TEXT, "ffn_dim": 48, "word_embed_proj_dim": 32, "max_position_embeddings": 64},
    "phi3": TEXT,
    "qwen3": TEXT,
    "smollm3": TEXT,
    "starcoder2": TEXT,
    "t5": {"vocab_size": 40, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
    "vit": {**VISION, **PATCHES},
    "whisper": {
        "vocab_size": 40,
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "num_mel_bins": 10,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "pad_token_id": 0,
        "max_source_positions": 30,
        "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 56,
        "max_target_positions": 24,
    },
}
MIXTURES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {**TEXT, **EXPERTS, **LATENT, "first_k_dense_replace": 1, "n_shared_experts": 1},
    "dots1": {**TEXT, **EXPERTS, "first_k_dense_replace": 1, "n_shared_experts": 1},
    "ernie4_5_moe": {**TEXT, **EXPERTS, "moe_num_experts": 3, "moe_k": 2, "moe_layer_start_index": 1},
    "glm4_moe": {**TEXT, **EXPERTS, "first_k_dense_replace": 1, "n_shared_experts": 1},
    "gpt_oss": {**TEXT, **EXPERTS, "intermediate_size": 24},
    "granitemoe": {**TEXT, **EXPERTS, "intermediate_size": 24},
    "hunyuan_v1_moe": {**TEXT, **EXPERTS, "num_experts": 3, "moe_topk": 2},
    "jamba": {
        **TEXT,
        **EXPERTS,
        "mamba_d_state": 6,
        "mamba_d_conv": 3,
        "mamba_dt_rank": 5,
        "use_mamba_kernels": False,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
    },
    "lfm2_moe": {**TEXT, **EXPERTS, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "llama4_text": {**TEXT, **EXPERTS, "intermediate_size": 24, "intermediate_size_mlp": 48},
    "minimax": {**TEXT, **EXPERTS, "intermediate_size": 24},
    "mixtral": {**TEXT, "intermediate_size": 24, "num_local_experts": 12, "num_experts_per_tok": 2},
    "nemotron_h": {
        **TEXT,
        **EXPERTS,
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "ssm_state_size": 6,
        "n_groups": 2,
        "moe_shared_expert_intermediate_size": 28,
        "layers_block_type": ["mamba", "moe", "attention"],
    },
    "olmoe": {**TEXT, **EXPERTS, "intermediate_size": 24},
    "phimoe": {**TEXT, **EXPERTS, "intermediate_size": 24},
    "qwen2_moe": {**TEXT, **EXPERTS, "shared_expert_intermediate_size": 28},
    "qwen3_5_moe_text": {
        **TEXT,
        **EXPERTS,
        "shared_expert_intermediate_size": 28,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 6,
        "linear_value_head_dim": 10,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "qwen3_moe": {**TEXT, **EXPERTS},
    "qwen3_next": {
        **TEXT,
        **EXPERTS,
        "shared_expert_intermediate_size": 28,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 6,
        "linear_value_head_dim": 10,
        "layer_types": ["linear_attention", "full_attention"],
    },
}
WITH_EYES: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": {**TEXT, "model_type": "gemma3_text"},
        "vision_config": {**VISION, **PATCHES, "model_type": "siglip_vision_model"},
        "mm_tokens_per_image": 4,
    },
    "llava": {
        "text_config": {**TEXT, "model_type": "llama"},
        "vision_config": {**VISION, **PATCHES, "model_type": "clip_vision_model", "projection_dim": 12},
    },
    "llava_next": {
        "text_config": {**TEXT, "model_type": "llama"},
        "vision_config": {**VISION, **PATCHES, "model_type": "clip_vision_model", "projection_dim": 12},
        "image_grid_pinpoints": [[28, 28]],
    },
    "mistral3": {
        "text_config": {**TEXT, "model_type": "mistral"},
        "vision_config": {**VISION, **PATCHES, "model_type": "pixtral", "head_dim": 8},
    },
    "mllama": {
        "text_config": {**TEXT, "model_type": "mllama_text_model", "cross_attention_layers": [1], "pad_token_id": 0},
        "vision_config": {
            **VISION,
            **PATCHES,
            "model_type": "mllama_vision_model",
            "attention_heads": 2,
            "num_global_layers": 1,
            "intermediate_layers_indices": [0],
            "vision_output_dim": 32,
            "max_num_tiles": 2,
            "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]],
        },
    },
    "paligemma": {
        "text_config": {**TEXT, "model_type": "gemma"},
        "vision_config": {**VISION, **PATCHES, "model_type": "siglip_vision_model"},
        "projection_dim": 32,
    },
    "qwen2_5_vl": {
        "text_config": {**TEXT, **ROPE, "model_type": "qwen2_5_vl_text"},
        "vision_config": {
            "hidden_size": 16,
            "out_hidden_size": 32,
            "depth": 2,
            "num_heads": 2,
            "intermediate_size": 20,
            "patch_size": 14,
            "fullatt_block_indexes": [1],
            "window_size": 56,
        },
    },
    "qwen2_vl": {"text_config": {**TEXT, **ROPE, "model_type": "qwen2_vl_text"}, "vision_config": QWEN_VISION},
    "qwen3_vl": {
        "text_config": {**TEXT, **ROPE, "model_type": "qwen3_vl_text"},
        "vision_config": {
            "hidden_size": 16,
            "out_hidden_size": 32,
            "depth": 2,
            "num_heads": 2,
            "intermediate_size": 20,
            "patch_size": 14,
            "deepstack_visual_indexes": [0],
            "num_position_embeddings": 16,
        },
    },
    "qwen3_vl_moe": {
        "text_config": {**TEXT, **EXPERTS, **ROPE, "model_type": "qwen3_vl_moe_text"},
        "vision_config": {
            "hidden_size": 16,
            "out_hidden_size": 32,
            "depth": 2,
            "num_heads": 2,
            "intermediate_size": 20,
            "patch_size": 14,
            "deepstack_visual_indexes": [0],
            "num_position_embeddings": 16,
        },
    },
}
CONFIGS = DENSE | MIXTURES | WITH_EYES
_AUTO = ("AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForSeq2SeqLM", "AutoModelForSpeechSeq2Seq")


def make_config(model_type: str) -> Any:
    """The config of a tiny model."""
    return CONFIG_MAPPING[model_type](**CONFIGS[model_type])


def make_model(model_type: str) -> PreTrainedModel:
    """A tiny model, in which no two numbers that should differ are the same."""
    config = make_config(model_type)
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = class_of(type(config))(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) / 8)
    return model


def class_of(config: Any) -> Any:
    """The class of a model with a head."""
    mappings = [getattr(transformers, name)._model_mapping for name in (*_AUTO, "AutoModelForMaskedLM", "AutoModel")]
    return next(mapping[config] for mapping in mappings if config in mapping)
