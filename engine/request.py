"""One request's life: what was asked (SamplingParams), where it stands (Request), what came out (RequestOutput)."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]


class RequestError(ValueError):
    """A request that the engine refuses; every other request goes on."""


@dataclass(frozen=True)
class SamplingParams:
    """How to choose a request's tokens.

    Attributes:
        max_tokens: Most tokens to generate.
        temperature: 0 is greedy (ties go to the lowest token id); above 0 divides the logits before the draw.
        top_p: Draw from the smallest set of most likely tokens whose probability reaches this (nucleus sampling,
            Holtzman et al. 2020).
        seed: Seed of the draws, which depend on (seed, position) alone; None takes a fresh one for each request.
        ignore_eos: Go on after an end-of-sequence token, until ``max_tokens``.
        stop_token_ids: Tokens that end the request, besides the model's own end-of-sequence tokens.
        cache_salt: Requests share cached prefixes only with those of the same salt: a tenant's secret keeps others from
            learning by timing which prompts it sent.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    cache_salt: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        if isinstance(self.max_tokens, bool) or not isinstance(self.max_tokens, int) or self.max_tokens < 1:
            raise RequestError(f"max_tokens={self.max_tokens!r} must be a whole number of at least 1; raise it")
        if not 0.0 <= self.temperature < float("inf"):
            raise RequestError(f"temperature={self.temperature!r} must be finite and at least 0 (0 is greedy)")
        if not 0.0 < self.top_p <= 1.0:
            raise RequestError(f"top_p={self.top_p!r} must lie in (0, 1]; 1 draws from every token")
        if self.seed is not None and not 0 <= self.seed < 1 << 64:
            raise RequestError(f"seed={self.seed!r} must lie in [0, 2**64); choose a seed in that range")
        if not isinstance(self.cache_salt, str):
            raise RequestError(f"cache_salt={self.cache_salt!r} is not a text; give a string")


@dataclass
class Request:
    """A request inside the engine, as counters over its tokens.

    ``num_computed_tokens`` moves towards ``num_tokens``; a token is sampled only where it catches up. Prefill,
    decode, a prefix hit and received KV are all this one rule. Times are seconds on ``time.perf_counter``'s clock.
    ``block_hashes`` is the prefix cache's: hash and tokens of each full block so far.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    arrival_time: float
    token_ids: list[int] = field(init=False)
    logprobs: list[float] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    block_table: list[int] = field(default_factory=list)
    num_promised_blocks: int = 0
    block_hashes: list[tuple[bytes, bytes]] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    admitted_time: float | None = None
    token_times: list[float] = field(default_factory=list)
    finish_time: float | None = None
    seed: int = field(init=False)

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)
        self.seed = secrets.randbits(64) if self.params.seed is None else self.params.seed

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def is_prefilling(self) -> bool:
        """Whether prompt tokens remain to be computed."""
        return self.num_computed_tokens < len(self.prompt_token_ids)


@dataclass(frozen=True)
class RequestTiming:
    """When things happened to a request, in seconds on ``time.perf_counter``'s clock; None is "never"."""

    arrival: float
    admitted: float | None
    token_times: tuple[float, ...]
    finish: float | None

    @property
    def first_token(self) -> float | None:
        return self.token_times[0] if self.token_times else None


@dataclass(frozen=True)
class RequestOutput:
    """What a request produced. ``logprobs[i]`` is the float32 log-probability of ``token_ids[i]`` under the model.

    ``error`` says why where ``finish_reason`` is ``error``: the output is what there was until then.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    text: str | None
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    num_cached_tokens: int
    timing: RequestTiming
    error: str | None = None


@dataclass(frozen=True)
class TokenOutput:
    """One token as it appears; ``stream`` fills in the text it adds (empty while it ends inside a character)."""

    request_id: str
    token_id: int
    logprob: float
    finish_reason: FinishReason | None
    text: str | None
