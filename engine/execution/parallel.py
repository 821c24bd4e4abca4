"""Which part of the model each rank of a tensor-parallel group holds. Sums do not depend on it: ``engine.ops.tree``."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from engine.config import ConfigError, ModelConfig
from engine.ops import VOCAB_CHUNK
from engine.ops.tree import SplitSum

_FFN_LEAVES = (12, 8, 6, 4, 3, 2, 1)
_LEAF_MULTIPLE = 32


@dataclass(frozen=True)
class Shard:
    """One rank's part of the model, and the others'.

    Attributes:
        rank: This rank, 0 .. size - 1.
        size: Ranks in the group.
        attention: The output projection's sum, a leaf for each KV head with its queries.
        mlp: The down projection's sum.
        vocab: Each rank's rows of the head: whole chunks of ``VOCAB_CHUNK``, possibly none.
    """

    rank: int
    size: int
    attention: SplitSum
    mlp: SplitSum
    vocab: tuple[range, ...]

    @property
    def num_kv_heads(self) -> int:
        """KV heads on this rank."""
        return len(self.attention.runs[self.rank])


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


def split_evenly(count: int, size: int) -> tuple[range, ...]:
    """``count`` items as ``size`` contiguous runs; the first ones take one more where it does not divide."""
    ends = [part * (count // size) + min(part, count % size) for part in range(size + 1)]
    return tuple(range(low, high) for low, high in itertools.pairwise(ends))


def largest_size(config: ModelConfig) -> int:
    """The most ranks that can share the model: each holds a KV head and a leaf of the FFN at least."""
    return min(config.num_kv_heads, ffn_leaves(config.intermediate_size))


def make_shard(config: ModelConfig, rank: int, size: int) -> Shard:
    """Rank ``rank``'s part of a model shared by ``size`` ranks.

    Raises:
        ConfigError: The model cannot be shared by so many.
    """
    most, num_leaves = largest_size(config), ffn_leaves(config.intermediate_size)
    if size > most:
        raise ConfigError(
            f"tensor_parallel_size={size} cannot split this model: every rank needs one of its {config.num_kv_heads} "
            f"KV heads and one of the {num_leaves} leaves of its FFN; choose 1 .. {most}"
        )
    chunks = split_evenly(-(-config.vocab_size // VOCAB_CHUNK), size)
    return Shard(
        rank=rank,
        size=size,
        attention=SplitSum(config.num_kv_heads, split_evenly(config.num_kv_heads, size)),
        mlp=SplitSum(num_leaves, split_evenly(num_leaves, size)),
        vocab=tuple(
            range(min(run.start * VOCAB_CHUNK, config.vocab_size), min(run.stop * VOCAB_CHUNK, config.vocab_size))
            for run in chunks
        ),
    )
