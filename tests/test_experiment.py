import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from lab import figures
from lab.comparison import MIN_PAIRS, Contrast
from lab.experiment import (
    Arm,
    CacheState,
    Experiment,
    ExperimentError,
    GoldenMismatchError,
    Verdict,
    run_experiment,
    unexplained_losses,
)
from lab.intervals import judge, noise_band, simultaneous_intervals
from lab.metrics import SLO
from lab.record import RunRecord
from tests.simulated import LENGTHS, fail, output_hash, simulate

SEEDS = (0, 1, 2)
GOLDEN = {
    seed: {f"r{i:03d}": output_hash(seed, i, output) for i, (_, output) in enumerate(LENGTHS)} for seed in (*SEEDS, 7)
}


# --------------------------------------------------------------------------------- the statistics, on simulated clocks


@dataclasses.dataclass(frozen=True)
class SharedMachine:
    """How the speed of a shared virtual machine wanders while an experiment runs on it.

    A trial's slowness is lognormal and autocorrelated (`sigma`, `phi`), drifts over the experiment by up to `drift`
    and swings by half of that, and with probability `stall` a whole trial is 1.2 to 1.8 times slower. Within a trial
    each step varies by 10%, and 1 step in 100 takes 1.5 to 5 times as long.
    """

    sigma: float = 0.03
    phi: float = 0.5
    drift: float = 0.10
    stall: float = 0.05

    def slowness(self, rng: np.random.Generator, trials: int) -> np.ndarray:
        wander = np.empty(trials)
        wander[0] = rng.normal(0, self.sigma)
        shocks = rng.normal(0, self.sigma * math.sqrt(1 - self.phi**2), trials)
        for i in range(1, trials):
            wander[i] = self.phi * wander[i - 1] + shocks[i]
        time = np.linspace(0, 1, trials)
        swing = np.sin(2 * np.pi * (rng.uniform(0.5, 3) * time + rng.uniform()))
        drift = self.drift * (rng.uniform(-1, 1) * time + 0.5 * swing)
        stalls = np.where(rng.random(trials) < self.stall, rng.uniform(1.2, 1.8, trials), 1.0)
        return np.exp(wander + drift) * stalls

    def steps(self, rng: np.random.Generator, slowness: np.ndarray, steps: int) -> np.ndarray:
        """Seconds of every step, shape [trials, steps]."""
        shape = (len(slowness), steps)
        outliers = np.where(rng.random(shape) < 0.01, rng.uniform(1.5, 5, shape), 1.0)
        return 0.02 * slowness[:, None] * rng.lognormal(0, 0.1, shape) * outliers


LOWER = 18  # of the metrics below; the other two are throughputs
OUTPUTS = np.random.default_rng(0).integers(4, 40, (3, 8))  # three static batches of eight


def trial_metrics(steps: np.ndarray) -> np.ndarray:
    """The lab's metrics of each trial of a static batch, vectorised over trials: shape [trials, LOWER + 2].

    Each of the batches prefills in one step, as long as ten, and then decodes 40.
    """
    durations = steps.reshape(len(steps), 3, 41).copy()
    durations[:, :, 0] *= 10
    ends = durations.reshape(len(steps), -1).cumsum(axis=1).reshape(durations.shape)
    requests = [(batch, output) for batch in range(3) for output in OUTPUTS[batch]]
    lengths = np.array([output for _, output in requests])
    ttft = np.stack([ends[:, batch, 0] for batch, _ in requests], axis=1)
    e2e = np.stack([ends[:, batch, output] for batch, output in requests], axis=1)
    gaps = np.concatenate([durations[:, batch, 1 : output + 1] for batch, output in requests], axis=1)
    columns = [
        np.percentile(sample, point, axis=1)
        for sample, points in (
            (ttft, (50, 95, 100)),
            (e2e, (50, 95, 100)),
            (e2e / (lengths + 1), (50, 95, 100)),
            ((e2e - ttft) / lengths, (50, 95, 100)),
            (gaps, (50, 95, 99, 100)),
        )
        for point in points
    ]
    columns += [gaps.std(axis=1), columns[-2] - columns[-4]]
    throughput = lengths.sum() / ends[:, -1, -1]
    return np.stack([*columns, throughput, 6 * throughput], axis=1)


def simulated_verdicts(machine: SharedMachine, rng: np.random.Generator, pairs: int, factor: float) -> np.ndarray:
    """One experiment on one clock, its feature `factor` times as slow: +1 better, -1 worse, 0 undecided per metric."""
    order = [
        (contrast, pair, side)
        for pair in range(pairs)
        for contrast in Contrast
        for side in ((0, 1) if pair % 2 == 0 else (1, 0))
    ]
    slowed = np.array([factor if (contrast, side) == (Contrast.FEATURE, 1) else 1.0 for contrast, _, side in order])
    steps = machine.steps(rng, machine.slowness(rng, len(order)) * slowed, 3 * 41)
    logs = np.log(trial_metrics(steps))
    at = {place: number for number, place in enumerate(order)}
    feature, noise = (
        logs[[at[c, pair, 1] for pair in range(pairs)]] - logs[[at[c, pair, 0] for pair in range(pairs)]]
        for c in Contrast
    )
    direction = np.array([-1] * LOWER + [1, 1])
    return judge(feature, noise)[2] * direction


@pytest.mark.parametrize("seed", [11, 12])
def test_an_arm_slowed_by_a_tenth_is_called_worse_in_95_of_100_experiments(seed: int) -> None:
    rng = np.random.default_rng(seed)
    verdicts = [simulated_verdicts(SharedMachine(), rng, 20, 1.1) for _ in range(100)]
    assert sum((v == -1).any() for v in verdicts) >= 95
    assert not any((v == 1).any() for v in verdicts)


@pytest.mark.parametrize("seed", [21, 22])
def test_identical_arms_are_told_apart_in_at_most_5_of_100_experiments(seed: int) -> None:
    rng = np.random.default_rng(seed)
    verdicts = [simulated_verdicts(SharedMachine(), rng, 20, 1.0) for _ in range(100)]
    assert sum((v != 0).any() for v in verdicts) <= 5


def test_the_least_number_of_pairs_tells_no_equals_apart_and_suffices_on_a_quiet_machine() -> None:
    rng = np.random.default_rng(31)
    quiet = SharedMachine(sigma=0.01, drift=0.03, stall=0.0)
    assert sum((simulated_verdicts(SharedMachine(), rng, MIN_PAIRS, 1.0) != 0).any() for _ in range(100)) <= 5
    assert sum((simulated_verdicts(quiet, rng, MIN_PAIRS, 1.1) == -1).any() for _ in range(50)) >= 48


def test_intervals_hold_their_true_values_for_all_metrics_together() -> None:
    """Correlated, heavy-tailed log-ratios around known centres: the family of intervals covers them all."""
    rng = np.random.default_rng(5)
    centres = np.linspace(-0.3, 0.3, 12)
    covered = 0
    for _ in range(300):
        common = rng.standard_t(3, (20, 1))
        intervals = simultaneous_intervals(centres + 0.02 * (common + rng.standard_t(3, (20, 12))))
        covered += bool(((intervals.low <= centres) & (centres <= intervals.high)).all())
    assert covered >= 0.92 * 300


def test_the_centre_and_band_are_yuens() -> None:
    d = np.random.default_rng(0).normal(0.1, 0.02, (20, 7))
    intervals = simultaneous_intervals(d)
    assert intervals.centre == pytest.approx(stats.trim_mean(d, 0.2))
    yuen = stats.ttest_ind(d[:, 0], [0.0] * 20, trim=0.2, equal_var=False)  # scipy has the two-sample form only
    error = intervals.centre[0] / yuen.statistic
    assert noise_band(d - intervals.centre)[0] == pytest.approx(stats.t.ppf(0.975, 11) * error)
    assert noise_band(d)[0] == pytest.approx(intervals.centre[0]), "a difference found is in the band"


def test_intervals_are_symmetric_in_the_arms_and_ignore_the_order_of_pairs() -> None:
    d = np.random.default_rng(0).normal(0.1, 0.02, (10, 5))
    there, back, shuffled = simultaneous_intervals(d), simultaneous_intervals(-d), simultaneous_intervals(d[::-1])
    assert back.low == pytest.approx(-there.high)
    assert shuffled.high == pytest.approx(there.high)


def test_metrics_without_noise_neither_widen_the_others_nor_show_a_difference_that_is_rounding() -> None:
    d = np.random.default_rng(0).normal(0, 0.02, (20, 3))
    exact = np.tile([math.log(1.1), 0.0, 1e-17], (20, 1))
    alone, beside = simultaneous_intervals(d), simultaneous_intervals(np.hstack([d, exact]))
    assert beside.high[:3] == pytest.approx(alone.high)
    assert beside.low[3:] == pytest.approx([math.log(1.1), 0, 0])
    _, _, place = judge(exact, 0 * exact)
    assert place.tolist() == [1, 0, 0]


def test_a_few_stalled_pairs_do_not_hide_a_difference() -> None:
    rng = np.random.default_rng(0)
    feature, noise = rng.normal(0.1, 0.01, (20, 4)), rng.normal(0, 0.01, (20, 4))
    feature[[3, 9, 14]] -= 2.0
    assert judge(feature, noise)[2].tolist() == [1, 1, 1, 1]


# --------------------------------------------------------------------------------------------- running an experiment


@dataclasses.dataclass
class Bench:
    """A simulated machine with arms on it, and a log of what ran."""

    noise: float = 0.01
    drift: float = 0.0
    log: list[tuple[str, int]] = dataclasses.field(default_factory=list)
    rng: np.random.Generator = dataclasses.field(default_factory=lambda: np.random.default_rng(0))

    def arm(
        self,
        name: str,
        factor: float = 1.0,
        cache: CacheState = CacheState.NONE,
        change: Callable[[RunRecord], RunRecord] = lambda record: record,
        **options: Any,
    ) -> Arm:
        def run(seed: int) -> RunRecord:
            self.log.append((name, seed))
            level = factor * math.exp(self.drift * len(self.log) + self.noise * self.rng.normal())
            noise = self.rng.lognormal(0, 0.05, 200)
            return change(simulate(seed=seed, step_s=lambda step: 0.01 * level * float(noise[step])))

        return Arm(name, run, cache, **{"observe_cache": lambda: cache, **options})


def experiment(bench: Bench, baseline: Arm, feature: Arm, **options: Any) -> Experiment:
    return run_experiment(baseline, feature, GOLDEN, **{"pairs": 10, "seeds": SEEDS, "progress": False, **options})


@cache
def example(factor: float = 1.0, slo: SLO | None = None, **options: Any) -> Experiment:
    """An experiment that several tests look at."""
    bench = Bench()
    return experiment(bench, bench.arm("off"), bench.arm("on", factor), slo=slo, **options)


def compared(factor: float = 1.0, reasons: Mapping[str, str] | None = None, **options: Any) -> pd.DataFrame:
    return example(factor, **options).compare(reasons).set_index("metric")


TIMED = ["TTFT p50", "ITL p50", "E2E max", "Output throughput"]


def test_a_slower_feature_is_worse_and_a_faster_one_better_in_both_directions() -> None:
    for factor, verdict in ((1.3, Verdict.WORSE), (0.8, Verdict.BETTER)):
        table = compared(factor)
        assert set(table.loc[TIMED, "verdict"]) == {verdict}
        assert table.loc[TIMED[:3], "ratio"].to_numpy() == pytest.approx(factor, rel=0.05)
        assert table.loc["Output throughput", "ratio"] == pytest.approx(1 / factor, rel=0.05)
        assert ((table["low"] <= table["ratio"]) & (table["ratio"] <= table["high"]))[TIMED].all()
        assert table.loc["ITL p50", "change"] == f"{table.loc['ITL p50', 'ratio'] - 1:+.1%}"


def test_identical_arms_are_undecided_in_every_metric() -> None:
    table = compared()
    assert set(table["verdict"]) == {Verdict.UNDECIDED}
    assert ((table["noise_low"] < 1) & (table["noise_high"] > 1))[TIMED].all()
    assert table["noise_low"][TIMED].to_numpy() == pytest.approx(1 / table["noise_high"][TIMED].to_numpy())


def test_the_table_has_every_metric_of_a_run_and_the_trials_behind_each_ratio() -> None:
    result = example(1.3, slo=SLO(e2e_s=100))
    table = result.compare().set_index("metric")
    frame = result.frame()
    assert list(table.index) == [*result.trials[0].summary["metric"], "Outputs equal to golden"]
    assert "Goodput" in table.index
    assert set(table["pairs"]) == {10}
    values = frame[(frame["metric"] == "TTFT p50") & (frame["contrast"] == "feature")]
    sides = values.pivot(index="pair", columns="side", values="value")
    assert table.loc["TTFT p50", "trials"] == pytest.approx((sides[1] / sides[0]).tolist())
    assert table.loc["TTFT p50", "baseline"] == sides[0].median()
    assert table.loc["Requests completed", ["baseline", "feature"]].tolist() == [120, 120]
    assert table.loc["Outputs equal to golden", ["baseline", "feature"]].tolist() == [120, 120]


def test_the_table_suits_the_figure_of_paired_bars() -> None:
    table = compared(1.3).reset_index()
    assert figures.paired_bars(table[table["ratio"].notna()]).data
    quick = compared(3.0, pairs=2, quick=True).reset_index()
    assert quick["low"].isna().all(), "two pairs have no interval"
    assert figures.paired_bars(quick[quick["ratio"].notna()]).data


def test_trials_run_in_abba_order_with_their_own_pairs_of_the_baseline_and_shared_seeds() -> None:
    bench = Bench()
    result = experiment(bench, bench.arm("off"), bench.arm("on"), pairs=12)
    assert bench.log[:6] == [("off", 0), ("off", 1), ("off", 2), ("on", 0), ("on", 1), ("on", 2)]
    timed = bench.log[6:]
    assert [name for name, _ in timed[:8]] == ["off", "on", "off", "off", "on", "off", "off", "off"]
    assert [seed for _, seed in timed[::8]] == [0, 1, 2, 0, 1, 2]
    assert all(seed == timed[8 * (i // 8)][1] for i, (_, seed) in enumerate(timed))
    places = [trial.place for trial in result.trials]
    assert [(place.arm, place.seed) for place in places] == timed
    firsts = Counter((place.contrast, place.side) for place in places if place.position == 0)
    assert set(firsts.values()) == {6}, "each side runs first equally often"


def test_a_drift_of_the_machine_is_not_taken_for_an_effect() -> None:
    bench = Bench(noise=0.002, drift=0.005)
    table = experiment(bench, bench.arm("off"), bench.arm("on")).compare()
    assert set(table["verdict"]) == {Verdict.UNDECIDED}


def test_quick_mode_judges_no_time_but_counts_all_the_same() -> None:
    table = compared(3.0, pairs=2, quick=True)
    timed = ~table.index.str.startswith(("Requests", "Outputs"))
    assert set(table.loc[timed, "verdict"]) == {Verdict.NOT_JUDGED}
    assert set(table.loc[timed, "note"].str.split("; ").str[-1]) == {"quick mode"}
    assert set(table.loc[~timed, "verdict"]) == {Verdict.UNDECIDED}
    assert table.loc["TTFT p50", "ratio"] == pytest.approx(3.0, rel=0.1)
    assert table["noise_high"].isna().all()


def test_quick_mode_runs_nothing_that_serves_timing_alone() -> None:
    bench = Bench()
    experiment(bench, bench.arm("off"), bench.arm("on"), pairs=2, quick=True)
    assert [name for name, _ in bench.log] == ["off", "on", "on", "off"]


def test_a_loss_without_a_reason_is_found_and_a_reason_stands_beside_its_loss() -> None:
    table = compared(1.3, {"TTFT p50": "waits for the batch", "Requests failed": "none did"}).reset_index()
    losses = table.loc[table["verdict"] == Verdict.WORSE, "metric"].tolist()
    assert unexplained_losses(table) == [metric for metric in losses if metric != "TTFT p50"]
    reasons = table.set_index("metric")["reason"]
    assert reasons["TTFT p50"] == "waits for the batch"
    assert reasons["Requests failed"] == "", "a reason is shown only beside a loss"
    assert unexplained_losses(compared().reset_index()) == []
    reasons = compared(1.3, {"TTFT": "of each TTFT", "TTFT p9": "of the tail"})["reason"]
    assert (reasons["TTFT p50"], reasons["TTFT p95"]) == ("of each TTFT", "of the tail"), "the longest name that fits"
    with pytest.raises(ValueError, match=r"reasons for \['TTFT p5O'\], which are not metrics; they are TTFT p50"):
        compared(reasons={"TTFT p5O": "typo"})


def test_a_metric_that_is_zero_has_no_ratio_and_is_not_judged() -> None:
    table = compared(1.3, slo=SLO(e2e_s=1e-9))
    assert table.loc["Goodput", "verdict"] == Verdict.NOT_JUDGED
    assert "0 or missing in some trial" in table.loc["Goodput", "note"]
    assert math.isnan(table.loc["Goodput", "ratio"]) and table.loc["Goodput", "trials"] == []
    assert table.loc["TTFT p50", "verdict"] == Verdict.WORSE


def test_failed_requests_are_shown_and_a_speed_that_drops_requests_is_not_judged() -> None:
    bench = Bench()
    dropping = bench.arm("on", 0.5, change=lambda record: fail(record, "r004"))
    table = experiment(bench, bench.arm("off"), dropping, pairs=2, quick=True).compare().set_index("metric")
    assert table.loc["Requests failed", ["baseline", "feature", "verdict"]].tolist() == [0, 2, "worse"]
    assert table.loc["Requests completed", ["baseline", "feature", "verdict"]].tolist() == [24, 22, "worse"]
    assert table.loc["Requests failed", "note"] == "1 refused"
    assert set(table.loc[TIMED, "verdict"]) == {Verdict.NOT_JUDGED}
    assert "completed different requests" in table.loc["TTFT p50", "note"]


def test_requests_that_fail_alike_in_both_arms_leave_the_rest_judged() -> None:
    bench = Bench()
    arms = [bench.arm(name, f, change=lambda record: fail(record, "r004")) for name, f in (("off", 1.0), ("on", 1.3))]
    table = experiment(bench, *arms).compare().set_index("metric")
    assert table.loc["Requests failed", ["baseline", "feature", "verdict"]].tolist() == [10, 10, "~"]
    assert table.loc["TTFT p50", "verdict"] == Verdict.WORSE


# ------------------------------------------------------------------------------------------------------ evidence rules


def with_output(record: RunRecord, value: str) -> RunRecord:
    hashes = [value, *record.requests["output_hash"][1:]]
    return dataclasses.replace(record, requests=record.requests.assign(output_hash=hashes))


def test_a_wrong_output_in_any_timed_run_stops_the_experiment() -> None:
    bench = Bench()

    def wrong_once(record: RunRecord) -> RunRecord:
        return with_output(record, "f" * 64) if len(bench.log) == 27 else record

    with pytest.raises(
        GoldenMismatchError, match=r"on, seed \d: 1 of 12 outputs .* First: r000 hashes to ffffffffffff, must"
    ):
        experiment(bench, bench.arm("off"), bench.arm("on", change=wrong_once))
    assert len(bench.log) == 27, "nothing runs after it"


def test_a_request_without_a_golden_output_stops_the_experiment() -> None:
    bench = Bench()
    golden = {seed: {k: v for k, v in GOLDEN[seed].items() if k != "r011"} for seed in SEEDS}
    with pytest.raises(GoldenMismatchError, match=r"First: r011 hashes to .*, has no golden output"):
        run_experiment(bench.arm("off"), bench.arm("on"), golden, pairs=10, progress=False)


def test_an_exempt_arm_may_differ_and_the_table_says_so() -> None:
    bench = Bench()
    other = bench.arm("on", change=lambda record: with_output(record, "f" * 64))
    exempt = {"on": "samples at random"}
    result = experiment(bench, bench.arm("off"), other, exempt=exempt, pairs=2, quick=True)
    row = result.compare().set_index("metric").loc["Outputs equal to golden"]
    assert (row["baseline"], row["feature"], row["verdict"]) == (24, 0, Verdict.NOT_JUDGED)
    assert row["note"] == "on is exempt: samples at random"
    with pytest.raises(GoldenMismatchError):
        experiment(bench, bench.arm("off"), other, exempt={"off": "the wrong one"})


def test_records_that_contradict_themselves_stop_the_experiment() -> None:
    bench = Bench()

    def lost_token(record: RunRecord) -> RunRecord:
        wrong = record.requests.assign(num_output_tokens=record.requests["num_output_tokens"] + 1)
        return dataclasses.replace(record, requests=wrong)

    with pytest.raises(ExperimentError, match="output tokens reported, 2 delivered"):
        experiment(bench, bench.arm("off"), bench.arm("on", change=lost_token))


def test_a_run_cut_short_or_without_a_completed_request_stops_the_experiment() -> None:
    bench = Bench()
    partial = bench.arm("on", change=lambda record: dataclasses.replace(record, meta={"partial": True}))
    with pytest.raises(ExperimentError, match="cut short"):
        experiment(bench, bench.arm("off"), partial)

    def nothing(record: RunRecord) -> RunRecord:
        for name in record.requests["request_id"]:
            record = fail(record, name)
        return record

    with pytest.raises(ExperimentError, match="none of 12 requests completed"):
        experiment(bench, bench.arm("off"), bench.arm("on", change=nothing))


def test_the_cache_state_is_prepared_and_asserted_before_every_trial() -> None:
    bench, state, prepared = Bench(), {"on": CacheState.COLD}, []

    def warm_up(seed: int) -> None:
        prepared.append(seed)
        if len(prepared) < 9:
            state["on"] = CacheState.WARM

    def spoil(record: RunRecord) -> RunRecord:
        state["on"] = CacheState.COLD
        return record

    warm = bench.arm("on", cache=CacheState.WARM, change=spoil, observe_cache=lambda: state["on"], prepare=warm_up)
    with pytest.raises(ExperimentError, match="on: the cache is cold, must be warm when a trial starts"):
        experiment(bench, bench.arm("off"), warm)
    assert Counter(name for name, _ in bench.log)["on"] == 8


def test_cold_and_warm_arms_are_never_compared() -> None:
    bench = Bench()
    with pytest.raises(ValueError, match="off starts cold, on warm; compare arms of one cache state"):
        experiment(bench, bench.arm("off", cache=CacheState.COLD), bench.arm("on", cache=CacheState.WARM))
    assert bench.log == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pairs": 8}, "pairs=8: must be even and at least 10"),
        ({"pairs": 11}, "pairs=11: must be even"),
        ({"pairs": 0, "quick": True}, "pairs=0: must be even and at least 2"),
        ({"seeds": ()}, r"seeds=\(\): needs at least one"),
        ({"seeds": (1, 1)}, r"seeds=\(1, 1\): .* each only once"),
        ({"seeds": (0, 9)}, r"no golden outputs for the seeds \[9\]"),
        ({"exempt": {"of": "typo"}}, r"exempt names \['of'\]; the arms are off, on"),
    ],
)
def test_an_experiment_that_could_not_be_judged_does_not_start(options: dict[str, Any], message: str) -> None:
    bench = Bench()
    with pytest.raises(ValueError, match=message):
        experiment(bench, bench.arm("off"), bench.arm("on"), **options)
    assert bench.log == []


def test_two_arms_of_one_name_are_refused() -> None:
    bench = Bench()
    with pytest.raises(ValueError, match="both arms are called 'off'"):
        experiment(bench, bench.arm("off"), bench.arm("off"))


def test_every_trial_is_kept_as_it_ends_and_survives_an_interruption(tmp_path: Path) -> None:
    bench = Bench()

    def interrupt(record: RunRecord) -> RunRecord:
        if len(bench.log) == 6 + 7:
            raise KeyboardInterrupt
        return record

    with pytest.raises(KeyboardInterrupt):
        experiment(bench, bench.arm("off", change=interrupt), bench.arm("on"), keep=tmp_path)
    kept = sorted(path.name for path in tmp_path.iterdir())
    assert kept == [
        "000_feature_off",
        "001_feature_on",
        "002_noise_off",
        "003_noise_off",
        "004_feature_on",
        "005_feature_off",
    ]
    place = RunRecord.load(tmp_path / "004_feature_on").meta["experiment"]
    assert place == {"contrast": "feature", "pair": 1, "side": 1, "position": 0, "arm": "on", "seed": 0}


def test_a_progress_bar_runs_over_all_trials(capsys: pytest.CaptureFixture[str]) -> None:
    bench = Bench()
    experiment(bench, bench.arm("off"), bench.arm("on"), pairs=2, quick=True, progress=True)
    assert "off / on: 100%" in capsys.readouterr().err
