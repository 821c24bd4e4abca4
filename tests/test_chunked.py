"""Stage 2: prompts are computed in chunks beside decodes. Scenarios on the fake model and on a tiny real one."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Literal

import pytest

from engine import LLM, SamplingParams
from engine.config import ConfigError
from engine.core import EngineCore
from engine.request import Request
from lab.acted import Acted
from lab.chunks import gaps, kv_tokens_read, prefill_steps, prefill_tokens, stalled_share, starved_steps, ttft
from lab.drive import drive
from lab.golden import differences, run_alone, run_among_aborts, run_cell
from lab.matrix import CHUNK_SIZES, CHUNKED, CONTINUOUS, golden_matrix, modes, random_prompts
from lab.workload import Workload, WorkloadRequest
from tests.fakes import VOCAB, expected_tokens, make_scheduler, run_step

MAX_MODEL_LEN = 5000


def request(name: str, num_prompt: int, max_tokens: int, **params: object) -> Request:
    prompt = tuple(random.Random(name).choices(range(VOCAB), k=num_prompt))
    return Request(name, prompt, SamplingParams(max_tokens, ignore_eos=True, **params), 0.0)  # type: ignore[arg-type]


def is_exact(one: Request) -> bool:
    return one.token_ids[one.num_prompt_tokens :] == expected_tokens(one.prompt_token_ids, one.params, MAX_MODEL_LEN)


def test_a_decode_gets_a_token_in_every_step_while_4000_tokens_prefill() -> None:
    scheduler, runner = make_scheduler(MAX_MODEL_LEN, num_kv_blocks=400, block_size=16, max_num_batched_tokens=64)
    decoding, long = request("decoding", 5, 100), request("long", 4000, 2)
    scheduler.add(decoding)
    run_step(scheduler, runner)
    scheduler.add(long)
    steps = 0
    while not long.num_output_tokens:
        plan = scheduler.schedule()
        assert [item.num_tokens for item in plan.scheduled] == [1, min(63, 4000 - long.num_computed_tokens)]
        assert decoding in run_step(scheduler, runner, plan)
        steps += 1
    assert steps == -(-4000 // 63)
    while scheduler.has_unfinished:
        run_step(scheduler, runner)
    assert is_exact(decoding) and is_exact(long)


def test_8_prompts_of_64_tokens_at_once_with_a_budget_of_50_finish() -> None:
    scheduler, runner = make_scheduler(num_kv_blocks=200, max_num_seqs=8, max_num_batched_tokens=50, max_model_len=100)
    asked = [request(f"r{i}", 64, 5) for i in range(8)]
    for one in asked:
        scheduler.add(one)
    computed = 0
    while scheduler.has_unfinished:
        plan = scheduler.schedule()
        assert plan.num_tokens <= 50
        computed += sum(item.num_tokens for item in plan.scheduled if item.is_prefill)
        run_step(scheduler, runner, plan)
    assert computed == 8 * 64 and all(map(is_exact, asked))


def test_what_a_finished_prompt_leaves_of_the_budget_goes_to_the_queue() -> None:
    scheduler, runner = make_scheduler(max_num_batched_tokens=10)
    for one in (request("first", 14, 2), request("second", 9, 2), request("third", 9, 2)):
        scheduler.add(one)
    seen = []
    for _ in range(3):
        plan = scheduler.schedule()
        seen.append([(item.request.request_id, item.num_tokens) for item in plan.scheduled])
        run_step(scheduler, runner, plan)
    assert seen[0] == [("first", 10)]
    assert seen[1] == [("first", 4), ("second", 6)]
    assert seen[2] == [("first", 1), ("second", 3), ("third", 6)]


def test_no_sample_is_taken_before_the_prompt_is_complete() -> None:
    scheduler, runner = make_scheduler(max_num_batched_tokens=4)
    one = request("one", 11, 3)
    scheduler.add(one)
    for computed in (4, 8):
        assert run_step(scheduler, runner) == [] and one.num_computed_tokens == computed and one.num_output_tokens == 0
    assert run_step(scheduler, runner) == [one] and one.num_output_tokens == 1


def test_an_abort_in_mid_prefill_frees_its_blocks_and_lets_the_next_one_in() -> None:
    scheduler, runner = make_scheduler(max_num_batched_tokens=4)
    one, other = request("one", 16, 3), request("other", 6, 2)
    scheduler.add(one)
    scheduler.add(other)
    run_step(scheduler, runner)
    run_step(scheduler, runner)
    assert one.num_computed_tokens == 8 and other.admitted_time is None
    scheduler.abort(one)
    assert scheduler.pool.num_held == 0
    while scheduler.has_unfinished:
        run_step(scheduler, runner)
    assert is_exact(other)


def tiny(dtype: Literal["float32", "bfloat16"] = "float32", **options: object) -> LLM:
    options = {"max_num_seqs": 8, "num_kv_blocks": 200, "check_invariants": True} | options
    llm = LLM("random:tiny", dtype=dtype, **options)
    for block in range(llm.core.scheduler.pool.num_blocks):  # what is not written yet must never be read
        llm.core.runner.poison(block)
    return llm


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("ops", ["reference", "cpu"])
@pytest.mark.parametrize("chunk", [1, 7, 16, 17, 33, 256])
def test_any_chunk_size_gives_the_bits_of_whole_prompts(
    chunk: int, ops: Literal["reference", "cpu"], dtype: Literal["float32", "bfloat16"]
) -> None:
    prompts, params = random_prompts(512, 16), SamplingParams(max_tokens=6)
    whole = run_alone(tiny(dtype, ops=ops, **CONTINUOUS), prompts, params)
    acted = Acted()
    options = CHUNKED | {"max_num_batched_tokens": chunk, "max_num_seqs": min(chunk, 8)}
    assert differences(whole, run_cell(tiny(dtype, ops=ops, **options), prompts, params, observe=acted.see)) == []
    assert acted.split > 0 and acted.mid_block > 0 and (acted.mixed > 0 or chunk == 1)
    if chunk > 1:
        assert differences(whole, run_among_aborts(tiny(dtype, ops=ops, **options), prompts, params)) == []


def test_seeded_draws_do_not_depend_on_the_chunks() -> None:
    prompt = tuple(random_prompts(512, 12)["r11"])
    params = SamplingParams(max_tokens=8, temperature=0.9, top_p=0.9, seed=5, ignore_eos=True)
    outputs = [tiny(max_num_seqs=1, max_num_batched_tokens=chunk).generate([prompt], params, use_tqdm=False)[0]
               for chunk in (3, 16, 128)]  # fmt: skip
    assert len({output.token_ids for output in outputs}) == 1


@pytest.mark.parametrize(("sizes", "rows"), [((1,), None), ((2, 3), ["whole prompts", "chunks of 17"])])
def test_stage_2_matrix_on_the_tiny_model(sizes: tuple[int, ...], rows: list[str] | None) -> None:
    """Every row in the modes of one rank, one chunk size over two and three (``make golden`` runs the rest)."""
    llm = LLM("random:tiny", dtype="float32", num_kv_blocks=400, max_num_seqs=5, enforce_eager=True)
    # 23 prompts leave a last batch that no graph fits; 30 tokens each let decodes meet behind small chunks.
    frame, _ = golden_matrix(2, llm, num_prompts=24, max_tokens=30, sizes=sizes, rows=rows)
    num_rows = len(rows) if rows else 2 + len(CHUNK_SIZES)
    assert frame["status"].tolist() == ["reference"] + ["equal"] * (num_rows * len(modes(sizes)) - 1)
    assert frame.loc[frame["row"] == "chunks of 17", "detail"].str.contains("steps mixed with decodes").all()
    with pytest.raises(ValueError, match=r"stage 2 has no rows \['chunks of 3'\]; it has whole prompts, chunks of 1"):
        golden_matrix(2, llm, num_prompts=1, max_tokens=1, rows=["chunks of 3"])


def workload(*requests: tuple[str, int, int]) -> Workload:
    asked = tuple(
        WorkloadRequest(f"{name}-{i}", 0.0, tuple(1 + (i + j) % (VOCAB - 1) for j in range(prompt)), output, True)
        for i, (name, prompt, output) in enumerate(requests)
    )
    return Workload("made", "made for a test", 0, asked, "spec", "content")


def test_counts_from_the_records(tmp_path: Path) -> None:
    asked = workload(("victim", 4, 12), ("long", 20, 2))
    scheduler, runner = make_scheduler(max_num_batched_tokens=6)
    record = drive(EngineCore(scheduler, runner, VOCAB), asked)
    # Steps: victim 4 + long 2; then victim 1 + long 5 three times; then the last 3.
    assert prefill_tokens(record) == 24
    assert kv_tokens_read(record) == 4 + (2 + 7 + 12 + 17 + 20)
    assert prefill_steps(record, "long").tolist() == [5]
    assert stalled_share(record, "victim") == pytest.approx(4 / 11)
    assert starved_steps(record) == 0
    assert len(gaps(record, "victim")) == 11 and len(ttft(record, "long")) == 1
    shifted = record.scheduled[~((record.scheduled["step"] == 3) & (record.scheduled["phase"] == "decode"))]
    object.__setattr__(record, "scheduled", shifted)
    assert starved_steps(record) == 1


def test_a_budget_below_the_seats_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens=4 is below max_num_seqs=8"):
        LLM("random:tiny", max_num_seqs=8, max_num_batched_tokens=4)
    with pytest.raises(ConfigError, match="enable_chunked_prefill=1 is not a bool"):
        LLM("random:tiny", enable_chunked_prefill=1)
