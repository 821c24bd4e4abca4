import argparse
import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from lab import workload as workload_module
from lab.traces import TraceError
from lab.workload import Workload, WorkloadError, WorkloadSpec, load_workload, preview, trace_replay

ROOT = Path(__file__).parents[1]
WORKLOADS = ROOT / "workloads"
CHAT: dict[str, Any] = {
    "name": "chat",
    "count": 50,
    "prompt": {"source": "random", "length": {"distribution": "uniform", "low": 3, "high": 9}},
    "output": {"tokens": {"distribution": "fixed", "value": 4}},
    "arrival": {"process": "poisson", "rate": 5},
}
TRACE: dict[str, Any] = {
    "name": "replay",
    "trace": {"format": "mooncake", "file": "trace.jsonl", "prompt_scale": 1 / 32},
    "prompt": {"source": "trace"},
    "output": {"tokens": {"distribution": "trace"}},
    "arrival": {"process": "trace"},
}
MOONCAKE = [(1000, 1100, 70, [0, 1, 2]), (1000, 1024, 1, [0, 1]), (3000, 513, 300, [0, 3]), (9000, 2, 4, [4])]


def write(folder: Path, *classes: Any, **top: Any) -> Path:
    path = folder / "example.yaml"
    path.write_text(yaml.safe_dump({"description": "An example.", "classes": list(classes), **top}))
    return path


def spec(folder: Path, *classes: Any, **top: Any) -> WorkloadSpec:
    return load_workload(write(folder, *classes, **top))


def build(folder: Path, *classes: Any, **options: Any) -> Workload:
    return spec(folder, *classes).build(**{"vocab_size": 1000, "max_model_len": 4096, "traces": folder, **options})


def with_trace(folder: Path) -> Path:
    rows = [dict(zip(("timestamp", "input_length", "output_length", "hash_ids"), row, strict=True)) for row in MOONCAKE]
    (folder / "trace.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def lengths_of(folder: Path, length: dict[str, Any], count: int = 4000) -> np.ndarray:
    prompt = {"source": "random", "length": length}
    return build(folder, {**CHAT, "count": count, "prompt": prompt}).lengths()["num_prompt_tokens"].to_numpy()


def arrivals_of(folder: Path, arrival: dict[str, Any], count: int = 4000) -> np.ndarray:
    return build(folder, {**CHAT, "count": count, "arrival": arrival}).lengths()["arrival_s"].to_numpy()


# ------------------------------------------------------------------------------------------------ determinism, hashes


def test_the_same_file_and_seed_give_the_same_requests(tmp_path: Path) -> None:
    first, again = build(tmp_path, CHAT), build(tmp_path, CHAT)
    assert first == again
    assert first.seed == 0


def test_another_seed_changes_the_content_and_not_the_spec(tmp_path: Path) -> None:
    first, other = build(tmp_path, CHAT), build(tmp_path, CHAT, seed=1)
    assert first.spec_hash == other.spec_hash
    assert first.content_hash != other.content_hash
    assert build(tmp_path, CHAT, seed=0) == first


@pytest.mark.parametrize(
    "change",
    [
        {"count": 49},
        {"output": {"tokens": {"distribution": "fixed", "value": 5}}},
        {"output": {"tokens": {"distribution": "fixed", "value": 4}, "ignore_eos": False}},
        {"arrival": {"process": "poisson", "rate": 6}},
        {"name": "talk"},
    ],
)
def test_every_change_of_what_is_asked_changes_both_hashes(change: dict[str, Any], tmp_path: Path) -> None:
    first, other = build(tmp_path, CHAT), build(tmp_path, {**CHAT, **change})
    assert first.spec_hash != other.spec_hash
    assert first.content_hash != other.content_hash


def test_streams_are_independent(tmp_path: Path) -> None:
    plain = build(tmp_path, CHAT)
    other_outputs = build(tmp_path, {**CHAT, "output": {"tokens": {"distribution": "uniform", "low": 1, "high": 9}}})
    other_arrivals = build(tmp_path, {**CHAT, "arrival": {"process": "at_once"}})
    beside = build(tmp_path, {**CHAT, "name": "other"}, CHAT)
    asked = [(r.request_id, r.arrival_s, r.prompt) for r in plain.requests]
    assert [(r.request_id, r.arrival_s, r.prompt) for r in other_outputs.requests] == asked
    assert [r.prompt for r in other_arrivals.requests] == [r.prompt for r in plain.requests]
    assert [r for r in beside.requests if r.request_id.startswith("chat")] == list(plain.requests)
    other = [r.prompt for r in beside.requests if r.request_id.startswith("other")]
    assert other != [r.prompt for r in plain.requests]


# --------------------------------------------------------------------------------------------------- lengths, arrivals


@pytest.mark.parametrize(
    ("length", "low", "high", "mean", "distinct"),
    [
        ({"distribution": "fixed", "value": 7}, 7, 7, 7, 1),
        ({"distribution": "uniform", "low": 3, "high": 9}, 3, 9, 6, 7),
        ({"distribution": "choice", "values": [2, 5, 11]}, 2, 11, 6, 3),
        ({"distribution": "choice", "values": [2, 6], "weights": [3, 1]}, 2, 6, 3, 2),
        ({"distribution": "lognormal", "median": 40, "sigma": 0.5, "high": 90}, 1, 90, 44, None),
        ({"distribution": "lognormal", "median": 40, "sigma": 0.5, "low": 30, "high": 50}, 30, 50, 40, 21),
        (
            {
                "distribution": "mixture",
                "components": [
                    {"weight": 3, "length": {"distribution": "uniform", "low": 1, "high": 3}},
                    {"weight": 1, "length": {"distribution": "fixed", "value": 30}},
                ],
            },
            1, 30, 9, 4,
        ),
    ],
)  # fmt: skip
def test_lengths_follow_their_distribution(
    length: dict[str, Any], low: int, high: int, mean: float, distinct: int | None, tmp_path: Path
) -> None:
    drawn = lengths_of(tmp_path, length)
    assert (drawn.min() >= low, drawn.max()) == (True, high)
    assert drawn.mean() == pytest.approx(mean, rel=0.06)
    assert distinct is None or len(np.unique(drawn)) == distinct


@pytest.mark.parametrize(
    ("arrival", "mean_gap", "cv"),
    [
        ({"process": "poisson", "rate": 4}, 0.25, 1.0),
        ({"process": "gamma", "rate": 4, "cv": 2}, 0.25, 2.0),
        ({"process": "gamma", "rate": 0.5, "cv": 0.2}, 2.0, 0.2),
    ],
)
def test_arrivals_follow_their_process(arrival: dict[str, Any], mean_gap: float, cv: float, tmp_path: Path) -> None:
    gaps = np.diff(arrivals_of(tmp_path, {**arrival, "start_s": 3}), prepend=3.0)
    assert (gaps >= 0).all()
    assert gaps.mean() == pytest.approx(mean_gap, rel=0.1)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.1)


def test_arrivals_at_once_and_at_given_times(tmp_path: Path) -> None:
    assert arrivals_of(tmp_path, {"process": "at_once"}, 3).tolist() == [0, 0, 0]
    assert arrivals_of(tmp_path, {"process": "at_once", "start_s": 2.5}, 2).tolist() == [2.5, 2.5]
    assert arrivals_of(tmp_path, {"process": "times", "times_s": [0.5, 0, 4]}, 3).tolist() == [0, 0.5, 4]


def test_long_prompts_arrive_among_steady_decodes(tmp_path: Path) -> None:
    """Several classes in one file, each with its own lengths and arrivals, merged in order of arrival."""
    documents = {
        "name": "documents",
        "count": 3,
        "prompt": {"source": "random", "length": {"distribution": "uniform", "low": 1000, "high": 4000}},
        "output": {"tokens": {"distribution": "fixed", "value": 2}},
        "arrival": {"process": "times", "times_s": [1, 2, 3]},
    }
    built = build(tmp_path, CHAT, documents)
    arrivals = [request.arrival_s for request in built.requests]
    assert arrivals == sorted(arrivals)
    long = [request for request in built.requests if (request.num_prompt_tokens or 0) >= 1000]
    assert [request.request_id for request in long] == ["documents-0000", "documents-0001", "documents-0002"]
    assert len({request.request_id for request in built.requests}) == 53


# ------------------------------------------------------------------------------------------------------ prompt sources


def test_random_prompts_stay_within_the_vocabulary(tmp_path: Path) -> None:
    tokens = {
        token for request in build(tmp_path, CHAT, vocab_size=7).requests for token in request.prompt_token_ids or ()
    }
    assert tokens == set(range(7))


def test_text_prompts_come_from_the_file_beside_the_workload(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Hi\u2028there"}]
    lines = [json.dumps({"text": "One"}), "", json.dumps({"id": "b", "messages": messages}, ensure_ascii=False), ""]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    source = {"source": "text", "path": "prompts.jsonl"}
    chat = {key: value for key, value in CHAT.items() if key != "count"} | {"prompt": source}
    built = build(tmp_path, {**chat, "arrival": {"process": "at_once"}})
    assert [request.prompt for request in built.requests] == ["One", tuple(messages)]
    assert [request.num_prompt_tokens for request in built.requests] == [None, None]
    assert [r.prompt for r in build(tmp_path, {**chat, "count": 1}).requests] == ["One"]
    assert "prompt tokens: text" in preview(built)


def test_the_projects_own_prompts_load(tmp_path: Path) -> None:
    source = {"source": "text", "path": str(WORKLOADS / "prompts.jsonl")}
    built = build(tmp_path, {**CHAT, "count": 64, "prompt": source})
    assert len(built.requests) == 64
    assert all(request.prompt_token_ids is None for request in built.requests)


def test_a_trace_gives_lengths_arrivals_and_shared_prefixes(tmp_path: Path) -> None:
    built = build(with_trace(tmp_path), TRACE)
    assert [r.arrival_s for r in built.requests] == [0, 0, 2, 8]
    assert [r.max_tokens for r in built.requests] == [70, 1, 300, 4]
    assert [r.num_prompt_tokens for r in built.requests] == [35, 32, 17, 1]
    first, second, third, _ = (r.prompt_token_ids or () for r in built.requests)
    assert first[:32] == second
    assert first[:16] == third[:16] and first[16] != third[16]


def test_a_trace_is_scaled_shortened_and_clipped(tmp_path: Path) -> None:
    trace = {**TRACE["trace"], "output_scale": 0.1, "max_prompt_tokens": 20, "max_output_tokens": 9}
    replay = {**TRACE, "trace": trace, "arrival": {"process": "trace", "time_scale": 0.5, "start_s": 1}, "count": 3}
    built = build(with_trace(tmp_path), replay)
    assert [(r.arrival_s, r.num_prompt_tokens, r.max_tokens) for r in built.requests] == [
        (1, 20, 7),
        (1, 20, 1),
        (2, 17, 9),
    ]


def test_longer_requests_can_be_left_out(tmp_path: Path) -> None:
    trace = {**TRACE["trace"], "max_prompt_tokens": 32, "max_output_tokens": 100, "longer": "drop"}
    built = build(with_trace(tmp_path), {**TRACE, "trace": trace, "count": 2})
    assert [(r.arrival_s, r.num_prompt_tokens, r.max_tokens) for r in built.requests] == [(0, 32, 1), (8, 1, 4)]
    with pytest.raises(WorkloadError, match="count is 3, but there are only 2 requests in the trace"):
        build(tmp_path, {**TRACE, "trace": trace, "count": 3})
    with pytest.raises(WorkloadError, match=r"leaves none of 4 requests; raise max_prompt_tokens \(None\)"):
        build(
            tmp_path,
            {**TRACE, "trace": {**TRACE["trace"], "max_output_tokens": 1, "longer": "drop", "output_scale": 9}},
        )


def test_an_azure_trace_gives_lengths_that_share_nothing(tmp_path: Path) -> None:
    rows = ["TIMESTAMP,ContextTokens,GeneratedTokens"] + [f"2023-11-16 18:17:0{i},50,{i + 1}" for i in range(9)]
    (tmp_path / "azure.csv").write_text("\r\n".join(rows))
    built = build(tmp_path, {**TRACE, "trace": {"format": "azure", "file": "azure.csv"}}, vocab_size=5)
    assert [r.max_tokens for r in built.requests] == list(range(1, 10))
    assert [r.num_prompt_tokens for r in built.requests] == [50] * 9
    assert len({r.prompt for r in built.requests}) == 9


def test_a_trace_can_give_only_the_arrivals(tmp_path: Path) -> None:
    built = build(with_trace(tmp_path), {**CHAT, "count": 4, "trace": TRACE["trace"], "arrival": {"process": "trace"}})
    assert [r.arrival_s for r in built.requests] == [0, 0, 2, 8]
    with pytest.raises(WorkloadError, match="count is 5, but there are only 4 requests in the trace"):
        build(tmp_path, {**CHAT, "count": 5, "trace": TRACE["trace"], "arrival": {"process": "trace"}})


def test_a_saturated_workload_asks_the_same_at_once() -> None:
    built = load_workload(WORKLOADS / "mixed_lengths.yaml").build(512, 4096)
    saturated = built.saturated()
    assert {request.arrival_s for request in saturated.requests} == {0.0} != {r.arrival_s for r in built.requests}
    same = ("request_id", "prompt", "max_tokens", "ignore_eos")
    assert [[getattr(r, name) for name in same] for r in saturated.requests] == [
        [getattr(r, name) for name in same] for r in built.requests
    ]
    assert saturated.content_hash != built.content_hash and saturated.saturated() == saturated


# --------------------------------------------------------------------------------------------------- the stages' files


@pytest.mark.parametrize(
    ("name", "content_hash"),
    [
        ("quick_mix", "b52289fc67b5e72d3f1ccfeb791c1a5659375f1ba4e7fe0246bcfd812430839e"),
        ("mixed_lengths", "beadc9434bf03258e6881fd115a4153537d65271db6c324ea382adc5f0032a25"),
        ("long_prompts_with_decode", "f10d3e628a6b0b0edf2b063c643f8eb9b84558b021334ad26e0b9adf3ce60fc1"),
        ("short_prompts", "b724ca3aceaf696acf9b19bd8e9ae97c8e73f9ddb9c06a9883562b439904960b"),
        ("short_behind_long", "9070065a322e18cbfdf255f826405304b2fd02e64a5f455c99ddc372e3e687a0"),
        ("shared_prefix", "fab3609326f909fda12a83025dbb980c20e02dcd51cc76228cf2568c10f7d172"),
        ("shared_prefix_overload", "812ef929bb5e333d1a46b84c372835b497364f90bc3672550cb05d7ad66c276b"),
        ("single_stream", "444a540289b13d6b458e2a82088ce04c5ae7e78e9b4f9715f76f386188c58247"),
        ("prefill_2000", "5d70cd02ca090f34e71a00ae0e578aebfd63ce2ccf6ea386cffeaee042621ebf"),
        ("uniform", "9b77b0f7e802db258087a384c6dd1e7a9188fc6166ebef98c3724fc1ffa40a56"),
    ],
)
def test_the_projects_workloads_are_frozen(name: str, content_hash: str) -> None:
    """A workload is fixed before the feature that it judges; a change of it is a new workload."""
    built = load_workload(WORKLOADS / f"{name}.yaml").build(vocab_size=49152, max_model_len=2048)
    assert built.content_hash == content_hash


@pytest.mark.parametrize("path", sorted(WORKLOADS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_workload_of_the_project_is_valid_and_described(path: Path) -> None:
    assert len(load_workload(path).file.description) > 40


# ----------------------------------------------------------------------------------------------------------- bad input


def chat(**change: Any) -> dict[str, Any]:
    return {**CHAT, **change}


def random_length(**length: Any) -> dict[str, Any]:
    return chat(prompt={"source": "random", "length": length})


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (chat(colour="red"), r"classes\[0\].*unknown key 'colour'; known keys: name, count, trace, prompt"),
        (chat(arrival={"process": "poisson", "rat": 1}), r"classes\[0\]\.arrival.*'rat'; did you mean 'rate'\?"),
        (random_length(distribution="uniform", low=1), r"classes\[0\]\.prompt\.length\.high: is missing; add it"),
        (random_length(distribution="zipf"), r"classes\[0\]\.prompt\.length.*'zipf'.*'fixed', 'uniform', 'lognormal'"),
        (random_length(distribution="uniform", low=9, high=4), r"prompt\.length: low is 9, must be at most high, 4"),
        (
            random_length(distribution="lognormal", median=9, sigma=1, low=9, high=4),
            "low is 9, must be at most high, 4",
        ),
        (random_length(distribution="choice", values=[]), r"length\.values = \[\].*at least 1 item"),
        (random_length(distribution="mixture", components=[]), r"length\.components = \[\].*at least 1 item"),
        (random_length(distribution="choice", values=[1, 2], weights=[1]), "1 weights for 2 values; give each"),
        (random_length(distribution="choice", values=[1, 2], weights=[1, 0]), r"weights\[1\] = 0: .*greater than 0"),
        (random_length(distribution="fixed", value=0), r"length\.value = 0: .*greater than or equal to 1"),
        (random_length(distribution="fixed", value="8"), r"length\.value = '8': .*valid integer"),
        (random_length(distribution="fixed", value=True), r"length\.value = True: .*valid integer"),
        (random_length(distribution="fixed", value=1.5), r"length\.value = 1\.5: .*valid integer"),
        (
            random_length(distribution="lognormal", median=float("inf"), sigma=1, high=9),
            "median = inf: .*finite number",
        ),
        (chat(count=0), r"classes\[0\]\.count = 0: .*greater than or equal to 1"),
        (
            chat(arrival={"process": "poisson", "rate": float("nan")}),
            r"arrival\.rate = nan: must be a finite number; change it",
        ),
        (chat(arrival={"process": "poisson", "rate": 0}), r"arrival\.rate = 0: .*greater than 0"),
        (chat(arrival={"process": "gamma", "rate": 1, "cv": -1}), r"arrival\.cv = -1: .*greater than 0"),
        (chat(arrival={"process": "times", "times_s": [0, float("nan")]}), r"arrival\.times_s\[1\] = nan: .*"),
        (
            chat(arrival={"process": "times", "times_s": [-0.5]}),
            r"arrival\.times_s\[0\] = -0\.5: .*greater than or equal",
        ),
        (chat(arrival={"process": "at_once", "start_s": -1}), r"arrival\.start_s = -1: .*greater than or equal to 0"),
        (
            chat(output={"tokens": {"distribution": "fixed", "value": 1}, "ignore_eos": "no"}),
            r"output\.ignore_eos = 'no'",
        ),
        (chat(name="Chat 1"), r"classes\[0\]\.name = 'Chat 1': .*pattern"),
        (chat(arrival={"process": "trace"}), r"classes\[0\].*arrival replays a trace, but trace is missing"),
        (chat(trace=TRACE["trace"]), r"trace is given, but none of prompt, output\.tokens, arrival replays it"),
        ({**TRACE, "trace": {"format": "vllm", "file": "x"}}, r"trace\.format = 'vllm': .*'mooncake' or 'azure'"),
        ("chat", r"classes\[0\] = 'chat'"),
    ],
)
def test_bad_classes_are_refused_with_file_key_value_and_limit(bad: Any, message: str, tmp_path: Path) -> None:
    path = write(tmp_path, bad)
    with pytest.raises(WorkloadError, match=message) as caught:
        load_workload(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value), "one mistake is one line"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("classes: []", r"description: is missing; add it\n.*classes = \[\]: .*at least 1 item"),
        ("description: ''\nclasses: []", "description = ''"),
        ("", "the file = None"),
        ("[1, 2]", "the file = "),
        ("a: [1", "not valid YAML"),
        ("description: a\ndescription: b\nclasses: []", "the key 'description' is given twice; remove one"),
        ("description: a\nseed: -1\nclasses: []", "seed = -1"),
        ("? [a]\n: 1", "not valid YAML|unhashable"),
    ],
)
def test_bad_files_are_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(WorkloadError, match=message):
        load_workload(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match=r"none\.yaml: cannot be read"):
        load_workload(tmp_path / "none.yaml")


def test_two_classes_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="the class names chat occur more than once"):
        load_workload(write(tmp_path, CHAT, CHAT))


def test_every_mistake_of_a_file_is_reported_at_once(tmp_path: Path) -> None:
    bad = chat(count=0, arrival={"process": "poisson", "rate": -1})
    with pytest.raises(WorkloadError) as caught:
        load_workload(write(tmp_path, bad, seed=-1))
    assert [key in str(caught.value) for key in ("seed = -1", "count = 0", "arrival.rate = -1")] == [True] * 3


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (
            random_length(distribution="uniform", low=10, high=30),
            r"request \d+ has \d+ prompt tokens and up to 4 output",
        ),
        (chat(output={"tokens": {"distribution": "fixed", "value": 99}}), "above max_model_len = 20; shorten"),
        ({k: v for k, v in CHAT.items() if k != "count"}, "count is missing"),
        (chat(arrival={"process": "times", "times_s": [1, 2]}), r"times_s has 2 times for 50 requests"),
        (chat(prompt={"source": "text", "path": "none.jsonl"}), r"prompt\.path = 'none\.jsonl': cannot read"),
        (chat(prompt={"source": "text", "path": "bad.jsonl"}), r"bad\.jsonl, line 2: needs either 'text'"),
        (chat(prompt={"source": "text", "path": "worse.jsonl"}), r"worse\.jsonl, line 1: not JSON"),
        (chat(prompt={"source": "text", "path": "few.jsonl"}), "count is 50, but there are only 1 prompts in"),
        ({**chat(prompt={"source": "text", "path": "empty.jsonl"}), "count": None}, "only 0 prompts in"),
    ],
)
def test_requests_that_cannot_be_built_are_refused(bad: Any, message: str, tmp_path: Path) -> None:
    (tmp_path / "few.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"text": ""}\n')
    (tmp_path / "worse.jsonl").write_text('{"text": \n')
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(WorkloadError, match=message) as caught:
        build(tmp_path, bad, max_model_len=20)
    assert str(caught.value).startswith(f"{tmp_path / 'example.yaml'}: classes[0] (chat): ")


@pytest.mark.parametrize("row", ['{"text": "a", "messages": [{"role": "user", "content": "b"}]}', '{"messages": []}',
                                 '{"messages": [{"role": "user"}]}', '{"prompt": "a"}', "[]"])  # fmt: skip
def test_a_prompt_line_needs_exactly_one_whole_prompt(row: str, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text(row)
    with pytest.raises(WorkloadError, match="line 1: needs either 'text' "):
        build(tmp_path, chat(count=1, prompt={"source": "text", "path": "prompts.jsonl"}))


def test_the_longest_prompt_that_fits_is_accepted_and_one_more_token_refused(tmp_path: Path) -> None:
    fixed = random_length(distribution="fixed", value=16)
    assert len(build(tmp_path, fixed, max_model_len=20).requests) == 50
    with pytest.raises(WorkloadError, match="20 together, above max_model_len = 19"):
        build(tmp_path, fixed, max_model_len=19)


def test_a_missing_or_broken_trace_names_the_workload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LAB_TRACES", raising=False)
    with pytest.raises(TraceError, match=r"example\.yaml: classes\[0\] \(replay\): trace 'trace.jsonl': no folder"):
        build(tmp_path, TRACE, traces=None)
    (tmp_path / "trace.jsonl").write_text('{"timestamp": 0, "inp')
    with pytest.raises(
        TraceError, match=r"example\.yaml: classes\[0\] \(replay\): .*line 1: the file ends in the middle"
    ):
        build(tmp_path, TRACE)


# ------------------------------------------------------------------------------------------------------------- preview


def test_the_preview_shows_counts_histograms_arrivals_and_the_hash(tmp_path: Path) -> None:
    built = build(tmp_path, CHAT, {**CHAT, "name": "other", "count": 3})
    text = preview(built, first=2)
    assert "53 requests (chat 50, other 3)" in text.replace("other 3, chat 50", "chat 50, other 3")
    assert built.content_hash in text and built.spec_hash in text
    assert built.requests[0].request_id in text and built.requests[1].request_id in text
    bars = [line for line in text.splitlines() if "█" in line]
    counts = [int(line.split()[-1].replace(",", "")) for line in bars]
    assert sum(counts) == 2 * 53
    by_length = list(itertools.chain.from_iterable(line.split(" to ")[0].split() for line in bars))
    assert by_length[-1] == "4"


def test_the_command_previews_a_file_and_reports_bad_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    workload_module.add_command(parser.add_subparsers())
    good = parser.parse_args(["workload", str(WORKLOADS / "quick_mix.yaml"), "--seed", "3"])
    assert good.run(good) == 0
    assert "24 requests (mix 24), seed 3" in capsys.readouterr().out
    bad = parser.parse_args(["workload", str(tmp_path / "none.yaml")])
    assert bad.run(bad) == 2
    assert "none.yaml: cannot be read" in capsys.readouterr().err


def test_workloads_need_no_engine() -> None:
    """A preview answers at once: nothing of torch or the engine is imported for it."""
    code = "import sys, lab.workload; sys.exit(any(name.split('.')[0] in ('torch', 'engine') for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_a_trace_is_replayed_scaled_down(tmp_path: Path) -> None:
    rows = [(i * 1000, 512 + 64 * i, 80, list(range(-(-(512 + 64 * i) // 512)))) for i in range(40)]
    lines = [
        json.dumps(dict(zip(("timestamp", "input_length", "output_length", "hash_ids"), row, strict=True)))
        for row in rows
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(line + "\n" for line in lines))
    built = load_workload(path).build(vocab_size=100, max_model_len=2048)
    assert len(built.requests) == 32 and built.name == "trace"
    assert [r.num_prompt_tokens for r in built.requests[:3]] == [16, 18, 20]
    assert [r.max_tokens for r in built.requests[:3]] == [10, 10, 10]
    assert [r.arrival_s for r in built.requests[:3]] == pytest.approx([0.0, 0.1, 0.2])
    assert len({r.prompt[:16] for r in built.requests}) == 1, "what shares a hash id shares its tokens"
    with pytest.raises(WorkloadError, match=r"a trace is one of \.jsonl, \.csv"):
        trace_replay(tmp_path / "trace.parquet")
    with pytest.raises(WorkloadError, match="count"):
        trace_replay(path, count=0)
