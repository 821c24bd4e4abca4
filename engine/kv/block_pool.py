"""BlockPool: the single owner of which KV block is free, who holds it, and what has been promised."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Protocol


class Contents(Protocol):
    """Who knows what a block holds, while it is held and after."""

    def is_known(self, block: int) -> bool:
        """Whether the block's contents may be asked for again."""

    def forget(self, block: int) -> None:
        """A known block is reused."""


class BlockPool:
    """Free queue, reference counts and promises over ``num_blocks`` blocks of KV memory.

    A *promise* is a counter: admission promises the blocks a request can need at worst, allocation draws on that
    promise lazily, so a running request can always go on and nobody is ever preempted. Freed blocks queue up behind
    the others (least recently freed is reused first), which is the order a prefix cache evicts in; where there is a
    cache, blocks whose contents it does not know are reused before all others.

    Args:
        num_blocks: Blocks in the pool; ids are 0 .. num_blocks - 1.
        on_free: Called with each block whose contents nobody can ask for any more: freed unknown, or known and about
            to be reused. Tests poison the block's memory here.

    Attributes:
        contents: The cache that knows what blocks hold, if there is one.
        num_cached: Free blocks whose contents are known.
    """

    def __init__(self, num_blocks: int, on_free: Callable[[int], None] | None = None) -> None:
        self.num_blocks = num_blocks
        self.num_promised = 0
        self.contents: Contents | None = None
        self.num_cached = 0
        self._ref_counts = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._on_free = on_free

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_held(self) -> int:
        return self.num_blocks - len(self._free)

    @property
    def num_unpromised(self) -> int:
        """Free blocks that a new request may count on."""
        return len(self._free) - self.num_promised

    def ref_count(self, block: int) -> int:
        return self._ref_counts[block]

    def promise(self, count: int) -> None:
        """Set ``count`` free blocks aside for one request."""
        assert 0 <= count <= self.num_unpromised, f"promise of {count} blocks, {self.num_unpromised} left"
        self.num_promised += count

    def withdraw(self, count: int) -> None:
        """Take back a promise of ``count`` blocks that will not be drawn on."""
        assert 0 <= count <= self.num_promised, f"withdrawal of {count} blocks, {self.num_promised} promised"
        self.num_promised -= count

    def allocate(self, count: int) -> list[int]:
        """Draw ``count`` promised blocks; each has one holder and undefined contents."""
        self.withdraw(count)
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._ref_counts[block] = 1
            if self._is_known(block):
                self._forget(block)
        return blocks

    def retain(self, blocks: Iterable[int]) -> None:
        """Add a holder to each block; a free one (whose contents are still known) leaves the free queue."""
        for block in blocks:
            if self._ref_counts[block] == 0:
                del self._free[block]
                self.num_cached -= self._is_known(block)
            self._ref_counts[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one hold on each block, in the order given; a block nobody holds joins the end of the free queue."""
        for block in blocks:
            assert self._ref_counts[block] > 0, f"block {block} is free already"
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                self._free[block] = None
                if self._is_known(block):
                    self.num_cached += 1
                    continue
                if self.contents is not None:
                    self._free.move_to_end(block, last=False)
                if self._on_free is not None:
                    self._on_free(block)

    def forget_all(self) -> None:
        """Make the contents of every free block unknown."""
        for block in self._free:
            if self._is_known(block):
                self._forget(block)

    def check(self, block_tables: Iterable[Iterable[int]]) -> None:
        """Assert the conservation laws against the block tables that hold blocks now (O(blocks); for tests)."""
        holders = [0] * self.num_blocks
        for table in block_tables:
            for block in table:
                holders[block] += 1
        assert holders == self._ref_counts, "a block's ref_count differs from the block tables that hold it"
        assert all((block in self._free) == (count == 0) for block, count in enumerate(holders)), "free queue differs"
        assert 0 <= self.num_promised <= self.num_free, f"{self.num_promised} promised of {self.num_free} free blocks"
        assert self.num_cached == sum(map(self._is_known, self._free)), "num_cached differs from the known free blocks"

    def _is_known(self, block: int) -> bool:
        return self.contents is not None and self.contents.is_known(block)

    def _forget(self, block: int) -> None:
        assert self.contents is not None
        self.contents.forget(block)
        self.num_cached -= 1
        if self._on_free is not None:
            self._on_free(block)
