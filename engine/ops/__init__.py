"""The op set and its contract.

Every backend obeys the *op contract*: row i of an op's output is a pure function of row i's inputs (for attention: of
that query and the KV at its own positions), whatever the number of rows is and whatever rows surround it. Sums that
tensor parallelism may split are defined over fixed leaves added in a fixed binary tree (``engine.ops.tree``). Greedy
tokens and logprobs are therefore a function of the request alone, bit for bit, within one backend, dtype and
instruction set.
"""

from __future__ import annotations

import functools
import hashlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.config import ConfigError, EngineConfig
from engine.execution.batch import ForwardBatch

VOCAB_CHUNK = 2048
"""Log-sum-exp and argmax run over vocabulary chunks of this size, combined in a fixed tree."""


class Ops(Protocol):
    """What a backend provides. Shapes: M rows (tokens), N outputs, K inputs, D head_dim, H heads, KVH KV heads."""

    name: str
    isa: str
    dtype: torch.dtype
    device: torch.device
    unpadded_rows: int
    """Up to how many rows every size of a decode step is worth a graph of its own."""

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None, num_leaves: int = 1) -> Any:
        """Bring a [N, K] weight (any float dtype) into the backend's own layout.

        ``num_leaves`` splits K evenly into the leaves of the shard tree, for a row-parallel weight, which has no bias:
        a rank that holds a part of the leaves would add it once more.
        """

    def linear(self, x: Tensor, weight: Any) -> Tensor:
        """[M, K] in the ops' dtype to [M, N] in the same.

        Leaves accumulate in float32 or better and become float32, are added in tree order, and are rounded once.
        """

    def linear_f32(self, x: Tensor, weight: Any) -> Tensor:
        """The same sum without the last rounding, [M, N] float32: for logits and for partial sums."""

    def embedding(self, token_ids: Tensor, table: Tensor) -> Tensor:
        """[M] int64 ids and a [vocab, hidden] table to [M, hidden]."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Root-mean-square norm over the last dimension (Zhang & Sennrich 2019); ``x`` [M, N], ``weight`` [N]."""

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """``residual + x`` in the ops' dtype, and its norm: returns (norm, sum), both [M, N]."""

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """[M, 2F] holding gate then up to [M, F]: ``silu(gate) * up``."""

    def allocate_kv(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> Any:
        """One layer's paged KV memory in the backend's own layout; contents are undefined."""

    def kv_bytes_per_block(self, block_size: int, num_kv_heads: int, head_dim: int) -> int:
        """Bytes of one block of one layer, K and V together."""

    def kv_tensors(self, kv: Any) -> tuple[Tensor, ...]:
        """A layer's memory as contiguous tensors [num_blocks, ...]: whoever copies a block copies a row of each."""

    def poison_kv(self, kv: Any, block: int) -> None:
        """Overwrite one block with NaN, so that a read of unwritten KV shows (for tests)."""

    def rope_and_store(self, q: Tensor, k: Tensor, v: Tensor, rope: Tensor, kv: Any, batch: ForwardBatch) -> Tensor:
        """Rotate q and k by position (Su et al. 2021, halves layout) and store k and v in their slots.

        Args:
            q: [M, H, D].
            k, v: [M, KVH, D].
            rope: [max_position, D] float32: cos of the D/2 angles, then sin.
            kv: The layer's memory.
            batch: Gives positions and slot_mapping.

        Returns:
            The rotated q, [M, H, D].
        """

    def paged_attention(self, q: Tensor, kv: Any, batch: ForwardBatch, scale: float) -> Tensor:
        """Causal attention of every row over its sequence's KV, read through the block table.

        One call serves any mix of whole prefills, chunks and decodes. ``q`` is [M, H, D]; the result is [M, H * D].
        """

    def greedy(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """[M, vocab] float32 to the lowest index of each row's maximum ([M] int64) and its logprob ([M] float32)."""

    def logprobs_of(self, logits: Tensor, token_ids: Tensor) -> Tensor:
        """[M, vocab] float32 logits and [M] int64 ids to the ids' float32 logprobs [M]."""

    def capture(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """What does again, on the same memory, what ``run`` does: a graph where the backend has such.

        Nothing but ops of this backend and views may lie between what ``run`` reads and its result. A replay overwrites
        what the one before it returned, of any graph.
        """


@functools.cache
def kernels_version() -> str:
    """Changes whenever the source of any op does: its order of additions, or the layout of its KV cache."""
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(Path(__file__).parent.rglob("*")):
        if path.suffix in (".py", ".cpp", ".h"):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def choose_device(config: EngineConfig, rank: int) -> torch.device:
    """Where a rank runs.

    Raises:
        ConfigError: ``device="cuda"`` and there is no GPU.
    """
    num_gpus = torch.cuda.device_count()
    if config.device == "cpu" or (config.device == "auto" and (num_gpus == 0 or config.ops == "cpu")):
        return torch.device("cpu")
    if num_gpus == 0:
        raise ConfigError("device='cuda' is not available: torch sees no GPU here; choose device='cpu'")
    return torch.device("cuda", rank % num_gpus)


def select_ops(config: EngineConfig, dtype: torch.dtype, device: torch.device) -> Ops:
    """The backend that ``config.ops`` names, for one dtype and device.

    ``auto`` takes the Triton kernels on a GPU, and on a CPU the compiled ones, or the reference ops, with a warning,
    where they cannot be built.

    Raises:
        ConfigError: The backend that is asked for cannot run on the device, or be built here.
    """
    from engine.ops.reference import ReferenceOps

    if config.ops == "reference":
        return ReferenceOps(dtype, device)
    if config.ops == "triton" or device.type == "cuda":
        from engine.ops import triton

        reason = triton.unavailable_reason(device)
        if reason is not None:
            raise ConfigError(f"ops='triton' is not available: {reason}; mend that, or choose ops='reference'")
        return triton.TritonOps(dtype, device)
    from engine.ops.cpu import CpuOps, unavailable_reason

    reason = unavailable_reason()
    if reason is None:
        return CpuOps(dtype, device)
    if config.ops == "cpu":
        raise ConfigError(f"ops='cpu' is not available: {reason}; mend that, or choose ops='reference'")
    warnings.warn(f"the CPU kernels are not available: {reason}; the slow reference ops run instead", stacklevel=2)
    return ReferenceOps(dtype, device)
