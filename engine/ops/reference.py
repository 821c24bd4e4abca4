"""Reference op set in torch: exact sums and elementary operations only (``engine.ops.exact``), on any device.

Correct first: matrix products accumulate exactly and round once, so a row's bits cannot depend on the batch, the
library or the machine. The cost is float64 arithmetic and float64 weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.execution.batch import ForwardBatch
from engine.ops import exact
from engine.ops.plain_kv import PagedKV, PlainKV
from engine.ops.tree import tree_sum

MAX_CONTEXT = 1 << 17
_ATTENTION_BITS = 18  # of a probability and of a V element: 2**17 products of 18 + 18 bits sum exactly
_QUERY_BITS = 23
# Rows multiplied, or attending, at once: temporaries stay in the cache. Rows are pure, so this cannot change bits.
_LINEAR_ROWS = 128
_QUERY_ROWS = 64


@dataclass(frozen=True)
class PackedLinear:
    """A weight as fixed-point integers: ``integers`` [leaves, N, K / leaves] and ``scale`` [leaves, 1, N], float64."""

    integers: Tensor
    scale: Tensor
    bias: Tensor | None


class ReferenceOps(PlainKV):
    """See ``engine.ops.Ops`` for the meaning and shapes of each op."""

    name = "reference"
    isa = "any"
    unpadded_rows = 1

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device
        # bfloat16 has 8 significant bits: one slice of a row holds all of them down to 2**-14 of its maximum. float32
        # rows take two slices, of fewer bits, which leaves more for the weight's one.
        self._num_slices, self._x_bits = (1, 22) if dtype == torch.bfloat16 else (2, 17)

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None, num_leaves: int = 1) -> PackedLinear:
        if bias is not None and num_leaves > 1:
            raise ValueError(f"a bias with num_leaves={num_leaves} would be added once a leaf; add it apart")
        n, k = weight.shape
        w_bits = exact.bits_left(k // num_leaves, self._x_bits)
        leaves = weight.to(self.device, self.dtype).reshape(n, num_leaves, k // num_leaves).transpose(0, 1)
        integers, scale = exact.fixed_point(leaves, w_bits, 1)
        packed_bias = None if bias is None else bias.to(self.device, self.dtype).to(torch.float64)
        return PackedLinear(integers[0].contiguous(), scale.transpose(1, 2).contiguous(), packed_bias)

    def linear(self, x: Tensor, weight: PackedLinear) -> Tensor:
        return self.linear_f32(x, weight).to(self.dtype)

    def linear_f32(self, x: Tensor, weight: PackedLinear) -> Tensor:
        leaves = (self._leaf_sums(rows, weight).to(torch.float32) for rows in x.split(_LINEAR_ROWS))
        return torch.cat([tree_sum(part) for part in leaves])

    def embedding(self, token_ids: Tensor, table: Tensor) -> Tensor:
        return table[token_ids]

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.to(torch.float64)
        mean = exact.row_sum(wide * wide) / x.shape[-1]
        return (wide / torch.sqrt(mean + eps) * weight).to(self.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = residual + x
        return self.rms_norm(total, weight, eps), total

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.to(torch.float64).chunk(2, dim=-1)
        return (gate / (1.0 + exact.exp(-gate)) * up).to(self.dtype)

    def rope_and_store(self, q: Tensor, k: Tensor, v: Tensor, rope: Tensor, kv: PagedKV, batch: ForwardBatch) -> Tensor:
        cos, sin = rope[batch.positions].unsqueeze(1).chunk(2, dim=-1)

        def rotate(x: Tensor) -> Tensor:
            a, b = x.to(torch.float32).chunk(2, dim=-1)
            return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(self.dtype)

        kv.k.flatten(0, 1)[batch.slot_mapping] = rotate(k)
        kv.v.flatten(0, 1)[batch.slot_mapping] = v
        return rotate(q)

    def paged_attention(self, q: Tensor, kv: PagedKV, batch: ForwardBatch, scale: float) -> Tensor:
        if batch.max_context_len > MAX_CONTEXT:
            raise ValueError(
                f"a context of {batch.max_context_len} tokens exceeds the {MAX_CONTEXT} that the reference attention "
                "sums exactly; lower max_model_len"
            )
        out = torch.empty_like(q)
        decodes = batch.decode_sequences
        if decodes.numel():
            last_rows = batch.query_start[decodes]
            out[last_rows] = self._attend(q[last_rows].unsqueeze(1), kv, batch, decodes, scale).squeeze(1)
        for sequence in batch.prefill_sequences:
            start, end = batch.query_range(sequence)
            for low in range(start, end, _QUERY_ROWS):
                rows = slice(low, min(low + _QUERY_ROWS, end))
                one = torch.tensor([sequence], device=self.device)
                out[rows] = self._attend(q[rows].unsqueeze(0), kv, batch, one, scale, rows).squeeze(0)
        return out.flatten(1)

    def greedy(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        # torch.argmax does not promise the lowest index among ties: take the least index that attains the maximum.
        index = torch.arange(logits.shape[1], device=logits.device)
        tied = logits == logits.amax(1, keepdim=True)
        token_ids = torch.where(tied, index, logits.shape[1]).amin(1).clamp_max(logits.shape[1] - 1)
        return token_ids, self.logprobs_of(logits, token_ids)

    def logprobs_of(self, logits: Tensor, token_ids: Tensor) -> Tensor:
        largest = logits.amax(1, keepdim=True).to(torch.float64)
        total = exact.row_sum(exact.exp(logits.to(torch.float64) - largest))
        chosen = logits.gather(1, token_ids.unsqueeze(1)).to(torch.float64)
        return ((chosen - largest) - exact.log(total)).squeeze(1).to(torch.float32)

    def capture(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        return run

    def _leaf_sums(self, x: Tensor, weight: PackedLinear) -> Tensor:
        """[M, K] to the leaves' products [leaves, M, N] in float64, each exact up to one rounding a slice."""
        num_leaves, _, k = weight.integers.shape
        leaves = x.reshape(-1, num_leaves, k).transpose(0, 1)
        slices, x_scale = exact.fixed_point(leaves, self._x_bits, self._num_slices)
        rows = slices.transpose(0, 1).flatten(1, 2)  # [leaves, slices * M, k]: one product reads the weight once
        products = torch.bmm(rows, weight.integers.transpose(1, 2)).unflatten(1, (self._num_slices, -1))
        total = products[:, -1]
        for i in reversed(range(self._num_slices - 1)):
            total.mul_(2.0**-self._x_bits).add_(products[:, i])
        total.mul_(x_scale).mul_(weight.scale)
        return total if weight.bias is None else total.add_(weight.bias)

    def _attend(
        self, q: Tensor, kv: PagedKV, batch: ForwardBatch, sequences: Tensor, scale: float, rows: slice | None = None
    ) -> Tensor:
        """Rows [B, R, H, D] of ``sequences`` [B] (their last rows, or ``rows`` of the batch) to [B, R, H, D]."""
        num_kv_heads, head_dim = kv.k.shape[2:]
        if rows is None:
            last = batch.context_lens[sequences] - 1
            positions = last.unsqueeze(1)
        else:
            positions = batch.positions[rows].unsqueeze(0)
        longest = int(positions.max()) + 1
        num_blocks = -(-longest // kv.k.shape[1])
        tables = batch.block_tables[sequences, :num_blocks].to(torch.int64)
        keys = torch.arange(num_blocks * kv.k.shape[1], device=self.device)
        written = (keys < batch.context_lens[sequences].unsqueeze(1)).view(len(sequences), -1, 1, 1)
        # Slots past the sequence's end may hold anything, NaN too: they become zeros before any arithmetic.
        k = torch.where(written, kv.k[tables].flatten(1, 2), 0).transpose(1, 2)  # [B, KVH, C, D]
        v = torch.where(written, kv.v[tables].flatten(1, 2), 0).transpose(1, 2)
        grouped = q.unflatten(2, (num_kv_heads, -1)).permute(0, 2, 1, 3, 4)  # [B, KVH, R, G, D]
        visible = (keys <= positions.unsqueeze(-1))[:, None, :, None, :]  # [B, 1, R, 1, C]

        q_int, q_scale = exact.fixed_point(grouped, _QUERY_BITS, 1)
        k_int, k_scale = exact.fixed_point(k, exact.bits_left(head_dim, _QUERY_BITS), 1)
        scores = torch.matmul(q_int[0].flatten(2, 3), k_int[0].transpose(-1, -2)).unflatten(2, grouped.shape[2:4])
        scores.mul_(q_scale).mul_(k_scale.squeeze(-1)[:, :, None, None, :]).mul_(scale)
        scores.masked_fill_(~visible, -torch.inf)
        weights = exact.exp(scores.sub_(scores.amax(-1, keepdim=True))).masked_fill_(~visible, 0.0)
        # 2**35 units of probability: 2**17 of them still sum exactly.
        total = (weights * 2.0**35).round_().sum(-1, keepdim=True) * 2.0**-35

        v_int, v_scale = exact.fixed_point(v, _ATTENTION_BITS, self._num_slices)
        p_int, p_scale = exact.fixed_point(
            weights * v_scale.squeeze(-1)[:, :, None, None, :], _ATTENTION_BITS, self._num_slices
        )
        result = torch.zeros_like(grouped, dtype=torch.float64)
        for order in reversed(range(self._num_slices)):  # smallest products first; those below the last slice are noise
            part = torch.zeros_like(result)
            for i in range(order + 1):
                part += torch.matmul(p_int[i].flatten(2, 3), v_int[order - i]).unflatten(2, grouped.shape[2:4])
            result = part + result * 2.0**-_ATTENTION_BITS
        result = result * p_scale / total
        return result.permute(0, 2, 1, 3, 4).flatten(2, 3).to(self.dtype)
