"""ModelRunner: loads a model and executes planned steps on it. Owns weights and KV memory, no policy."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.config import DEFAULT_KV_CACHE_BYTES, ConfigError, EngineConfig, ModelConfig
from engine.execution.batch import ForwardBatch, StepLayout
from engine.execution.channels import make_channel, resolve_channel
from engine.execution.communicator import Communicator, LocalGroup
from engine.execution.graph import GraphRunner, bucket_sizes, emulate
from engine.execution.parallel import make_shard
from engine.execution.results import RunnerFacts, StepResult
from engine.execution.sampler import sample
from engine.execution.transfers import Transfers
from engine.execution.workers import Workers
from engine.kv.transfer import KVChannel
from engine.models.checkpoint import open_checkpoint
from engine.models.decoder import Decoder, rope_table
from engine.models.hub import ModelSource
from engine.models.weights import expected_tensors, load_weights
from engine.ops import choose_device, select_ops
from engine.scheduler.loop import ScheduledRequest

_STEP, _POISON = 0, -1  # what a message to the ranks is about; the others are transfers' operations


class ModelRunner:
    """Runs a real model in this process: all of it, or one rank's part together with the other ranks.

    Rank 0 executes plans; the others ``follow``.

    Raises:
        ConfigError: The KV pool would hold no block, or exceeds what the options allow, or the model cannot be split
            over so many ranks.
    """

    def __init__(
        self,
        source: ModelSource,
        model: ModelConfig,
        config: EngineConfig,
        max_model_len: int,
        group: Communicator | None = None,
        workers: Workers | None = None,
    ) -> None:
        self.group: Communicator = LocalGroup() if group is None else group
        self._workers = Workers() if workers is None else workers
        self._config = config
        self._to_poison: list[int] = []
        dtype = getattr(torch, model.dtype if config.dtype == "auto" else config.dtype)
        shard = make_shard(model, self.group.rank, self.group.size)
        with using_threads(config.num_threads):
            self.ops = select_ops(config, dtype, choose_device(config, self.group.rank))
            # Blocks are counted for the whole model, so that the pool does not depend on the number of ranks.
            shape = (config.block_size, model.num_kv_heads, model.head_dim)
            self.bytes_per_block = model.num_layers * self.ops.kv_bytes_per_block(*shape)
            self.num_kv_blocks = num_kv_blocks(config, self.bytes_per_block, max_model_len)
            weights = load_weights(model, open_checkpoint(source, expected_tensors(model)), self.ops, shard)
            # One block more than the scheduler knows: what pads a graph's batch is written there.
            local = (self.num_kv_blocks + 1, config.block_size, shard.num_kv_heads, model.head_dim)
            self._kv = [self.ops.allocate_kv(*local) for _ in range(model.num_layers)]
            rope = rope_table(model, max_model_len, self.ops.device)
            decoder = Decoder(model, weights, self.ops, self._kv, rope, self.group, shard)
            self.graphs: GraphRunner | None = None
            eager = self.ops.device.type != "cuda" if config.enforce_eager is None else config.enforce_eager
            if not eager:
                chosen = config.graph_capture_sizes
                default = bucket_sizes(config.max_num_seqs, self.ops.unpadded_rows)
                self.graphs = GraphRunner(
                    decoder.forward,
                    self.ops.device,
                    sizes=default if chosen is None else sorted({*chosen, config.max_num_seqs}),
                    max_model_len=max_model_len,
                    block_size=config.block_size,
                    padding_block=self.num_kv_blocks,
                    capture=self.ops.capture if self.group.capturable else emulate,
                )
            self._forward = decoder.forward if self.graphs is None else self.graphs.forward
        self.transfers = Transfers(self._make_channel, self.group, self._tell)

    def meet(self) -> None:
        """Wait until every rank has loaded its part."""
        message = np.array([self.num_kv_blocks]) if self.group.rank == 0 else None
        leaders = int(self.group.broadcast(message)[0])
        if leaders != self.num_kv_blocks:
            raise RuntimeError(f"rank {self.group.rank} has {self.num_kv_blocks} KV blocks, rank 0 has {leaders}")

    def follow(self) -> None:
        """Compute this rank's part of every step of rank 0 until that closes the group."""
        while len(message := self.group.broadcast(None)):
            if message[0] == _STEP:
                self._run(message[1:])
            elif message[0] == _POISON:
                self._poison(message[1:])
            else:
                self.transfers.perform(message)

    def logits(self, scheduled: Sequence[ScheduledRequest]) -> Tensor:
        """Compute a plan's tokens and write their KV; float32 [samples, vocab] where the plan takes samples."""
        with self._workers.together():
            poisoned, self._to_poison = self._to_poison, []
            message = StepLayout.of(scheduled, poisoned).message()
            return self._run(self.group.broadcast(np.concatenate(([_STEP], message)))[1:])

    @torch.inference_mode()
    def execute(self, scheduled: Sequence[ScheduledRequest]) -> StepResult:
        start = time.perf_counter()
        logits = self.logits(scheduled)
        forward_end = time.perf_counter()
        sampled = [item.request for item in scheduled if item.takes_sample]
        with using_threads(self._config.num_threads):
            drawn = sample(logits, sampled, self.ops) if sampled else []
        samples = {request.request_id: value for request, value in zip(sampled, drawn, strict=True)}
        return StepResult(samples, forward_end - start, time.perf_counter() - forward_end)

    def poison(self, block: int) -> None:
        self._to_poison.append(block)

    @property
    def channel_name(self) -> str:
        """The channel to another instance that the configuration chooses here."""
        return resolve_channel(self._config.kv_channel)

    def facts(self) -> RunnerFacts:
        replays = () if self.graphs is None else self.graphs.replays
        return RunnerFacts(self.ops.name, self.group.size, self.group.seconds, replays)

    def close(self) -> None:
        """End the other ranks, if there are any; nothing runs afterwards."""
        self._workers.close(self.group)

    @torch.inference_mode()
    def _run(self, message: NDArray[np.int64]) -> Tensor:
        layout = StepLayout.parse(message)
        self._poison(layout.poisoned)
        batch = ForwardBatch.from_layout(layout, self._config.block_size, self.ops.device)
        with using_threads(self._config.num_threads):
            if self._config.check_invariants:
                self._check_plans(batch)
            return self._forward(batch)

    def _tell(self, message: NDArray[np.int64]) -> NDArray[np.int64]:
        with self._workers.together():
            if self._to_poison:  # before KV arrives in one of these blocks
                blocks, self._to_poison = np.array(self._to_poison), []
                self._poison(self.group.broadcast(np.concatenate(([_POISON], blocks)))[1:])
            return self.transfers.perform(self.group.broadcast(message))

    def _poison(self, blocks: NDArray[np.int64]) -> None:
        for block in blocks.tolist():
            for kv in self._kv:
                self.ops.poison_kv(kv, block)

    def _make_channel(self, host: str) -> KVChannel:
        memory = [tensor for kv in self._kv for tensor in self.ops.kv_tensors(kv)]
        return make_channel(self.channel_name, memory, host, self._config.kv_transfer_timeout)

    def _check_plans(self, batch: ForwardBatch) -> None:
        """Assert on rank 0 that every rank is about to compute the same batch."""
        mine = torch.frombuffer(bytearray(batch.digest), dtype=torch.float32).unsqueeze(0).to(self.ops.device)
        everyones = self.group.gather(mine, (2,) * self.group.size).cpu().numpy().view(np.int64)[0]
        assert all(digest == everyones[0] for digest in everyones), f"the ranks' plans differ: digests {everyones}"


@contextlib.contextmanager
def using_threads(count: int | None) -> Iterator[None]:
    """Run the ops on ``count`` threads; None leaves torch's own choice."""
    before = torch.get_num_threads()
    if count is None or count == before:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def num_kv_blocks(config: EngineConfig, bytes_per_block: int, max_model_len: int) -> int:
    """Blocks of the KV pool, from whichever of ``num_kv_blocks`` and ``kv_cache_bytes`` is given, or the default.

    Raises:
        ConfigError: ``kv_cache_bytes`` holds no block.
    """
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks
    if config.kv_cache_bytes is not None:
        if config.kv_cache_bytes < bytes_per_block:
            raise ConfigError(
                f"kv_cache_bytes={config.kv_cache_bytes} holds no KV block, one takes {bytes_per_block} bytes; raise it"
            )
        return config.kv_cache_bytes // bytes_per_block
    full_length = -(-max_model_len // config.block_size)
    return max(full_length, min(config.max_num_seqs * full_length, DEFAULT_KV_CACHE_BYTES // bytes_per_block))
