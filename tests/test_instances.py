"""Stage 4 in processes: the bits of one engine over both channels, and that nothing leaks or hangs whatever dies."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine import LLM, RequestError, SamplingParams, disaggregated
from engine.config import parse_options
from engine.disaggregated import SECRET_VARIABLE, DisaggregatedCore
from engine.execution.workers import WorkerError
from engine.request import RequestOutput
from lab.drive import drive
from lab.golden import run_among_aborts, run_cell
from lab.matrix import STAGES, golden_matrix, random_prompts
from lab.transfers import blocks_unaccounted, bytes_unaccounted, handovers
from lab.workload import Workload, WorkloadRequest
from tests.namespaces import free_port, two_hosts

ROOT = Path(__file__).parents[1]
LENGTHS = (1, 15, 16, 17, 47, 48, 49)
OPTIONS: dict[str, Any] = {
    "dtype": "float32", "num_kv_blocks": 64, "max_num_seqs": 4, "num_threads": 1, "check_invariants": True,
}  # fmt: skip


def prompts() -> dict[str, tuple[int, ...]]:
    return {str(n): tuple(random.Random(n).choices(range(3, 512), k=n)) for n in LENGTHS}


def bits(outputs: list[RequestOutput]) -> list[Any]:
    return [(one.token_ids, one.logprobs, one.finish_reason) for one in outputs]


def is_idle(llm: LLM) -> bool:
    """Whether both instances hold nothing; the transfers of aborted requests may take a moment to end."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if not any(pool.num_held for pool in llm.kv_pools.values()):
            return not llm.has_unfinished_requests
        time.sleep(0.01)
    return False


@pytest.fixture(scope="module")
def alone() -> LLM:
    """One engine, one request at a time: it defines the answers."""
    return LLM("random:tiny", **OPTIONS | {"max_num_seqs": 1, "enable_prefix_caching": False})


@pytest.mark.parametrize(
    "options",
    [
        {"kv_channel": "nixl"},
        {"kv_channel": "distributed", "enable_chunked_prefill": False, "max_num_batched_tokens": 2048},
        {"kv_channel": "nixl", "enable_prefix_caching": False, "enforce_eager": False},
        {"kv_channel": "distributed", "tensor_parallel_size": 2, "enforce_eager": False},
        {"kv_channel": "nixl", "tensor_parallel_size": 2, "max_num_batched_tokens": 17},
    ],
    ids=lambda options: ", ".join(str(value) for value in options.values()),
)
def test_two_instances_give_the_bits_of_one_engine(alone: LLM, options: dict[str, Any]) -> None:
    asked = list(prompts().values())
    with LLM("random:tiny", disaggregated=True, **OPTIONS | options) as llm:
        for max_tokens in (1, 2, 9):
            params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
            want = bits(alone.generate(asked, params, use_tqdm=False))
            assert bits(llm.generate(asked, params, use_tqdm=False)) == want
        for _ in range(3):  # the same prompt, block-aligned: a full hit from the second time on
            assert bits(llm.generate([asked[5]], params, use_tqdm=False)) == want[5:6]
        drawn = SamplingParams(max_tokens=8, temperature=0.9, top_p=0.9, seed=3, ignore_eos=True)
        assert bits(llm.generate(asked[3], drawn, use_tqdm=False)) == bits(
            alone.generate(asked[3], drawn, use_tqdm=False)
        )
        first = want[2][0][0]
        stops = SamplingParams(max_tokens=9, stop_token_ids=(first,))  # as an end-of-sequence, on the first token
        (stopped,) = llm.generate([asked[2]], stops, use_tqdm=False)
        assert stopped.token_ids == (first,) and stopped.finish_reason == "stop"
        many = random_prompts(512, 12)
        greedy = SamplingParams(max_tokens=6)
        assert run_among_aborts(llm, many, greedy) == run_cell(alone, many, greedy)
        assert is_idle(llm)


def test_the_interface_is_the_same(alone: LLM) -> None:
    with LLM("random:tiny", disaggregated=True, **OPTIONS) as llm:
        prompt, params = (5, 6, 7), SamplingParams(max_tokens=5, ignore_eos=True)
        (want,) = alone.generate([prompt], params, use_tqdm=False)
        assert [token.token_id for token in llm.stream(prompt, params)] == list(want.token_ids)
        assert llm.next_token_logits(prompt).equal(alone.next_token_logits(prompt))
        name = llm.add_request(prompt, params)
        assert llm.has_unfinished_requests
        with pytest.raises(RequestError, match="requests are running"):
            llm.reset_prefix_cache()
        partial = llm.abort(name)
        assert partial is not None and partial.finish_reason == "abort"
        assert llm.step() == ([], [], None) and is_idle(llm)
        llm.reset_prefix_cache()
        assert all(pool.num_cached == 0 for pool in llm.kv_pools.values())
        assert llm.world_size == 1 and llm.ops_name == alone.ops_name and llm.graph_replays == ()
        with pytest.raises(RequestError, match=r"can need 65 KV blocks of 16 tokens, and the pool has 64"):
            llm.add_request((1,) * 1030, SamplingParams(max_tokens=11))
        with pytest.raises(RequestError, match="the prompt is empty"):
            llm.add_request(())
        (output,) = llm.generate([prompt], params, use_tqdm=False)
        assert output.timing.arrival <= output.timing.token_times[0] <= output.timing.token_times[-1]
    with pytest.raises(WorkerError, match="the engine is closed; make a new one"):
        llm.generate([prompt], params, use_tqdm=False)


def test_records_account_for_every_byte(alone: LLM) -> None:
    params = {"ignore_eos": True, "max_tokens": 6}
    asked = tuple(
        WorkloadRequest(f"r{n}-{i}", 0.02 * i, prompt, params["max_tokens"], True)
        for i, (n, prompt) in enumerate([*prompts().items()] * 2)
    )
    with LLM("random:tiny", disaggregated=True, **OPTIONS) as llm:
        record = drive(llm.core, Workload("made", "made for a test", 0, asked, "spec", "content"))
    assert record.check() == []
    assert set(record.steps["instance"]) == {"prefill", "decode"}
    assert bytes_unaccounted(record, alone.core.runner.bytes_per_block) == 0
    assert blocks_unaccounted(record, 16) == 0
    assert len(record.transfers) == len(asked) and record.transfers["completed"].all()
    assert record.transfers["num_blocks_hit"].sum() > 0, "the second time, the full blocks are there"
    handed = handovers(record)
    assert len(handed) == len(asked)
    assert (handed[["ttft", "gap"]] > 0).all().all() and (handed["gap"] >= handed["travelled"]).all()
    object.__setattr__(record, "transfers", record.transfers.assign(num_bytes=record.transfers["num_bytes"] + 1))
    assert bytes_unaccounted(record, alone.core.runner.bytes_per_block) == len(asked)


@pytest.mark.parametrize("rows", [["1P1D, NIXL", "1P1D, NIXL, sent twice", "1P1D, gloo, random arrivals and aborts"]])
def test_stage_4_matrix_on_the_tiny_model(rows: list[str]) -> None:
    llm = LLM("random:tiny", dtype="float32", num_kv_blocks=400, max_num_seqs=7, enforce_eager=True)
    frame, _ = golden_matrix(4, llm, num_prompts=16, max_tokens=40, sizes=(1,), rows=rows)
    assert frame["status"].tolist() == ["reference"] + ["equal"] * (2 * len(rows))
    assert frame["detail"][1:].str.contains("KV blocks travelled").all()
    assert {variant.name for variant in STAGES[4].variants} >= set(rows)


# ------------------------------------------------------------------------------------------- what can go wrong

Slow = Any


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    """Starts engines whose transfers are slow."""
    engines: list[LLM] = []

    def start(delays: str, **options: Any) -> LLM:
        monkeypatch.setenv("SLOW_PULLS", delays)
        monkeypatch.setattr(disaggregated, "INSTANCE_MODULE", "tests.slow_instance")
        engines.append(LLM("random:tiny", disaggregated=True, **OPTIONS | options))
        return engines[-1]

    yield start
    for llm in engines:
        llm.close()


def until_offered(llm: LLM) -> None:
    """Step until the first token of a request is here: its KV is on its way."""
    while not llm.step()[0]:
        pass


@pytest.mark.parametrize("channel", ["nixl", "distributed"])
def test_aborts_at_any_moment_of_a_transfer_leave_nothing(slow: Slow, alone: LLM, channel: str) -> None:
    llm = slow("0.1", kv_channel=channel)
    params, generator = SamplingParams(max_tokens=6, ignore_eos=True), random.Random(4)
    for moment in range(20):
        prompt = tuple(generator.choices(range(3, 512), k=40))
        doomed = llm.add_request(prompt, params)
        until_offered(llm)
        time.sleep(generator.uniform(0, 0.15))
        llm.abort(doomed)
        if moment % 5 == 0:
            (output,) = llm.generate([prompt], params, use_tqdm=False)
            (want,) = alone.generate([prompt], params, use_tqdm=False)
            assert bits([output]) == bits([want])
    assert is_idle(llm)


@pytest.mark.parametrize("channel", ["nixl", "distributed"])
def test_a_transfer_that_never_confirms_fails_its_request_alone(slow: Slow, alone: LLM, channel: str) -> None:
    llm = slow("0 1000 0", kv_channel=channel, kv_transfer_timeout=1.0)
    params, asked = SamplingParams(max_tokens=30, ignore_eos=True), [*prompts().values()]
    want = bits(alone.generate(asked, params, use_tqdm=False))
    outputs = llm.generate(asked[2:4], params, use_tqdm=False)
    assert bits(outputs[:1]) == want[2:3]
    assert outputs[1].finish_reason == "error" and "did not arrive within kv_transfer_timeout=1.0 s" in outputs[1].error
    assert outputs[1].token_ids == want[3][0][:1], "the first token was delivered"
    assert is_idle(llm)
    assert bits(llm.generate(asked, params, use_tqdm=False)) == want


@pytest.mark.parametrize("channel", ["nixl", "distributed"])
def test_a_stopped_prefill_instance_is_a_timeout_and_goes_on_when_woken(alone: LLM, channel: str) -> None:
    options = OPTIONS | {"kv_channel": channel, "kv_transfer_timeout": 1.0}
    params, asked = SamplingParams(max_tokens=4, ignore_eos=True), [*prompts().values()]
    with LLM("random:tiny", disaggregated=True, **options) as llm:
        assert isinstance(llm.core, DisaggregatedCore)
        llm.generate(asked[4], params, use_tqdm=False)
        pid = llm.core.pids["the prefill instance"]
        name = llm.add_request(asked[6], params)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(1.5)
        os.kill(pid, signal.SIGCONT)
        outputs: list[RequestOutput] = []
        while llm.has_unfinished_requests:
            outputs += llm.step()[1]
        assert [output.request_id for output in outputs] == [name]  # in time or not: it ended
        want = bits(alone.generate(asked, params, use_tqdm=False))
        assert bits(llm.generate(asked, params, use_tqdm=False)) == want
        assert is_idle(llm)


def step_for_ever(llm: LLM) -> None:
    while True:
        llm.step()


@pytest.mark.parametrize("channel", ["nixl", "distributed"])
@pytest.mark.parametrize("killed", ["prefill", "decode"])
def test_killing_an_instance_in_mid_transfer_is_an_error_and_frees_the_other(
    slow: Slow, killed: str, channel: str
) -> None:
    llm = slow("1000", kv_channel=channel)
    llm.add_request(tuple(range(3, 60)), SamplingParams(max_tokens=8, ignore_eos=True))
    until_offered(llm)
    assert isinstance(llm.core, DisaggregatedCore)
    deadline = time.monotonic() + 10
    while not llm.core.status("decode")["in_flight"]:
        assert time.monotonic() < deadline
    pids = llm.core.pids
    os.kill(pids[f"the {killed} instance"], signal.SIGKILL)
    started = time.monotonic()
    other = "decode" if killed == "prefill" else "prefill"
    with pytest.raises(WorkerError) as raised:
        step_for_ever(llm)
    assert time.monotonic() - started < 10
    said = str(raised.value)
    assert f"the {killed} instance (process {pids[f'the {killed} instance']}) ended with signal SIGKILL" in said
    assert f"The {other} instance is left with 0 of 64 KV blocks held." in said
    with pytest.raises(WorkerError, match="SIGKILL"):
        llm.generate([(1, 2, 3)], use_tqdm=False)
    assert not any(Path(f"/proc/{pid}/exe").exists() for pid in pids.values()), "an instance is left behind"


def test_the_instances_end_with_the_process_that_started_them() -> None:
    program = (
        "import os, signal\nfrom engine import LLM\n"
        f"llm = LLM('random:tiny', disaggregated=True, **{OPTIONS!r})\n"
        "print(*llm.core.pids.values(), flush=True)\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2, done.stderr
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline, "an instance outlives its front end"
        time.sleep(0.05)


# ------------------------------------------------------------------------------------------------- two hosts

FRONT = """
import json, sys
from engine import LLM, SamplingParams
prompts, params, options = json.loads(sys.argv[1])
with LLM("random:tiny", disaggregated=True, prefill_address=sys.argv[2], decode_address=sys.argv[3], **options) as llm:
    outputs = llm.generate(prompts, SamplingParams(**params), use_tqdm=False)
    print(json.dumps([[one.token_ids, one.logprobs] for one in outputs]))
"""


def instance(prefix: tuple[str, ...], role: str, listen: str, *arguments: str) -> subprocess.Popen[str]:
    command = [*prefix, sys.executable, "-m", "engine.disaggregated", "--role", role, "--listen", listen,
               "--model", "random:tiny", *arguments]  # fmt: skip
    environment = os.environ | {SECRET_VARIABLE: "a secret of the tests"}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("channel", ["nixl", "distributed"])
def test_two_hosts_give_the_bits_of_one_engine(alone: LLM, channel: str) -> None:
    params = {"max_tokens": 7, "ignore_eos": True}
    asked = list(prompts().values())
    want = [[list(one.token_ids), list(one.logprobs)]
            for one in alone.generate(asked, SamplingParams(**params), use_tqdm=False)]  # fmt: skip
    options = OPTIONS | {"kv_channel": channel}
    given = [f"{name}={value}" for name, value in options.items()]
    with two_hosts() as (first, second):
        addresses = f"{first.address}:{free_port()}", f"{second.address}:{free_port()}"
        started = [
            instance(first.prefix, "prefill", addresses[0], *given),
            instance(second.prefix, "decode", addresses[1], "--connect", addresses[0], *given),
        ]
        try:
            front = subprocess.run(
                [*first.prefix, sys.executable, "-c", FRONT, json.dumps([asked, params, options]), *addresses],
                cwd=ROOT, env=os.environ | {SECRET_VARIABLE: "a secret of the tests"}, capture_output=True, text=True,
                timeout=180,
            )  # fmt: skip
            said = [process.communicate(timeout=30)[1] for process in started]
        finally:
            for process in started:
                process.kill()
    assert front.returncode == 0, front.stderr + "".join(said)
    assert json.loads(front.stdout) == want
    assert [process.returncode for process in started] == [0, 0], said


def test_instances_that_do_not_match_refuse_before_any_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, "a secret of the tests")
    addresses = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    started = [
        instance((), "prefill", addresses[0], "dtype=float32", "block_size=16", "num_kv_blocks=20"),
        instance((), "decode", addresses[1], "--connect", addresses[0], "dtype=bfloat16", "block_size=32",
                 "num_kv_blocks=20"),
    ]  # fmt: skip
    with pytest.raises(
        WorkerError, match="dtype: prefill has float32, decode has bfloat16; block_size: prefill has 16"
    ):
        LLM("random:tiny", disaggregated=True, prefill_address=addresses[0], decode_address=addresses[1])
    for process in started:
        assert "block_size: prefill has 16, decode has 32" in process.communicate(timeout=30)[1]
        assert process.returncode == 2


def test_the_command_line_names_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    listen = ["--listen", "127.0.0.1:7001", "--model", "random:tiny"]
    with pytest.raises(SystemExit):
        disaggregated.main(["--role", "decode", *listen])
    assert "--connect is the decode instance's" in capsys.readouterr().err
    assert disaggregated.main(["--role", "prefill", *listen, "blok_size=4"]) == 2
    assert "did you mean 'block_size'" in capsys.readouterr().err
    assert disaggregated.main(["--role", "prefill", *listen]) == 2
    assert f"{SECRET_VARIABLE} is not set" in capsys.readouterr().err
    assert parse_options(["a=1", "b=text", "c=None"]) == {"a": 1, "b": "text", "c": None}
