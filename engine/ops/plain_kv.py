"""Paged KV memory in the plain layout, which the reference and the Triton ops share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PagedKV:
    """One layer's K and V, each [num_blocks, block_size, KVH, D]."""

    k: Tensor
    v: Tensor


class PlainKV:
    """The part of ``engine.ops.Ops`` that concerns KV memory, for ops whose blocks are ``PagedKV``."""

    dtype: torch.dtype
    device: torch.device

    def allocate_kv(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> PagedKV:
        shape = (num_blocks, block_size, num_kv_heads, head_dim)
        return PagedKV(*(torch.empty(shape, dtype=self.dtype, device=self.device) for _ in range(2)))

    def kv_bytes_per_block(self, block_size: int, num_kv_heads: int, head_dim: int) -> int:
        return 2 * block_size * num_kv_heads * head_dim * self.dtype.itemsize

    def kv_tensors(self, kv: PagedKV) -> tuple[Tensor, ...]:
        return kv.k, kv.v

    def poison_kv(self, kv: PagedKV, block: int) -> None:
        kv.k[block] = kv.v[block] = float("nan")
