"""What the ranks of a tensor-parallel group exchange, and the ways to do it.

Every rank calls the same methods in the same order. Nothing is computed on the way but the additions of a fixed tree,
so every way gives the same bits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from engine.extension import load_extension
from engine.ops.tree import SplitSum, combine

SLOT_BYTES = 1 << 18
"""Bytes of an exchange that travel at once: they stay in the second-level cache."""

_SHM_SOURCE = Path(__file__).parent / "csrc" / "shm.cpp"
# A rank may wait for work as long as its leader lives; that it does is watched elsewhere.
_FOREVER = timedelta(days=365)


class Communicator(Protocol):
    """A group of ranks 0 .. size - 1; rank 0 leads."""

    rank: int
    size: int
    capturable: bool
    """Whether a graph can hold the exchanges."""

    @property
    def seconds(self) -> float:
        """Time spent in exchanges so far, waiting for the others included."""

    def add(self, parts: Sequence[Tensor], total: SplitSum) -> Tensor:
        """The sum of every rank's parts ([M, N] float32 each) in tree order, on every rank."""

    def gather(self, columns: Tensor, widths: Sequence[int]) -> Tensor:
        """Rank r's [M, widths[r]] float32 side by side on rank 0; [M, 0] on the others."""

    def broadcast(self, message: NDArray[np.int64] | None) -> NDArray[np.int64]:
        """Rank 0's message, of any length, on every rank; the others pass None."""

    def close(self) -> None:
        """Give back what the group holds."""


class LocalGroup:
    """One rank: nothing to exchange."""

    rank, size, seconds, capturable = 0, 1, 0.0, True

    def add(self, parts: Sequence[Tensor], total: SplitSum) -> Tensor:
        return combine(parts, total.order)

    def gather(self, columns: Tensor, widths: Sequence[int]) -> Tensor:
        return columns

    def broadcast(self, message: NDArray[np.int64] | None) -> NDArray[np.int64]:
        assert message is not None
        return message

    def close(self) -> None:
        pass


class SharedMemoryGroup:
    """Ranks on the CPU of one host that exchange through one piece of memory (``csrc/shm.cpp``).

    Args:
        fd: File descriptor of the memory, at least ``memory_bytes(size)`` long, zero at first.
        rank: This rank.
        size: Ranks in the group.
        check: Called now and then while this rank waits; raises to give up.

    Raises:
        BuildError: The extension cannot be built or loaded here.
    """

    def __init__(self, fd: int, rank: int, size: int, check: Callable[[], None]) -> None:
        self.rank, self.size, self.capturable = rank, size, False
        self._group = _shm_extension().Group(fd, rank, size, SLOT_BYTES, check)

    @staticmethod
    def memory_bytes(size: int) -> int:
        """Bytes that ``size`` ranks need. The kernel provides those that are touched."""
        return int(_shm_extension().memory_bytes(size, SLOT_BYTES))

    @property
    def seconds(self) -> float:
        return float(self._group.seconds())

    def add(self, parts: Sequence[Tensor], total: SplitSum) -> Tensor:
        out: Tensor = self._group.add(parts, total.counts, total.order)
        return out

    def gather(self, columns: Tensor, widths: Sequence[int]) -> Tensor:
        out: Tensor = self._group.gather(columns, widths)
        return out

    def broadcast(self, message: NDArray[np.int64] | None) -> NDArray[np.int64]:
        received: NDArray[np.int64] = self._group.broadcast(message)
        return received

    def close(self) -> None:
        self._group.close()


class DistributedGroup:
    """Ranks anywhere, through torch.distributed: gloo for the CPU and for messages, NCCL for tensors on a GPU.

    NCCL wants a GPU for each rank: where ranks share one, gloo carries their tensors through the CPU.

    Args:
        store: Where the ranks meet.
        rank: This rank.
        size: Ranks in the group.
        device: Where tensors are.
        check: Called when an exchange failed; raises if it knows why.
    """

    def __init__(
        self, store: dist.Store, rank: int, size: int, device: torch.device, check: Callable[[], None]
    ) -> None:
        self.rank, self.size, self.seconds = rank, size, 0.0
        self._check = check
        control = dist.ProcessGroupGloo(dist.PrefixStore("control", store), rank, size, _FOREVER)
        self._control: Any = control
        self._data: Any = control
        has_gpu_each = device.type == "cuda" and size <= torch.cuda.device_count()
        self.capturable = has_gpu_each
        self._on_device = device.type == "cpu" or has_gpu_each
        if has_gpu_each:
            self._data = dist.ProcessGroupNCCL(
                dist.PrefixStore("data", store), rank, size, dist.ProcessGroupNCCL.Options()
            )

    def add(self, parts: Sequence[Tensor], total: SplitSum) -> Tensor:
        mine = parts[0].new_zeros((max(total.counts), *parts[0].shape))  # every rank sends as much as the one with most
        torch.stack(list(parts), out=mine[: len(parts)])
        received = self._all_gather(mine)
        return combine(
            [part for rank, count in enumerate(total.counts) for part in received[rank][:count]], total.order
        )

    def gather(self, columns: Tensor, widths: Sequence[int]) -> Tensor:
        mine = columns.new_zeros((len(columns), max(widths)))
        mine[:, : columns.shape[1]] = columns
        received = self._all_gather(mine)
        if self.rank != 0:
            return columns[:, :0]
        return torch.cat([part[:, :width] for part, width in zip(received, widths, strict=True)], 1)

    def broadcast(self, message: NDArray[np.int64] | None) -> NDArray[np.int64]:
        length = torch.tensor([0 if message is None else len(message)])
        with self._timed():
            self._control.broadcast(length, 0).wait()
            content = torch.empty(int(length), dtype=torch.int64) if message is None else torch.from_numpy(message)
            if len(content):
                self._control.broadcast(content, 0).wait()
        received: NDArray[np.int64] = content.numpy()
        return received

    def close(self) -> None:
        self._control = self._data = None

    def _all_gather(self, mine: Tensor) -> list[Tensor]:
        sent = mine if self._on_device else mine.cpu()
        received = [torch.empty_like(sent) for _ in range(self.size)]
        with self._timed():
            self._data.allgather(received, sent).wait()
        return [part.to(mine.device) for part in received]

    @contextmanager
    def _timed(self) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        except RuntimeError:
            self._check()
            raise
        self.seconds += time.perf_counter() - start


def _shm_extension() -> Any:
    return load_extension("engine_shm", (_SHM_SOURCE,), ("-O3",), "the exchange between ranks")
