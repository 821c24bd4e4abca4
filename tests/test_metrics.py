import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from lab.metrics import METRICS, P99_SAMPLES, SLO, Samples, glossary, summarise
from lab.record import RunRecord
from tests.simulated import fail, simulate

RECOMPUTE = Path(__file__).parent / "recompute_metrics.py"


def jittery(num_requests: int) -> RunRecord:
    rng = np.random.default_rng(3)
    durations = rng.lognormal(np.log(0.01), 0.3, 10_000)
    lengths = [(int(p), int(o)) for p, o in rng.integers(1, 40, (num_requests, 2))]
    return simulate(lengths, step_s=lambda step: float(durations[step]), arrival=lambda request: 0.1 * request)


def values(record: RunRecord, slo: SLO | None = None) -> dict[str, float]:
    return summarise(record, slo).set_index("metric")["value"].to_dict()


def run(*requests: tuple[float, float, list[float]], prompt_tokens: int = 10) -> RunRecord:
    """A run of requests given as (arrival, admitted, token times)."""
    record = simulate([(prompt_tokens, 1)] * len(requests), batch=1)
    arrival, admitted, times = (list(column) for column in zip(*requests, strict=True))
    return dataclasses.replace(
        record,
        requests=record.requests.assign(
            arrival=arrival,
            admitted=admitted,
            first_token=[t[0] for t in times],
            finish=[t[-1] for t in times],
            num_output_tokens=[len(t) for t in times],
            token_times=times,
        ),
    )


@pytest.mark.parametrize("num_requests", [8, 40, 150])
def test_an_independent_script_finds_the_same_to_the_microsecond(num_requests: int, tmp_path: Path) -> None:
    record = jittery(num_requests)
    record = fail(record, "r001")
    command = [sys.executable, "-I", str(RECOMPUTE), str(record.save(tmp_path))]
    recomputed = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    ours = values(record, SLO(ttft_s=0.3, tpot_s=0.0105))
    timed = {metric: value for metric, value in ours.items() if not metric.startswith("Requests ")}
    assert recomputed.keys() == timed.keys()
    for metric, value in timed.items():
        assert value == pytest.approx(recomputed[metric], rel=0, abs=1e-6), metric
    assert 0 < ours["Goodput"] * record.completed["finish"].max() < num_requests - 1


def test_the_script_is_independent_and_short() -> None:
    text = RECOMPUTE.read_text()
    assert "import lab" not in text and "from lab" not in text
    assert len([line for line in text.splitlines() if line.strip()]) <= 45


def test_each_metric_on_a_run_computed_by_hand() -> None:
    record = run((0.0, 0.5, [1.0, 1.5, 3.0]), (1.0, 1.0, [2.0]))
    assert values(record, SLO(ttft_s=1.0, tpot_s=1.0, e2e_s=2.9)) == pytest.approx(
        {
            "TTFT p50": 1.0, "TTFT p95": 1.0, "TTFT max": 1.0,
            "ITL p50": 1.0, "ITL p95": 1.45, "ITL max": 1.5, "ITL std": 0.5,
            "Jitter max − p50": 0.5,
            "TPOT p50": 1.0, "TPOT p95": 1.0, "TPOT max": 1.0,
            "E2E p50": 2.0, "E2E p95": 2.9, "E2E max": 3.0,
            "Normalised latency p50": 1.0, "Normalised latency p95": 1.0, "Normalised latency max": 1.0,
            "Queue time p50": 0.25, "Queue time p95": 0.475, "Queue time max": 0.5,
            "Output throughput": 4 / 3, "Total throughput": 24 / 3, "Goodput": 1 / 3,
            "Requests completed": 2, "Requests failed": 0, "Requests unfinished": 0,
        }
    )  # fmt: skip


def test_the_maximum_stands_in_for_a_p99_of_too_few_samples_and_says_so() -> None:
    for size, statistic, note in ((P99_SAMPLES - 1, "max", "p99 needs 100 samples"), (P99_SAMPLES, "p99", "")):
        table = summarise(jittery(size)).set_index("metric")
        row = table.loc[f"TTFT {statistic}"]
        assert (row["n"], row["note"]) == (size, note)
        assert f"TTFT {'max' if statistic == 'p99' else 'p99'}" not in table.index


def test_a_metric_is_listed_once_even_where_its_maximum_stands_in() -> None:
    table = summarise(jittery(3))
    assert table["metric"].is_unique
    assert table[table["name"] == "itl"]["statistic"].tolist() == ["p50", "p95", "max", "std"]
    full = summarise(jittery(40))
    assert full[full["name"] == "itl"]["statistic"].tolist() == ["p50", "p95", "p99", "std", "max"]


@pytest.mark.parametrize("reason", ["refused", "error", "abort"])
def test_failed_requests_are_counted_and_change_no_other_number(reason: str) -> None:
    record = jittery(40)
    failed = fail(record, "r039", reason)
    without = dataclasses.replace(record, requests=record.requests.iloc[:39])
    ours, theirs = values(failed), values(without)
    counts = {"Requests completed", "Requests failed", "Requests unfinished"}
    assert {m: v for m, v in ours.items() if m not in counts} == {m: v for m, v in theirs.items() if m not in counts}
    assert [ours[m] for m in sorted(counts)] == [39, 1, 0]
    assert summarise(failed).set_index("metric").loc["Requests failed", "note"] == f"1 {reason}"


def test_unfinished_requests_are_counted() -> None:
    record = jittery(5)
    requests = record.requests.assign(finish_reason=["length"] * 4 + [None])
    partial = dataclasses.replace(record, requests=requests, meta={"partial": True})
    assert [values(partial)[f"Requests {name}"] for name in ("completed", "failed", "unfinished")] == [4, 0, 1]


def test_without_a_completed_request_every_time_is_missing_and_nothing_is_invented() -> None:
    record = simulate([(4, 1)])
    table = summarise(fail(record, "r000"), SLO(e2e_s=1)).set_index("name")
    assert table.drop(index="requests")["value"].isna().all()
    assert (table.drop(index="requests")["n"] == 0).all()


def test_goodput_counts_requests_that_meet_every_objective_and_only_where_there_are_any() -> None:
    record = run((0.0, 0.0, [1.0, 2.0]), (0.0, 0.0, [2.0, 2.5]), (0.0, 0.0, [4.0]))
    assert "Goodput" not in values(record)
    for slo, met in (
        (SLO(ttft_s=1.0), 1),
        (SLO(ttft_s=2.0), 2),
        (SLO(tpot_s=0.5), 2),
        (SLO(tpot_s=0.5, ttft_s=3), 1),
        (SLO(e2e_s=4.0), 3),
        (SLO(e2e_s=0.1), 0),
    ):
        assert values(record, slo)["Goodput"] == pytest.approx(met / 4.0)


@pytest.mark.parametrize("wrong", [{}, {"ttft_s": 0.0}, {"tpot_s": -1.0}, {"e2e_s": float("nan")}])
def test_objectives_that_mean_nothing_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="SLO"):
        SLO(**wrong)


def test_the_glossary_defines_every_metric() -> None:
    table = glossary()
    assert table["metric"].tolist() == [metric.label for metric in METRICS.values()]
    assert (table[["metric", "unit", "better", "formula", "definition"]] != "").all(axis=None)
    shown = summarise(jittery(5), SLO(e2e_s=1))
    assert set(shown["name"]) == {*METRICS, "requests"}
    assert all(shown["metric"].str.startswith((*table["metric"], "Requests")))


def test_the_samples_behind_the_figures_are_those_of_the_table() -> None:
    record = jittery(30)
    gaps = Samples.of(record).gaps
    assert len(gaps) == record.requests["num_output_tokens"].sum() - 30
    assert np.percentile(gaps, 95) == values(record)["ITL p95"]
    assert isinstance(summarise(record), pd.DataFrame)
