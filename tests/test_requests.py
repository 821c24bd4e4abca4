"""Requests that got slower are found, and the records say why."""

from __future__ import annotations

from pathlib import Path

from lab.experiment import Arm, CacheState, run_experiment
from lab.requests import slower_requests
from tests.simulated import LENGTHS, output_hash, simulate


def arm(name: str, step_s: float, batch: int) -> Arm:
    def run(seed: int):  # type: ignore[no-untyped-def]
        return simulate(seed=seed, batch=batch, step_s=lambda step: step_s)

    return Arm(name, run, CacheState.NONE, lambda: CacheState.NONE)


def test_slower_requests_are_listed_with_their_reason(tmp_path: Path) -> None:
    golden = {
        seed: {f"r{i:03d}": output_hash(seed, i, output) for i, (_, output) in enumerate(LENGTHS)} for seed in (0, 1)
    }
    options = {"pairs": 12, "seeds": (0, 1), "progress": False}
    run_experiment(arm("off", 0.01, 4), arm("slow", 0.02, 4), golden, keep=tmp_path / "slow", **options)
    quick = options | {"pairs": 2}
    table, noise, compared = slower_requests(tmp_path / "slow")
    assert noise == 1.0 and compared == 2 * len(LENGTHS) == len(table)
    assert table["change"].str.match(r"\+(9[5-9]|10[0-5])\.\d%").all(), "every one took twice as long"
    assert table["reason"].str.contains("each token took 20 ms instead of 10").any()
    assert table["reason"].str.contains(r"waited \d").any()
    run_experiment(arm("off", 0.01, 4), arm("wide", 0.01, 12), golden, keep=tmp_path / "wide", **options)
    table, _, compared = slower_requests(tmp_path / "wide")
    assert 0 < len(table) < compared, "those who came first gain nothing and have more rows beside them"
    run_experiment(arm("off", 0.01, 4), arm("slow", 0.02, 4), golden, keep=tmp_path / "quick", quick=True, **quick)
    table, noise, compared = slower_requests(tmp_path / "quick")
    assert noise == 1.0 and compared == len(table), "every one that is slower, where the noise was not measured"
