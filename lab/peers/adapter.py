"""The adapter: what a peer must be able to do, in the fewest words. Standard library alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Settings:
    """What every engine is asked for.

    Attributes:
        model: The Hugging Face folder.
        dtype: ``bfloat16`` or ``float32``.
        threads: Of computing.
        max_num_seqs: Most requests at once.
        max_model_len: Most tokens of a request.
        kv_tokens: Size of the KV cache, for those that let one choose it.
        stop_token_ids: Tokens that end an answer.
        options: More, by the peer's own names.
        gguf: The same weights in ``dtype`` as one GGUF file, for those that read no other; "" for the others.
    """

    model: str
    dtype: str
    threads: int
    max_num_seqs: int
    max_model_len: int
    kv_tokens: int
    stop_token_ids: Sequence[int]
    options: Mapping[str, Any] = field(default_factory=dict)
    gguf: str = ""


class Token(NamedTuple):
    """One token of an answer; ``time`` is on ``time.perf_counter``'s clock, ``is_last`` ends the request."""

    request_id: str
    token_id: int
    time: float
    is_last: bool


class Adapter(ABC):
    """A peer. Greedy; requests in the order of ``submit``, as many at once as ``max_num_seqs``."""

    @abstractmethod
    def start(self, settings: Settings) -> dict[str, str]:
        """Load the model. Returns versions and the settings in use, for the report."""

    @abstractmethod
    def submit(self, request_id: str, prompt: Sequence[int], max_tokens: int, ignore_eos: bool) -> None:
        """Queue a request."""

    @abstractmethod
    def step(self) -> list[Token]:
        """Go on, and return what came of it; called while a request is unfinished. It may return nothing at all."""

    @abstractmethod
    def reset(self) -> None:
        """Forget every prompt; called when idle."""

    def stop(self) -> None:  # noqa: B027 - most peers have nothing that outlives them
        """End what would outlive the process."""
