"""The decoder against Hugging Face, for every supported architecture and feature of its config, on random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from engine import LLM, ConfigError, SamplingParams
from engine.config import ModelConfig
from engine.models.hub import resolve_model

COMMON: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 96,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
    "initializer_range": 0.2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaForCausalLM, LlamaConfig(**COMMON, tie_word_embeddings=True)),
    "llama untied": (LlamaForCausalLM, LlamaConfig(**COMMON, tie_word_embeddings=False, rms_norm_eps=1e-5)),
    "llama 3 rope": (LlamaForCausalLM, LlamaConfig(**COMMON, rope_parameters=LLAMA3_ROPE)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**COMMON)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**COMMON, head_dim=32, tie_word_embeddings=True)),
}


@pytest.mark.parametrize("ops", ["reference", "cpu"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_hugging_face(name: str, ops: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    cls, config = MODELS[name]
    model = cls(config).eval()
    for parameter in model.parameters():  # norms and biases start at 1 and 0, where a mistake would not show
        parameter.data += torch.randn_like(parameter) * 0.05
    model.save_pretrained(tmp_path)
    prompt = torch.randint(3, 300, (90,)).tolist()
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0]
    llm = LLM(str(tmp_path), dtype="float32", ops=ops, num_kv_blocks=40)
    for length in (1, 15, 16, 17, 90):
        logits = llm.next_token_logits(prompt[:length])
        assert torch.allclose(logits, expected[length - 1], atol=2e-4, rtol=1e-4), (name, length)
    # Decode steps give what a prefill gives: the tokens follow from the logits just checked.
    output = llm.generate([prompt[:20]], SamplingParams(max_tokens=6, ignore_eos=True), use_tqdm=False)[0]
    for i, token in enumerate(output.token_ids):
        assert int(llm.next_token_logits([*prompt[:20], *output.token_ids[:i]]).argmax()) == token


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, r"'GPT2LMHeadModel' is not supported; supported: LlamaForCausalLM"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2}}, r"RoPE type 'yarn' is not supported; supported"),
        ({"hidden_act": "gelu"}, r"hidden_act='gelu' is not supported"),
        ({"num_attention_heads": 5}, r"num_attention_heads=5 is not a multiple of num_key_value_heads=3"),
        ({"hidden_size": None}, r"no 'hidden_size'"),
        ({"attention_bias": True}, r"attention_bias=True is not supported"),
        ({"use_sliding_window": True}, r"use_sliding_window=True is not supported"),
    ],
)
def test_unsupported_models_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    hf = dict(resolve_model("random:tiny").hf_config) | change
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_hf(hf, "model")
