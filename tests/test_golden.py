"""One request, one answer, bit for bit: alone or in any batch; and the golden harness that proves it can also fail."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Literal

import pytest

from engine import LLM, SamplingParams
from lab.golden import (
    Cell,
    GoldenOutput,
    Outputs,
    differences,
    encode,
    explain,
    load_prompts,
    random_compositions,
    run_alone,
    run_cell,
    run_matrix,
)
from lab.matrix import CONTINUOUS, Mode, golden_matrix, modes, random_prompts, run

ROOT = Path(__file__).parent.parent
DTYPES = ("float32", "bfloat16")


def output(*token_ids: int, logprobs: tuple[float, ...] | None = None) -> GoldenOutput:
    return GoldenOutput(token_ids, logprobs or (-0.5,) * len(token_ids), "length")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ops", ["reference", "cpu"])
def test_alone_equals_50_random_batches_on_the_tiny_model(ops: Literal["reference", "cpu"], dtype: str) -> None:
    llm = LLM("random:tiny", ops=ops, dtype=dtype, **CONTINUOUS, num_kv_blocks=200, max_num_seqs=8)
    prompts, params = random_prompts(512, 24), SamplingParams(max_tokens=24)
    alone = run_alone(llm, prompts, params)
    assert len({one.token_ids for one in alone.values()}) > 20, "the prompts' answers must differ to prove anything"
    for batch in random_compositions(prompts, 50, 6, seed=1):
        assert differences({name: alone[name] for name in batch}, run_cell(llm, batch, params)) == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_alone_equals_8_random_batches_on_the_real_model(dtype: str, smollm2: Path) -> None:
    llm = LLM("smollm2-135m", dtype=dtype, **CONTINUOUS, num_kv_blocks=200)
    # A part of the set and a few tokens each: all of them, at full length, run in stage 0's notebook.
    encoded = encode(llm, load_prompts(ROOT / "workloads" / "prompts.jsonl"))
    prompts = dict(sorted(encoded.items(), key=lambda item: len(item[1]))[:40:5])
    params = SamplingParams(max_tokens=24)
    alone = run_alone(llm, prompts, params)
    for batch in random_compositions(prompts, 8, 4, seed=2):
        assert differences({name: alone[name] for name in batch}, run_cell(llm, batch, params)) == []


def test_differences_name_the_first_place_and_both_tokens() -> None:
    expected = {"a": output(1, 2, 3), "b": output(1, 2), "c": output(1)}
    actual = {"a": output(1, 9, 8), "b": output(1), "c": output(1, logprobs=(-0.5000001,))}
    found = {one.prompt_id: one for one in differences(expected, actual)}
    assert (found["a"].position, found["a"].expected, found["a"].actual) == (1, 2, 9)
    assert (found["b"].position, found["b"].expected, found["b"].actual) == (1, 2, None)
    assert found["c"].position == 0 and "logprob of token 1 is -0.5000001 instead of -0.5" in str(found["c"])
    ended = GoldenOutput((1,), (-0.5,), "stop")
    assert differences({"c": output(1)}, {"c": ended})[0].position == 1
    with pytest.raises(ValueError, match=r"different prompts: \['b'\]"):
        differences({"a": output(1)}, {"a": output(1), "b": output(1)})


def test_a_difference_is_explained_by_the_margin_of_the_top_two() -> None:
    llm = LLM("random:tiny", dtype="float32", num_kv_blocks=20)
    prompts = {"a": (5, 6, 7)}
    expected = run_cell(llm, prompts, SamplingParams(max_tokens=4, ignore_eos=True))
    tokens = expected["a"].token_ids
    wrong = {"a": GoldenOutput((*tokens[:2], tokens[2] ^ 1, tokens[3]), expected["a"].logprobs, "length")}
    explained = explain(llm, prompts, expected, differences(expected, wrong))[0]
    top = llm.next_token_logits((5, 6, 7, *tokens[:2])).topk(2).values
    assert explained.position == 2 and explained.margin == float(top[0] - top[1]) > 0
    assert "the top two logits lie" in str(explained)


def test_matrix_marks_absent_different_and_proven_cells() -> None:
    good: Outputs = {"a": output(1), "b": output(2)}
    bad: Outputs = {"a": output(1), "b": output(3)}
    reference = Cell("off", "TP 1", lambda: dict(good))
    frame, expected = run_matrix(
        reference,
        [
            Cell("on", "TP 1", lambda: dict(good), proof=lambda: "3 joined"),
            Cell("on", "TP 2", lambda: dict(bad)),
            Cell("on", "graph", None),
        ],
    )
    assert expected == good
    assert frame["status"].tolist() == ["reference", "equal", "different", "absent"]
    assert frame["num_equal"].tolist() == [2, 2, 1, 0]
    assert frame["detail"][1] == "3 joined" and "token 2 became 3" in frame["detail"][2]

    def did_not_act() -> str:
        raise AssertionError("no request joined mid-batch")

    with pytest.raises(AssertionError, match="no request joined"):
        run_matrix(reference, [Cell("on", "TP 1", lambda: dict(good), proof=did_not_act)])


def test_compositions_cover_every_prompt() -> None:
    batches = random_compositions(random_prompts(512, 24), 50, 6, seed=1)
    assert {name for batch in batches for name in batch} == set(random_prompts(512, 24))
    assert all(1 <= len(batch) <= 6 for batch in batches) and len(batches) == 50
    assert batches == random_compositions(random_prompts(512, 24), 50, 6, seed=1)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("not json\n", "line 1: not an object with id, kind and messages"),
        (json.dumps({"id": "a", "kind": "k"}) + "\n", "line 1: .*messages"),
        ((json.dumps({"id": "a", "kind": "k", "messages": []}) + "\n") * 2, r"ids \['a'\] occur more than once"),
    ],
)
def test_a_bad_prompt_file_is_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        load_prompts(path)


def test_stage_0_matrix_on_the_tiny_model() -> None:
    llm = LLM("random:tiny", dtype="float32", num_kv_blocks=200, max_num_seqs=8, enforce_eager=True)
    frame, expected = golden_matrix(0, llm, num_prompts=13, max_tokens=8)
    status = frame.set_index(["row", "column"])["status"]
    assert status.pop(("alone", "TP 1, eager")) == "reference"
    assert set(status) == {"equal"} and status.index.tolist() == [("static batches", str(mode)) for mode in modes()]
    assert "2 ranks, 7 padded graphs replayed" in frame["detail"].iloc[-1], "13 prompts: 8, then 5 padded to 8"
    assert len(expected) == 13
    with pytest.raises(ValueError, match="stage 9 has no golden matrix"):
        golden_matrix(9, llm, num_prompts=1, max_tokens=1)


def test_a_mode_that_did_not_act_proves_nothing() -> None:
    llm = LLM("random:tiny", dtype="float32", num_kv_blocks=20, max_num_seqs=4)
    with pytest.raises(AssertionError, match="TP 1, graph: 0 padded graphs were replayed"):
        Mode(1, graph=True).proof(llm)
    with pytest.raises(AssertionError, match="TP 2, eager: 1 ranks ran"):
        Mode(2, graph=False).proof(llm)


def test_a_matrix_too_small_to_prove_anything_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = argparse.Namespace(stage=1, model="random:tiny", dtype=["float32"], prompts=4, max_tokens=4, tp=[1])
    assert run(arguments) == 1
    assert "error: a cell could not have failed: TP 1, graph: 0 padded graphs" in capsys.readouterr().err
