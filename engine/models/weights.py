"""From checkpoint tensors to the packed weights that the ops work on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.config import ModelConfig
from engine.models.checkpoint import Checkpoint
from engine.ops import Ops

_FFN_LEAVES = (12, 8, 6, 4, 3, 2, 1)
_LEAF_MULTIPLE = 32


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer; the Any fields are in the ops' own layout, the tensors in the ops' dtype."""

    input_norm: Tensor
    qkv: Any
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Any
    post_norm: Tensor
    gate_up: Any
    down: Any


@dataclass(frozen=True)
class DecoderWeights:
    """The whole model; see ``LayerWeights`` for the fields' layouts."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    lm_head: Any


def ffn_leaves(intermediate_size: int) -> int:
    """Leaves of the down projection's shard tree: the most of a few counts that split the FFN evenly.

    A function of the shape alone, so that every tensor-parallel size adds the same leaves. A leaf holds a multiple of
    32 inputs where the shape allows it.
    """
    for multiple in (_LEAF_MULTIPLE, 1):
        for count in _FFN_LEAVES:
            if intermediate_size % (count * multiple) == 0:
                return count
    return 1


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a checkpoint of this model holds (Hugging Face names)."""
    hidden, ffn = config.hidden_size, config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    projections = {"q_proj": config.q_size, "k_proj": config.kv_size, "v_proj": config.kv_size}
    for i in range(config.num_layers):
        layer = f"model.layers.{i}."
        shapes[layer + "input_layernorm.weight"] = (hidden,)
        shapes[layer + "post_attention_layernorm.weight"] = (hidden,)
        for name, size in projections.items():
            shapes[f"{layer}self_attn.{name}.weight"] = (size, hidden)
            if config.qkv_bias:
                shapes[f"{layer}self_attn.{name}.bias"] = (size,)
        shapes[layer + "self_attn.o_proj.weight"] = (hidden, config.q_size)
        if config.qk_norm:
            shapes[layer + "self_attn.q_norm.weight"] = (config.head_dim,)
            shapes[layer + "self_attn.k_norm.weight"] = (config.head_dim,)
        shapes[layer + "mlp.gate_proj.weight"] = (ffn, hidden)
        shapes[layer + "mlp.up_proj.weight"] = (ffn, hidden)
        shapes[layer + "mlp.down_proj.weight"] = (hidden, ffn)
    return shapes


def load_weights(config: ModelConfig, checkpoint: Checkpoint, ops: Ops) -> DecoderWeights:
    """Read every tensor once, fuse q/k/v and gate/up, and pack them for ``ops``."""

    def plain(name: str) -> Tensor:
        return checkpoint.read(name).to(ops.device, ops.dtype)

    def fused(layer: str, names: tuple[str, ...], with_bias: bool = False) -> Any:
        weight = torch.cat([checkpoint.read(f"{layer}{name}.weight") for name in names])
        bias = torch.cat([checkpoint.read(f"{layer}{name}.bias") for name in names]) if with_bias else None
        return ops.pack_linear(weight, bias)

    def layer_weights(i: int) -> LayerWeights:
        layer = f"model.layers.{i}."
        attention, mlp = layer + "self_attn.", layer + "mlp."
        return LayerWeights(
            input_norm=plain(layer + "input_layernorm.weight"),
            qkv=fused(attention, ("q_proj", "k_proj", "v_proj"), config.qkv_bias),
            q_norm=plain(attention + "q_norm.weight") if config.qk_norm else None,
            k_norm=plain(attention + "k_norm.weight") if config.qk_norm else None,
            output=ops.pack_linear(checkpoint.read(attention + "o_proj.weight"), num_leaves=config.num_kv_heads),
            post_norm=plain(layer + "post_attention_layernorm.weight"),
            gate_up=fused(mlp, ("gate_proj", "up_proj")),
            down=ops.pack_linear(
                checkpoint.read(mlp + "down_proj.weight"), num_leaves=ffn_leaves(config.intermediate_size)
            ),
        )

    head = "model.embed_tokens.weight" if config.tie_embeddings else "lm_head.weight"
    return DecoderWeights(
        embedding=plain("model.embed_tokens.weight"),
        layers=tuple(layer_weights(i) for i in range(config.num_layers)),
        final_norm=plain("model.norm.weight"),
        lm_head=ops.pack_linear(checkpoint.read(head)),
    )
