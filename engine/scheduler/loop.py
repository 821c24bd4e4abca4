"""The scheduler loop. Every feature is a substitution of a policy; the loop has no feature flags.

schedule:  the running requests, oldest first, take their share of the step's token budget; then the oldest
           waiting requests are admitted, strictly first come first served, while budget, seats and blocks last,
           and run as soon as the KV that they start from is here: at once where it is computed here.
update:    computed tokens move on by what was scheduled; a request whose computed tokens caught up with its
           tokens takes its sample; finished ones leave.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from engine.config import EngineConfig
from engine.kv.block_pool import BlockPool
from engine.kv.prefix_cache import CacheStats, PrefixCacheLike, make_prefix_cache
from engine.kv.transfer import KVSource, LocalKV
from engine.request import FinishReason, Request, RequestError
from engine.scheduler.admission import Admission, give_back, make_admission
from engine.scheduler.prefill import Prefill, make_prefill


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """One request's part of a step: tokens ``start`` .. ``start + num_tokens - 1`` are computed."""

    request: Request
    start: int
    num_tokens: int

    @property
    def takes_sample(self) -> bool:
        """Whether the step catches up with the request's tokens, so that its last row gives the next one."""
        return self.start + self.num_tokens == self.request.num_tokens

    @property
    def is_prefill(self) -> bool:
        return self.start < self.request.num_prompt_tokens


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step computes, in row order."""

    scheduled: tuple[ScheduledRequest, ...]
    num_admitted: int
    num_waiting: int

    @property
    def num_tokens(self) -> int:
        return sum(item.num_tokens for item in self.scheduled)


def worst_case_blocks(request: Request, max_tokens: int, block_size: int, max_model_len: int) -> int:
    """KV blocks that a request can need if it generates ``max_tokens``."""
    # The last token of a request is sampled but never computed, so it needs no slot.
    longest = min(request.num_prompt_tokens + max_tokens, max_model_len)
    return -(-(longest - 1) // block_size)


def refuse_oversized(request: Request, max_tokens: int, block_size: int, num_blocks: int, max_model_len: int) -> None:
    """Refuse a request that a pool of ``num_blocks`` could never run.

    Raises:
        RequestError: The prompt leaves no room for a token within ``max_model_len``, or the blocks the request can
            need at worst exceed the whole pool.
    """
    if request.num_prompt_tokens >= max_model_len:
        raise RequestError(
            f"request {request.request_id}: a prompt of {request.num_prompt_tokens} tokens leaves no room to "
            f"generate within max_model_len={max_model_len}; shorten it or raise max_model_len"
        )
    need = worst_case_blocks(request, max_tokens, block_size, max_model_len)
    if need > num_blocks:
        raise RequestError(
            f"request {request.request_id}: {request.num_prompt_tokens} prompt tokens and max_tokens={max_tokens} "
            f"can need {need} KV blocks of {block_size} tokens, and the pool has {num_blocks}; lower max_tokens or "
            "raise num_kv_blocks / kv_cache_bytes"
        )


class Scheduler:
    """Owns the waiting and running queues, and moves requests through them."""

    def __init__(
        self,
        pool: BlockPool,
        admission: Admission,
        prefill: Prefill,
        cache: PrefixCacheLike,
        source: KVSource,
        *,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        eos_token_ids: tuple[int, ...],
        check_invariants: bool = False,
    ) -> None:
        self.pool = pool
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.admission, self.source = admission, source
        self._prefill, self._cache = prefill, cache
        self._block_size = block_size
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_model_len = max_model_len
        self._eos_token_ids = frozenset(eos_token_ids)
        self._check_invariants = check_invariants

    @classmethod
    def from_config(
        cls,
        config: EngineConfig,
        pool: BlockPool,
        max_model_len: int,
        eos_token_ids: tuple[int, ...],
        fingerprint: str = "",
        admission: Admission | None = None,
        source: KVSource | None = None,
    ) -> Scheduler:
        """The factory: which policy each option substitutes. ``fingerprint`` names whose KV the pool holds.

        Of a pair of instances, the one that prefills brings its ``admission`` and the one that decodes its ``source``.
        """
        return cls(
            pool,
            admission=make_admission(config, pool) if admission is None else admission,
            prefill=make_prefill(config),
            cache=make_prefix_cache(config, pool, fingerprint),
            source=LocalKV() if source is None else source,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=max_model_len,
            eos_token_ids=eos_token_ids,
            check_invariants=config.check_invariants,
        )

    @property
    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running or self.source.num_receiving)

    def validate(self, request: Request) -> None:
        """Refuse a request that could never run; raises like ``refuse_oversized``."""
        max_tokens = request.params.max_tokens
        refuse_oversized(request, max_tokens, self._block_size, self.pool.num_blocks, self._max_model_len)

    def add(self, request: Request) -> None:
        """Queue a request that ``validate`` accepts, behind every other."""
        self.waiting.append(request)

    def abort(self, request: Request) -> None:
        """Take an unfinished request out, wherever it is, and free its blocks: at once, unless KV is on its way."""
        request.finish_reason = "abort"
        if request.admitted_time is None:
            self.waiting.remove(request)
            return
        if self.source.cancel(request):
            return
        self.running.remove(request)
        give_back(request, self.pool)
        if not self.running:
            self.admission.drained()

    def schedule(self, now: float = 0.0) -> StepPlan:
        """Plan the next step and allocate the blocks it writes; empty exactly when nothing can be computed now."""
        budget = self._max_num_batched_tokens
        plan: list[ScheduledRequest] = []
        num_prefills = 0

        def go_on(request: Request) -> None:
            nonlocal budget, num_prefills
            num_tokens = self._prefill.share(request.num_uncomputed_tokens, budget, num_prefills)
            num_prefills += request.is_prefilling
            budget -= self._plan(plan, request, num_tokens)

        for request in self.running:
            go_on(request)
        num_running = len(self.running)
        self._start_arrived(go_on)
        while (
            budget > 0
            and self.waiting
            and len(self.running) + self.source.num_receiving < self._max_num_seqs
            and self.admission.may_join(len(self.running))
            and self.source.may_begin()
        ):
            request = self.waiting[0]
            hit = self._cache.match(request)
            need = worst_case_blocks(request, request.params.max_tokens, self._block_size, self._max_model_len)
            if need - sum(self.pool.ref_count(block) > 0 for block in hit) > self.pool.num_unpromised:
                break
            num_cached = len(hit) * self._block_size
            if self._prefill.share(self.source.num_to_compute(request, num_cached), budget, num_prefills) == 0:
                break
            self.waiting.popleft()
            self.admission.joined()
            request.admitted_time = now
            self.pool.retain(hit)
            self._cache.admitted(request, len(hit))
            request.block_table = list(hit)
            request.num_cached_tokens = request.num_computed_tokens = num_cached
            request.num_promised_blocks = need - len(hit)
            self.pool.promise(request.num_promised_blocks)
            self.source.begin(request, self._grow)
            self._start_arrived(go_on)
        num_admitted = len(self.running) - num_running
        self.admission.end_schedule(num_admitted, len(self.running))
        step = StepPlan(tuple(plan), num_admitted, len(self.waiting))
        if self._check_invariants:
            self._check_plan(step, num_prefills)
        return step

    def update(self, plan: StepPlan, samples: Mapping[str, tuple[int, float]], now: float = 0.0) -> list[Request]:
        """Account for an executed plan.

        Args:
            plan: The plan that ``schedule`` returned last.
            samples: (token id, logprob) by request id, for the requests whose part ``takes_sample``.
            now: When the samples arrived, in seconds.

        Returns:
            The requests that took a sample, in plan order; those that ended have a ``finish_reason``.
        """
        sampled = []
        for item in plan.scheduled:
            request = item.request
            if request.finish_reason is not None:  # aborted while the step ran
                continue
            takes_sample = item.takes_sample
            request.num_computed_tokens += item.num_tokens
            self._cache.publish(request, item.start)
            if takes_sample:
                token_id, logprob = samples[request.request_id]
                request.token_ids.append(token_id)
                request.logprobs.append(logprob)
                request.token_times.append(now)
                request.finish_reason = self._finish_reason(request)
                sampled.append(request)
        finished = [request for request in sampled if request.finish_reason is not None]
        if finished:
            self.running = [request for request in self.running if request.finish_reason is None]
            for request in finished:
                request.finish_time = now
                self.admission.release(request)
            if not self.running:
                self.admission.drained()
        if self._check_invariants:
            self.check()
        return sampled

    def drain_cache(self) -> CacheStats:
        """What the prefix cache did since the last call."""
        return self._cache.drain()

    def check(self) -> None:
        """Assert the conservation laws (O(blocks); for tests and debugging)."""
        holders = (*self.running, *self.admission.held(), *self.source.held())
        self._cache.check()
        self.pool.check(request.block_table for request in holders)
        assert self.pool.num_promised == sum(request.num_promised_blocks for request in holders)
        assert len(self.running) + self.source.num_receiving <= self._max_num_seqs
        assert sum(request.is_prefilling for request in self.running[:-1]) == 0, "only the newest may be mid-prefill"
        for request in self.running:
            assert 0 <= request.num_cached_tokens <= request.num_computed_tokens < request.num_tokens
            assert request.num_tokens < self._max_model_len
            assert len(request.block_table) * self._block_size >= request.num_computed_tokens
        if not holders:
            assert self.pool.num_held == 0 and self.pool.num_promised == 0, "blocks are held by nobody that runs"

    def _plan(self, plan: list[ScheduledRequest], request: Request, num_tokens: int) -> int:
        assert 1 <= num_tokens <= request.num_uncomputed_tokens, f"{num_tokens} tokens planned for {request.request_id}"
        self._grow(request, request.num_computed_tokens + num_tokens)
        plan.append(ScheduledRequest(request, request.num_computed_tokens, num_tokens))
        return num_tokens

    def _grow(self, request: Request, num_tokens: int) -> None:
        """Allocate the blocks that the request's first ``num_tokens`` tokens lack."""
        missing = -(-num_tokens // self._block_size) - len(request.block_table)
        if missing > 0:
            request.block_table += self.pool.allocate(missing)
            request.num_promised_blocks -= missing

    def _start_arrived(self, go_on: Callable[[Request], None]) -> None:
        """Let the requests run whose KV is here."""
        for request in self.source.arrived():
            self._cache.publish(request, request.num_cached_tokens)
            self.running.append(request)
            go_on(request)

    def _finish_reason(self, request: Request) -> FinishReason | None:
        token_id, params = request.token_ids[-1], request.params
        if token_id in params.stop_token_ids or (token_id in self._eos_token_ids and not params.ignore_eos):
            return "stop"
        if request.num_output_tokens >= params.max_tokens or request.num_tokens >= self._max_model_len:
            return "length"
        return None

    def _check_plan(self, plan: StepPlan, num_prefills: int) -> None:
        rows = [item.request.request_id for item in plan.scheduled]
        assert rows == [request.request_id for request in self.running], "every running request moves in every step"
        assert plan.num_tokens <= self._max_num_batched_tokens or (num_prefills == 1 and not self._prefill.splits)
        blocked = self.admission.held() or self.source.held() or not self.source.may_begin()
        assert rows or not self.waiting or blocked, "requests wait and nothing runs"
