"""A hypothesis state machine over the scheduler: random arrivals, aborts and steps, on the fake model."""

from __future__ import annotations

from typing import Any, ClassVar

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from engine.request import Request, RequestError, SamplingParams
from tests.fakes import VOCAB, expected_tokens, make_scheduler, run_step

MAX_MODEL_LEN = 40


class Schedules(RuleBasedStateMachine):
    """Every finished request has exactly the tokens of the model alone, and every law holds after every step.

    Subclasses say with which engine options: ``OPTIONS`` draws them, over ``pool``'s sizes.
    """

    OPTIONS: ClassVar[st.SearchStrategy[dict[str, Any]]]
    PROMPTS: ClassVar[st.SearchStrategy[list[int]]] = st.lists(
        st.integers(0, VOCAB - 1), min_size=1, max_size=MAX_MODEL_LEN + 2
    )
    SALTS: ClassVar[st.SearchStrategy[str]] = st.just("")

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        sizes = {
            "num_kv_blocks": st.integers(10, 40),
            "block_size": st.sampled_from([1, 2, 4, 16]),
            "max_num_seqs": st.integers(1, 6),
            "max_num_batched_tokens": st.integers(6, 48),
        }
        options = {name: data.draw(values, label=name) for name, values in sizes.items()}
        options |= data.draw(self.OPTIONS, label="options")
        self.scheduler, self.runner = make_scheduler(MAX_MODEL_LEN, **options)
        self.requests: dict[str, Request] = {}
        self.order: list[str] = []

    @rule(
        data=st.data(),
        max_tokens=st.integers(1, 12),
        ignore_eos=st.booleans(),
        stops=st.lists(st.integers(0, VOCAB - 1), max_size=4),
    )
    def add(self, data: st.DataObject, max_tokens: int, ignore_eos: bool, stops: list[int]) -> None:
        prompt, salt = data.draw(self.PROMPTS, label="prompt"), data.draw(self.SALTS, label="salt")
        params = SamplingParams(max_tokens, ignore_eos=ignore_eos, stop_token_ids=tuple(stops), cache_salt=salt)
        request = Request(str(len(self.requests)), tuple(prompt), params, 0.0)
        try:
            self.scheduler.validate(request)
        except RequestError:
            return
        self.scheduler.add(request)
        self.requests[request.request_id] = request

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            plan = self.scheduler.schedule()
            self.order += [
                item.request.request_id for item in plan.scheduled if item.request.request_id not in self.order
            ]
            for request in run_step(self.scheduler, self.runner, plan):
                if request.finish_reason is not None:
                    self.verify(request)

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        live = [*self.scheduler.waiting, *self.scheduler.running]
        if live:
            request = data.draw(st.sampled_from(live), label="abort")
            held, alone = self.scheduler.pool.num_held, self._held_by_nobody_else(request)
            self.scheduler.abort(request)
            assert self.scheduler.pool.num_held <= held - alone, "an abort frees its blocks at once"
            assert request.finish_reason == "abort"

    @invariant()
    def conserved(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.check()

    def verify(self, request: Request) -> None:
        expected = expected_tokens(request.prompt_token_ids, request.params, MAX_MODEL_LEN)
        assert request.token_ids[request.num_prompt_tokens :] == expected

    def _held_by_nobody_else(self, request: Request) -> int:
        return sum(self.scheduler.pool.ref_count(block) == 1 for block in request.block_table)

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for _ in range(10_000):
            if not self.scheduler.has_unfinished:
                break
            self.step(1)
        assert not self.scheduler.has_unfinished, "requests wait for ever"
        assert self.scheduler.pool.num_free == self.scheduler.pool.num_blocks
        assert self.scheduler.pool.num_promised == 0
        in_order = sorted(self.order, key=int)
        assert self.order == in_order, "admission is first come first served"
        for request in self.requests.values():
            assert request.finish_reason is not None


def machine(schedules: type[Schedules], examples: int = 2000) -> Any:
    """The test case of a state machine."""
    case = schedules.TestCase
    case.settings = settings(
        max_examples=examples, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
    )
    return case
