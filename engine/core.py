"""EngineCore: the step. Plain token ids in, plain token ids out; tokenising and waiting live in ``LLM``."""

from __future__ import annotations

import time
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from engine.execution.results import Runner, RunnerFacts
from engine.kv.prefix_cache import CacheEvent, CacheStats
from engine.kv.transfer import Transfer
from engine.request import Request, RequestError
from engine.scheduler.loop import ScheduledRequest, Scheduler

ENGINE = "engine"
"""The instance of an engine that runs prefill and decode together."""


@dataclass(frozen=True, slots=True)
class StepStats:
    """What one step did and what it took. Times are seconds on ``time.perf_counter``'s clock.

    ``num_blocks_cached`` of the free blocks hold known prefixes; the cache's time is part of ``schedule_s``.
    ``instance`` is whose step it was, and ``transfers`` are those that have ended since the last step, where prefill
    and decode run apart.
    """

    start: float
    end: float
    scheduled: tuple[ScheduledRequest, ...]
    num_running: int
    num_waiting: int
    num_blocks_held: int
    num_blocks_free: int
    num_blocks_cached: int
    schedule_s: float
    forward_s: float
    sample_s: float
    cache: CacheStats
    instance: str = ENGINE
    transfers: tuple[Transfer, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(item.num_tokens for item in self.scheduled)


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The requests that took a token in a step, in row order; those that ended have a ``finish_reason``.

    ``failed`` are requests that ended with an error, each with what happened.
    """

    sampled: tuple[Request, ...]
    stats: StepStats | None
    failed: tuple[tuple[Request, str], ...] = ()


@dataclass(frozen=True)
class PoolUse:
    """A KV pool: all its blocks, those that are held, and of the free ones those whose contents are known."""

    num_blocks: int
    num_held: int
    num_cached: int


class Core(Protocol):
    """An engine without words: token ids in, token ids out. ``LLM`` and the lab's driver stand on it."""

    @property
    def has_unfinished(self) -> bool:
        """Whether a request has not ended."""

    def validate(self, request: Request) -> None:
        """Refuse what could not run, before anything is queued."""

    def add(self, request: Request) -> None:
        """Queue a request; raises like ``validate``."""

    def abort(self, request_id: str) -> Request | None:
        """Take a request out at once, wherever it is; None when it is unknown or has ended."""

    def step(self, until: float | None = None) -> StepOutput | None:
        """Go on by one step. None when there is nothing to do, or nothing came ``until`` then (perf_counter)."""

    def logits(self, request: Request) -> Any:
        """Float32 logits [vocab] of the token after the request's prompt, while nothing else runs."""

    def forget_prefixes(self) -> None:
        """Forget every cached prefix, while nothing runs."""

    def pools(self) -> Mapping[str, PoolUse]:
        """The KV pools by instance."""

    def facts(self) -> RunnerFacts:
        """What runs, and what it has done so far."""

    def close(self) -> None:
        """End every process that the engine has started."""


def refuse_malformed(request: Request, vocab_size: int, in_use: Container[str]) -> None:
    """Refuse a request that no engine could run.

    Raises:
        RequestError: Empty prompt, token id outside the vocabulary, or request id in use.
    """
    if not request.prompt_token_ids:
        raise RequestError(f"request {request.request_id}: the prompt is empty (0 tokens); give at least 1 token")
    for position, token_id in enumerate(request.prompt_token_ids):
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
            raise RequestError(
                f"request {request.request_id}: token id {token_id!r} at position {position} is not a whole number "
                f"in 0 .. {vocab_size - 1}, the model's vocabulary; tokenise with the model's own tokenizer"
            )
    if request.request_id in in_use:
        raise RequestError(f"request id {request.request_id!r} is in use; choose another or wait until it ends")


class EngineCore:
    """Drives a scheduler and a runner, one step at a time."""

    def __init__(self, scheduler: Scheduler, runner: Runner, vocab_size: int) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self._vocab_size = vocab_size
        self._live: dict[str, Request] = {}
        self._unreported: tuple[CacheEvent, ...] = ()

    @property
    def has_unfinished(self) -> bool:
        return bool(self._live)

    def validate(self, request: Request) -> None:
        """Refuse what could not run, before anything is queued.

        Raises:
            RequestError: Empty prompt, token id outside the vocabulary, request id in use, or a request that
                ``max_model_len`` or the KV pool can never hold.
        """
        refuse_malformed(request, self._vocab_size, self._live)
        self.scheduler.validate(request)

    def add(self, request: Request) -> None:
        """Queue a request; raises like ``validate``."""
        self.validate(request)
        self._live[request.request_id] = request
        self.scheduler.add(request)

    def abort(self, request_id: str) -> Request | None:
        """Take a request out at once, wherever it is; None when it is unknown or has ended."""
        request = self._live.pop(request_id, None)
        if request is not None:
            self.scheduler.abort(request)
            request.finish_time = time.perf_counter()
        return request

    def _drain(self) -> CacheStats:
        drained, before = self.scheduler.drain_cache(), self._unreported
        self._unreported = ()
        return CacheStats(before + drained.events, drained.seconds)

    def forget(self, request_id: str) -> None:
        """A request has ended outside of a step: it failed."""
        del self._live[request_id]

    def logits(self, request: Request) -> Any:
        self.add(request)
        try:
            while True:
                plan = self.scheduler.schedule()
                logits = self.runner.logits(plan.scheduled)
                if plan.scheduled[0].takes_sample:
                    return logits[0].clone()
                self.scheduler.update(plan, {})
        finally:
            self.abort(request.request_id)
            self.scheduler.drain_cache()  # no step of the requests did this

    def forget_prefixes(self) -> None:
        self.scheduler.pool.forget_all()
        self._drain()  # the next step's log begins with an empty cache

    def pools(self) -> Mapping[str, PoolUse]:
        pool = self.scheduler.pool
        return {ENGINE: PoolUse(pool.num_blocks, pool.num_held, pool.num_cached)}

    def facts(self) -> RunnerFacts:
        return self.runner.facts()

    def close(self) -> None:
        self.runner.close()

    def step(self, until: float | None = None) -> StepOutput | None:
        """Schedule, execute, account. None when nothing can be computed; waiting for anything is for others."""
        start = time.perf_counter()
        plan = self.scheduler.schedule(start)
        if not plan.scheduled:  # what the cache did, as where a request was admitted and waits, goes to the next step
            self._unreported += self.scheduler.drain_cache().events
            return None
        num_running = len(self.scheduler.running)
        pool = self.scheduler.pool
        held, free, cached = pool.num_held, pool.num_free, pool.num_cached
        scheduled_at = time.perf_counter()
        result = self.runner.execute(plan.scheduled)
        executed_at = time.perf_counter()
        sampled = self.scheduler.update(plan, result.samples, executed_at)
        for request in sampled:
            if request.finish_reason is not None:
                del self._live[request.request_id]
        end = time.perf_counter()
        stats = StepStats(
            start=start,
            end=end,
            scheduled=plan.scheduled,
            num_running=num_running,
            num_waiting=plan.num_waiting,
            num_blocks_held=held,
            num_blocks_free=free,
            num_blocks_cached=cached,
            schedule_s=(scheduled_at - start) + (end - executed_at),
            forward_s=result.forward_s,
            sample_s=result.sample_s,
            cache=self._drain(),
        )
        return StepOutput(tuple(sampled), stats)
