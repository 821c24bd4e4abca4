"""Stage 1: requests join and leave at every step. Scenarios on the fake model and on a tiny real one."""

from __future__ import annotations

import random
import tracemalloc
from typing import Literal

import pytest

from engine import LLM, SamplingParams
from engine.config import ConfigError
from engine.request import Request
from lab.acted import Acted
from lab.golden import differences, run_alone, run_among_aborts, run_cell
from lab.matrix import golden_matrix, modes, random_prompts
from tests.fakes import VOCAB, expected_tokens, make_scheduler, run_step

Tiny = dict[str, tuple[int, ...]]


def request(name: str, num_prompt: int, max_tokens: int) -> Request:
    prompt = tuple(random.Random(name).choices(range(VOCAB), k=num_prompt))
    return Request(name, prompt, SamplingParams(max_tokens, ignore_eos=True), 0.0)


def is_exact(one: Request) -> bool:
    return one.token_ids[one.num_prompt_tokens :] == expected_tokens(one.prompt_token_ids, one.params, 64)


def test_a_seat_is_given_away_in_the_step_after_it_is_free() -> None:
    scheduler, runner = make_scheduler(max_num_seqs=2)
    short, long, late = request("short", 5, 2), request("long", 5, 9), request("late", 5, 2)
    for one in (short, long, late):
        scheduler.add(one)
    run_step(scheduler, runner)
    run_step(scheduler, runner)
    assert short.finish_reason == "length" and short.block_table == [], "its blocks went back at once"
    assert scheduler.pool.num_held == len(long.block_table)
    run_step(scheduler, runner)
    assert [one.request_id for one in scheduler.running] == ["long", "late"]
    while scheduler.has_unfinished:
        run_step(scheduler, runner)
    assert all(map(is_exact, (short, long, late)))


def test_a_request_that_ends_in_prefill_runs_beside_decodes_and_frees_its_seat() -> None:
    scheduler, runner = make_scheduler(max_num_seqs=2)
    scheduler.add(request("decoding", 6, 8))
    run_step(scheduler, runner)
    ones = [request(f"one-{i}", 7, 1) for i in range(4)]
    for one in ones:
        scheduler.add(one)
    for i, one in enumerate(ones):
        plan = scheduler.schedule()
        assert [item.num_tokens for item in plan.scheduled] == [1, 7]
        run_step(scheduler, runner, plan)
        assert one.finish_reason == "length" and is_exact(one), f"one-{i} takes one step"


def test_an_abort_in_the_step_a_request_would_finish_loses_only_that_token() -> None:
    scheduler, runner = make_scheduler()
    ending, staying = request("ending", 5, 2), request("staying", 5, 4)
    scheduler.add(ending)
    scheduler.add(staying)
    run_step(scheduler, runner)
    plan = scheduler.schedule()
    samples = runner.execute(plan.scheduled).samples
    scheduler.abort(ending)
    assert scheduler.update(plan, samples) == [staying]
    assert ending.finish_reason == "abort" and ending.num_output_tokens == 1 and ending.block_table == []
    while scheduler.has_unfinished:
        run_step(scheduler, runner)
    assert is_exact(staying) and scheduler.pool.num_held == 0


def test_a_head_that_waits_for_blocks_keeps_later_ones_waiting_that_would_fit() -> None:
    scheduler, runner = make_scheduler(num_kv_blocks=8, max_num_batched_tokens=64)
    running, big, small = request("running", 16, 5), request("big", 16, 5), request("small", 2, 2)
    for one in (running, big, small):
        scheduler.add(one)
    while running.finish_reason is None:
        run_step(scheduler, runner)
        assert big.admitted_time is None and small.admitted_time is None
    run_step(scheduler, runner)
    assert [one.request_id for one in scheduler.running] == ["big", "small"]


def test_a_pool_exactly_as_large_as_one_request_serves_them_one_by_one() -> None:
    scheduler, runner = make_scheduler(num_kv_blocks=3)
    asked = [request(f"r{i}", 8, 5) for i in range(3)]
    for one in asked:
        scheduler.add(one)
    while scheduler.has_unfinished:
        run_step(scheduler, runner)
        assert len(scheduler.running) <= 1
    assert all(map(is_exact, asked))


def test_500_requests_through_a_pool_of_40_blocks_end_with_every_block_free() -> None:
    scheduler, runner = make_scheduler(num_kv_blocks=40, max_num_seqs=8)
    generator = random.Random(0)
    asked = [request(f"r{i}", generator.randint(1, 30), generator.randint(1, 20)) for i in range(500)]
    for one in asked:
        scheduler.add(one)
    steps = 0
    while scheduler.has_unfinished:
        run_step(scheduler, runner)
        steps += 1
    assert all(map(is_exact, asked))
    assert scheduler.pool.num_free == 40 and scheduler.pool.num_promised == 0
    total = sum(one.num_output_tokens for one in asked)
    assert steps < total / 2, "rows share steps"


def test_memory_stays_flat_over_10_000_requests() -> None:
    """What a step allocates is freed with its requests: nothing grows with history."""
    scheduler, _ = make_scheduler(num_kv_blocks=64, max_num_seqs=8)

    def serve(count: int) -> None:
        for i in range(count):
            scheduler.add(Request(str(i), (1,) * (1 + i % 7), SamplingParams(1 + i % 5, ignore_eos=True), 0.0))
            while len(scheduler.waiting) > 4 or (i + 1 == count and scheduler.has_unfinished):
                plan = scheduler.schedule()
                scheduler.update(plan, {item.request.request_id: (1, -1.0) for item in plan.scheduled})
                scheduler.drain_cache()  # as EngineCore does after each step

    serve(500)  # what is allocated once
    tracemalloc.start()
    try:
        serve(500)
        before = tracemalloc.get_traced_memory()[0]
        serve(10_000)
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert grown < 20_000, f"{grown} bytes more after 10,000 requests"


def tiny(seats: int, dtype: Literal["float32", "bfloat16"] = "float32", **options: object) -> LLM:
    """Few tokens a step, so that prompts join one after the other and do not end together."""
    return LLM("random:tiny", dtype=dtype, max_num_seqs=seats, max_num_batched_tokens=64, num_kv_blocks=200, **options)


@pytest.fixture(scope="module")
def prompts() -> Tiny:
    return dict(random_prompts(512, 24))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("seats", [1, 3, 8])
def test_any_number_of_seats_gives_the_bits_of_each_prompt_alone(
    prompts: Tiny, seats: int, dtype: Literal["float32", "bfloat16"]
) -> None:
    params, acted = SamplingParams(max_tokens=16), Acted()
    alone = run_alone(tiny(1, dtype, batching="static"), prompts, params)
    assert differences(alone, run_cell(tiny(seats, dtype), prompts, params, observe=acted.see)) == []
    assert (acted.joined > 0) == (seats > 1)
    assert differences(alone, run_among_aborts(tiny(seats, dtype), prompts, params, seed=seats)) == []


def test_the_same_prompt_alone_eight_times_and_among_seven_others(prompts: Tiny) -> None:
    params, llm = SamplingParams(max_tokens=12), tiny(8)
    names = list(prompts)[:8]
    alone = run_cell(llm, {names[0]: prompts[names[0]]}, params)
    eight = run_cell(llm, {str(i): prompts[names[0]] for i in range(8)}, params)
    assert {output.digest for output in eight.values()} == {alone[names[0]].digest}
    among = run_cell(llm, {name: prompts[name] for name in names}, params)
    assert among[names[0]].digest == alone[names[0]].digest


def test_stage_1_matrix_on_the_tiny_model_over_every_mode() -> None:
    llm = tiny(5, batching="static", enforce_eager=True)
    frame, _ = golden_matrix(1, llm, num_prompts=23, max_tokens=10, sizes=(1, 2, 3))
    assert frame["status"].tolist() == ["reference"] + ["equal"] * (3 * len(modes((1, 2, 3))) - 1)
    on = frame[frame["row"] != "static"]
    assert on["detail"].str.contains("requests joined mid-batch").all()


def test_static_batches_let_nobody_join() -> None:
    acted, prompts = Acted(), random_prompts(512, 12)
    run_cell(tiny(4, batching="static"), prompts, SamplingParams(max_tokens=6, ignore_eos=True), observe=acted.see)
    assert acted.joined == 0 and acted.steps > 6


def test_batching_is_checked() -> None:
    with pytest.raises(ConfigError, match="batching='dynamic' is unknown; choose one of continuous, static"):
        LLM("random:tiny", batching="dynamic")
