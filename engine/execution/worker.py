"""A rank above 0 on the leader's host: ``python -m engine.execution.worker``, with its ``Setup`` on standard input."""

from __future__ import annotations

import os
import pickle
import sys
from dataclasses import dataclass

import torch.distributed as dist

from engine.config import EngineConfig, ModelConfig
from engine.execution.communicator import Communicator, DistributedGroup, SharedMemoryGroup
from engine.execution.runner import ModelRunner
from engine.execution.workers import end_with_the_pipe
from engine.models.hub import ModelSource
from engine.ops import choose_device


@dataclass(frozen=True)
class Setup:
    """All that a worker is told.

    Attributes:
        memory_fd: The ranks' shared memory; None when they talk through gloo.
        port: Of the store on this host where gloo's ranks meet; None with shared memory.
        leader: Process id of rank 0.
    """

    rank: int
    size: int
    source: ModelSource
    model: ModelConfig
    config: EngineConfig
    max_model_len: int
    memory_fd: int | None
    port: int | None
    leader: int

    def connect(self) -> Communicator:
        """This rank's end of the group."""
        if self.memory_fd is not None:
            group = SharedMemoryGroup(self.memory_fd, self.rank, self.size, self.check_leader)
            os.close(self.memory_fd)
            return group
        assert self.port is not None
        store = dist.TCPStore("127.0.0.1", self.port)
        store.set(f"rank {self.rank}", "")
        return DistributedGroup(store, self.rank, self.size, choose_device(self.config, self.rank), self.check_leader)

    def check_leader(self) -> None:
        """End this process if rank 0's is gone."""
        if os.getppid() != self.leader:
            os._exit(1)


def serve(setup: Setup, group: Communicator) -> None:
    """Load this rank's part of the model and compute it until rank 0 closes the group."""
    runner = ModelRunner(setup.source, setup.model, setup.config, setup.max_model_len, group)
    runner.meet()
    runner.follow()
    group.close()


def main() -> None:
    """What the process does."""
    setup: Setup = pickle.load(sys.stdin.buffer)
    end_with_the_pipe()
    serve(setup, setup.connect())
    os._exit(0)  # there is nothing to tidy up, and torch takes seconds to


if __name__ == "__main__":
    main()
