"""ForwardBatch: one step's ragged batch as flat tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.scheduler.loop import ScheduledRequest


@dataclass(frozen=True)
class ForwardBatch:
    """M token rows of S sequences; a sequence's rows are consecutive.

    Attributes:
        token_ids: [M] int64.
        positions: [M] int64, each token's absolute position in its sequence.
        slot_mapping: [M] int64, the KV slot (block * block_size + offset) each row's K and V are written to.
        query_start: [S + 1] int64, where each sequence's rows begin.
        context_lens: [S] int64, tokens of each sequence in KV once this step has written its own.
        block_tables: [S, max blocks] int32, padded with 0; entries past a sequence's context are never read.
        sample_rows: [number of samples] int64, rows whose logits give a token.
        decode_sequences: int64, the sequences with one row.
        prefill_sequences: the sequences with more rows.
        max_context_len: The largest of ``context_lens``.
    """

    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    query_start: Tensor
    context_lens: Tensor
    block_tables: Tensor
    sample_rows: Tensor
    decode_sequences: Tensor
    prefill_sequences: tuple[int, ...]
    max_context_len: int
    query_offsets: tuple[int, ...]

    def query_range(self, sequence: int) -> tuple[int, int]:
        """First and one-past-last row of a sequence."""
        return self.query_offsets[sequence], self.query_offsets[sequence + 1]

    @classmethod
    def from_plan(cls, scheduled: Sequence[ScheduledRequest], block_size: int, device: torch.device) -> ForwardBatch:
        """Lay out a step's plan; the plan's blocks are allocated already."""
        counts = np.array([item.num_tokens for item in scheduled], dtype=np.int64)
        starts = np.array([item.start for item in scheduled], dtype=np.int64)
        offsets = np.concatenate(([0], np.cumsum(counts)))
        num_rows = int(offsets[-1])
        sequence_of_row = np.repeat(np.arange(len(scheduled)), counts)
        positions = np.arange(num_rows) - offsets[sequence_of_row] + starts[sequence_of_row]
        token_ids = np.empty(num_rows, dtype=np.int64)
        width = max(len(item.request.block_table) for item in scheduled)
        tables = np.zeros((len(scheduled), width), dtype=np.int32)
        for i, item in enumerate(scheduled):
            token_ids[offsets[i] : offsets[i + 1]] = item.request.token_ids[item.start : item.start + item.num_tokens]
            tables[i, : len(item.request.block_table)] = item.request.block_table
        blocks = tables[sequence_of_row, positions // block_size].astype(np.int64)
        samples = [offsets[i + 1] - 1 for i, item in enumerate(scheduled) if item.takes_sample]
        contexts = starts + counts

        def tensor(values: np.ndarray) -> Tensor:
            return torch.from_numpy(values).to(device)

        return cls(
            token_ids=tensor(token_ids),
            positions=tensor(positions),
            slot_mapping=tensor(blocks * block_size + positions % block_size),
            query_start=tensor(offsets),
            context_lens=tensor(contexts),
            block_tables=tensor(tables),
            sample_rows=tensor(np.array(samples, dtype=np.int64)),
            decode_sequences=tensor(np.flatnonzero(counts == 1)),
            prefill_sequences=tuple(np.flatnonzero(counts > 1).tolist()),
            max_context_len=int(contexts.max()),
            query_offsets=tuple(offsets.tolist()),
        )
