"""A runner without a model: its KV remembers which token was written where, and its next token hashes what it reads."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from engine.config import EngineConfig
from engine.execution.results import StepResult
from engine.kv.block_pool import BlockPool
from engine.request import Request, SamplingParams
from engine.scheduler.loop import ScheduledRequest, Scheduler, StepPlan

VOCAB = 97
EOS = 0


def next_token(prefix: Sequence[tuple[int, int]]) -> int:
    """The fake model: a hash of the exact (token, position) prefix."""
    return hashlib.blake2b(repr(list(prefix)).encode(), digest_size=4).digest()[0] % VOCAB


def expected_tokens(prompt: Sequence[int], params: SamplingParams, max_model_len: int) -> list[int]:
    """What a request must produce, whatever runs beside it: the fake model without any engine."""
    tokens = list(prompt)
    while True:
        tokens.append(next_token([(token, position) for position, token in enumerate(tokens)]))
        out = len(tokens) - len(prompt)
        if tokens[-1] in params.stop_token_ids or (tokens[-1] == EOS and not params.ignore_eos):
            return tokens[len(prompt) :]
        if out == params.max_tokens or len(tokens) == max_model_len:
            return tokens[len(prompt) :]


class FakeRunner:
    """Executes plans on a dictionary of slots. Any wrong slot, stale block or early publish changes tokens."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_kv_blocks = num_blocks
        self._block_size = block_size
        self.slots: dict[int, tuple[int, int] | str] = {}

    def poison(self, block: int) -> None:
        for slot in range(block * self._block_size, (block + 1) * self._block_size):
            self.slots[slot] = "poison"

    def execute(self, scheduled: Sequence[ScheduledRequest]) -> StepResult:
        written: set[int] = set()
        for item in scheduled:
            for position in range(item.start, item.start + item.num_tokens):
                slot = self._slot(item.request, position)
                assert slot not in written, f"slot {slot} is written twice in one step"
                written.add(slot)
                self.slots[slot] = (item.request.token_ids[position], position)
        samples = {}
        for item in scheduled:
            if item.takes_sample:
                read = [self.slots[self._slot(item.request, p)] for p in range(item.start + item.num_tokens)]
                token = next_token(read)  # type: ignore[arg-type]
                samples[item.request.request_id] = (token, -1.0)
        return StepResult(samples, 0.0, 0.0)

    def _slot(self, request: Request, position: int) -> int:
        return request.block_table[position // self._block_size] * self._block_size + position % self._block_size


def make_scheduler(max_model_len: int = 64, **options: Any) -> tuple[Scheduler, FakeRunner]:
    """A scheduler with the engine's options and a fake runner; freed blocks are poisoned, and all checks are on."""
    small = {"num_kv_blocks": 64, "block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 32}
    config = EngineConfig.from_options(small | options | {"check_invariants": True})
    assert config.num_kv_blocks is not None
    runner = FakeRunner(config.num_kv_blocks, config.block_size)
    pool = BlockPool(config.num_kv_blocks, on_free=runner.poison)
    return Scheduler.from_config(config, pool, max_model_len, (EOS,)), runner


def run_step(scheduler: Scheduler, runner: FakeRunner, plan: StepPlan | None = None) -> list[Request]:
    """Execute a plan, or the next one; the requests that took a token."""
    plan = scheduler.schedule() if plan is None else plan
    assert plan.scheduled or not scheduler.has_unfinished
    return scheduler.update(plan, runner.execute(plan.scheduled).samples)
