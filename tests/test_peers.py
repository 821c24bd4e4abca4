"""The side-by-side contest: the host's open loop, processes that fail, who wins what, and whose answers are exact."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from engine import LLM, SamplingParams
from engine.models.gguf_import import _hf_name, _undo_rope_interleaving
from lab.drive import drive
from lab.figures import exactness as exactness_figure
from lab.figures import race
from lab.paths import repository_root
from lab.peers import environments
from lab.peers.adapter import Settings
from lab.peers.catalogue import THIS_ENGINE, Peer, chosen, peers
from lab.peers.contest import (
    Field,
    Trial,
    first_differing_token,
    match_rates,
    measured,
    repeated,
    run_contest,
    standings,
)
from lab.peers.environments import PeerError, preloaded, python_of
from lab.peers.exactness import (
    Ledger,
    alone,
    counts,
    everywhere,
    extent,
    in_chunks_and_cached,
    in_company,
    survivors,
)
from lab.peers.gguf_file import write_gguf
from lab.peers.host import replay, serve
from lab.peers.process import PeerProcess
from lab.peers.step_tokens import step_tokens
from lab.peers.tables import ahead_of, set_up, step_costs
from lab.workload import Workload, WorkloadRequest
from tests.peer_adapters import Failing, Fake, Slow

ROOT = repository_root()
END = 30  # ends some of the tiny model's answers early
SETTINGS = Settings("", "float32", 1, 4, 256, 1024, (2,))
PROMPTS = {f"p{i}": tuple(range(3 + i, 9 + 2 * i)) for i in range(6)}


def workload(arrivals: Sequence[float] = (0.0, 0.0), tokens: int = 4, ignore_eos: bool = True) -> Workload:
    requests = tuple(
        WorkloadRequest(f"r-{i:04d}", arrival, (5 + i, 6, 7), tokens, ignore_eos) for i, arrival in enumerate(arrivals)
    )
    return Workload("made_up", "For the tests.", 0, requests, "spec", "content")


def fake(name: str, kind: str = "Fake", **more: object) -> Peer:
    return Peer(name, f"tests.peer_adapters:{kind}", "", "made for the tests", **more)  # type: ignore[arg-type]


@pytest.fixture
def process(tmp_path: Path) -> Iterator[PeerProcess]:
    peer = fake("fake", variables={"FAKE": "seen"}, options={"chunk": 7})
    with PeerProcess(peer, SETTINGS, ROOT, tmp_path) as started:
        yield started


# ---- the host -------------------------------------------------------------------------------------------------------


def test_requests_are_due_whatever_the_peer_is_doing() -> None:
    peer = Slow()
    peer.start(SETTINGS)
    asked = [
        {"id": "a", "arrival": 0.0, "prompt": [1], "max_tokens": 4, "ignore_eos": True},
        {"id": "b", "arrival": 0.02, "prompt": [2], "max_tokens": 1, "ignore_eos": True},
        {"id": "c", "arrival": 0.6, "prompt": [3], "max_tokens": 1, "ignore_eos": True},
    ]
    answers = replay(peer, asked)
    assert [len(answers[name]["tokens"]) for name in "abc"] == [4, 1, 1]
    first = {name: answer["times"][0] for name, answer in answers.items()}
    # b came in the middle of a's first step: its second step answers both. c was not submitted before it was due.
    assert first["b"] == pytest.approx(answers["a"]["times"][1], abs=0.02) and first["c"] >= 0.6


def test_a_token_of_a_stranger_is_an_error() -> None:
    peer = Fake()
    peer.start(SETTINGS)
    peer.submit("stranger", [1], 3, True)
    with pytest.raises(RuntimeError, match="stranger"):
        replay(peer, [{"id": "a", "arrival": 0.0, "prompt": [1], "max_tokens": 3, "ignore_eos": True}])


def test_an_error_is_an_answer_and_the_next_command_is_tried() -> None:
    settings = {**vars(SETTINGS)}
    asked = [{"id": "a", "arrival": 0.0, "prompt": [1], "max_tokens": 1, "ignore_eos": True}]
    commands = [{"do": "start", "settings": settings}, {"do": "replay", "requests": asked}, {"do": "stop"}]
    out = io.StringIO()
    serve(Failing, [json.dumps(command) for command in commands], out)
    started, failed, stopped = (json.loads(line) for line in out.getvalue().splitlines())
    assert started["ok"]["versions"] == "fake 1" and stopped == {"ok": None}
    assert failed == {"error": "ArithmeticError: out of numbers"}


def test_the_host_needs_the_standard_library_alone() -> None:
    """It runs where nothing of this project is installed."""
    code = "import sys, lab.peers.host; print([n for n in ('numpy', 'torch', 'pandas', 'engine') if n in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


# ---- a process ------------------------------------------------------------------------------------------------------


def test_a_peer_in_its_process(process: PeerProcess) -> None:
    assert process.facts == {"versions": "fake 1", "options": "{'chunk': 7}", "variable": "seen"}
    record = process.replay(workload((0.0, 0.05)))
    rows = record.requests.set_index("request_id")
    assert list(rows["num_output_tokens"]) == [4, 4] and set(rows["finish_reason"]) == {"length"}
    assert list(rows.loc["r-0000", "token_ids"]) == [5, 6, 7, 18, 36, 72, 144 % 97]
    assert (rows["first_token"] >= rows["arrival"]).all() and rows.loc["r-0001", "arrival"] == 0.05
    assert process.answer({"x": [1, 2]}, 2) == {"x": (3, 6)}


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("Dying", "replay: the process ended with status 3: last words"),
        ("Failing", "replay: ArithmeticError: out of numbers"),
        ("Short", "got 1 tokens, 4 were asked for"),
    ],
)
def test_a_peer_that_fails_says_how(tmp_path: Path, kind: str, message: str) -> None:
    with PeerProcess(fake("fake", kind), SETTINGS, ROOT, tmp_path) as started, pytest.raises(PeerError, match=message):
        started.replay(workload())


def test_a_peer_that_does_not_start_leaves_no_process(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match="start: ImportError: no such library"):
        PeerProcess(fake("fake", "Unstartable"), SETTINGS, ROOT, tmp_path)
    with pytest.raises(PeerError, match=r"start: the process ended with status 1: .*Nothing"):
        PeerProcess(fake("fake", "Nothing"), SETTINGS, ROOT, tmp_path)


def test_an_environment_that_cannot_be_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peer = Peer("odd", "x:Y", "odd", "", requirements=("./no/such/folder",))
    with pytest.raises(PeerError, match=r"pip install failed: .*no/such/folder.*see .*odd\.log"):
        python_of(peer, tmp_path)

    asked = []
    monkeypatch.setattr(environments, "_pip", lambda python, log, variables, *rest: asked.append(rest[0]))
    peer = Peer("fine", "x:Y", "fine", "", requirements=("six",), unwanted=("torchaudio",))
    for _ in range(2):  # the second time it is there
        assert python_of(peer, tmp_path) == tmp_path / ".venv-peers" / "fine" / "bin" / "python"
    assert asked == ["install", "uninstall"]


def test_what_is_preloaded_is_what_is_there(tmp_path: Path) -> None:
    library = tmp_path / ".venv-peers" / "x" / "lib" / "liba.so"
    library.parent.mkdir(parents=True)
    library.touch()
    peer = Peer("x", "x:Y", "x", "", preload=("lib/lib*.so", "lib/missing.so", f"{tmp_path}/.venv-peers/*/lib/liba.so"))
    assert preloaded(peer, tmp_path) == [library, library]


def test_the_catalogue() -> None:
    listed = peers(threads=2)
    assert listed[0].name == THIS_ENGINE and len({peer.name for peer in listed}) == len(listed)
    for peer in listed:
        module, name = peer.adapter.split(":")
        source = ROOT / f"{module.replace('.', '/')}.py"
        assert f"class {name}(Adapter):" in source.read_text(encoding="utf-8")
        assert peer.settings and all("==" in requirement for requirement in peer.requirements)
        assert peer.variables["OMP_NUM_THREADS"] == "2"


def test_engines_are_chosen_by_name_and_this_one_always_takes_part() -> None:
    listed = [peer.name for peer in peers(threads=1)]
    assert list(chosen([listed[3], listed[1]], threads=1)) == [THIS_ENGINE, listed[1], listed[3]]
    with pytest.raises(ValueError, match=r"engines \['vllm'\] are unknown; there are this engine, vLLM"):
        chosen(["vllm"], threads=1)


def test_the_table_of_engines_says_what_each_is_or_why_it_is_absent() -> None:
    both = {"A": "1"}
    engines = {"ours": fake("ours", variables=both), "theirs": fake("theirs", variables=both | {"B": "2"})}
    html = set_up(engines, {"ours": {"versions": "fake 1", "cache": "on"}}, {"theirs": "no such library"}).to_html()
    assert "fake 1" in html and "cache: on" in html and "absent: no such library" in html
    assert "for all: A=1" in html and "B=2" in html and html.count("A=1") == 1


def test_an_experiments_options_go_before_a_peers_own(tmp_path: Path) -> None:
    peer = fake("fake", options={"chunk": 7, "cache": "on"})
    with PeerProcess(peer, replace(SETTINGS, options={"chunk": 3}), ROOT, tmp_path) as process:
        assert process.facts["options"] == "{'chunk': 3, 'cache': 'on'}"


# ---- the contest ----------------------------------------------------------------------------------------------------


def field_of(tmp_path: Path, **kinds: str) -> Field:
    def starter(name: str, kind: str):  # type: ignore[no-untyped-def]
        return lambda: PeerProcess(fake(name, kind), SETTINGS, ROOT, tmp_path)

    return Field({name: starter(name, kind) for name, kind in kinds.items()})


def test_arms_alternate_and_failures_are_reported(tmp_path: Path) -> None:
    kinds = {"ours": "Fake", "sick": "Failing", "missing": "Unstartable", "theirs": "Sociable"}
    with field_of(tmp_path, **kinds) as field:
        assert field.absent == {"missing": "start: ImportError: no such library"}
        trials, failed = run_contest(field, workload(), rounds=3, keep=tmp_path / "kept", settle_s=0)
        assert [trial.engine for trial in trials] == ["ours", "theirs"] * 3
        assert failed == field.absent | {"sick": "replay: ArithmeticError: out of numbers"}
        assert [entrant.name for entrant in field.present()] == ["ours", "sick", "theirs"]  # tried again
    assert len(list((tmp_path / "kept").iterdir())) == 6
    frame = measured(trials)
    assert set(frame["engine"]) == {"ours", "theirs"} and "Queue time p50" not in set(frame["metric"])
    rates = match_rates(trials, "ours").set_index("engine")
    assert rates.loc["ours", "equal"] == 2 and rates.loc["ours", "agreed"] == 1
    assert rates.loc["theirs", "equal"] == 0 and rates.loc["theirs", "agreed"] == 0
    assert repeated(trials, "ours") == (2, 2)
    other = trials[0].record.requests.assign(output_hash="another")
    changed = replace(trials[0], record=replace(trials[0].record, requests=other))
    assert repeated([changed, *trials[1:]], "ours") == (0, 2)


def test_where_answers_part() -> None:
    assert first_differing_token((1, 2, 3), [1, 2, 3]) is None
    assert first_differing_token((1, 2, 3), (1, 5, 3)) == 1
    assert first_differing_token((1, 2), (1, 2, 3)) == first_differing_token((1, 2, 3), (1, 2)) == 2


def test_standings_divide_runs_of_the_same_round() -> None:
    rows = [
        {"engine": engine, "workload": "w", "round": number, "metric": metric, "kind": "timing", "unit": "s",
         "better": "lower", "value": value * (1 + number)}
        for engine, ttft, itl in (("ours", 1.0, 2.0), ("theirs", 3.0, 0.0))
        for number in range(5)
        for metric, value in (("TTFT p50", ttft), ("ITL p50", itl))
    ]  # fmt: skip
    table = standings(pd.DataFrame(rows), "ours").set_index(["engine", "metric"])
    row = table.loc[("theirs", "TTFT p50")]
    assert row["value"] == 9 and (row["least"], row["most"]) == (3, 15)
    assert row["ratio"] == pytest.approx(3) and row["low"] == pytest.approx(3) and row["high"] == pytest.approx(3)
    assert np.isnan(table.loc[("theirs", "ITL p50"), "ratio"]) and np.isnan(table.loc[("ours", "TTFT p50"), "ratio"])


def test_exactness_tells_an_engine_that_minds_its_company(tmp_path: Path) -> None:
    with field_of(tmp_path, ours="Fake", theirs="Sociable") as field:
        frames = []
        for entrant in field.present():
            ledger = Ledger(tmp_path / f"{entrant.name}.jsonl", {})
            expected = alone(entrant, PROMPTS, 3, ledger)
            frames.append(in_company(entrant, PROMPTS, expected, 3, 2, 0, ledger))
            frames.append(in_chunks_and_cached(entrant, PROMPTS, expected, 3, ledger))
    frame = pd.concat(frames, ignore_index=True)
    assert everywhere(frame).to_dict() == {"ours": 6, "theirs": 0}
    table = counts(frame).set_index(["engine", "composition"])["equal"]
    assert table.loc["theirs"].to_dict() == {"batch 1": 0, "batch 2": 0, "in chunks": 6, "cached": 6}
    theirs = frame[(frame["engine"] == "theirs") & (frame["composition"] == "batch 1")]
    assert (theirs["differs_at"] == 0).all() and frame.loc[frame["equal"], "differs_at"].isna().all()
    figure = exactness_figure(counts(frame), ["ours", "theirs", "missing"])
    assert list(figure.data[0].z[2]) == [None] * 4 and "0/6" in figure.data[1].text


class Counted:
    """An engine that answers with the number of times it was asked, and fails at the ``ends``-th."""

    name = "counted"

    def __init__(self, ends: int = 1000) -> None:
        self.asked, self._ends, self._known = 0, ends, 0

    def reset(self) -> None:
        self._known = 0

    def answer(self, prompts: Mapping[str, Sequence[int]], max_tokens: int) -> dict[str, tuple[int, ...]]:
        self.asked += 1
        self._known += 1
        if self.asked == self._ends:
            raise PeerError("ended by hand")
        return {name: (self._known, len(prompts)) for name in prompts}


def count_all(entrant: Counted, ledger: Ledger) -> pd.DataFrame:
    expected = alone(entrant, PROMPTS, 2, ledger)  # type: ignore[arg-type]
    company = in_company(entrant, PROMPTS, expected, 2, 3, 0, ledger)  # type: ignore[arg-type]
    return pd.concat([company, in_chunks_and_cached(entrant, PROMPTS, expected, 2, ledger)])  # type: ignore[arg-type]


@pytest.mark.parametrize("ends", range(1, 6 + 3 + 2 * 6 + 1))
def test_a_count_that_was_ended_goes_on_where_it_was(tmp_path: Path, ends: int) -> None:
    path, about = tmp_path / "runs" / "counted.jsonl", {"versions": "1", "prompts": 6}
    with pytest.raises(PeerError, match="by hand"):
        count_all(Counted(ends), Ledger(path, about))
    with path.open("a", encoding="utf-8") as file:
        file.write('{"piece": "half a li')  # killed while it wrote
    second, whole = Counted(), Counted()
    frame = count_all(second, Ledger(path, about, resume=True))
    half_a_pair = ends > 6 + 3 and (ends - 6 - 3) % 2 == 0
    assert second.asked == 6 + 3 + 2 * 6 - (ends - 1) + half_a_pair
    pd.testing.assert_frame_equal(frame, count_all(whole, Ledger(tmp_path / "whole.jsonl", about)))
    assert set(frame.loc[frame["composition"] == "cached", "equal"]) == {False}  # the same engine, asked twice


def test_a_count_without_time_reports_what_is_known(tmp_path: Path) -> None:
    def counted(ends: int) -> pd.DataFrame:
        path = tmp_path / f"{ends}.jsonl"
        with pytest.raises(PeerError, match="by hand"):
            count_all(Counted(ends), Ledger(path, {}))
        entrant = Counted()
        frame = count_all(entrant, Ledger(path, {}, resume=True, patience_s=0))
        assert entrant.asked == 0
        return frame

    with pytest.raises(PeerError, match="4 of 6 prompts alone"):
        counted(5)
    with pytest.raises(PeerError, match="none of 3 batches within 0 minutes; give it more"):
        counted(7)
    assert counted(9).groupby("composition").size().to_dict() == {"batch 1": 6, "batch 2": 6}
    some = counted(15)
    assert some.groupby("composition").size().to_dict() == {
        "batch 1": 6, "batch 2": 6, "batch 3": 6, "in chunks": 2, "cached": 2,
    }  # fmt: skip
    assert (
        extent(some, 6) == "3, 2 in part" and extent(some[~some["composition"].isin(["cached", "in chunks"])], 6) == "3"
    )


def test_a_count_of_other_settings_or_begun_anew_keeps_nothing(tmp_path: Path) -> None:
    path = tmp_path / "counted.jsonl"
    count_all(Counted(), Ledger(path, {"versions": "1"}))
    for about, resume, asks in (
        ({"versions": "1"}, True, 0),
        ({"versions": "2"}, True, 21),
        ({"versions": "2"}, False, 21),
    ):
        entrant = Counted()
        count_all(entrant, Ledger(path, about, resume))
        assert entrant.asked == asks


def test_an_engine_that_fails_while_exactness_is_counted_is_absent(tmp_path: Path) -> None:
    done, failed = {}, {}  # type: ignore[var-annotated]
    kinds = {"ours": "Fake", "sick": "Dying", "missing": "Unstartable", "theirs": "Sociable"}
    with field_of(tmp_path, **kinds) as field:
        ledgers = {name: Ledger(tmp_path / f"{name}.jsonl", {}) for name in kinds}
        survivors(field, failed, lambda one: done.update({one.name: alone(one, PROMPTS, 2, ledgers[one.name])}))
    assert list(done) == ["ours", "theirs"]
    assert failed["sick"].endswith("status 3: last words") and "no such library" in failed["missing"]


def test_a_model_without_a_gguf_form_makes_its_readers_absent(tmp_path: Path) -> None:
    peer = Peer("llama", "tests.peer_adapters:Fake", "", "", needs_gguf=True)
    settings = Settings("random:tiny", "float32", 1, 4, 128, 1024, (2,))
    with pytest.raises(PeerError, match="no GGUF file of the model: random:tiny has random weights"):
        PeerProcess(peer, settings, ROOT, tmp_path)


def test_the_cost_of_steps_adds_up() -> None:
    llm = LLM("random:tiny", max_num_seqs=4, num_kv_blocks=64, max_num_batched_tokens=8, enable_prefix_caching=False)
    record = drive(llm.core, workload((0.0, 0.0, 0.0), tokens=6))
    table = step_costs(record).set_index("step")
    # 8 of the 9 prompt tokens, then the last one beside two decodes.
    assert table.index.tolist() == ["decode, 1 row", "decode, 3 rows", "with prompt tokens, 4 of them on average"]
    assert table["steps"].tolist() == [1, 4, 2] and table["share"].sum() == pytest.approx(1)
    seconds = (record.steps["end"] - record.steps["start"]).sum()
    assert (table["token"] * [1, 12, 11]).sum() == pytest.approx(seconds)
    assert table["median"].iloc[0] == table["token"].iloc[0] == pytest.approx(table["share"].iloc[0] * seconds)


def test_who_is_ahead_is_told_also_where_it_ran_once() -> None:
    nan = float("nan")
    rows = [
        ("TTFT", "lower", "clearly", 0.5, 0.4, 0.6, True), ("TTFT", "lower", "within the noise", 0.9, 0.7, 1.1, False),
        ("TTFT", "lower", "once", 0.5, nan, nan, True), ("TTFT", "lower", "once, behind", 2.0, nan, nan, False),
        ("Output", "higher", "clearly", 2.0, 1.5, 3.0, True), ("Output", "higher", "once", 2.0, nan, nan, True),
        ("TTFT", "lower", "ours", nan, nan, nan, False),
    ]  # fmt: skip
    table = pd.DataFrame(rows, columns=["metric", "better", "engine", "ratio", "low", "high", "ahead"])
    assert ahead_of(table).index.tolist() == table.index[table["ahead"]].tolist()


def test_the_race_marks_who_is_absent(tmp_path: Path) -> None:
    with field_of(tmp_path, ours="Fake", theirs="Sociable") as field:
        trials, _ = run_contest(field, workload(), rounds=2, settle_s=0)
    figure = race(measured(trials), {"made_up": "TTFT p50"}, ["ours", "theirs", "missing"])
    assert "absent" in [note.text for note in figure.layout.annotations] and len(figure.data[1].x) == 4
    with pytest.raises(ValueError, match="no run of made_up has 'nothing'"):
        race(measured(trials), {"made_up": "nothing"}, ["ours"])


# ---- the real adapters that this environment can run ----------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder of a small random model whose answers depend on their prompts."""
    folder = tmp_path_factory.mktemp("tiny_llama")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, eos_token_id=END, bos_token_id=1, pad_token_id=2,
        initializer_range=0.3,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def expected_of(folder: Path, max_tokens: int) -> Mapping[str, tuple[int, ...]]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    answers = {}
    for name, prompt in PROMPTS.items():
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        out = model.generate(ids, attention_mask=mask, max_new_tokens=max_tokens, do_sample=False)
        answers[name] = tuple(out[0, len(prompt) :].tolist())
    return answers


@pytest.mark.slow
@pytest.mark.parametrize("name", [THIS_ENGINE, "transformers generate", "transformers generate_batch"])
def test_adapters_give_the_models_greedy_answers(tiny_llama: Path, tmp_path: Path, name: str) -> None:
    """Alone, in a batch with others of other lengths, and at fixed lengths with the end of answers ignored."""
    found = next(peer for peer in peers(threads=1) if peer.name == name)
    peer = Peer(name, found.adapter, "", "", variables=found.variables)
    expected = expected_of(tiny_llama, 12)
    assert len(set(expected.values())) == len(PROMPTS) and len({len(answer) for answer in expected.values()}) > 1
    settings = Settings(str(tiny_llama), "float32", 1, 4, 128, 1024, (END,))
    with PeerProcess(peer, settings, ROOT, tmp_path) as started:
        assert started.answer(PROMPTS, 12) == expected
        assert alone(started, PROMPTS, 12, Ledger(tmp_path / "answers.jsonl", {})) == expected
        record = started.replay(workload((0.0, 0.0, 0.05, 0.1, 0.1, 0.1), tokens=9))
        assert list(record.requests["num_output_tokens"]) == [9] * 6


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_gguf_file_holds_the_same_weights(tiny_llama: Path, tmp_path: Path, dtype: str) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(tiny_llama, path, dtype)
    reader = gguf.GGUFReader(path)
    model = LlamaForCausalLM.from_pretrained(tiny_llama).state_dict()
    names = set()
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        for part, heads in (("attn_q", 4), ("attn_k", 2)):
            if part in tensor.name:
                values = _undo_rope_interleaving(values, heads)
        names.add(name := _hf_name(tensor.name))
        torch.testing.assert_close(
            torch.from_numpy(np.array(values)), model[name].to(getattr(torch, dtype)).float(), rtol=0, atol=0
        )
    assert names == set(model)


def test_a_gguf_file_of_another_architecture_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    save_file({}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="only LlamaForCausalLM"):
        write_gguf(tmp_path, tmp_path / "model.gguf", "float32")


def test_this_engines_adapter_refuses_unknown_options(tmp_path: Path) -> None:
    peer = Peer("x", "lab.peers.adapters.this_engine:ThisEngine", "", "", options={"speed": 3})
    settings = Settings("random:tiny", "float32", 1, 4, 128, 1024, (2,))
    with pytest.raises(PeerError, match="speed"):
        PeerProcess(peer, settings, ROOT, tmp_path)


def test_trials_are_plain_records(process: PeerProcess) -> None:
    record = process.replay(workload())
    assert record.meta["engine"] == "fake" and Trial("fake", "made_up", 0, record).record.completed.shape[0] == 2


def test_the_engine_answers_as_it_does_without_the_adapter(tmp_path: Path) -> None:
    peer = Peer("ours", "lab.peers.adapters.this_engine:ThisEngine", "", "", chunked={"max_num_batched_tokens": 4})
    settings = Settings("random:tiny", "float32", 1, 4, 128, 1024, (2,), peer.chunked or {})
    llm = LLM("random:tiny", dtype="float32", max_num_seqs=4, enforce_eager=True)
    outputs = llm.generate([list(prompt) for prompt in PROMPTS.values()], SamplingParams(max_tokens=6), use_tqdm=False)
    with PeerProcess(peer, settings, ROOT, tmp_path) as started:
        answers = started.answer(PROMPTS, 6)
    assert answers == {name: output.token_ids for name, output in zip(PROMPTS, outputs, strict=True)}


def test_a_step_has_as_many_tokens_as_fit_the_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock by which a prompt's token takes a millisecond."""
    clock = [0.0]
    generate = LLM.generate

    def timed(self: LLM, prompts: Any, *arguments: Any, **options: Any) -> Any:
        clock[0] += 1e-3 * len(prompts[0])
        return generate(self, prompts, *arguments, **options)

    monkeypatch.setattr(LLM, "generate", timed)
    monkeypatch.setattr("lab.peers.step_tokens.time.perf_counter", lambda: clock[0])
    shape = {"num_kv_blocks": 64, "max_num_seqs": 4}
    found = {gap: step_tokens(gap, "random:tiny", **shape) for gap in (0.001, 0.065, 0.1, 0.129, 0.2, 1.0)}
    assert found == {0.001: 32, 0.065: 64, 0.1: 64, 0.129: 128, 0.2: 128, 1.0: 256}
