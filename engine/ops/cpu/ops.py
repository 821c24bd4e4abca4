"""CpuOps: the op set over the compiled kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.execution.batch import ForwardBatch
from engine.ops.cpu.build import load_kernels
from engine.ops.cpu.isa import choose_isa


@dataclass(frozen=True)
class PackedLinear:
    """A weight in panels of 16 outputs (csrc/gemm.h).

    Attributes:
        panels: [ceil(N / 16), leaves, padded K / leaves, 16] in the ops' dtype.
        bias: float32, padded to the panels, or None.
    """

    panels: Tensor
    bias: Tensor | None
    num_outputs: int
    num_inputs: int


@dataclass(frozen=True)
class PagedKV:
    """One layer's K and V (csrc/kernels.h draws the inside of a block).

    Attributes:
        tensor: [num_blocks, elements of a block] in the ops' dtype; a block is one contiguous run, head after head.
    """

    tensor: Tensor
    block_size: int
    num_kv_heads: int


class CpuOps:
    """See ``engine.ops.Ops`` for the meaning and shapes of each op.

    Threads: at most ``torch.get_num_threads()`` in each call, the caller among them (csrc/threads.h).

    Args:
        dtype: float32 or bfloat16.
        device: The CPU.
        isa: Name of the instruction set; None takes the environment's, else the best this CPU has.

    Raises:
        IsaError: ``isa`` is unknown, or not this CPU's.
        BuildError: The kernels could not be built; ``unavailable_reason`` asks beforehand.
        ValueError: Another dtype or device.
    """

    name = "cpu"
    unpadded_rows = 8  # arithmetic counts on a CPU from a few rows on, and a capture costs one step

    def __init__(self, dtype: torch.dtype, device: torch.device, isa: str | None = None) -> None:
        if dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"dtype {dtype} is not one of the CPU ops'; choose float32 or bfloat16")
        if device.type != "cpu":
            raise ValueError(f"device {device} is not a CPU; choose another ops backend")
        self.dtype = dtype
        self.device = device
        chosen = choose_isa(isa)
        self.isa = chosen.name
        self._kernels = load_kernels(chosen)

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None, num_leaves: int = 1) -> PackedLinear:
        if bias is not None and num_leaves > 1:
            raise ValueError(f"a bias with num_leaves={num_leaves} would be added once a leaf; add it apart")
        n, k = weight.shape
        panels = self._kernels.pack_linear(weight.to(self.device, self.dtype).contiguous(), num_leaves)
        padded = None
        if bias is not None:
            padded = torch.zeros(panels.shape[0] * panels.shape[3])
            padded[:n] = bias.to(self.device, self.dtype)
        return PackedLinear(panels, padded, n, k)

    def linear(self, x: Tensor, weight: PackedLinear) -> Tensor:
        return self._linear(x, weight, False)

    def linear_f32(self, x: Tensor, weight: PackedLinear) -> Tensor:
        return self._linear(x, weight, True)

    def embedding(self, token_ids: Tensor, table: Tensor) -> Tensor:
        out: Tensor = self._kernels.embedding(token_ids, table)
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out: Tensor = self._kernels.rms_norm(x, weight, eps)
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        out: tuple[Tensor, Tensor] = self._kernels.add_rms_norm(x, residual, weight, eps)
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        out: Tensor = self._kernels.silu_mul(gate_up)
        return out

    def allocate_kv(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> PagedKV:
        elements = self._kernels.kv_block_elements(block_size, num_kv_heads, head_dim, self.dtype == torch.bfloat16)
        empty = torch.empty((num_blocks, elements), dtype=self.dtype, device=self.device)
        tensor: Tensor = self._kernels.with_huge_pages(empty)
        # Written once now: else the first prompts wait until the system has found and cleared the pages.
        return PagedKV(tensor.zero_(), block_size, num_kv_heads)

    def kv_bytes_per_block(self, block_size: int, num_kv_heads: int, head_dim: int) -> int:
        elements = self._kernels.kv_block_elements(block_size, num_kv_heads, head_dim, self.dtype == torch.bfloat16)
        return int(elements) * self.dtype.itemsize

    def kv_tensors(self, kv: PagedKV) -> tuple[Tensor, ...]:
        return (kv.tensor,)

    def poison_kv(self, kv: PagedKV, block: int) -> None:
        kv.tensor[block] = float("nan")

    def rope_and_store(self, q: Tensor, k: Tensor, v: Tensor, rope: Tensor, kv: PagedKV, batch: ForwardBatch) -> Tensor:
        out: Tensor = self._kernels.rope_and_store(
            q, k, v, rope, batch.positions, batch.slot_mapping, kv.tensor, kv.block_size
        )
        return out

    def paged_attention(self, q: Tensor, kv: PagedKV, batch: ForwardBatch, scale: float) -> Tensor:
        out: Tensor = self._kernels.paged_attention(
            q,
            kv.tensor,
            kv.block_size,
            kv.num_kv_heads,
            batch.query_start,
            batch.context_lens,
            batch.block_tables,
            scale,
        )
        return out

    def greedy(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        out: tuple[Tensor, Tensor] = self._kernels.greedy(logits)
        return out

    def logprobs_of(self, logits: Tensor, token_ids: Tensor) -> Tensor:
        out: Tensor = self._kernels.logprobs_of(logits, token_ids)
        return out

    def capture(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        graph = self._kernels.Graph()
        with graph:
            result = run()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay

    def _linear(self, x: Tensor, weight: PackedLinear, to_float: bool) -> Tensor:
        out: Tensor = self._kernels.linear(
            x, weight.panels, weight.bias, weight.num_outputs, weight.num_inputs, to_float
        )
        return out
