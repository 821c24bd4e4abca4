"""One GGUF file (Llama architecture, GPT-2 style tokenizer) to a Hugging Face folder, with nothing lost on the way.

GGUF is specified in ggml's ``docs/gguf.md``. Quantised blocks are dequantised to float32, the type in which ggml
defines them: 16-bit types cannot hold the product of a 4-bit value and a float16 scale plus a float16 offset.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, TokenType, dequantize
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tqdm import tqdm

_TOP_LEVEL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_PER_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GGUFError(ValueError):
    """A GGUF file that this importer cannot turn into a Hugging Face folder."""


def convert_gguf(gguf_file: Path, folder: Path) -> None:
    """Write ``config.json``, ``generation_config.json``, ``model.safetensors`` (float32) and the tokenizer.

    Args:
        gguf_file: The file to read.
        folder: An existing folder to write into.

    Raises:
        GGUFError: Not a GGUF file, or one of another architecture or tokenizer, or with unknown tensors.
    """
    try:
        reader = GGUFReader(gguf_file)
    except (ValueError, IndexError) as error:
        raise GGUFError(f"{gguf_file.name} is not a readable GGUF file ({error}); fetch it again") from error
    metadata = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    for key, supported in (
        ("general.architecture", "llama"),
        ("tokenizer.ggml.model", "gpt2"),
        ("tokenizer.ggml.pre", "smollm"),
    ):
        if metadata.get(key) != supported:
            raise GGUFError(f"{gguf_file.name}: {key}={metadata.get(key)!r} is not supported; only {supported!r} is")
    config = _config(metadata, tied=all(tensor.name != "output.weight" for tensor in reader.tensors))
    weights: dict[str, NDArray[np.float32]] = {}
    for tensor in tqdm(reader.tensors, desc=f"converting {gguf_file.name}", unit="tensor", mininterval=1):
        values = np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        if re.fullmatch(r"blk\.\d+\.attn_[qk]\.weight", tensor.name):
            key = "num_attention_heads" if ".attn_q." in tensor.name else "num_key_value_heads"
            values = _undo_rope_interleaving(values, config[key])
        weights[_hf_name(tensor.name)] = values
    ids = {name: metadata[f"tokenizer.ggml.{name}"] for name in ("bos_token_id", "eos_token_id")}
    ids["pad_token_id"] = metadata.get("tokenizer.ggml.padding_token_id", ids["eos_token_id"])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # written for the owner alone, but a cache may be shared
    _write_json(folder / "config.json", config | ids)
    _write_json(folder / "generation_config.json", ids)
    _write_tokenizer(metadata, ids, folder)


def _config(metadata: dict[str, Any], tied: bool) -> dict[str, Any]:
    def single(key: str) -> float:
        """GGUF holds float32; the shortest decimal that means the same float32 is what the model's authors wrote."""
        return float(str(np.float32(metadata[key])))

    heads = metadata["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "hidden_size": metadata["llama.embedding_length"],
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.get("llama.attention.head_count_kv", heads),
        "head_dim": metadata.get("llama.attention.key_length", metadata["llama.embedding_length"] // heads),
        "max_position_embeddings": metadata["llama.context_length"],
        "rms_norm_eps": single("llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": single("llama.rope.freq_base"),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "dtype": "float32",
    }


def _hf_name(gguf_name: str) -> str:
    parts = gguf_name.split(".")
    match parts:
        case ["blk", layer, kind, "weight"] if kind in _PER_LAYER:
            return f"model.layers.{layer}.{_PER_LAYER[kind]}.weight"
        case [kind, "weight"] if kind in _TOP_LEVEL:
            return f"{_TOP_LEVEL[kind]}.weight"
    raise GGUFError(f"tensor {gguf_name!r} has no place in a Llama decoder without biases; use another file")


def _undo_rope_interleaving(weight: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """[heads x head_dim, hidden]: GGUF interleaves each head's rotary halves, Hugging Face has one after the other."""
    pairs = weight.reshape(num_heads, -1, 2, weight.shape[1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(weight.shape)


def _write_tokenizer(metadata: dict[str, Any], ids: dict[str, int], folder: Path) -> None:
    """Byte-level BPE as in GPT-2, with each digit a word of its own (llama.cpp's pre-tokenizer ``smollm``)."""
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == TokenType.CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **{name.removesuffix("_id"): tokens[token_id] for name, token_id in ids.items()},
            "additional_special_tokens": special,
            "chat_template": metadata["tokenizer.chat_template"],
            "clean_up_tokenization_spaces": False,
            "model_max_length": metadata["llama.context_length"],
        },
    )


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
