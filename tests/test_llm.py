"""The public interface: generation, bad input, aborts, streams, interrupts; on a tiny random model."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from engine import LLM, ConfigError, EngineConfig, RequestError, SamplingParams
from engine.__main__ import main

PROMPTS = [[5, 9, 200, 31], [7] * 17, list(range(40, 90))]


@pytest.fixture(scope="module")
def shared() -> LLM:
    return LLM("random:tiny", dtype="float32", num_kv_blocks=64, max_num_seqs=4, check_invariants=True)


@pytest.fixture
def llm(shared: LLM) -> Iterator[LLM]:
    """The engine, idle before and after every test, with every block back."""
    yield shared
    assert not shared.has_unfinished_requests
    pool = shared.core.scheduler.pool
    assert pool.num_free == pool.num_blocks and pool.num_promised == 0


def generate(llm: LLM, prompts: Any, params: SamplingParams | list[SamplingParams] | None = None) -> list[Any]:
    return llm.generate(prompts, params, use_tqdm=False)


def test_generate_returns_outputs_in_order_with_timing(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (9, 1, 5)]
    outputs = generate(llm, PROMPTS, params)
    assert [len(output.token_ids) for output in outputs] == [9, 1, 5]
    for output, prompt in zip(outputs, PROMPTS, strict=True):
        timing = output.timing
        assert output.prompt_token_ids == tuple(prompt) and output.finish_reason == "length"
        assert len(output.logprobs) == len(output.token_ids) == len(timing.token_times)
        assert all(logprob <= 0 for logprob in output.logprobs)
        assert timing.arrival <= timing.admitted <= timing.first_token <= timing.finish
        assert list(timing.token_times) == sorted(timing.token_times)


def test_one_prompt_needs_no_list(llm: LLM) -> None:
    params = SamplingParams(max_tokens=3)
    assert generate(llm, PROMPTS[0], params)[0].token_ids == generate(llm, [PROMPTS[0]], params)[0].token_ids


def test_stop_tokens_end_a_request(llm: LLM) -> None:
    free = generate(llm, PROMPTS[0], SamplingParams(max_tokens=8, ignore_eos=True))[0].token_ids
    stop = free[3]
    output = generate(llm, PROMPTS[0], SamplingParams(max_tokens=8, ignore_eos=True, stop_token_ids=(stop,)))[0]
    assert output.finish_reason == "stop" and output.token_ids == free[: free.index(stop) + 1]


def test_seeded_draws_depend_on_seed_and_position_alone(llm: LLM) -> None:
    def params(seed: int) -> SamplingParams:
        return SamplingParams(max_tokens=12, temperature=1.0, top_p=0.9, seed=seed, ignore_eos=True)

    alone = generate(llm, PROMPTS[0], params(1))[0]
    together = generate(llm, [PROMPTS[1], PROMPTS[0], PROMPTS[2]], [params(7), params(1), SamplingParams(4)])[1]
    assert alone.token_ids == together.token_ids and alone.logprobs == together.logprobs
    assert generate(llm, PROMPTS[0], params(2))[0].token_ids != alone.token_ids
    nearly_greedy = SamplingParams(max_tokens=6, temperature=1.0, top_p=1e-6, seed=3, ignore_eos=True)
    greedy = SamplingParams(max_tokens=6, ignore_eos=True)
    assert generate(llm, PROMPTS[0], nearly_greedy)[0].token_ids == generate(llm, PROMPTS[0], greedy)[0].token_ids
    unseeded = SamplingParams(max_tokens=12, temperature=5.0, ignore_eos=True)
    assert len({generate(llm, PROMPTS[0], unseeded)[0].token_ids for _ in range(3)}) > 1


def test_draws_follow_the_distribution(llm: LLM) -> None:
    """Frequencies of the first drawn token over many seeds match the softmax (total variation)."""
    logits = llm.next_token_logits(PROMPTS[0]).double()
    expected = (logits / 0.7).softmax(0)
    counts = expected.new_zeros(expected.shape)
    params = [SamplingParams(max_tokens=1, temperature=0.7, seed=seed) for seed in range(600)]
    for output in generate(llm, [PROMPTS[0]] * 600, params):
        counts[output.token_ids[0]] += 1
    top = expected.topk(8).indices
    assert ((counts / 600)[top] - expected[top]).abs().max() < 0.06


def test_stream_yields_what_generate_returns(llm: LLM) -> None:
    params = SamplingParams(max_tokens=7, ignore_eos=True)
    tokens = list(llm.stream(PROMPTS[1], params))
    output = generate(llm, PROMPTS[1], params)[0]
    assert tuple(token.token_id for token in tokens) == output.token_ids
    assert [token.finish_reason for token in tokens] == [None] * 6 + ["length"]


def test_leaving_a_stream_aborts_its_request(llm: LLM) -> None:
    stream = llm.stream(PROMPTS[1], SamplingParams(max_tokens=50, ignore_eos=True))
    assert len(list(itertools.islice(stream, 3))) == 3
    stream.close()


def test_requests_of_add_request_survive_generate_and_stream(llm: LLM) -> None:
    """Nothing is lost for other requests while generate, or a stream, drives the engine."""
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    expected = [output.token_ids for output in generate(llm, PROMPTS, params)]
    mine = llm.add_request(PROMPTS[0], params)
    generate(llm, PROMPTS[1], params)
    list(llm.stream(PROMPTS[2], params))
    tokens, outputs = [], []
    while llm.has_unfinished_requests:
        new_tokens, new_outputs, _ = llm.step()
        tokens += new_tokens
        outputs += new_outputs
    assert [output.request_id for output in outputs] == [mine] and outputs[0].token_ids == expected[0]
    assert tuple(token.token_id for token in tokens) == expected[0]


def test_abort_frees_at_once_and_says_what_there_was(llm: LLM) -> None:
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    first, second = llm.add_request(PROMPTS[0], params), llm.add_request(PROMPTS[1], params)
    for _ in range(4):
        llm.step()
    held = llm.core.scheduler.pool.num_held
    output = llm.abort(first)
    assert output is not None and output.finish_reason == "abort" and len(output.token_ids) == 4
    assert llm.core.scheduler.pool.num_held < held
    assert llm.abort(first) is None and llm.abort("no such request") is None
    assert llm.abort(second) is not None
    assert llm.step()[2] is None


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, r"the prompt is empty \(0 tokens\); give at least 1 token"),
        ([5, 512], {}, r"token id 512 at position 1 is not a whole number in 0 \.\. 511"),
        ([5, -1], {}, r"token id -1 at position 1"),
        ([5, 1.5], {}, r"token id 1.5 at position 1"),
        ([5] * 2048, {}, r"a prompt of 2048 tokens leaves no room .* max_model_len=2048; shorten it"),
        ([5] * 1000, {"max_tokens": 500}, r"can need 94 KV blocks of 16 tokens, and the pool has 64; lower max_tokens"),
        ("text", {}, r"the model has no tokenizer, so 'text' cannot be encoded; give token ids"),
    ],
)
def test_bad_prompts_are_refused_and_lose_nothing(llm: LLM, prompt: Any, params: dict[str, Any], message: str) -> None:
    mine = llm.add_request(PROMPTS[0], SamplingParams(max_tokens=2, ignore_eos=True))
    with pytest.raises(RequestError, match=message):
        generate(llm, [PROMPTS[1], prompt], SamplingParams(**params))
    with pytest.raises(RequestError, match=message):
        llm.add_request(prompt, SamplingParams(**params))
    outputs = []
    while llm.has_unfinished_requests:
        outputs += llm.step()[1]
    assert [output.request_id for output in outputs] == [mine], "the others go on, and no part of the call ran"


def test_a_request_id_in_use_is_refused(llm: LLM) -> None:
    llm.add_request(PROMPTS[0], request_id="mine")
    with pytest.raises(RequestError, match="'mine' is in use"):
        llm.add_request(PROMPTS[0], request_id="mine")
    llm.abort("mine")


def test_one_sampling_params_for_each_prompt(llm: LLM) -> None:
    with pytest.raises(RequestError, match="2 sampling_params for 3 prompts"):
        generate(llm, PROMPTS, [SamplingParams(), SamplingParams()])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 0}, "max_tokens=0 must be a whole number of at least 1"),
        ({"max_tokens": 2.5}, "max_tokens=2.5"),
        ({"temperature": -1}, "temperature=-1 must be finite and at least 0"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_p": 0}, r"top_p=0 must lie in \(0, 1\]"),
        ({"seed": -1}, "seed=-1"),
    ],
)
def test_bad_sampling_params(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_seqs": 3}, "unknown engine option max_seqs=3; did you mean 'max_num_seqs'"),
        ({"zzz": 3}, "unknown engine option zzz=3; the options are batching, block_size"),
        ({"num_kv_blocks": 4, "kv_cache_bytes": 4}, "num_kv_blocks=4 and kv_cache_bytes=4 both size"),
        ({"max_num_batched_tokens": 8}, "max_num_batched_tokens=8 is below max_num_seqs=32"),
        ({"block_size": 0}, "block_size=0 is below 1"),
        ({"block_size": "16"}, "block_size='16' is not an integer"),
        ({"max_num_seqs": None}, "max_num_seqs=None is not an integer"),
        ({"dtype": "float16"}, "dtype='float16' is unknown; choose one of auto, float32, bfloat16"),
        ({"ops": "cuda"}, "ops='cuda' is unknown; choose one of auto, reference, cpu"),
        ({"check_invariants": 1}, "check_invariants=1 is not a bool"),
        ({"max_model_len": 4096}, "max_model_len=4096 exceeds 2048, the model's own limit"),
        ({"kv_cache_bytes": 100}, "kv_cache_bytes=100 holds no KV block, one takes"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM("random:tiny", **options)


def test_a_config_and_options_contradict() -> None:
    with pytest.raises(ConfigError, match="config and the options block_size are both given"):
        LLM("random:tiny", EngineConfig(), block_size=16)


def test_an_interrupt_aborts_this_calls_requests_only(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    other = llm.add_request(PROMPTS[0], SamplingParams(max_tokens=9, ignore_eos=True))
    execute, calls = llm.core.runner.execute, itertools.count()

    def interrupted(scheduled: Any) -> Any:
        if next(calls) == 3:
            raise KeyboardInterrupt
        return execute(scheduled)

    monkeypatch.setattr(llm.core.runner, "execute", interrupted)
    with pytest.raises(KeyboardInterrupt):
        generate(llm, PROMPTS[1], SamplingParams(max_tokens=30, ignore_eos=True))
    outputs = []
    while llm.has_unfinished_requests:
        outputs += llm.step()[1]
    assert [output.request_id for output in outputs] == [other] and len(outputs[0].token_ids) == 9
    expected = generate(llm, PROMPTS[0], SamplingParams(max_tokens=9, ignore_eos=True))[0]
    assert outputs[0].token_ids == expected.token_ids


def test_the_pool_is_sized_by_bytes_blocks_or_default() -> None:
    per_block = 2 * 2 * 16 * 3 * 16 * 4  # K and V, layers, tokens, KV heads, head_dim, bytes
    assert LLM("random:tiny", dtype="float32", kv_cache_bytes=10 * per_block + 5).core.scheduler.pool.num_blocks == 10
    assert LLM("random:tiny", max_num_seqs=2).core.scheduler.pool.num_blocks == 2 * 2048 // 16


def test_the_shell_command_reports_errors(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hello", "--model", "random:tiny"]) == 2
    assert "no tokenizer" in capsys.readouterr().err
