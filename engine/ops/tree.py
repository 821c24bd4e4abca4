r"""The shard tree: one fixed order of addition for sums that tensor parallelism may split.

A sum over leaves 0 .. n-1 is a fixed binary tree over the leaf range: a range splits after the largest power of two
below its length.

    n = 3:        +              n = 5:          +
                 / \                            / \
                +   2                          +   4
               / \                           /   \
              0   1                         +     +
                                           / \   / \
                                          0   1 2   3

Whoever holds a contiguous run of leaves can add whole subtrees and send those; the receiver finishes the same tree, so
every split gives the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def split_point(low: int, high: int) -> int:
    """Where the range [low, high) of at least two leaves splits into its two subtrees."""
    return low + (1 << (high - low - 1).bit_length() - 1)


def tree_sum(leaves: Sequence[Tensor] | Tensor) -> Tensor:
    """Add leaves (equal shapes, along dimension 0 when one tensor) in the tree's order."""

    def add(low: int, high: int) -> Tensor:
        if high - low == 1:
            return leaves[low]
        middle = split_point(low, high)
        return add(low, middle) + add(middle, high)

    return add(0, len(leaves))
