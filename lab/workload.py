"""Workloads: a YAML file says what is asked of the engine and when; `build` draws exactly those requests.

A file holds a description, a seed and one or more request classes, each with its own prompts, output lengths and
arrivals:

    description: Chat turns with long documents in between.
    seed: 0
    classes:
      - name: chat
        count: 64
        prompt: {source: random, length: {distribution: lognormal, median: 120, sigma: 0.8, high: 600}}
        output: {tokens: {distribution: uniform, low: 32, high: 128}}
        arrival: {process: poisson, rate: 4}
      - name: documents
        count: 6
        prompt: {source: random, length: {distribution: uniform, low: 1000, high: 4000}}
        output: {tokens: {distribution: fixed, value: 16}}
        arrival: {process: times, times_s: [1, 3, 5, 7, 9, 11]}

Draws use numpy's PCG64 seeded with (seed, class name, what is drawn), so that each stream keeps its values when another
part of the file changes.
"""

import argparse
import hashlib
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
import yaml
from pydantic import Field, ValidationError, model_validator

from lab.distributions import Arrival, Count, OutputLength, Schema, WorkloadError, invalid
from lab.sources import BuildContext, Prompt, PromptSource, TraceSource, available
from lab.traces import TRACES_VARIABLE, TraceError, TraceFormat

__all__ = ["Workload", "WorkloadError", "WorkloadRequest", "WorkloadSpec", "load_workload", "preview"]

TRACE_SUFFIXES = {".jsonl": TraceFormat.MOONCAKE, ".csv": TraceFormat.AZURE}
PREVIEW_VOCAB_SIZE = 49152
PREVIEW_MAX_MODEL_LEN = 8192
_BAR = 40


# ------------------------------------------------------------------------------------------------ what a build returns


@dataclass(frozen=True)
class WorkloadRequest:
    """One request of a built workload.

    request_id: unique within the workload, "<class>-<number>".
    arrival_s: seconds after the run's start.
    prompt: token ids, a text, or chat messages.
    max_tokens, ignore_eos: as in `engine.SamplingParams`; with ignore_eos the output has exactly max_tokens tokens.
    """

    request_id: str
    arrival_s: float
    prompt: Prompt
    max_tokens: int
    ignore_eos: bool

    @property
    def num_prompt_tokens(self) -> int | None:
        """Tokens of the prompt; None where only the model's tokenizer knows them (text and messages)."""
        return None if self._is_text else len(self.prompt)

    @property
    def prompt_token_ids(self) -> tuple[int, ...] | None:
        return None if self._is_text else self.prompt  # type: ignore[return-value]

    @property
    def _is_text(self) -> bool:
        return isinstance(self.prompt, str) or not isinstance(self.prompt[0], int)


@dataclass(frozen=True)
class Workload:
    """Requests in order of arrival, ready to replay.

    spec_hash: SHA-256 of the validated file. content_hash: SHA-256 of every request's id, arrival, prompt and limits;
    two runs with equal content hashes were asked the same.
    """

    name: str
    description: str
    seed: int
    requests: tuple[WorkloadRequest, ...]
    spec_hash: str
    content_hash: str

    def saturated(self) -> "Workload":
        """The same requests, all due at the start: no engine is so fast that it waits for the next one."""
        requests = tuple(replace(request, arrival_s=0.0) for request in self.requests)
        return replace(self, requests=requests, content_hash=_content_hash(requests))

    def lengths(self) -> pd.DataFrame:
        """A row per request: request_id, arrival_s, num_prompt_tokens (NaN for text), num_output_tokens (the limit)."""
        return pd.DataFrame(
            {
                "request_id": [r.request_id for r in self.requests],
                "arrival_s": [r.arrival_s for r in self.requests],
                "num_prompt_tokens": [r.num_prompt_tokens for r in self.requests],
                "num_output_tokens": [r.max_tokens for r in self.requests],
            }
        )


# ------------------------------------------------------------------------------------------------------------ the file


class Output(Schema):
    """How many tokens each request generates: exactly `tokens` with ignore_eos, else at most."""

    tokens: OutputLength
    ignore_eos: Annotated[bool, Field(strict=True)] = True


class RequestClass(Schema):
    """Requests that are alike: `count` of them, or as many as the text file or the trace holds."""

    name: str = Field(pattern=r"^[a-z][a-z0-9_]*$")
    count: Count | None = None
    trace: TraceSource | None = None
    prompt: PromptSource
    output: Output
    arrival: Arrival

    @model_validator(mode="after")
    def _trace_is_given_where_used(self) -> "RequestClass":
        replays = {
            "prompt": self.prompt.source == "trace",
            "output.tokens": self.output.tokens.distribution == "trace",
            "arrival": self.arrival.process == "trace",
        }
        if any(replays.values()) and self.trace is None:
            used = ", ".join(key for key, is_replayed in replays.items() if is_replayed)
            raise invalid("{used} replays a trace, but trace is missing; add it with format and file", used=used)
        if self.trace is not None and not any(replays.values()):
            raise invalid(
                "trace is given, but none of {keys} replays it; say trace in one of them", keys=", ".join(replays)
            )
        return self

    def build(
        self, seed: int, folder: Path, vocab_size: int, max_model_len: int, traces: Path | None
    ) -> list[WorkloadRequest]:
        """The requests of this class; see `WorkloadSpec.build`."""
        trace, block = ((), 1) if self.trace is None else (self.trace.read(self.count, traces), self.trace.block_tokens)
        context = BuildContext(seed, self.name, folder, vocab_size, trace, block)
        prompts = self.prompt.open(self.count, context)
        if self.trace is not None:
            available(prompts.size, len(trace), "requests in the trace")
        limits = self.output.tokens.sample(prompts.size, context.rng("output length"), trace)
        arrivals = self.arrival.sample(prompts.size, context.rng("arrival"), trace)
        prompt_lengths = np.ones(prompts.size, np.int64) if prompts.lengths is None else prompts.lengths
        worst = int(np.argmax(prompt_lengths + limits))
        if (needed := prompt_lengths[worst] + limits[worst]) > max_model_len:
            known = "a prompt" if prompts.lengths is None else f"{prompt_lengths[worst]} prompt tokens"
            raise WorkloadError(
                f"request {worst} has {known} and up to {limits[worst]} output tokens, {needed} together, above "
                f"max_model_len = {max_model_len}; shorten prompt or output, or raise the engine's max_model_len"
            )
        return [
            WorkloadRequest(f"{self.name}-{number:04d}", arrival, prompt, limit, self.output.ignore_eos)
            for number, (arrival, prompt, limit) in enumerate(
                zip(arrivals.tolist(), prompts.draw(), limits.tolist(), strict=True)
            )
        ]


class WorkloadFile(Schema):
    """The whole file."""

    description: str = Field(min_length=1)
    seed: Annotated[int, Field(strict=True, ge=0)] = 0
    classes: tuple[RequestClass, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _unique_names(self) -> "WorkloadFile":
        names = [c.name for c in self.classes]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise invalid("the class names {twice} occur more than once; give each its own", twice=", ".join(twice))
        return self


@dataclass(frozen=True)
class WorkloadSpec:
    """A validated workload file, from which requests are built."""

    path: Path
    file: WorkloadFile

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def spec_hash(self) -> str:
        return _sha256([self.file.model_dump(mode="json")])

    def build(
        self, vocab_size: int, max_model_len: int, seed: int | None = None, traces: Path | None = None
    ) -> Workload:
        """Draws the requests: the same for the same file, seed, vocabulary size and trace.

        Args:
            vocab_size: random token ids lie in [0, vocab_size).
            max_model_len: most tokens, prompt and output together, that the model takes.
            seed: used in place of the file's, as for repeats of an experiment.
            traces: folder of the traces; None takes the one that the variable LAB_TRACES names.

        Raises:
            WorkloadError: a request is too long for the model, or a class cannot be built; names file and class.
            TraceError: a trace is missing or broken.
        """
        seed = self.file.seed if seed is None else seed
        requests: list[WorkloadRequest] = []
        for index, request_class in enumerate(self.file.classes):
            try:
                requests += request_class.build(seed, self.path.parent, vocab_size, max_model_len, traces)
            except TraceError as error:
                raise TraceError(f"{self.path}: classes[{index}] ({request_class.name}): {error}") from error
            except ValueError as error:
                raise WorkloadError(f"{self.path}: classes[{index}] ({request_class.name}): {error}") from error
        requests.sort(key=lambda request: request.arrival_s)  # stable: ties stay in the file's order
        chosen = tuple(requests)
        return Workload(self.name, self.file.description, seed, chosen, self.spec_hash, _content_hash(chosen))


def load_workload(path: Path | str) -> WorkloadSpec:
    """Reads and validates a workload file; a public trace (`TRACE_SUFFIXES`) becomes its `trace_replay`.

    Raises WorkloadError that names the file, each wrong key, its value, its limit and the remedy.
    """
    path = Path(path)
    if path.suffix in TRACE_SUFFIXES:
        return trace_replay(path)
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), Loader=_UniqueKeyLoader)
    except (OSError, UnicodeDecodeError) as error:
        raise WorkloadError(f"{path}: cannot be read ({error}); correct the path") from error
    except yaml.YAMLError as error:
        raise WorkloadError(f"{path}: not valid YAML: {error}") from error
    try:
        return WorkloadSpec(path, WorkloadFile.model_validate(data))
    except ValidationError as error:
        problems = [
            f"{path}: {_key(data, details)}{_shown(details)}: {_remedy(details)}"
            for details in error.errors()
            # Where every item of a list is wrong, pydantic also counts the list as empty.
            if not (details["type"] == "too_short" and details["input"])
        ]
        raise WorkloadError("\n".join(problems)) from error


def trace_replay(
    path: Path,
    *,
    count: int = 32,
    prompt_scale: float = 1 / 32,
    output_scale: float = 1 / 8,
    time_scale: float = 0.1,
    max_prompt_tokens: int = 1024,
    max_output_tokens: int = 128,
) -> WorkloadSpec:
    """The first `count` requests of a public trace, scaled down to a small model on a small machine.

    Production prompts have thousands of tokens; the defaults keep the shape of the lengths and of the arrivals, and
    shared prefixes stay whole blocks. What is longer than the limits is clipped to them.

    Raises WorkloadError for a file whose name ends in none of `TRACE_SUFFIXES`, or a value out of range.
    """
    if path.suffix not in TRACE_SUFFIXES:
        raise WorkloadError(f"{path}: a trace is one of {', '.join(TRACE_SUFFIXES)}; rename it or write a workload")
    trace = {
        "format": TRACE_SUFFIXES[path.suffix],
        "file": str(path.absolute()),
        "prompt_scale": prompt_scale,
        "output_scale": output_scale,
        "max_prompt_tokens": max_prompt_tokens,
        "max_output_tokens": max_output_tokens,
    }
    replay = {
        "name": "replay",
        "count": count,
        "trace": trace,
        "prompt": {"source": "trace"},
        "output": {"tokens": {"distribution": "trace"}},
        "arrival": {"process": "trace", "time_scale": time_scale},
    }
    description = f"The first {count} requests of the trace {path.name}, scaled down."
    try:
        return WorkloadSpec(path, WorkloadFile.model_validate({"description": description, "classes": [replay]}))
    except ValidationError as error:
        raise WorkloadError(f"{path}: {error}") from error


class _UniqueKeyLoader(yaml.SafeLoader):
    """Safe YAML in which a key given twice is an error; PyYAML would drop the first silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for (key_node, _), key in zip(node.value, keys, strict=True):
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is given twice; remove one", key_node.start_mark
                )
        return super().construct_mapping(node, deep)


def _key(data: Any, details: Any) -> str:
    """The key's place in the file, as in "classes[0].prompt.length.high"; pydantic also lists the variants it tried."""
    key, value = "", data
    for position, part in enumerate(details["loc"]):
        if isinstance(part, int):
            key, value = f"{key}[{part}]", value[part]
        elif isinstance(value, dict) and part in value:
            key, value = f"{key}.{part}", value[part]
        elif details["type"] == "missing" and position == len(details["loc"]) - 1:
            key = f"{key}.{part}"
    return key.lstrip(".") or "the file"


def _shown(details: Any) -> str:
    value = details["input"]
    return "" if details["type"] == "missing" or (isinstance(value, dict) and len(value) > 1) else f" = {value!r}"


def _remedy(details: Any) -> str:
    """The limit and what to do, where the message is not one of `invalid`, which says so itself."""
    if details["type"] == "missing":
        return "is missing; add it"
    message: str = details["msg"]
    return message if details["type"] == "invalid" else f"{message.replace('Input should', 'must')}; change it"


def _content_hash(requests: tuple[WorkloadRequest, ...]) -> str:
    return _sha256([r.request_id, r.arrival_s, r.prompt, r.max_tokens, r.ignore_eos] for r in requests)


def _sha256(parts: Any) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(json.dumps(part, sort_keys=True, ensure_ascii=False).encode() + b"\n")
    return digest.hexdigest()


# ------------------------------------------------------------------------------------------------------------- preview


def preview(workload: Workload, first: int = 8) -> str:
    """What a workload asks, as text: counts, histograms of the lengths, the first arrivals and the hashes."""
    lengths = workload.lengths()
    classes = lengths["request_id"].str.rsplit("-", n=1).str[0].value_counts(sort=False)
    parts = [
        f"{workload.name}: {' '.join(workload.description.split())}",
        f"{len(lengths):,} requests ({', '.join(f'{name} {count:,}' for name, count in classes.items())}), "
        f"seed {workload.seed}, arriving from {lengths['arrival_s'].min():.3f} to {lengths['arrival_s'].max():.3f} s",
        _histogram("prompt tokens", lengths["num_prompt_tokens"]),
        _histogram("output tokens (limit)", lengths["num_output_tokens"]),
        f"first {min(first, len(lengths))} arrivals\n"
        + lengths.head(first).to_string(
            index=False,
            header=["request", "arrival, s", "prompt tokens", "output tokens"],
            float_format="{:.4f}".format,
            na_rep="text",
        ),
        f"content hash {workload.content_hash}\nspec hash    {workload.spec_hash}",
    ]
    return "\n\n".join(parts)


def _histogram(title: str, lengths: pd.Series, bins: int = 10) -> str:
    known = lengths.dropna().astype(int)
    if known.empty:
        return f"{title}: text, counted by the model's tokenizer"
    edges = np.unique(np.linspace(known.min(), known.max() + 1, bins + 1).astype(int))
    counts, _ = np.histogram(known, edges)
    rows = [
        f"{low:>7,} to {high - 1:>7,}  {'█' * round(_BAR * count / counts.max()):<{_BAR}} {count:,}"
        for low, high, count in zip(edges[:-1], edges[1:], counts, strict=True)
    ]
    summary = f"{title}: median {known.median():,.0f}, mean {known.mean():,.1f}, total {known.sum():,}"
    return "\n".join([summary, *rows])


def add_command(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Registers `workload`."""
    parser = subparsers.add_parser(
        "workload", description="Shows what a workload file asks: counts, lengths, first arrivals, content hash."
    )
    parser.add_argument(
        "file",
        type=Path,
        metavar="FILE",
        help="workload, as in workloads/quick_mix.yaml, or a trace (.jsonl Mooncake, .csv Azure)",
    )
    parser.add_argument("--seed", type=int, help="seed to use in place of the file's")
    parser.add_argument(
        "--traces", type=Path, metavar="DIR", help=f"folder of the traces (default: ${TRACES_VARIABLE})"
    )
    parser.add_argument("--vocab-size", type=int, default=PREVIEW_VOCAB_SIZE, help="of the model (%(default)s)")
    parser.add_argument("--max-model-len", type=int, default=PREVIEW_MAX_MODEL_LEN, help="of the model (%(default)s)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Prints the preview and returns the exit status."""
    try:
        spec = load_workload(arguments.file)
        workload = spec.build(arguments.vocab_size, arguments.max_model_len, arguments.seed, arguments.traces)
    except (WorkloadError, TraceError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(preview(workload))
    return 0
