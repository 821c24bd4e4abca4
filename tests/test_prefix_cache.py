"""Stage 3: blocks are found again by their prefix: the cache alone, on the fake model, and on a tiny real one."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import pytest

from engine import LLM, SamplingParams
from engine.core import EngineCore
from engine.kv.prefix_cache import PrefixCache, chained_hash
from engine.request import Request, RequestError
from engine.scheduler.loop import Scheduler
from lab.acted import Acted
from lab.bench import engine_arm
from lab.cache_oracle import prefix_tree, replay_hits
from lab.drive import drive
from lab.experiment import CacheState
from lab.golden import differences, run_alone, run_among_aborts, run_cell, run_half_warm, run_warm
from lab.matrix import CHUNKED, CONTINUOUS, PREFIX, golden_matrix, modes, random_prompts
from lab.traces import find_trace
from lab.workload import Workload, WorkloadRequest, load_workload, trace_replay
from tests.fakes import VOCAB, FakeRunner, expected_tokens, make_scheduler, run_step

ROOT = Path(__file__).parent.parent
LARGE_VOCAB = 50_000


def tokens(family: str, count: int) -> tuple[int, ...]:
    return tuple(random.Random(family).choices(range(VOCAB), k=count))


def request(name: str, prompt: Sequence[int], max_tokens: int = 3, salt: str = "") -> Request:
    return Request(name, tuple(prompt), SamplingParams(max_tokens, ignore_eos=True, cache_salt=salt), 0.0)


def serve(scheduler: Scheduler, runner: FakeRunner, *requests: Request) -> None:
    """Run requests to their end, all added at once, and check their tokens."""
    for one in requests:
        scheduler.validate(one)
        scheduler.add(one)
    while scheduler.has_unfinished:
        run_step(scheduler, runner)
    for one in requests:
        assert one.token_ids[one.num_prompt_tokens :] == expected_tokens(one.prompt_token_ids, one.params, 400)


def cached(**options: Any) -> tuple[Scheduler, FakeRunner]:
    return make_scheduler(400, **({"num_kv_blocks": 64, "block_size": 4, "max_num_batched_tokens": 64} | options))


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9])
def test_a_match_never_covers_the_last_prompt_token(length: int) -> None:
    scheduler, runner = cached()
    first, again = request("first", tokens("a", length)), request("again", tokens("a", length))
    serve(scheduler, runner, first)
    serve(scheduler, runner, again)
    assert again.num_cached_tokens == (length - 1) // 4 * 4


def test_a_longer_prompt_finds_what_prompt_and_output_left() -> None:
    scheduler, runner = cached()
    donor = request("donor", tokens("a", 10), max_tokens=8)
    serve(scheduler, runner, donor)
    # 18 tokens, of which 17 were computed: four full blocks, the donor stopped in the middle of the fifth.
    follower = request("follower", [*donor.token_ids, 5, 6, 7])
    serve(scheduler, runner, follower)
    assert follower.num_cached_tokens == 16


def test_only_computed_full_blocks_are_published_and_identical_prompts_do_not_disturb_each_other() -> None:
    scheduler, runner = cached(max_num_seqs=4)
    twins = [request(f"twin-{i}", tokens("a", 13), max_tokens=6) for i in range(3)]
    serve(scheduler, runner, *twins)
    assert [twin.num_cached_tokens for twin in twins] == [0, 0, 0], "nothing is known before the step has computed it"
    later = request("later", tokens("a", 13))
    serve(scheduler, runner, later)
    assert later.num_cached_tokens == 12


def test_a_copy_keeps_a_prefix_known_when_the_older_block_is_reused() -> None:
    scheduler, runner = cached(num_kv_blocks=12, max_num_seqs=2)
    first, second = request("first", tokens("a", 9), 2), request("second", tokens("a", 9), 24)
    scheduler.add(first)
    scheduler.add(second)
    while first.finish_reason is None:
        run_step(scheduler, runner)
    evicting = request("evicting", tokens("b", 9), 2)  # takes the blocks that the first one left
    scheduler.add(evicting)
    while evicting.finish_reason is None:
        run_step(scheduler, runner)
    third = request("third", tokens("a", 9), 2)
    scheduler.add(third)
    while scheduler.has_unfinished:
        run_step(scheduler, runner)
    assert third.num_cached_tokens == 8


def test_the_least_recently_used_prefix_is_forgotten_first_and_from_its_end() -> None:
    scheduler, runner = cached(num_kv_blocks=10)
    serve(scheduler, runner, request("a", tokens("a", 13), 1))  # 3 full blocks each, and one that is not
    serve(scheduler, runner, request("b", tokens("b", 13), 1))
    serve(scheduler, runner, request("a again", tokens("a", 13), 1))
    assert scheduler.pool.num_cached == 6
    serve(scheduler, runner, request("c", tokens("c", 18), 1))  # 5 blocks: 4 unknown ones, then the tail of b
    hits = []
    for family in "bac":
        probe = request(f"probe {family}", tokens(family, 13), 1)
        hits.append(len(scheduler._cache.match(probe)))
    assert hits == [2, 3, 3]


def test_a_hit_on_a_free_block_counts_against_the_free_ones() -> None:
    scheduler, runner = cached(num_kv_blocks=8, max_num_seqs=4)
    serve(scheduler, runner, request("donor", tokens("a", 17), 1))
    assert (scheduler.pool.num_cached, scheduler.pool.num_free) == (4, 8)
    scheduler.add(request("reviver", tokens("a", 17), 4))  # revives 4, needs 1 more
    scheduler.add(request("other", tokens("b", 9), 4))  # needs 3
    scheduler.add(request("waits", tokens("c", 3), 4))  # needs 2, and none is left
    run_step(scheduler, runner)
    assert [one.request_id for one in scheduler.running] == ["reviver", "other"]
    assert scheduler.pool.num_unpromised == 0
    while scheduler.has_unfinished:
        run_step(scheduler, runner)


def test_a_waiting_head_is_hashed_once() -> None:
    scheduler, runner = cached(num_kv_blocks=10)
    calls: list[bytes] = []

    def counting(parent: bytes, block: bytes) -> bytes:
        calls.append(block)
        return chained_hash(parent, block)

    scheduler._cache = PrefixCache(scheduler.pool, 4, "", counting)
    scheduler.add(request("running", tokens("a", 20), 18))
    scheduler.add(request("head", tokens("b", 33), 2))
    for _ in range(8):
        run_step(scheduler, runner)
    head = scheduler.waiting[0]
    assert head.request_id == "head" and len(head.block_hashes) == 8
    assert sum(block == head.block_hashes[0][1] for block in calls) == 1


def test_salts_keep_tenants_apart() -> None:
    scheduler, runner = cached()
    serve(scheduler, runner, request("mine", tokens("a", 13), salt="mine"))
    theirs, mine = request("theirs", tokens("a", 13), salt="theirs"), request("again", tokens("a", 13), salt="mine")
    serve(scheduler, runner, theirs, mine)
    assert (theirs.num_cached_tokens, mine.num_cached_tokens) == (0, 12)
    with pytest.raises(RequestError, match="cache_salt=3 is not a text"):
        SamplingParams(cache_salt=3)  # type: ignore[arg-type]


def test_a_collision_hides_but_never_returns_another_prompts_blocks() -> None:
    scheduler, runner = cached()
    scheduler._cache = PrefixCache(scheduler.pool, 4, "", lambda parent, block: b"same")
    serve(scheduler, runner, request("a", tokens("a", 13)))
    other, again = request("other", tokens("b", 13)), request("again", tokens("a", 13))
    serve(scheduler, runner, other)
    serve(scheduler, runner, again)
    assert other.num_cached_tokens == 0 and again.num_cached_tokens == 4, "the first block took the only hash"


def test_hashes_are_equal_in_every_process() -> None:
    code = "from engine.kv.prefix_cache import chained_hash as h; print(h(h(b'model', b'salt'), b'tokens').hex())"
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed},
            cwd=ROOT,
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1 and len(outputs.pop().strip()) == 32


def test_resetting_forgets_everything_and_needs_an_idle_engine() -> None:
    llm = LLM("random:tiny", dtype="float32", num_kv_blocks=40, max_num_seqs=2)
    prompt, params = tuple(range(40)), SamplingParams(max_tokens=2)
    assert llm.generate([prompt], params, use_tqdm=False)[0].num_cached_tokens == 0
    assert llm.generate([prompt], params, use_tqdm=False)[0].num_cached_tokens == 32
    llm.add_request(prompt, params)
    with pytest.raises(RequestError, match="requests are running; let them end"):
        llm.reset_prefix_cache()
    while llm.has_unfinished_requests:
        llm.step()
    llm.reset_prefix_cache()
    assert llm.core.scheduler.pool.num_cached == 0
    assert llm.generate([prompt], params, use_tqdm=False)[0].num_cached_tokens == 0


# ------------------------------------------------------------------------------------------------ an independent count


def fake_core(**options: Any) -> EngineCore:
    scheduler, runner = make_scheduler(4096, **options)
    return EngineCore(scheduler, runner, LARGE_VOCAB)


def assert_replay_agrees(core: EngineCore, asked: Workload) -> pd.DataFrame:
    record = drive(core, asked)
    assert record.check() == []
    hits = replay_hits(record, 16)
    assert len(hits) == len(asked.requests)
    assert hits["hit_tokens"].tolist() == hits["recorded"].tolist(), "to the token"
    assert (hits["recorded"] <= hits["ideal"]).all()
    return hits


def mooncake(tmp_path: Path, count: int) -> Path:
    """A trace of the Mooncake format with shared prefixes, in families that grow."""
    generator = random.Random(0)
    families: list[list[int]] = []
    fresh = itertools.count()
    lines = []
    for i in range(count):
        if not families or generator.random() < 0.2:
            families.append([next(fresh) for _ in range(generator.randint(1, 4))])
        family = generator.choice(families[-20:])
        ids = family[: generator.randint(1, len(family))] + [next(fresh) for _ in range(generator.randint(1, 3))]
        if generator.random() < 0.3:
            family[:] = ids[:8]
        length = 512 * len(ids) - generator.randint(0, 500)
        lines.append(
            f'{{"timestamp": {i * 10}, "input_length": {length}, "output_length": {generator.randint(1, 64)}, '
            f'"hash_ids": {ids}}}'
        )
    path = tmp_path / "made.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize("num_kv_blocks", [120, 400])
def test_hits_equal_an_independent_replay_on_2000_requests_of_a_mooncake_trace(
    tmp_path: Path, num_kv_blocks: int
) -> None:
    spec = trace_replay(mooncake(tmp_path, 2000), count=2000, time_scale=1e-6)
    asked = spec.build(LARGE_VOCAB, 4096)
    core = fake_core(num_kv_blocks=num_kv_blocks, block_size=16, max_num_seqs=8, max_num_batched_tokens=128)
    core.scheduler._check_invariants = False  # O(blocks) a step; the state machines check them
    hits = assert_replay_agrees(core, asked)
    assert 0 < hits["hit_tokens"].sum() < hits["ideal"].sum(), "blocks were evicted"


@pytest.mark.skipif(not os.environ.get("LAB_TRACES"), reason="LAB_TRACES names no folder of public traces")
def test_hits_equal_an_independent_replay_on_the_public_trace() -> None:
    path = find_trace("mooncake_conversation.jsonl")
    asked = trace_replay(path, count=2000, time_scale=1e-6, output_scale=1 / 32).build(LARGE_VOCAB, 4096)
    core = fake_core(num_kv_blocks=2000, block_size=16, max_num_seqs=16, max_num_batched_tokens=512)
    core.scheduler._check_invariants = False
    hits = assert_replay_agrees(core, asked)
    assert hits["hit_tokens"].sum() > 0


def workload(prompts: Sequence[Sequence[int]]) -> Workload:
    asked = tuple(WorkloadRequest(f"r{i}", 1e-6 * i, tuple(prompt), 3, True) for i, prompt in enumerate(prompts))
    return Workload("made", "made for a test", 0, asked, "spec", "content")


def test_one_after_another_in_a_large_pool_reaches_the_ideal_and_random_prompts_hit_nothing() -> None:
    shared = [tokens("system", 40) + tokens(f"user {i}", 7 + i) for i in range(12)]
    options = {"num_kv_blocks": 400, "block_size": 16, "max_num_seqs": 1, "max_num_batched_tokens": 64}
    hits = assert_replay_agrees(fake_core(**options), workload(shared))
    assert hits["recorded"].tolist() == hits["ideal"].tolist() == [0] + [32] * 11
    hits = assert_replay_agrees(fake_core(**options), workload([tokens(f"random {i}", 50) for i in range(12)]))
    assert hits["recorded"].sum() == hits["ideal"].sum() == 0


def test_a_wrong_hit_count_would_be_noticed() -> None:
    shared = [tokens("system", 40) + tokens(f"user {i}", 7 + i) for i in range(4)]
    core = fake_core(num_kv_blocks=60, block_size=16, max_num_seqs=1, max_num_batched_tokens=64)
    record = drive(core, workload(shared))
    record.requests.loc[2, "num_cached_tokens"] = 16
    hits = replay_hits(record, 16)
    assert hits["hit_tokens"].tolist() != hits["recorded"].tolist()


def test_the_prefix_tree_counts_sharing_prompts() -> None:
    system = tokens("system", 32)
    prompts = [system + tokens("branch", 16) + tokens(f"own {i}", 9) for i in range(3)] + [system + tokens("x", 9)]
    record = drive(
        fake_core(num_kv_blocks=60, block_size=16, max_num_seqs=1, max_num_batched_tokens=64), workload(prompts)
    )
    rows = prefix_tree(record, 16)[["parent", "depth", "tokens", "requests", "hits"]].to_numpy().tolist()
    assert rows == [[-1, 0, 32, 4, 3], [0, 32, 16, 3, 2]]


# ----------------------------------------------------------------------------------------------------- the real thing


def tiny(dtype: Literal["float32", "bfloat16"] = "float32", **options: Any) -> LLM:
    options = {"max_num_seqs": 8, "num_kv_blocks": 200, "check_invariants": True} | options
    return LLM("random:tiny", dtype=dtype, **options)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("ops", ["reference", "cpu"])
def test_cold_warm_mixed_and_evicting_caches_give_the_same_bits(
    ops: Literal["reference", "cpu"], dtype: Literal["float32", "bfloat16"]
) -> None:
    prompts, params = random_prompts(512, 24), SamplingParams(max_tokens=8)
    expected = run_alone(tiny(dtype, ops=ops, **CHUNKED), prompts, params)
    for options in (PREFIX, CONTINUOUS | {"enable_prefix_caching": True}, PREFIX | {"num_kv_blocks": 20}):
        for run in (run_cell, run_warm, run_half_warm, run_among_aborts):
            acted = Acted()
            assert differences(expected, run(tiny(dtype, ops=ops, **options), prompts, params, observe=acted.see)) == []
            assert acted.hit_tokens > 0, f"{run.__name__}, {options}"


@pytest.mark.parametrize("length", [16, 32, 48])
def test_block_aligned_prompts_twice_then_extended(length: int) -> None:
    llm, plain = tiny(), tiny(**CHUNKED)
    params, prompt = SamplingParams(max_tokens=5, ignore_eos=True), tuple(range(3, 3 + length))
    for asked, found in ((prompt, 0), (prompt, length - 16), ((*prompt, 99, 98), length)):
        hit, miss = (one.generate([asked], params, use_tqdm=False)[0] for one in (llm, plain))
        assert hit.num_cached_tokens == found
        assert (hit.token_ids, hit.logprobs) == (miss.token_ids, miss.logprobs)


def test_an_abort_after_the_second_of_four_chunks_then_the_same_prompt() -> None:
    llm, plain = tiny(max_num_batched_tokens=16, max_num_seqs=4), tiny(**CHUNKED)
    params, prompt = SamplingParams(max_tokens=5, ignore_eos=True), tuple(range(3, 3 + 60))
    name = llm.add_request(prompt, params)
    llm.step()
    llm.step()
    llm.abort(name)
    hit, miss = (one.generate([prompt], params, use_tqdm=False)[0] for one in (llm, plain))
    assert hit.num_cached_tokens == 32
    assert (hit.token_ids, hit.logprobs) == (miss.token_ids, miss.logprobs)


@pytest.mark.parametrize(("sizes", "rows"), [((1,), None), ((2, 3), ["no cache", "hits beside misses"])])
def test_stage_3_matrix_on_the_tiny_model(sizes: tuple[int, ...], rows: list[str] | None) -> None:
    """Every row in the modes of one rank, one over two and three (``make golden`` runs the rest)."""
    llm = LLM("random:tiny", dtype="float32", num_kv_blocks=400, max_num_seqs=5, enforce_eager=True)
    frame, _ = golden_matrix(3, llm, num_prompts=24, max_tokens=30, sizes=sizes, rows=rows)
    assert frame["status"].tolist() == ["reference"] + ["equal"] * ((len(rows) if rows else 8) * len(modes(sizes)) - 1)


def test_an_arm_empties_or_warms_the_cache_before_each_trial() -> None:
    class Made:
        def drive(self, llm: LLM, seed: int) -> Any:
            return drive(llm.core, workload([tuple(range(40))]))

    llm = LLM("random:tiny", dtype="float32", num_kv_blocks=40, max_num_seqs=2)
    for warm, state, found in ((False, CacheState.COLD, 0), (True, CacheState.WARM, 32)):
        arm = engine_arm("arm", llm, Made(), warm=warm)  # type: ignore[arg-type]
        for _ in range(2):
            arm.prepare(0)
            assert arm.observe_cache() == arm.cache == state
            record = arm.run(0)
            assert record.requests["num_cached_tokens"].tolist() == [found]
            if not warm:
                assert replay_hits(record, 16)["hit_tokens"].tolist() == [0], "no trial's log holds another's evictions"


def test_the_shared_prefix_workload_shares_what_it_says() -> None:
    asked = load_workload(ROOT / "workloads" / "shared_prefix.yaml").build(49152, 2048).requests
    assistants = [one.prompt for one in asked if one.request_id.startswith("assistant")]
    assert len({prompt[:256] for prompt in assistants}) == 3 and len(set(assistants)) == 12
    assert all(256 + 8 <= len(prompt) <= 256 + 32 for prompt in assistants)
    turns = [one.prompt for one in asked if one.request_id.startswith("conversation")]
    for before, after in zip(turns[:-2], turns[2:], strict=True):
        assert after[: len(before)] == before and 16 + 16 <= len(after) - len(before) <= 32 + 16
    assert np.unique([len(prompt) for prompt in turns[:2]]).max() <= 128 + 32
