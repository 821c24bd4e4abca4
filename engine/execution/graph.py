"""GraphRunner: decode steps in batches of a few fixed sizes, over buffers that never move.

A graph replays the kernels it captured: the same ones on the same addresses for the same number of rows, without the
Python between them. So a decode step is copied into static buffers and padded to the next size for which there is a
graph. On a GPU it is a CUDA graph, with the CPU kernels a list of their calls; the reference ops, and ranks whose
exchanges no graph can hold, run on the static buffers as usual ("emulated").
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.execution.batch import ForwardBatch
from engine.execution.results import GraphReplay

Forward = Callable[[ForwardBatch], Tensor]
Capture = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]
"""From what runs some ops to what replays them; ``engine.ops.Ops.capture`` is one."""


def bucket_sizes(max_num_seqs: int, unpadded_rows: int) -> tuple[int, ...]:
    """Every size up to ``unpadded_rows``, 1, 2, 4, then multiples of 8, as far as ``max_num_seqs``, always the last."""
    sizes = {1, 2, 4, *range(1, unpadded_rows + 1), *range(8, max_num_seqs, 8)}
    return (*sorted(size for size in sizes if size < max_num_seqs), max_num_seqs)


class GraphRunner:
    """Runs decode steps through graphs and everything else (prefills, mixed steps) as it comes.

    Padding rows are sequences of one token at position 0. They write to ``padding_block`` and read it, which no request
    can: no block table names it. Rows are pure, so they change no other row's bits.

    Args:
        forward: The model.
        device: Where it runs.
        sizes: Rows that get a graph, ascending; the last is the most that a decode step has.
        max_model_len: Most tokens of a sequence.
        block_size: Tokens per KV block.
        padding_block: A block of the KV memory beyond those of the scheduler's pool.
        capture: Makes a graph of the model on static buffers.
    """

    def __init__(
        self,
        forward: Forward,
        device: torch.device,
        *,
        sizes: Sequence[int],
        max_model_len: int,
        block_size: int,
        padding_block: int,
        capture: Capture,
    ) -> None:
        self._eager = forward
        max_num_seqs = sizes[-1]
        rows = torch.arange(max_num_seqs + 1, device=device)
        self._padding_block, self._padding_slot = padding_block, padding_block * block_size
        width = -(-max_model_len // block_size)
        self._static = ForwardBatch(
            token_ids=torch.zeros_like(rows[1:]),
            positions=torch.zeros_like(rows[1:]),
            slot_mapping=torch.full_like(rows[1:], self._padding_slot),
            query_start=rows,
            context_lens=torch.ones_like(rows[1:]),
            block_tables=torch.full((max_num_seqs, width), padding_block, dtype=torch.int32, device=device),
            sample_rows=rows[:-1],
            decode_sequences=rows[:-1],
            prefill_sequences=(),
            max_context_len=max_model_len,
            query_offsets=tuple(range(max_num_seqs + 1)),
        )
        self._counts = {size: [0, 0] for size in sizes}
        # The largest first: the others then fit into the memory it took.
        self._graphs = {size: self._capture(size, capture) for size in sorted(self._counts, reverse=True)}

    @property
    def replays(self) -> tuple[GraphReplay, ...]:
        """One entry for each bucket, in ascending order."""
        return tuple(GraphReplay(bucket, *counts) for bucket, counts in self._counts.items())

    def forward(self, batch: ForwardBatch) -> Tensor:
        """What the model gives for ``batch``: float32 logits [samples, vocab], which the next step overwrites.

        A copy of them for each step would cost a quarter of it on a CPU: torch copies so much on several threads, and
        OpenMP's keep spinning on the cores that the next kernels need.
        """
        if not batch.samples_every_row:
            return self._eager(batch)
        num_rows = len(batch.token_ids)
        bucket = next(size for size in self._counts if size >= num_rows)
        self._counts[bucket][0] += 1
        self._counts[bucket][1] += bucket > num_rows
        self._fill(batch, num_rows, bucket)
        return self._graphs[bucket]()[:num_rows]

    def _fill(self, batch: ForwardBatch, num_rows: int, bucket: int) -> None:
        static = self._static
        for name in ("token_ids", "positions", "slot_mapping", "context_lens"):
            getattr(static, name)[:num_rows] = getattr(batch, name)
        # Entries past a sequence's context are left over from other steps; they are never read.
        static.block_tables[:num_rows, : batch.block_tables.shape[1]] = batch.block_tables
        if num_rows < bucket:
            padding = slice(num_rows, bucket)
            static.token_ids[padding] = 0
            static.positions[padding] = 0
            static.slot_mapping[padding] = self._padding_slot
            static.context_lens[padding] = 1
            static.block_tables[padding, 0] = self._padding_block

    def _capture(self, bucket: int, capture: Capture) -> Callable[[], Tensor]:
        """What runs the model on the first ``bucket`` rows of the static buffers."""
        static = self._static
        rows = {
            name: getattr(static, name)[:bucket]
            for name in ("token_ids", "positions", "slot_mapping", "context_lens", "block_tables", "sample_rows",
                         "decode_sequences")
        }  # fmt: skip
        batch = dataclasses.replace(
            static,
            **rows,
            query_start=static.query_start[: bucket + 1],
            query_offsets=static.query_offsets[: bucket + 1],
        )
        with torch.inference_mode():
            return capture(lambda: self._eager(batch))


def emulate(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """The capture that captures nothing."""
    return run
