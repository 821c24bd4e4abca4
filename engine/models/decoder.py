"""One decoder for Llama, Qwen2 and Qwen3; their differences are fields of ModelConfig."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from engine.config import ModelConfig
from engine.execution.batch import ForwardBatch
from engine.execution.communicator import Communicator
from engine.models.weights import DecoderWeights, LayerWeights, RowParallel
from engine.ops import Ops

if TYPE_CHECKING:
    from engine.execution.parallel import Shard


def rope_table(config: ModelConfig, max_positions: int, device: torch.device) -> Tensor:
    """[max_positions, head_dim] float32: the cosines of each position's head_dim / 2 angles, then the sines.

    RoFormer (Su et al. 2021); frequencies in float32 as Hugging Face computes them, with Llama 3.1's scaling where
    the model asks for it.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    scaling = config.rope_scaling
    if scaling is not None:
        wavelengths = 2 * math.pi / frequencies
        turns = scaling.original_max_position / wavelengths
        blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        blend = blend.clamp(0.0, 1.0)  # 0: slow frequencies, fully scaled; 1: fast ones, as they are
        frequencies = (1 - blend) * frequencies / scaling.factor + blend * frequencies
    angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies)
    return torch.cat((angles.cos(), angles.sin()), dim=1).to(device)


class Decoder:
    """Runs a ForwardBatch through the layers, together with the other ranks of the group.

    Stateless: weights and KV memory, of this rank's heads, are handed in once.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        ops: Ops,
        kv: Sequence[Any],
        rope: Tensor,
        group: Communicator,
        shard: Shard,
    ) -> None:
        self.config = config
        self._weights, self._ops, self._kv, self._rope = weights, ops, kv, rope
        self._group, self._vocab_widths = group, tuple(map(len, shard.vocab))
        self._kv_heads = len(shard.attention.runs[shard.rank])
        self._scale = config.head_dim**-0.5

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Compute all rows and write their KV; logits of ``batch.sample_rows``, float32 [samples, vocab].

        Rank 0 gets the logits; the others get none, [samples, 0].
        """
        ops, weights, eps = self._ops, self._weights, self.config.rms_norm_eps
        residual = ops.embedding(batch.token_ids, weights.embedding)
        hidden = ops.rms_norm(residual, weights.layers[0].input_norm, eps)
        for i, layer in enumerate(weights.layers):
            hidden = self._attention(hidden, layer, self._kv[i], batch)
            hidden, residual = ops.add_rms_norm(hidden, residual, layer.post_norm, eps)
            hidden = self._row_parallel(ops.silu_mul(ops.linear(hidden, layer.gate_up)), layer.down)
            last = i + 1 == len(weights.layers)
            next_norm = weights.final_norm if last else weights.layers[i + 1].input_norm
            if last:  # only the rows that are sampled go on, gathered by an op: a graph holds nothing else
                hidden, residual = (ops.embedding(batch.sample_rows, rows) for rows in (hidden, residual))
            hidden, residual = ops.add_rms_norm(hidden, residual, next_norm, eps)
        head = weights.lm_head
        logits = hidden.new_empty((len(hidden), 0)).float() if head is None else ops.linear_f32(hidden, head)
        return self._group.gather(logits, self._vocab_widths)

    def _attention(self, hidden: Tensor, layer: LayerWeights, kv: Any, batch: ForwardBatch) -> Tensor:
        config, ops = self.config, self._ops
        heads = ops.linear(hidden, layer.qkv).view(len(hidden), -1, config.head_dim)
        q, k, v = heads.split_with_sizes((self._kv_heads * config.group_size, self._kv_heads, self._kv_heads), 1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q = ops.rms_norm(q, layer.q_norm, config.rms_norm_eps)
            k = ops.rms_norm(k, layer.k_norm, config.rms_norm_eps)
        q = ops.rope_and_store(q, k, v, self._rope, kv, batch)
        return self._row_parallel(ops.paged_attention(q, kv, batch, self._scale), layer.output)

    def _row_parallel(self, x: Tensor, weight: RowParallel) -> Tensor:
        if self._group.size == 1:
            return self._ops.linear(x, weight.parts[0])  # the one subtree is the whole tree
        parts = [
            self._ops.linear_f32(x[:, low:high], part)
            for (low, high), part in zip(weight.columns, weight.parts, strict=True)
        ]
        return self._group.add(parts, weight.total).to(self._ops.dtype)
