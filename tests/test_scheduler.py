"""The scheduler loop and the block pool on a fake model: tokens, conservation laws, and the static baseline's rules."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import initialize

from engine.kv.block_pool import BlockPool
from engine.kv.prefix_cache import PrefixCache
from engine.request import Request, RequestError, SamplingParams
from engine.scheduler.loop import Scheduler
from tests.fakes import EOS, VOCAB, expected_tokens, make_scheduler, run_step
from tests.schedules import MAX_MODEL_LEN, Schedules, machine

UNCACHED: dict[str, Any] = {"enable_prefix_caching": False}
STATIC: dict[str, Any] = {"batching": "static", "enable_chunked_prefill": False} | UNCACHED


class StaticSchedules(Schedules):
    """The baseline."""

    OPTIONS = st.just({"batching": "static", "enable_chunked_prefill": False} | UNCACHED)


TestStaticSchedules = machine(StaticSchedules)


class ContinuousSchedules(Schedules):
    """Requests join and leave at every step."""

    OPTIONS = st.just({"enable_chunked_prefill": False} | UNCACHED)


TestContinuousSchedules = machine(ContinuousSchedules)


class ChunkedSchedules(Schedules):
    """Prompts are split, in continuous and in static batches."""

    OPTIONS = st.fixed_dictionaries(
        {"batching": st.sampled_from(["continuous", "continuous", "static"]), "enable_prefix_caching": st.just(False)}
    )


TestChunkedSchedules = machine(ChunkedSchedules)


def shared_prompt(family: int, shared: int, own: list[int]) -> list[int]:
    """A prompt that begins like every other of its family."""
    return ([(7 * family + 3 * i) % VOCAB for i in range(shared)] + own)[:MAX_MODEL_LEN] or [family]


class PrefixSchedules(Schedules):
    """Prompts begin alike, blocks are shared, forgotten and revived; salts keep some apart."""

    OPTIONS = st.fixed_dictionaries(
        {
            "batching": st.sampled_from(["continuous", "continuous", "static"]),
            "enable_chunked_prefill": st.booleans(),
        }
    )
    PROMPTS = st.builds(
        shared_prompt,
        st.integers(0, 2),
        st.integers(0, MAX_MODEL_LEN - 4),
        st.lists(st.integers(0, VOCAB - 1), max_size=6),
    )
    SALTS = st.sampled_from(["", "", "tenant"])


TestPrefixSchedules = machine(PrefixSchedules, examples=5000)


def weak_hash(parent: bytes, tokens: bytes) -> bytes:
    """Four values for every block: most of what is looked up collides."""
    return bytes([(sum(parent) + sum(tokens)) % 4])


class CollidingSchedules(PrefixSchedules):
    """The same with a hash that nearly always collides: entries hide each other, and tokens never change."""

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        super().start(data)
        pool, block_size = self.scheduler.pool, self.scheduler._block_size
        self.scheduler._cache = PrefixCache(pool, block_size, "", weak_hash)


TestCollidingSchedules = machine(CollidingSchedules, examples=1000)


def request(name: str, num_prompt: int, max_tokens: int, ignore_eos: bool = True) -> Request:
    return Request(
        name,
        tuple(1 + i % (VOCAB - 1) for i in range(num_prompt)),
        SamplingParams(max_tokens, ignore_eos=ignore_eos),
        0.0,
    )


def add(scheduler: Scheduler, *requests: Request) -> None:
    for one in requests:
        scheduler.validate(one)
        scheduler.add(one)


def names(requests: list[Request]) -> list[str]:
    return [one.request_id for one in requests]


def test_static_batch_forms_once_and_frees_when_its_last_row_ends() -> None:
    scheduler, runner = make_scheduler(**STATIC, max_num_seqs=2)
    a, b, c = request("a", 5, 2), request("b", 5, 6), request("c", 5, 2)
    add(scheduler, a, b, c)
    run_step(scheduler, runner)
    assert names(scheduler.running) == ["a", "b"]
    held = scheduler.pool.num_held
    run_step(scheduler, runner)
    assert a.finish_reason == "length" and names(scheduler.running) == ["b"]
    for _ in range(3):
        run_step(scheduler, runner)
        assert names(scheduler.running) == ["b"], "nobody takes a finished row's seat"
        assert scheduler.pool.num_held >= held, "no block is freed before the last row ends"
    run_step(scheduler, runner)
    assert b.finish_reason == "length" and scheduler.pool.num_held == 0
    run_step(scheduler, runner)
    assert names(scheduler.running) == ["c"]


def test_static_batch_stays_open_while_steps_admit() -> None:
    scheduler, runner = make_scheduler(**STATIC, max_num_seqs=3, max_num_batched_tokens=10)
    add(scheduler, request("a", 8, 9), request("b", 8, 9), request("c", 8, 9))
    for expected in (["a"], ["a", "b"], ["a", "b", "c"]):
        run_step(scheduler, runner)
        assert names(scheduler.running) == expected


def test_static_batch_closes_when_a_step_admits_nobody() -> None:
    scheduler, runner = make_scheduler(**STATIC, max_num_seqs=3)
    add(scheduler, request("a", 4, 6))
    run_step(scheduler, runner)
    run_step(scheduler, runner)
    add(scheduler, request("late", 4, 2))
    run_step(scheduler, runner)
    assert names(scheduler.running) == ["a"]


def test_a_prompt_longer_than_the_budget_runs_whole_and_is_the_only_prefill() -> None:
    scheduler, _ = make_scheduler(enable_chunked_prefill=False, max_num_batched_tokens=8, max_num_seqs=4)
    add(scheduler, request("long", 20, 2), request("short", 2, 2))
    plan = scheduler.schedule()
    assert [(item.request.request_id, item.num_tokens) for item in plan.scheduled] == [("long", 20)]


def test_queue_head_that_waits_for_blocks_stops_later_ones_that_would_fit() -> None:
    scheduler, runner = make_scheduler(num_kv_blocks=8, block_size=4, max_num_seqs=4, max_num_batched_tokens=64)
    add(scheduler, request("a", 16, 5), request("big", 16, 5), request("small", 2, 2))
    run_step(scheduler, runner)
    assert names(scheduler.running) == ["a"]
    assert [one.request_id for one in scheduler.waiting] == ["big", "small"]


def test_requests_that_can_never_run_are_refused_with_the_numbers() -> None:
    scheduler, _ = make_scheduler(num_kv_blocks=3, block_size=4, max_model_len=64)
    with pytest.raises(RequestError, match=r"64 tokens .* max_model_len=64; shorten"):
        scheduler.validate(request("long", 64, 1))
    with pytest.raises(
        RequestError, match=r"8 prompt tokens and max_tokens=9 can need 4 KV blocks .* pool has 3; lower"
    ):
        scheduler.validate(request("greedy", 8, 9))
    scheduler.validate(request("exact", 8, 5))


def test_pool_exactly_as_large_as_one_request() -> None:
    scheduler, runner = make_scheduler(num_kv_blocks=3, block_size=4)
    one, two = request("one", 8, 5), request("two", 8, 5)
    add(scheduler, one, two)
    while scheduler.has_unfinished:
        run_step(scheduler, runner)
    for done in (one, two):
        assert done.token_ids[8:] == expected_tokens(done.prompt_token_ids, done.params, 64)


def test_stop_reasons() -> None:
    scheduler, runner = make_scheduler(max_model_len=20)
    natural = request("natural", 3, 200, ignore_eos=False)
    expected = expected_tokens(natural.prompt_token_ids, natural.params, 20)
    stopping = Request("stop", natural.prompt_token_ids, SamplingParams(9, stop_token_ids=(expected[2],)), 0.0)
    add(scheduler, natural, stopping, request("full", 3, 200), request("one", 3, 1))
    done: dict[str, Request] = {}
    while scheduler.has_unfinished:
        done |= {one.request_id: one for one in run_step(scheduler, runner) if one.finish_reason}
    assert done["natural"].finish_reason == ("stop" if expected[-1] == EOS else "length")
    assert done["stop"].finish_reason == "stop" and done["stop"].token_ids[-1] == expected[2]
    assert done["full"].finish_reason == "length" and done["full"].num_tokens == 20
    assert done["one"].num_output_tokens == 1


def test_pool_counts_holders_and_reuses_the_least_recently_freed_first() -> None:
    pool = BlockPool(4)
    pool.promise(3)
    first = pool.allocate(3)
    assert first == [0, 1, 2] and pool.num_free == 1 and pool.num_promised == 0
    pool.retain([1])
    pool.release([2, 1, 0])
    pool.check([[1]])
    pool.promise(3)
    assert pool.allocate(3) == [3, 2, 0]
    pool.release([1])
    pool.retain([1])  # revived while its contents are still known
    assert pool.ref_count(1) == 1 and pool.num_free == 0


@pytest.mark.parametrize("misuse", ["promise", "allocate", "release"])
def test_pool_refuses_misuse(misuse: str) -> None:
    pool = BlockPool(2)
    with pytest.raises(AssertionError):
        {
            "promise": lambda: pool.promise(3),
            "allocate": lambda: pool.allocate(1),
            "release": lambda: pool.release([0]),
        }[misuse]()


@pytest.mark.parametrize("fault", ["stale block", "wrong slot"])
def test_the_fake_model_notices_a_fault(fault: str) -> None:
    """The test bench itself can fail: a fault in the block table changes tokens."""
    scheduler, runner = make_scheduler()
    one = request("one", 9, 4)
    add(scheduler, one)
    run_step(scheduler, runner)
    if fault == "stale block":
        runner.poison(one.block_table[0])
    else:
        one.block_table[0], one.block_table[1] = one.block_table[1], one.block_table[0]
    while scheduler.has_unfinished:
        run_step(scheduler, runner)
    assert one.token_ids[9:] != expected_tokens(one.prompt_token_ids, one.params, 64)
