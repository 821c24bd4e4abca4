"""One step's ragged batch: as the flat arrays that travel to every rank, and as the tensors that the ops take."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.scheduler.loop import ScheduledRequest

Int64s = NDArray[np.int64]


@dataclass(frozen=True)
class StepLayout:
    """A step's plan, all that the forward pass needs of it. M rows, S sequences; every array is int64.

    Attributes:
        token_ids: [M].
        query_start: [S + 1], where each sequence's rows begin.
        context_lens: [S], tokens of each sequence in KV once the step has written its own.
        block_tables: [S, max blocks], padded with 0.
        sample_rows: Rows whose logits give a token.
        poisoned: Blocks to overwrite with NaN before the step (for tests).
    """

    token_ids: Int64s
    query_start: Int64s
    context_lens: Int64s
    block_tables: Int64s
    sample_rows: Int64s
    poisoned: Int64s

    @classmethod
    def of(cls, scheduled: Sequence[ScheduledRequest], poisoned: Sequence[int] = ()) -> StepLayout:
        """Lay out a step's plan; the plan's blocks are allocated already."""
        counts = np.array([item.num_tokens for item in scheduled], dtype=np.int64)
        starts = np.array([item.start for item in scheduled], dtype=np.int64)
        offsets = np.concatenate(([0], np.cumsum(counts)))
        token_ids = np.empty(int(offsets[-1]), dtype=np.int64)
        width = max(len(item.request.block_table) for item in scheduled)
        tables = np.zeros((len(scheduled), width), dtype=np.int64)
        for i, item in enumerate(scheduled):
            token_ids[offsets[i] : offsets[i + 1]] = item.request.token_ids[item.start : item.start + item.num_tokens]
            tables[i, : len(item.request.block_table)] = item.request.block_table
        samples = [offsets[i + 1] - 1 for i, item in enumerate(scheduled) if item.takes_sample]
        return cls(
            token_ids=token_ids,
            query_start=offsets,
            context_lens=starts + counts,
            block_tables=tables,
            sample_rows=np.array(samples, dtype=np.int64),
            poisoned=np.array(poisoned, dtype=np.int64),
        )

    def message(self) -> Int64s:
        """One array that ``parse`` understands; never empty."""
        parts = [getattr(self, field.name) for field in fields(self)]
        return np.concatenate(([part.size for part in parts], *(part.ravel() for part in parts)))

    @classmethod
    def parse(cls, message: Int64s) -> StepLayout:
        """The layout whose ``message`` this is; its arrays are views."""
        names = [field.name for field in fields(cls)]
        ends = len(names) + np.cumsum(message[: len(names)])
        parts = dict(zip(names, np.split(message[: ends[-1]], [len(names), *ends[:-1]])[1:], strict=True))
        parts["block_tables"] = parts["block_tables"].reshape(len(parts["context_lens"]), -1)
        return cls(**parts)


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

    @property
    def samples_every_row(self) -> bool:
        """Whether the step is all decodes: one row a sequence, each giving a token."""
        return not self.prefill_sequences and len(self.sample_rows) == len(self.token_ids)

    @property
    def digest(self) -> bytes:
        """Eight bytes that differ where batches do."""
        tensors = (value for field in fields(self) if isinstance(value := getattr(self, field.name), Tensor))
        parts = (f"{tensor.dtype}{list(tensor.shape)}".encode() + tensor.cpu().numpy().tobytes() for tensor in tensors)
        return hashlib.blake2b(b"".join(parts), digest_size=8).digest()

    @classmethod
    def from_plan(cls, scheduled: Sequence[ScheduledRequest], block_size: int, device: torch.device) -> ForwardBatch:
        """Lay out a step's plan; the plan's blocks are allocated already."""
        return cls.from_layout(StepLayout.of(scheduled), block_size, device)

    @classmethod
    def from_layout(cls, layout: StepLayout, block_size: int, device: torch.device) -> ForwardBatch:
        """Derive what the ops need beyond the layout."""
        offsets, contexts, tables = layout.query_start, layout.context_lens, layout.block_tables
        counts = np.diff(offsets)
        sequence_of_row = np.repeat(np.arange(len(counts)), counts)
        positions = np.arange(len(layout.token_ids)) - (offsets[1:] - contexts)[sequence_of_row]
        slots = tables[sequence_of_row, positions // block_size] * block_size + positions % block_size

        def tensor(values: np.ndarray) -> Tensor:
            return torch.from_numpy(values).to(device)

        return cls(
            token_ids=tensor(layout.token_ids),
            positions=tensor(positions),
            slot_mapping=tensor(slots),
            query_start=tensor(offsets),
            context_lens=tensor(contexts),
            block_tables=tensor(tables.astype(np.int32)),
            sample_rows=tensor(layout.sample_rows),
            decode_sequences=tensor(np.flatnonzero(counts == 1)),
            prefill_sequences=tuple(np.flatnonzero(counts > 1).tolist()),
            max_context_len=int(contexts.max()),
            query_offsets=tuple(offsets.tolist()),
        )
