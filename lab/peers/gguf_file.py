"""A Hugging Face folder of the Llama architecture as one GGUF file in a 16- or 32-bit type: the peers' same weights.

The inverse of ``engine.models.gguf_import``. There is no tokenizer in it: peers are given token ids.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors.torch import load_file

from engine.config import ModelConfig
from engine.models.hub import ModelSource, cache_root

_TENSORS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_TYPES = {
    "bfloat16": (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    "float32": (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
}


def write_gguf(folder: Path, path: Path, dtype: str) -> None:
    """Write the folder's weights, rounded to ``dtype``, to ``path``.

    Norms are stored as float32, which ggml asks for, once rounded to ``dtype`` like all others.

    Raises:
        ValueError: The model is no Llama, scales its rotary frequencies, or ``dtype`` is neither bfloat16 nor float32.
    """
    found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if found["architectures"] != ["LlamaForCausalLM"] or dtype not in _TYPES:
        raise ValueError(f"{found['architectures']} in {dtype}: only LlamaForCausalLM in {', '.join(_TYPES)}")
    quantisation, file_type = _TYPES[dtype]
    config = ModelConfig.from_hf(found, folder.name)
    if config.rope_scaling is not None:
        raise ValueError(f"{folder.name} scales its rotary frequencies, which this writer does not put into GGUF")
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_file_type(file_type)
    writer.add_context_length(config.max_position)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    for file in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            rounded = tensor.to(getattr(torch, dtype)).float().numpy()
            count = config.num_heads if ".q_proj." in name else config.num_kv_heads if ".k_proj." in name else 0
            values = _interleave_rope(rounded, count) if count else rounded
            if values.ndim == 1:
                writer.add_tensor(_gguf_name(name), values)
            else:
                writer.add_tensor(_gguf_name(name), gguf.quantize(values, quantisation), raw_dtype=quantisation)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def cached_gguf(source: ModelSource, dtype: str) -> Path:
    """The model as a GGUF file in the user's cache, written there the first time.

    Raises:
        ValueError: As for ``write_gguf``, or the model has no folder.
    """
    if source.folder is None:
        raise ValueError(f"{source.name} has random weights and no folder to convert")
    path = cache_root() / "gguf" / f"{source.fingerprint}-{dtype}.gguf"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        write_gguf(source.folder, partial, dtype)
        partial.replace(path)
    return path


def _gguf_name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if layer := re.fullmatch(r"model\.layers\.(\d+)\.(.+)", stem):
        return f"blk.{layer[1]}.{_TENSORS[layer[2]]}.weight"
    return f"{_TENSORS[stem]}.weight"


def _interleave_rope(weight: np.ndarray, heads: int) -> np.ndarray:
    """[heads x head_dim, hidden]: the two rotary halves of each head, element by element in turn."""
    halves = weight.reshape(heads, 2, -1, weight.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weight.shape)
