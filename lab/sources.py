"""Where a request class takes its prompts from, and the trace it may replay: parts of the workload's YAML schema.

A source states how long its prompts are before it draws a token, so that a workload too long for the model is refused
before it fills the memory. A new kind of prompt is a new class in `PromptSource`.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from lab.distributions import Count, Length, Positive, Schema, Trace, WorkloadError
from lab.traces import (
    TraceFormat,
    TraceRequest,
    find_trace,
    prompts_from_hash_ids,
    read_trace,
    scale_block,
    scale_length,
)

Messages = tuple[dict[str, str], ...]
Prompt = tuple[int, ...] | str | Messages


@dataclass(frozen=True)
class BuildContext:
    """What a request class may draw from while it is built."""

    seed: int
    class_name: str
    folder: Path
    vocab_size: int
    trace: Trace
    trace_block: int

    def rng(self, stream: str) -> np.random.Generator:
        digest = hashlib.sha256(f"{self.class_name}/{stream}".encode()).digest()
        words = np.frombuffer(digest, dtype="<u4").tolist()
        return np.random.Generator(np.random.PCG64(np.random.SeedSequence([self.seed, *words])))

    def random_prompts(self, lengths: np.ndarray) -> list[Prompt]:
        """Prompts of these lengths (int64), each token uniform in [0, vocab_size)."""
        tokens = self.rng("prompt tokens").integers(self.vocab_size, size=int(lengths.sum()))
        return [tuple(part.tolist()) for part in np.split(tokens, np.cumsum(lengths)[:-1])]


@dataclass(frozen=True)
class PromptSet:
    """Prompts whose lengths (int64, tokens) are known, where they can be, before any token is drawn."""

    size: int
    lengths: np.ndarray | None
    draw: Callable[[], Sequence[Prompt]]


class RandomPrompts(Schema):
    """Uniformly random token ids, of lengths drawn from a distribution."""

    source: Literal["random"]
    length: Length

    def open(self, count: int | None, context: BuildContext) -> PromptSet:
        if count is None:
            raise WorkloadError("count is missing, and random prompts have no number of their own; add it")
        lengths = self.length.sample(count, context.rng("prompt length"), context.trace)
        return PromptSet(count, lengths, lambda: context.random_prompts(lengths))


class TextPrompts(Schema):
    """The lines of a JSONL file (`path`, relative to the workload file), each with `text` or chat `messages`."""

    source: Literal["text"]
    path: str

    def open(self, count: int | None, context: BuildContext) -> PromptSet:
        path = context.folder / self.path
        try:
            lines = path.read_text(encoding="utf-8").split("\n")  # splitlines would cut at U+2028 too
        except (OSError, UnicodeDecodeError) as error:
            raise WorkloadError(
                f"prompt.path = {self.path!r}: cannot read {path} ({error}); correct the path"
            ) from error
        prompts = [_text_prompt(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
        size = available(count, len(prompts), f"prompts in {path}")
        return PromptSet(size, None, lambda: prompts[:size])


class TracePrompts(Schema):
    """Random token ids of the trace's lengths; where the trace has hash ids, sharing prefixes exactly as they do."""

    source: Literal["trace"]

    def open(self, count: int | None, context: BuildContext) -> PromptSet:
        trace = context.trace[: available(count, len(context.trace), "requests in the trace")]
        lengths = np.array([request.num_prompt_tokens for request in trace], np.int64)
        ids = [request.hash_ids for request in trace if request.hash_ids is not None]
        if not ids:
            return PromptSet(len(trace), lengths, lambda: context.random_prompts(lengths))

        def draw() -> list[Prompt]:
            rng = context.rng("prompt tokens")
            tokens = prompts_from_hash_ids(lengths.tolist(), ids, context.trace_block, context.vocab_size, rng)
            return [tuple(prompt.tolist()) for prompt in tokens]

        return PromptSet(len(trace), lengths, draw)


class SharedPrefixPrompts(Schema):
    """Random token ids behind one of `prefixes` random beginnings, as of requests to a few assistants.

    Each prompt is a prefix, equally likely, of a length drawn from `prefix_length`, and `length` tokens of its own.
    """

    source: Literal["shared_prefix"]
    prefixes: Count
    prefix_length: Length
    length: Length

    def open(self, count: int | None, context: BuildContext) -> PromptSet:
        if count is None:
            raise WorkloadError("count is missing, and these prompts have no number of their own; add it")
        own = self.length.sample(count, context.rng("prompt length"), context.trace)
        shared = self.prefix_length.sample(self.prefixes, context.rng("prefix length"), context.trace)
        chosen = context.rng("prefix choice").integers(self.prefixes, size=count)

        def draw() -> list[Prompt]:
            rng = context.rng("prefix tokens")
            prefixes = [tuple(rng.integers(context.vocab_size, size=size).tolist()) for size in shared]
            return [
                prefixes[prefix] + tuple(suffix)
                for prefix, suffix in zip(chosen, context.random_prompts(own), strict=True)
            ]

        return PromptSet(count, own + shared[chosen], draw)


class ConversationPrompts(Schema):
    """Turns of `conversations` that each extend their own history, with random token ids.

    A conversation begins with `system_length` tokens; each turn adds the answer before it (`answer_length` tokens that
    stand for what was said: they are part of the workload, not the model's) and `length` tokens of the user. Requests
    go round the conversations: the first turn of each, then the second of each.
    """

    source: Literal["conversation"]
    conversations: Count
    system_length: Length
    length: Length
    answer_length: Length

    def open(self, count: int | None, context: BuildContext) -> PromptSet:
        if count is None:
            raise WorkloadError("count is missing, and conversations have no end of their own; add it")
        system = self.system_length.sample(self.conversations, context.rng("system length"), context.trace)
        user = self.length.sample(count, context.rng("prompt length"), context.trace)
        answer = self.answer_length.sample(count, context.rng("answer length"), context.trace)
        lengths = np.empty(count, np.int64)
        for turn in range(count):
            before = turn - self.conversations
            lengths[turn] = user[turn] + (system[turn] if before < 0 else lengths[before] + answer[turn])

        def draw() -> list[Prompt]:
            rng = context.rng("prompt tokens")
            histories = [tuple(rng.integers(context.vocab_size, size=size).tolist()) for size in system]
            prompts: list[Prompt] = []
            for turn in range(count):
                number = turn % self.conversations
                added = user[turn] + (0 if turn < self.conversations else answer[turn])
                histories[number] += tuple(rng.integers(context.vocab_size, size=added).tolist())
                prompts.append(histories[number])
            return prompts

        return PromptSet(count, lengths, draw)


PromptSource = Annotated[
    RandomPrompts | TextPrompts | TracePrompts | SharedPrefixPrompts | ConversationPrompts,
    Field(discriminator="source"),
]


def available(count: int | None, size: int, what: str) -> int:
    """`count`, or all of `size` where it is None; raises WorkloadError where there are fewer than that, or none."""
    if size < (count or 1):
        raise WorkloadError(f"count is {count or 1}, but there are only {size} {what}; lower count or add to them")
    return count or size


def _text_prompt(path: Path, number: int, line: str) -> Prompt:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise WorkloadError(f"{path}, line {number}: not JSON ({error}); write one object a line") from error
    match row:
        case {"text": str(text)} if text and "messages" not in row:
            return text
        case {"messages": [*messages]} if messages and "text" not in row and all(map(_is_message, messages)):
            return tuple(messages)
    raise WorkloadError(
        f"{path}, line {number}: needs either 'text' (not empty) or 'messages' (a list of objects with role and "
        f"content), found {line.strip()[:80]!r}"
    )


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))


class TraceSource(Schema):
    """A trace to replay: its prompts, outputs and arrivals are used where the class says `trace`.

    Prompt lengths are multiplied by `prompt_scale`, output lengths by `output_scale`. What is longer than
    `max_prompt_tokens` or `max_output_tokens` after that is clipped to it, or with `longer: drop` left out.
    """

    format: TraceFormat
    file: str
    prompt_scale: Positive = 1.0
    output_scale: Positive = 1.0
    max_prompt_tokens: Count | None = None
    max_output_tokens: Count | None = None
    longer: Literal["clip", "drop"] = "clip"

    @property
    def block_tokens(self) -> int:
        return scale_block(self.prompt_scale) if self.format == TraceFormat.MOONCAKE else 1

    def read(self, count: int | None, traces: Path | None) -> tuple[TraceRequest, ...]:
        """The first `count` requests that are kept, scaled."""
        path = find_trace(self.file, traces)
        rows = read_trace(path, self.format, count if self.longer == "clip" else None)
        scaled = [self._scaled(row) for row in rows]
        kept = [request for request in scaled if request is not None][:count]
        if not kept:
            raise WorkloadError(
                f"trace.longer = 'drop' leaves none of {len(rows)} requests; raise max_prompt_tokens "
                f"({self.max_prompt_tokens}) or max_output_tokens ({self.max_output_tokens}), or scale the trace"
            )
        return tuple(kept)

    def _scaled(self, row: TraceRequest) -> TraceRequest | None:
        lengths = (
            (scale_length(row.num_prompt_tokens, self.prompt_scale), self.max_prompt_tokens),
            (scale_length(row.num_output_tokens, self.output_scale), self.max_output_tokens),
        )
        if self.longer == "drop" and any(limit and length > limit for length, limit in lengths):
            return None
        prompt, output = (min(length, limit or length) for length, limit in lengths)
        return TraceRequest(row.arrival_s, prompt, output, row.hash_ids)
