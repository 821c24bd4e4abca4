"""Readers for public production traces: Mooncake FAST'25 (JSONL) and Azure LLM inference 2023 (CSV).

Mooncake (https://github.com/kvcache-ai/Mooncake, FAST'25): one JSON object a line with `timestamp` (ms),
`input_length`, `output_length` (tokens) and `hash_ids`, one id per `MOONCAKE_BLOCK_TOKENS` prompt tokens; equal ids
mean an equal prefix.
Azure (https://github.com/Azure/AzurePublicDataset, 2023): a CSV of TIMESTAMP, ContextTokens, GeneratedTokens.

The trace files are not part of the project: a name is looked up in the folder that the caller gives or that the
environment variable `LAB_TRACES` names.
"""

import json
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import StrEnum
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np

MOONCAKE_BLOCK_TOKENS = 512
TRACES_VARIABLE = "LAB_TRACES"

_AZURE_HEADER = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]
_AZURE_TIMESTAMP = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(\.\d{1,9})?")
_MOONCAKE_KEYS = ("timestamp", "input_length", "output_length", "hash_ids")


class TraceError(ValueError):
    """A trace that is missing, truncated, unordered or of another format."""


class TraceFormat(StrEnum):
    """The formats there is a reader for."""

    MOONCAKE = "mooncake"
    AZURE = "azure"


@dataclass(frozen=True)
class TraceRequest:
    """One row of a trace.

    arrival_s: seconds since the first row of the file, never decreasing.
    num_prompt_tokens, num_output_tokens: tokens, both at least 1.
    hash_ids: one id per started block of `MOONCAKE_BLOCK_TOKENS` prompt tokens; None where the format has no prefixes.
    """

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    hash_ids: tuple[int, ...] | None = None


Rows = Iterator[tuple[int, TraceRequest]]  # line number and request; arrivals count from where the format likes


def find_trace(name: str, traces: Path | None = None) -> Path:
    """The path of trace `name`: absolute as it is, else in `traces`, else in the folder that `LAB_TRACES` names.

    Raises TraceError where no folder is known or the file does not exist.
    """
    path = Path(name)
    if not path.is_absolute():
        folder = traces if traces is not None else os.environ.get(TRACES_VARIABLE)
        if not folder:
            raise TraceError(
                f"trace {name!r}: no folder to look in. Pass the traces folder (--traces) or set {TRACES_VARIABLE}."
            )
        path = Path(folder) / name
    if not path.is_file():
        raise TraceError(f"trace {name!r}: there is no file {path}. Check the name and the traces folder.")
    return path


def read_trace(path: Path, trace_format: TraceFormat, first: int | None = None) -> tuple[TraceRequest, ...]:
    """The first `first` rows of a trace (all of them where None).

    Raises TraceError with the line number for a line cut off in the middle, a value out of range, timestamps that go
    back, or a file of another format. A CSV cut inside the last number of its last line cannot be told from a whole
    one: the published Azure files do not end in a newline either.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = tuple(islice(_READERS[trace_format](path, file), first))
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}: not a text file ({error}). Is it compressed? Unpack it first.") from error
    except OSError as error:
        raise TraceError(f"{path}: cannot be read ({error.strerror}). Check its permissions.") from error
    if not rows:
        raise TraceError(f"{path}: the trace holds no requests. Download it again.")
    for (_, before), (line, after) in pairwise(rows):
        if after.arrival_s < before.arrival_s:
            raise TraceError(
                f"{path}, line {line}: arrives {before.arrival_s - after.arrival_s:g} s before the line above it. "
                "Sort the file by its timestamps."
            )
    start = rows[0][1].arrival_s
    return tuple(replace(request, arrival_s=request.arrival_s - start) for _, request in rows)


def _read_mooncake(path: Path, lines: Iterator[str]) -> Rows:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            if line.startswith("{") and not line.endswith("\n"):
                raise _truncated(path, number) from error
            raise _other_format(path, number, line, TraceFormat.MOONCAKE) from error
        if not isinstance(row, dict) or any(key not in row for key in _MOONCAKE_KEYS):
            raise _other_format(path, number, line, TraceFormat.MOONCAKE)
        timestamp, hash_ids = row["timestamp"], row["hash_ids"]
        if not _is_number(timestamp) or not math.isfinite(timestamp) or timestamp < 0:
            raise TraceError(
                f"{path}, line {number}: timestamp is {timestamp!r}, must be a finite number of ms, at least 0."
            )
        prompt, output = (_token_count(path, number, key, row[key]) for key in ("input_length", "output_length"))
        if not isinstance(hash_ids, list) or not all(_is_int(h) for h in hash_ids):
            raise TraceError(f"{path}, line {number}: hash_ids must be a list of integers.")
        if len(hash_ids) != (blocks := -(-prompt // MOONCAKE_BLOCK_TOKENS)):
            raise TraceError(
                f"{path}, line {number}: {len(hash_ids)} hash_ids for input_length {prompt}, must be {blocks}, one per "
                f"{MOONCAKE_BLOCK_TOKENS} tokens. Is the trace of another block size?"
            )
        yield number, TraceRequest(timestamp / 1000.0, prompt, output, tuple(hash_ids))


def _read_azure(path: Path, lines: Iterator[str]) -> Rows:
    # The fields hold neither quotes nor commas, and splitting keeps the line's end, which tells a cut line apart.
    epoch: datetime | None = None
    for number, line in enumerate(lines, start=1):
        fields = line.rstrip("\r\n").split(",")
        if number == 1:
            if fields != _AZURE_HEADER:
                raise _other_format(path, number, line, TraceFormat.AZURE)
            continue
        if fields == [""]:
            continue
        match = _AZURE_TIMESTAMP.fullmatch(fields[0])
        if len(fields) != len(_AZURE_HEADER) or match is None or not all(fields):
            if not line.endswith("\n"):
                raise _truncated(path, number)
            raise _other_format(path, number, line, TraceFormat.AZURE)
        try:
            second, fraction = datetime.fromisoformat(match[1]), float(match[2] or 0)
            tokens = [int(field) for field in fields[1:]]
        except ValueError as error:
            raise TraceError(f"{path}, line {number}: {error}.") from error
        prompt, output = (
            _token_count(path, number, key, value) for key, value in zip(_AZURE_HEADER[1:], tokens, strict=True)
        )
        epoch = epoch or second
        # Whole seconds and fractions apart: the file's 100 ns survive, where a datetime would keep microseconds.
        yield number, TraceRequest((second - epoch).total_seconds() + fraction, prompt, output)


_READERS: dict[TraceFormat, Callable[[Path, Iterator[str]], Rows]] = {
    TraceFormat.MOONCAKE: _read_mooncake,
    TraceFormat.AZURE: _read_azure,
}


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return _is_int(value) or isinstance(value, float)


def _token_count(path: Path, line: int, key: str, value: Any) -> int:
    if not _is_int(value) or value < 1:
        raise TraceError(f"{path}, line {line}: {key} is {value!r}, must be a whole number of tokens, at least 1.")
    return int(value)


def _truncated(path: Path, line: int) -> TraceError:
    return TraceError(f"{path}, line {line}: the file ends in the middle of this line. Download it again.")


def _other_format(path: Path, line: int, text: str, expected: TraceFormat) -> TraceError:
    wanted = {
        TraceFormat.MOONCAKE: f"a JSON object with {', '.join(_MOONCAKE_KEYS)}",
        TraceFormat.AZURE: f"{','.join(_AZURE_HEADER)} with a timestamp like 2023-11-16 18:17:03.9799600",
    }[expected]
    formats = ", ".join(TraceFormat)
    return TraceError(
        f"{path}, line {line}: not the {expected} format, which has {wanted}; found {text.strip()[:80]!r}. "
        f"Set the trace's format to the file's own (known: {formats})."
    )


def scale_length(tokens: int, scale: float) -> int:
    """`tokens * scale` rounded up, at least 1: a started block stays a started block when its size is scaled too."""
    # The rounding absorbs the float error of scales such as 1/3, which would otherwise push whole numbers up by one.
    return max(1, math.ceil(round(tokens * scale, 6)))


def scale_block(scale: float) -> int:
    """Tokens that one Mooncake block of `MOONCAKE_BLOCK_TOKENS` stands for at prompt scale `scale`.

    Raises TraceError unless they are a whole number: only then does the scaled trace share prefixes exactly as the
    original does.
    """
    block = MOONCAKE_BLOCK_TOKENS * scale
    if round(block) < 1 or abs(block - round(block)) > 1e-6:
        near = max(1, round(block))
        raise TraceError(
            f"prompt scale {scale!r} makes a block of {MOONCAKE_BLOCK_TOKENS} tokens {block:g} tokens, must be a whole "
            f"number so that prefixes stay shared exactly. The nearest scale is {near / MOONCAKE_BLOCK_TOKENS!r}."
        )
    return round(block)


def prompts_from_hash_ids(
    lengths: Sequence[int],
    hash_ids: Sequence[Sequence[int]],
    block_tokens: int,
    vocab_size: int,
    rng: np.random.Generator,
) -> list[np.ndarray]:
    """Random prompts that share prefixes exactly where the trace's hash ids do.

    Two prompts agree on their first `min(shared * block_tokens, both lengths)` tokens, where `shared` counts the
    leading ids they have in common, and differ at the next one. The blocks form a tree: a block is its parent and its
    id, its tokens are drawn once, and siblings begin with different tokens.

    lengths: tokens of each prompt, at most `len(ids) * block_tokens`. Returns int64 arrays of these lengths, ids in
    [0, vocab_size). Raises TraceError where one block has more children than the vocabulary has tokens to tell apart.
    """
    root = _Block(np.empty(0, np.int64))
    prompts = []
    for length, ids in zip(lengths, hash_ids, strict=True):
        block, parts = root, [root.tokens]
        for hash_id in ids[: -(-length // block_tokens)]:
            block = block.child(hash_id, block_tokens, vocab_size, rng)
            parts.append(block.tokens)
        prompts.append(np.concatenate(parts)[:length])
    return prompts


@dataclass(frozen=True)
class _Block:
    """A node of the tree of prompt blocks."""

    tokens: np.ndarray
    children: dict[int, "_Block"] = field(default_factory=dict)

    def child(self, hash_id: int, size: int, vocab_size: int, rng: np.random.Generator) -> "_Block":
        """The block `hash_id` after this one; drawn when first asked for, its first token unlike its siblings'."""
        if hash_id not in self.children:
            if len(self.children) == vocab_size:
                raise TraceError(
                    f"hash id {hash_id}: over {vocab_size} different blocks follow one prefix, but a vocabulary of "
                    f"{vocab_size} tells no more apart. Take fewer requests or a model with a larger vocabulary."
                )
            tokens = rng.integers(vocab_size, size=size)
            if self.children:
                eldest = next(iter(self.children.values()))
                tokens[0] = (eldest.tokens[0] + len(self.children)) % vocab_size
            self.children[hash_id] = _Block(tokens)
        return self.children[hash_id]
