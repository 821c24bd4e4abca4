"""ModelRunner: loads a model and executes planned steps on it. Owns weights and KV memory, no policy."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.config import DEFAULT_KV_CACHE_BYTES, ConfigError, EngineConfig, ModelConfig
from engine.execution.batch import ForwardBatch
from engine.execution.results import StepResult
from engine.execution.sampler import sample
from engine.models.checkpoint import open_checkpoint
from engine.models.decoder import Decoder, rope_table
from engine.models.hub import ModelSource
from engine.models.weights import expected_tensors, load_weights
from engine.ops import select_ops
from engine.scheduler.loop import ScheduledRequest


class ModelRunner:
    """Runs a real model in this process.

    Raises:
        ConfigError: The KV pool would hold no block, or exceeds what the options allow.
    """

    def __init__(self, source: ModelSource, model: ModelConfig, config: EngineConfig, max_model_len: int) -> None:
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        dtype = getattr(torch, model.dtype if config.dtype == "auto" else config.dtype)
        self._block_size = config.block_size
        self.ops = select_ops(config, dtype, torch.device("cpu"))
        checkpoint = open_checkpoint(source, expected_tensors(model))
        weights = load_weights(model, checkpoint, self.ops)
        shape = (config.block_size, model.num_kv_heads, model.head_dim)
        self.bytes_per_block = model.num_layers * self.ops.kv_bytes_per_block(*shape)
        self.num_kv_blocks = num_kv_blocks(config, self.bytes_per_block, max_model_len)
        self._kv = [self.ops.allocate_kv(self.num_kv_blocks, *shape) for _ in range(model.num_layers)]
        rope = rope_table(model, max_model_len, self.ops.device)
        self._decoder = Decoder(model, weights, self.ops, self._kv, rope)

    @torch.inference_mode()
    def logits(self, scheduled: Sequence[ScheduledRequest]) -> Tensor:
        """Compute a plan's tokens and write their KV; float32 [samples, vocab] where the plan takes samples."""
        return self._decoder.forward(ForwardBatch.from_plan(scheduled, self._block_size, self.ops.device))

    @torch.inference_mode()
    def execute(self, scheduled: Sequence[ScheduledRequest]) -> StepResult:
        start = time.perf_counter()
        logits = self.logits(scheduled)
        forward_end = time.perf_counter()
        sampled = [item.request for item in scheduled if item.takes_sample]
        drawn = sample(logits, sampled, self.ops) if sampled else []
        samples = {request.request_id: value for request, value in zip(sampled, drawn, strict=True)}
        return StepResult(samples, forward_end - start, time.perf_counter() - forward_end)

    def poison(self, block: int) -> None:
        for kv in self._kv:
            self.ops.poison_kv(kv, block)


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
