"""From a configuration to a runner that leads its group of ranks: alone, with workers on this host, under torchrun."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist

from engine.config import ConfigError, EngineConfig, ModelConfig
from engine.core import EngineCore
from engine.execution.communicator import Communicator, DistributedGroup, SharedMemoryGroup
from engine.execution.parallel import make_shard
from engine.execution.runner import ModelRunner
from engine.execution.worker import Setup, serve
from engine.execution.workers import GroupWorkers, LocalWorkers
from engine.extension import BuildError
from engine.kv.block_pool import BlockPool
from engine.kv.transfer import KVSource
from engine.models.hub import ModelSource
from engine.ops import choose_device
from engine.scheduler.admission import Admission
from engine.scheduler.loop import Scheduler


def start_engine(
    source: ModelSource,
    model: ModelConfig,
    config: EngineConfig,
    max_model_len: int,
    make_admission: Callable[[BlockPool], Admission] | None = None,
    make_source: Callable[[BlockPool, ModelRunner], KVSource] | None = None,
) -> EngineCore:
    """An engine, with the policies that an instance brings of its own; raises like ``start_runner``."""
    runner = start_runner(source, model, config, max_model_len)
    pool = BlockPool(runner.num_kv_blocks, on_free=runner.poison if config.check_invariants else None)
    dtype = model.dtype if config.dtype == "auto" else config.dtype
    scheduler = Scheduler.from_config(
        config,
        pool,
        max_model_len,
        model.eos_token_ids,
        f"{source.fingerprint}/{dtype}/{runner.ops.name}",
        admission=None if make_admission is None else make_admission(pool),
        source=None if make_source is None else make_source(pool, runner),
    )
    return EngineCore(scheduler, runner, model.vocab_size)


def start_runner(source: ModelSource, model: ModelConfig, config: EngineConfig, max_model_len: int) -> ModelRunner:
    """Load the model on every rank; returns rank 0's runner once all are ready.

    Under torchrun, with ``tensor_parallel_size`` above 1, the other ranks serve and do not return.

    Raises:
        ConfigError: The options fit neither each other, nor the model, nor torchrun's number of processes.
        WorkerError: A rank could not start.
        SystemExit: On torchrun's ranks above 0, once rank 0 has closed the group.
    """
    size = config.tensor_parallel_size
    if size == 1:
        return ModelRunner(source, model, config, max_model_len)
    make_shard(model, 0, size)  # refuse before anything starts
    if config.num_threads is None:
        config = dataclasses.replace(config, num_threads=max(1, torch.get_num_threads() // size))
    setup = Setup(0, size, source, model, config, max_model_len, None, None, os.getpid())
    return _under_torchrun(setup) if "TORCHELASTIC_RUN_ID" in os.environ else _with_local_workers(setup)


def _with_local_workers(setup: Setup) -> ModelRunner:
    size = setup.size
    if choose_device(setup.config, 0).type == "cuda":
        return _through_torch_distributed(setup)
    try:
        memory_bytes = SharedMemoryGroup.memory_bytes(size)
    except BuildError as error:
        warnings.warn(f"the ranks talk through gloo, several times slower than memory: {error}", stacklevel=5)
        return _through_torch_distributed(setup)
    memory = os.memfd_create("engine-ranks")
    try:
        os.ftruncate(memory, memory_bytes)
        setup = dataclasses.replace(setup, memory_fd=memory)
        workers = LocalWorkers(
            [(f"rank {rank}", dataclasses.replace(setup, rank=rank), (memory,)) for rank in range(1, size)]
        )
        group = SharedMemoryGroup(memory, 0, size, workers.check)
    finally:
        os.close(memory)
    return _lead(setup, group, workers)


def _through_torch_distributed(setup: Setup) -> ModelRunner:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    setup = dataclasses.replace(setup, port=store.port)
    workers = LocalWorkers(
        [(f"rank {rank}", dataclasses.replace(setup, rank=rank), ()) for rank in range(1, setup.size)]
    )
    while not store.check([f"rank {rank}" for rank in range(1, setup.size)]):
        workers.check()
    device = choose_device(setup.config, 0)
    return _lead(setup, DistributedGroup(store, 0, setup.size, device, workers.check), workers)


def _under_torchrun(setup: Setup) -> ModelRunner:
    store, rank, world_size = next(dist.rendezvous("env://"))
    if world_size != setup.size:
        raise ConfigError(
            f"tensor_parallel_size={setup.size}, and torchrun started {world_size} processes; make the two equal"
        )
    workers = GroupWorkers()
    group = DistributedGroup(store, rank, world_size, choose_device(setup.config, rank), workers.check)
    if rank == 0:
        return _lead(setup, group, workers)
    serve(dataclasses.replace(setup, rank=rank), group)
    raise SystemExit(0)


def _lead(setup: Setup, group: Communicator, workers: GroupWorkers) -> ModelRunner:
    try:
        runner = ModelRunner(setup.source, setup.model, setup.config, setup.max_model_len, group, workers)
        runner.meet()
    except BaseException as error:
        workers.abandon(f"the ranks have ended after: {type(error).__name__}: {error}")
        raise
    return runner
