"""The driver and the bench command on the real engine: open loop, honest records, nothing lost on an interrupt."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from engine import LLM
from engine.core import EngineCore
from engine.execution.results import StepResult
from engine.request import Request, SamplingParams
from engine.scheduler.loop import ScheduledRequest
from lab.__main__ import main
from lab.bench import Replays, engine_arm
from lab.drive import drive
from lab.experiment import GoldenMismatchError, run_experiment
from lab.record import RunRecord, hash_tokens
from lab.workload import Workload, WorkloadRequest, load_workload
from tests.fakes import VOCAB, expected_tokens, make_scheduler

ROOT = Path(__file__).parent.parent
MIX = """
description: A mix for tests.
classes:
  - name: mix
    count: 10
    prompt: {source: random, length: {distribution: uniform, low: 1, high: 30}}
    output: {tokens: {distribution: uniform, low: 1, high: 9}}
    arrival: {process: poisson, rate: 400}
"""
MOONCAKE = "".join(
    json.dumps({"timestamp": 20 * i, "input_length": 600 + 40 * i, "output_length": 3 + i, "hash_ids": [0, i + 1]})
    + "\n"
    for i in range(6)
)
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:15:46.{100 + i}0000,{30 + i},{2 + i}\n" for i in range(6)
)


def workload(*requests: tuple[float, int, int]) -> Workload:
    """Requests of (arrival, prompt tokens, output tokens)."""
    asked = tuple(
        WorkloadRequest(f"r{i}", arrival, tuple(1 + (i + j) % (VOCAB - 1) for j in range(prompt)), output, True)
        for i, (arrival, prompt, output) in enumerate(requests)
    )
    return Workload("made", "made for a test", 0, asked, "spec", "content")


def fake_core(**options: Any) -> EngineCore:
    scheduler, runner = make_scheduler(**options)
    return EngineCore(scheduler, runner, VOCAB)


def test_records_are_sound_and_outputs_exact() -> None:
    asked = workload((0.0, 5, 6), (0.0, 9, 2), (0.0, 1, 1), (0.004, 12, 8), (0.03, 3, 4))
    record = drive(fake_core(max_num_seqs=2), asked, meta={"why": "test"})
    assert record.check() == [] and not record.partial
    assert record.meta == {"workload": "made", "seed": 0, "content_hash": "content", "why": "test"}
    assert record.requests["num_output_tokens"].tolist() == [6, 2, 1, 8, 4]
    for row, request in zip(record.requests.itertuples(), asked.requests, strict=True):
        params = SamplingParams(request.max_tokens, ignore_eos=True)
        tokens = expected_tokens(request.prompt_token_ids or (), params, 64)
        assert row.output_hash == hash_tokens(tokens)
        assert row.arrival == pytest.approx(request.arrival_s) and row.finish_reason == "length"


def test_time_counts_from_the_arrival_that_was_due() -> None:
    """A request that is due while a step runs waits from then on, although the loop adds it later."""
    core = fake_core(max_num_seqs=1)
    due_during_the_first_step = 1e-5
    record = drive(core, workload((0.0, 20, 3), (due_during_the_first_step, 4, 2)))
    late = record.requests.iloc[1]
    assert late["arrival"] == pytest.approx(due_during_the_first_step)
    assert late["admitted"] >= record.requests.iloc[0]["finish"] - 1e-3 and late["first_token"] > late["admitted"]


def test_refused_requests_are_recorded_and_the_others_run() -> None:
    record = drive(fake_core(), workload((0.0, 5, 3), (0.0, 70, 3), (0.0, 4, 2)))
    assert record.requests["finish_reason"].tolist() == ["length", "refused", "length"]
    assert record.check() == [] and len(record.completed) == 2


def test_an_interrupt_keeps_partial_records_and_frees_the_engine(tmp_path: Path) -> None:
    scheduler, runner = make_scheduler(batching="static", max_num_seqs=2)

    class Interrupting:
        num_kv_blocks, poison, calls = runner.num_kv_blocks, runner.poison, 0

        def execute(self, scheduled: Sequence[ScheduledRequest]) -> StepResult:
            self.calls += 1
            if self.calls == 5:
                raise KeyboardInterrupt
            return runner.execute(scheduled)

    core = EngineCore(scheduler, Interrupting(), VOCAB)
    with pytest.raises(KeyboardInterrupt):
        drive(core, workload((0.0, 5, 3), (0.0, 5, 9), (0.0, 5, 3)), save_to=tmp_path)
    record = RunRecord.load(tmp_path)
    assert record.partial and len(record.steps) == 4 and record.check() == []
    assert record.requests["finish_reason"].tolist() == ["length", "abort", "abort"]
    assert not core.has_unfinished and scheduler.pool.num_held == 0


def test_a_busy_engine_is_refused() -> None:
    core = fake_core()
    drive(core, workload((0.0, 4, 1)))
    core.add(Request("mine", (1,), SamplingParams(1), 0.0))
    with pytest.raises(ValueError, match="not idle"):
        drive(core, workload((0.0, 4, 1)))


def test_text_needs_a_tokenizer() -> None:
    asked = Workload("text", "text", 0, (WorkloadRequest("a", 0.0, "hello", 2, True),), "", "")
    with pytest.raises(ValueError, match="request a holds text; give encode"):
        drive(fake_core(), asked)
    record = drive(fake_core(), asked, encode=lambda prompt: tuple(len(word) for word in str(prompt).split()))
    assert record.requests["num_prompt_tokens"].tolist() == [1]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("random:tiny", dtype="float32", num_kv_blocks=256, max_num_seqs=4)


def test_an_experiment_on_the_real_engine_holds_outputs_against_golden(llm: LLM, tmp_path: Path) -> None:
    (tmp_path / "mix.yaml").write_text(MIX)
    replays = Replays(load_workload(tmp_path / "mix.yaml"), llm)
    golden = replays.golden(LLM("random:tiny", dtype="float32", num_kv_blocks=64, max_num_seqs=1), [0])
    arms = engine_arm("static", llm, replays), engine_arm("slowed", llm, replays, slow_down=lambda: None)
    options: dict[str, Any] = {"pairs": 2, "seeds": [0], "quick": True, "progress": False}
    table = run_experiment(*arms, golden, keep=tmp_path / "records", **options).compare().set_index("metric")
    assert table.loc["Outputs equal to golden", "feature"] == 20
    assert set(table.loc[table["ratio"].notna(), "verdict"]) == {"not judged"}
    assert len(list((tmp_path / "records").iterdir())) == 4
    wrong = {0: golden[0] | {"mix-0003": "0" * 64}}
    with pytest.raises(GoldenMismatchError, match="mix-0003"):
        run_experiment(*arms, wrong, **options)


def test_the_slow_down_runs_once_a_step_and_is_taken_off_again(llm: LLM, tmp_path: Path) -> None:
    (tmp_path / "mix.yaml").write_text(MIX)
    replays = Replays(load_workload(tmp_path / "mix.yaml"), llm)
    calls: list[int] = []
    runner = llm.core.runner
    record = engine_arm("slowed", llm, replays, slow_down=lambda: calls.append(1)).run(0)
    assert len(calls) == len(record.steps) and llm.core.runner is runner


@pytest.mark.parametrize(("form", "text"), [("mooncake", MOONCAKE), ("azure", AZURE)])
def test_both_trace_formats_replay_through_the_engine(llm: LLM, tmp_path: Path, form: str, text: str) -> None:
    (tmp_path / "trace").write_text(text)
    (tmp_path / "replay.yaml").write_text(
        f"""
description: A replay.
classes:
  - name: replay
    trace: {{format: {form}, file: {tmp_path / "trace"}, prompt_scale: 0.25}}
    prompt: {{source: trace}}
    output: {{tokens: {{distribution: trace}}}}
    arrival: {{process: trace, time_scale: 0.01}}
"""
    )
    replays = Replays(load_workload(tmp_path / "replay.yaml"), llm)
    record = replays.drive(llm, 0)
    assert record.check() == [] and len(record.completed) == 6
    lengths = replays.of(0).lengths()
    assert record.requests["num_prompt_tokens"].tolist() == lengths["num_prompt_tokens"].tolist()
    assert record.requests["num_output_tokens"].tolist() == lengths["num_output_tokens"].tolist()


@pytest.mark.skipif("LAB_TRACES" not in os.environ, reason="LAB_TRACES names no folder of public traces")
def test_public_traces_replay_through_the_engine(llm: LLM, tmp_path: Path) -> None:
    for name in ("mooncake_conversation.jsonl", "azure_2023_conv.csv"):
        path = Path(os.environ["LAB_TRACES"]) / name
        form = "mooncake" if name.startswith("mooncake") else "azure"
        (tmp_path / "replay.yaml").write_text(
            f"""
description: The first requests of a public trace.
classes:
  - name: replay
    count: 20
    trace: {{format: {form}, file: {path}, prompt_scale: 0.03125, output_scale: 0.03, max_prompt_tokens: 300}}
    prompt: {{source: trace}}
    output: {{tokens: {{distribution: trace}}}}
    arrival: {{process: trace, time_scale: 0.001}}
"""
        )
        record = Replays(load_workload(tmp_path / "replay.yaml"), llm).drive(llm, 0)
        assert record.check() == [] and len(record.completed) == 20


def test_the_bench_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mix.yaml").write_text(MIX)
    options = ["--model", "random:tiny", "--baseline", "num_kv_blocks=64", "dtype=float32"]
    assert main(["bench", str(tmp_path / "mix.yaml"), *options, "--save", str(tmp_path / "records")]) == 0
    assert "Output throughput" in capsys.readouterr().out
    assert RunRecord.load(tmp_path / "records").check() == []
    assert main(["bench", str(tmp_path / "mix.yaml"), *options, "--feature", "max_seqs=1"]) == 2
    assert "did you mean 'max_num_seqs'" in capsys.readouterr().err
    assert main(["bench", str(tmp_path / "mix.yaml"), "--baseline", "nonsense"]) == 2
    assert "not OPTION=VALUE" in capsys.readouterr().err


def test_the_golden_command(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model", "random:tiny", "--dtype", "float32", "--prompts", "6", "--max-tokens", "4"]
    assert main(["golden", *options]) == 0
    assert "static batches" in capsys.readouterr().out
    assert main(["golden", *options, "--stage", "9"]) == 2
    assert "no golden matrix" in capsys.readouterr().err
