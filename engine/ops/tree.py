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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

ADD = -1
"""In an order of addition: replace the last two sums by their sum."""


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


def subtrees(low: int, high: int, num_leaves: int) -> tuple[tuple[int, int], ...]:
    """The maximal subtrees, as ranges in ascending order, of the tree over ``num_leaves`` within [low, high)."""

    def walk(first: int, last: int) -> Iterator[tuple[int, int]]:
        if low <= first and last <= high:
            yield first, last
        elif first < high and low < last:
            middle = split_point(first, last)
            yield from walk(first, middle)
            yield from walk(middle, last)

    return tuple(walk(0, num_leaves))


def combine(parts: Sequence[Tensor], order: Sequence[int]) -> Tensor:
    """Add parts in an order of addition: an index takes that part, ``ADD`` adds the last two sums."""
    sums: list[Tensor] = []
    for item in order:
        if item == ADD:
            right = sums.pop()
            sums[-1] = sums[-1] + right
        else:
            sums.append(parts[item])
    return sums.pop()


@dataclass(frozen=True)
class SplitSum:
    """A tree sum whose leaves lie with several holders.

    Attributes:
        num_leaves: Leaves of the whole tree.
        runs: The leaves of each holder: contiguous, ascending, together all of them.
    """

    num_leaves: int
    runs: tuple[range, ...]

    @cached_property
    def held(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Each holder's maximal subtrees. It adds the leaves of each; that sum is one part."""
        return tuple(subtrees(run.start, run.stop, self.num_leaves) for run in self.runs)

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """How many parts each holder has."""
        return tuple(map(len, self.held))

    @cached_property
    def order(self) -> tuple[int, ...]:
        """How ``combine`` finishes the tree from all holders' parts, numbered holder after holder."""
        numbers = {part: i for i, part in enumerate(part for parts in self.held for part in parts)}

        def walk(low: int, high: int) -> tuple[int, ...]:
            if (low, high) in numbers:
                return (numbers[low, high],)
            middle = split_point(low, high)
            return (*walk(low, middle), *walk(middle, high), ADD)

        return walk(0, self.num_leaves)
