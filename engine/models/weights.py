"""From checkpoint tensors to the packed weights that the ops work on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from engine.config import ModelConfig
from engine.models.checkpoint import Checkpoint
from engine.ops import Ops
from engine.ops.tree import SplitSum

if TYPE_CHECKING:
    from engine.execution.parallel import Shard


@dataclass(frozen=True)
class RowParallel:
    """What one rank holds of a weight whose inputs are split: one packed weight for each subtree of the sum.

    Attributes:
        columns: The rank's own inputs that each part multiplies, as ranges.
        parts: Packed weights, in the ops' own layout.
        total: The whole sum.
    """

    columns: tuple[tuple[int, int], ...]
    parts: tuple[Any, ...]
    total: SplitSum


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer; the Any fields are in the ops' own layout, the tensors in the ops' dtype."""

    input_norm: Tensor
    qkv: Any
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: RowParallel
    post_norm: Tensor
    gate_up: Any
    down: RowParallel


@dataclass(frozen=True)
class DecoderWeights:
    """The whole model; see ``LayerWeights`` for the fields' layouts. No ``lm_head`` where a rank has no vocabulary."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    lm_head: Any


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


def load_weights(config: ModelConfig, checkpoint: Checkpoint, ops: Ops, shard: Shard) -> DecoderWeights:
    """Read every tensor once, take the shard's part, fuse q/k/v and gate/up, and pack them for ``ops``.

    Embedding and norms are whole on every rank. Rows are split for q, k and v (by KV head), gate and up (by leaf of the
    FFN) and the head (by vocabulary chunk); columns for the output and down projections, as their sums are.
    """
    kv_heads, leaves, vocab = (split[shard.rank] for split in (shard.attention.runs, shard.mlp.runs, shard.vocab))
    ffn_width = config.intermediate_size // shard.mlp.num_leaves
    kv_rows = slice(kv_heads.start * config.head_dim, kv_heads.stop * config.head_dim)
    q_rows = slice(kv_rows.start * config.group_size, kv_rows.stop * config.group_size)
    ffn_rows = slice(leaves.start * ffn_width, leaves.stop * ffn_width)

    def plain(name: str) -> Tensor:
        return checkpoint.read(name).to(ops.device, ops.dtype)

    def fused(layer: str, rows: Mapping[str, slice], with_bias: bool = False) -> Any:
        weight = torch.cat([checkpoint.read(f"{layer}{name}.weight")[part] for name, part in rows.items()])
        biases = [checkpoint.read(f"{layer}{name}.bias")[part] for name, part in rows.items() if with_bias]
        return ops.pack_linear(weight, torch.cat(biases) if biases else None)

    def row_parallel(name: str, total: SplitSum) -> RowParallel:
        weight = checkpoint.read(name)
        width, held = weight.shape[1] // total.num_leaves, total.held[shard.rank]
        first = held[0][0]
        return RowParallel(
            columns=tuple(((low - first) * width, (high - first) * width) for low, high in held),
            parts=tuple(ops.pack_linear(weight[:, low * width : high * width], None, high - low) for low, high in held),
            total=total,
        )

    def layer_weights(i: int) -> LayerWeights:
        layer = f"model.layers.{i}."
        attention, mlp = layer + "self_attn.", layer + "mlp."
        return LayerWeights(
            input_norm=plain(layer + "input_layernorm.weight"),
            qkv=fused(attention, {"q_proj": q_rows, "k_proj": kv_rows, "v_proj": kv_rows}, config.qkv_bias),
            q_norm=plain(attention + "q_norm.weight") if config.qk_norm else None,
            k_norm=plain(attention + "k_norm.weight") if config.qk_norm else None,
            output=row_parallel(attention + "o_proj.weight", shard.attention),
            post_norm=plain(layer + "post_attention_layernorm.weight"),
            gate_up=fused(mlp, {"gate_proj": ffn_rows, "up_proj": ffn_rows}),
            down=row_parallel(mlp + "down_proj.weight", shard.mlp),
        )

    head = "model.embed_tokens.weight" if config.tie_embeddings else "lm_head.weight"
    return DecoderWeights(
        embedding=plain("model.embed_tokens.weight"),
        layers=tuple(layer_weights(i) for i in range(config.num_layers)),
        final_norm=plain("model.norm.weight"),
        lm_head=ops.pack_linear(checkpoint.read(head)[vocab.start : vocab.stop]) if vocab else None,
    )
