"""Named model shapes for seeded random weights: Hugging Face configs without a download."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

_LLAMA: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "dtype": "bfloat16",
}
_QWEN2: Mapping[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "use_sliding_window": False,
    "dtype": "bfloat16",
}
_QWEN3: Mapping[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "attention_bias": False,
    "use_sliding_window": False,
    "dtype": "bfloat16",
}
_TINY: Mapping[str, Any] = {
    "vocab_size": 512,
    "num_hidden_layers": 2,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "float32",
}
_TINY_LLAMA: Mapping[str, Any] = {
    **_LLAMA,
    **_TINY,
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}

_LLAMA_8B: Mapping[str, Any] = {
    **_LLAMA,
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": False,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
}

_SHAPES: Mapping[str, Mapping[str, Any]] = {
    "tiny": _TINY_LLAMA,
    "tiny-vocab": {**_TINY_LLAMA, "vocab_size": 5000},  # more than one vocabulary chunk
    "tiny-llama3-rope": {
        **_TINY_LLAMA,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 256,
        },
    },
    "tiny-qwen2": {
        **_QWEN2,
        **_TINY,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    },
    "tiny-qwen3": {
        **_QWEN3,
        **_TINY,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    },
    "smollm2-135m": {
        **_LLAMA,
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "qwen3-0.6b": {
        **_QWEN3,
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
    },
    "llama-3.1-8b": _LLAMA_8B,
    "llama-3.1-8b-4-layers": {**_LLAMA_8B, "num_hidden_layers": 4},  # its steps, in a quarter of a minute's weights
}

SHAPE_NAMES = tuple(_SHAPES)


def shape_config(shape: str) -> dict[str, Any]:
    """The Hugging Face config of a named shape, a fresh copy at each call.

    Raises:
        KeyError: ``shape`` is not one of ``SHAPE_NAMES``.
    """
    return copy.deepcopy(dict(_SHAPES[shape]))
