"""TritonOps: the op set over the Triton kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.execution.batch import ForwardBatch
from engine.ops.plain_kv import PagedKV, PlainKV
from engine.ops.tree import tree_sum

_ROWS = 64
_INPUTS = {torch.bfloat16: 64, torch.float32: 32}
_QUERY_ROWS, _KEYS, _SPLIT = 64, 64, 512
_ELEMENTS = 1024
_VOCAB_CHUNK = 2048
_STAGES = 4  # tiles of a weight that are under way: decode waits for memory
_MULTIPROCESSORS = 128  # of a large GPU


@dataclass(frozen=True)
class PackedLinear:
    """A weight [N, K] in the ops' dtype, its float32 bias or None, and the leaves that K is split into."""

    weight: Tensor
    bias: Tensor | None
    num_leaves: int


class TritonOps(PlainKV):
    """See ``engine.ops.Ops`` for the meaning and shapes of each op.

    Args:
        dtype: float32 or bfloat16.
        device: A GPU, or the CPU under Triton's interpreter.

    Raises:
        ValueError: Another dtype.
    """

    name = "triton"
    unpadded_rows = 1  # a step's time is that of reading the weights far beyond 8 rows

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        if dtype not in _INPUTS:
            raise ValueError(f"dtype {dtype} is not one of the Triton ops'; choose float32 or bfloat16")
        self.dtype, self.device = dtype, device
        self.isa = "interpreter" if device.type == "cpu" else torch.cuda.get_device_name(device)
        from engine.ops.triton import kernels

        if device.type == "cpu":
            from engine.ops.triton.interpreter import compute_as_a_gpu

            compute_as_a_gpu()
        self._kernels: Any = kernels
        self._graph_memory: Any = None  # a handle of torch.cuda's

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None, num_leaves: int = 1) -> PackedLinear:
        if bias is not None and num_leaves > 1:
            raise ValueError(f"a bias with num_leaves={num_leaves} would be added once a leaf; add it apart")
        packed = None if bias is None else bias.to(self.device, self.dtype).to(torch.float32)
        return PackedLinear(weight.to(self.device, self.dtype).contiguous(), packed, num_leaves)

    def linear(self, x: Tensor, weight: PackedLinear) -> Tensor:
        return self._linear(x, weight, self.dtype)

    def linear_f32(self, x: Tensor, weight: PackedLinear) -> Tensor:
        return self._linear(x, weight, torch.float32)

    def embedding(self, token_ids: Tensor, table: Tensor) -> Tensor:
        return table[token_ids]

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        normed = torch.empty_like(rows)
        self._norm(rows, rows, weight, eps, normed, normed, add=False)
        return normed.view(x.shape)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        normed, total = torch.empty_like(x), torch.empty_like(x)
        self._norm(x.contiguous(), residual.contiguous(), weight, eps, normed, total, add=True)
        return normed, total

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty((rows, width))
        if rows:
            grid = (rows, -(-width // _ELEMENTS))
            self._kernels.silu_mul[grid](_aligned(gate_up.contiguous()), out, width, ELEMENTS=_ELEMENTS)
        return out

    def rope_and_store(self, q: Tensor, k: Tensor, v: Tensor, rope: Tensor, kv: PagedKV, batch: ForwardBatch) -> Tensor:
        rows, heads, head_dim = q.shape
        kv_heads = k.shape[1]
        q, k, v = (_aligned(part if part.stride()[1:] == (head_dim, 1) else part.contiguous()) for part in (q, k, v))
        rotated = torch.empty((rows, heads, head_dim), dtype=self.dtype, device=self.device)
        if rows:
            self._kernels.rope_and_store[(rows, 3)](
                q, k, v, rope, batch.positions, batch.slot_mapping, rotated, kv.k, kv.v,
                q.stride(0), k.stride(0), v.stride(0),
                NUM_HEADS=heads, HEADS_PADDED=_power_of_two(heads),
                NUM_KV_HEADS=kv_heads, KV_HEADS_PADDED=_power_of_two(kv_heads),
                HALF=head_dim // 2, HALF_PADDED=_power_of_two(head_dim // 2),
            )  # fmt: skip
        return rotated

    def paged_attention(self, q: Tensor, kv: PagedKV, batch: ForwardBatch, scale: float) -> Tensor:
        rows, heads, head_dim = q.shape
        _, block_size, kv_heads, _ = kv.k.shape
        group = heads // kv_heads
        padded = _power_of_two(group)
        out = q.new_empty((rows, heads * head_dim))
        if not rows:
            return out
        tokens = max(1, _QUERY_ROWS // padded)
        sequences, first_rows = self._tiles(batch, tokens)
        splits = -(-batch.max_context_len // _SPLIT)
        parts = [torch.empty((rows, heads, splits), dtype=torch.float32, device=self.device) for _ in range(2)]
        products = torch.empty((rows, heads, splits, head_dim), dtype=torch.float32, device=self.device)
        dim_padded = max(16, _power_of_two(head_dim))
        self._kernels.attention[(len(sequences), kv_heads, splits)](
            _aligned(q.contiguous()), kv.k, kv.v, sequences, first_rows, batch.query_start, batch.context_lens,
            batch.block_tables, *parts, products, scale, batch.block_tables.stride(0), splits,
            BLOCK_SIZE=block_size, NUM_KV_HEADS=kv_heads, GROUP=group, GROUP_PADDED=padded,
            ROWS=max(16, tokens * padded), HEAD_DIM=head_dim, DIM_PADDED=dim_padded, KEYS=_KEYS, SPLIT=_SPLIT,
        )  # fmt: skip
        self._kernels.combine[(rows,)](
            *parts, products, out, splits,
            NUM_HEADS=heads, HEADS_PADDED=_power_of_two(heads), HEAD_DIM=head_dim, DIM_PADDED=dim_padded,
        )  # fmt: skip
        return out

    def greedy(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        token_ids = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        return token_ids, self._choose(logits, token_ids, greedy=True)

    def logprobs_of(self, logits: Tensor, token_ids: Tensor) -> Tensor:
        return self._choose(logits, token_ids.contiguous(), greedy=False)

    def capture(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        if self.device.type != "cuda":
            return run
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):  # what happens only once (workspaces, compilation) is not captured
            run()
        torch.cuda.current_stream(self.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._graph_memory):
            result = run()
        self._graph_memory = graph.pool()  # graphs run one at a time: what the largest took is enough for all

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay

    def _linear(self, x: Tensor, weight: PackedLinear, dtype: torch.dtype) -> Tensor:
        rows, (outputs, inputs), leaves = len(x), weight.weight.shape, weight.num_leaves
        x = _aligned(x if x.stride(1) == 1 else x.contiguous())
        out = torch.empty((leaves, rows, outputs), dtype=dtype if leaves == 1 else torch.float32, device=self.device)
        if rows:
            tile = _outputs_tile(outputs)
            grid = (-(-rows // _ROWS), -(-outputs // tile), leaves)
            self._kernels.linear[grid](
                x, weight.weight, weight.weight if weight.bias is None else weight.bias, out,
                rows, outputs, inputs, inputs // leaves, x.stride(0), HAS_BIAS=weight.bias is not None,
                ROWS=_ROWS, OUTPUTS=tile, INPUTS=_INPUTS[self.dtype], num_stages=_STAGES,
            )  # fmt: skip
        return out[0] if leaves == 1 else tree_sum(out).to(dtype)

    def _norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, normed: Tensor, total: Tensor, add: bool
    ) -> None:
        width = x.shape[-1]
        if len(x):
            self._kernels.rms_norm[(len(x),)](
                _aligned(x), _aligned(residual), weight, normed, total, width, eps, ADD=add, WIDTH=_power_of_two(width)
            )

    def _choose(self, logits: Tensor, token_ids: Tensor, greedy: bool) -> Tensor:
        logprobs = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
        if len(logits):
            self._kernels.choose[(len(logits),)](
                _aligned(logits.contiguous()), token_ids, logprobs, logits.shape[1], GREEDY=greedy, CHUNK=_VOCAB_CHUNK
            )
        return logprobs

    def _tiles(self, batch: ForwardBatch, tokens: int) -> tuple[Tensor, Tensor]:
        """The sequence of each tile of up to ``tokens`` rows, and its first row."""
        if not batch.prefill_sequences:  # a tile a sequence; nothing depends on the data, so a graph can capture it
            return _numbers(len(batch.context_lens), self.device), batch.query_start
        offsets = batch.query_offsets
        tiles = [
            (sequence, row)
            for sequence in range(len(offsets) - 1)
            for row in range(offsets[sequence], offsets[sequence + 1], tokens)
        ]
        both = torch.tensor(tiles, device=self.device)
        return both[:, 0].contiguous(), both[:, 1].contiguous()


@functools.cache
def _numbers(count: int, device: torch.device) -> Tensor:
    return torch.arange(count, device=device)


def _outputs_tile(outputs: int) -> int:
    """The widest tile of outputs that still gives every multiprocessor one; a narrow one reads its rows more often."""
    return next((tile for tile in (128, 64) if outputs >= tile * _MULTIPROCESSORS), 32)


def _aligned(tensor: Tensor) -> Tensor:
    """At an address that every allocation has: Triton compiles anew for others."""
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def unavailable_reason(device: torch.device) -> str | None:
    """Why the Triton ops cannot run on a device, or None when they can."""
    try:
        import triton
    except ImportError as error:
        return f"triton cannot be imported: {error}"
    if device.type == "cuda" or triton.knobs.runtime.interpret:
        return None
    return "triton runs on a GPU, or with TRITON_INTERPRET=1 in its interpreter"
