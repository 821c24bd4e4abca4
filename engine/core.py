"""EngineCore: the step. Plain token ids in, plain token ids out; tokenising and waiting live in ``LLM``."""

from __future__ import annotations

import time
from dataclasses import dataclass

from engine.execution.results import Runner
from engine.kv.prefix_cache import CacheStats
from engine.request import Request, RequestError
from engine.scheduler.loop import ScheduledRequest, Scheduler


@dataclass(frozen=True, slots=True)
class StepStats:
    """What one step did and what it took. Times are seconds on ``time.perf_counter``'s clock.

    ``num_blocks_cached`` of the free blocks hold known prefixes; the cache's time is part of ``schedule_s``.
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

    @property
    def num_tokens(self) -> int:
        return sum(item.num_tokens for item in self.scheduled)


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The requests that took a token in a step, in row order; those that ended have a ``finish_reason``."""

    sampled: tuple[Request, ...]
    stats: StepStats


class EngineCore:
    """Drives a scheduler and a runner, one step at a time."""

    def __init__(self, scheduler: Scheduler, runner: Runner, vocab_size: int) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self._vocab_size = vocab_size
        self._live: dict[str, Request] = {}

    @property
    def has_unfinished(self) -> bool:
        return bool(self._live)

    def validate(self, request: Request) -> None:
        """Refuse what could not run, before anything is queued.

        Raises:
            RequestError: Empty prompt, token id outside the vocabulary, request id in use, or a request that
                ``max_model_len`` or the KV pool can never hold.
        """
        if not request.prompt_token_ids:
            raise RequestError(f"request {request.request_id}: the prompt is empty (0 tokens); give at least 1 token")
        for position, token_id in enumerate(request.prompt_token_ids):
            if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < self._vocab_size:
                raise RequestError(
                    f"request {request.request_id}: token id {token_id!r} at position {position} is not a whole number "
                    f"in 0 .. {self._vocab_size - 1}, the model's vocabulary; tokenise with the model's own tokenizer"
                )
        if request.request_id in self._live:
            raise RequestError(f"request id {request.request_id!r} is in use; choose another or wait until it ends")
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

    def step(self) -> StepOutput | None:
        """Schedule, execute, account. None when there is nothing to do."""
        start = time.perf_counter()
        plan = self.scheduler.schedule(start)
        if not plan.scheduled:
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
            cache=self.scheduler.drain_cache(),
        )
        return StepOutput(tuple(sampled), stats)
