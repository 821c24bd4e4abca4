"""The trials of a paired experiment, and the one table of every metric that is made of them."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import pandas as pd

from lab.intervals import judge
from lab.metrics import Better, Kind

MIN_PAIRS = 10


class Verdict(StrEnum):
    """What a comparison says of a metric."""

    BETTER = "better"
    WORSE = "worse"
    UNDECIDED = "~"
    NOT_JUDGED = "not judged"


class Contrast(StrEnum):
    """Which of the two comparisons a trial belongs to."""

    FEATURE = "feature"  # baseline against feature
    NOISE = "noise"  # baseline against itself; not in quick mode


@dataclass(frozen=True)
class Place:
    """Where a trial stands in its experiment.

    side: 0 is the baseline's of the pair, 1 the other. position: 0 ran first of the pair, 1 second.
    """

    contrast: Contrast
    pair: int
    side: int
    position: int
    arm: str
    seed: int


@dataclass(frozen=True)
class Trial:
    """One timed run.

    summary: its metrics (`lab.metrics.summarise`). completed: the requests behind them. golden_outputs: how many of
    their outputs were held against the golden ones; all of these were equal.
    """

    place: Place
    summary: pd.DataFrame
    completed: frozenset[str]
    golden_outputs: int


@dataclass(frozen=True)
class Experiment:
    """Every trial of an experiment. exempt: arms whose output was not held against the golden one, and why."""

    baseline: str
    feature: str
    trials: tuple[Trial, ...]
    quick: bool
    exempt: Mapping[str, str]

    def frame(self) -> pd.DataFrame:
        """Every value of every trial: the fields of its `Place`, and the columns of `summarise`."""
        parts = [trial.summary.assign(**asdict(trial.place)) for trial in self.trials]
        return pd.concat(parts, ignore_index=True)

    def compare(self, reasons: Mapping[str, str] | None = None) -> pd.DataFrame:
        """The table: a row for every metric, better or worse.

        Columns: metric, unit, better ("lower" | "higher"), baseline and feature (medians over the trials of the
        feature's pairs; of counts the sums), ratio (feature / baseline, the trimmed mean over pairs) with its
        simultaneous 95% interval low to high, the A/A band noise_low to noise_high, change (the ratio as a text),
        pairs, verdict, reason (why a metric got worse), note, and trials (every pair's ratio). Where a metric has no
        ratio (a count; a value that is 0 or missing in some trial) these are NaN, and trials is empty.

        Times are judged with at least `MIN_PAIRS` pairs, unless the experiment is quick, and only where every trial of
        a seed completed the same requests. Counts are exact and always judged.

        reasons: a metric, or the beginning of several metrics' names ("ITL"), to the reason of its loss; the longest
        that fits counts. Raises ValueError for one that fits none in the table.
        """
        frame = self.frame()
        # A metric may be noted differently in each trial, as in "2 abort": every note once, in order.
        rows: pd.DataFrame = frame.drop_duplicates("metric").set_index("metric")[["unit", "better", "kind"]]
        notes = frame.groupby("metric")["note"].agg(lambda notes: "; ".join(dict.fromkeys(filter(None, notes))))
        rows["note"] = notes.reindex(rows.index)
        values = {
            (contrast, side): frame[(frame["contrast"] == contrast) & (frame["side"] == side)]
            .pivot(index="pair", columns="metric", values="value")
            .reindex(columns=rows.index)
            .astype(float)
            for contrast in Contrast
            for side in (0, 1)
        }
        rows = _with_verdicts(_with_ratios(rows, values))
        self._withhold(rows)
        rows = pd.concat([rows, self._golden_row()])
        reasons = reasons or {}
        if unknown := sorted(name for name in reasons if not any(metric.startswith(name) for metric in rows.index)):
            raise ValueError(f"reasons for {unknown}, which are not metrics; they are {', '.join(rows.index)}")
        lost = rows["verdict"] == Verdict.WORSE
        rows["reason"] = [_reason(reasons, metric) if lost[metric] else "" for metric in rows.index]
        rows["pairs"] = len(self._trials(Contrast.FEATURE, 0))
        columns = (
            "unit", "better", "baseline", "feature", "ratio", "low", "high", "noise_low", "noise_high", "change",
            "pairs", "verdict", "reason", "note", "trials",
        )  # fmt: skip
        return rows.rename_axis("metric").reset_index()[["metric", *columns]]

    def _trials(self, contrast: Contrast, side: int) -> list[Trial]:
        return [t for t in self.trials if t.place.contrast == contrast and t.place.side == side]

    def _withhold(self, rows: pd.DataFrame) -> None:
        """Takes back the verdicts on times that this experiment cannot give, and notes why."""
        timed = rows["kind"] == Kind.TIMING
        pairs = len(self._trials(Contrast.FEATURE, 0))
        completed: dict[int, frozenset[str]] = {}
        differing = [t for t in self.trials if completed.setdefault(t.place.seed, t.completed) != t.completed]
        if differing:
            place = differing[0].place
            why = f"trials completed different requests (first seen: {place.arm}, seed {place.seed}, pair {place.pair})"
        elif self.quick:
            why = "quick mode"
        elif pairs < MIN_PAIRS:
            why = f"{pairs} pairs, {MIN_PAIRS} needed"
        else:
            timed &= rows["ratio"].isna()
            why = "0 or missing in some trial"
        rows.loc[timed, "verdict"] = Verdict.NOT_JUDGED
        rows.loc[timed, "note"] = [f"{note}; {why}" if note else why for note in rows.loc[timed, "note"]]

    def _golden_row(self) -> pd.DataFrame:
        """How many outputs of the feature's pairs were compared with the golden ones; every one of them was equal."""
        base, feature = (sum(t.golden_outputs for t in self._trials(Contrast.FEATURE, side)) for side in (0, 1))
        row: dict[str, Any] = {
            "unit": "outputs",
            "better": Better.HIGHER,
            "kind": Kind.COUNT,
            "baseline": float(base),
            "feature": float(feature),
            "change": "",
            "trials": [],
            "verdict": Verdict.NOT_JUDGED if self.exempt else Verdict.UNDECIDED,
            "note": "; ".join(f"{arm} is exempt: {reason}" for arm, reason in self.exempt.items()),
        }
        return pd.DataFrame([row], index=["Outputs equal to golden"])


def _reason(reasons: Mapping[str, str], metric: str) -> str:
    fitting = [name for name in reasons if metric.startswith(name)]
    return reasons[max(fitting, key=len)] if fitting else ""


def unexplained_losses(table: pd.DataFrame) -> list[str]:
    """The metrics of a `compare` table that got worse without a reason given."""
    return table.loc[(table["verdict"] == Verdict.WORSE) & (table["reason"] == ""), "metric"].tolist()


def _with_ratios(rows: pd.DataFrame, values: Mapping[tuple[Contrast, int], pd.DataFrame]) -> pd.DataFrame:
    """Adds baseline, feature, ratio, low, high, noise_low, noise_high, change, trials and place (see `judge`).

    values: by contrast and side, a row for each pair and a column for each metric.
    """
    counted = rows["kind"] == Kind.COUNT
    base, other = (values[Contrast.FEATURE, side] for side in (0, 1))
    rows = rows.assign(**{n: v.sum().where(counted, v.median()) for n, v in (("baseline", base), ("feature", other))})
    positive = np.all([(v.gt(0) & np.isfinite(v)).all() for v in values.values()], axis=0)
    comparable = rows.index[~counted & positive]
    feature, noise = (values[c, 1][comparable] / values[c, 0][comparable] for c in (Contrast.FEATURE, Contrast.NOISE))
    intervals, band, place = judge(np.log(feature.to_numpy()), np.log(noise.to_numpy()))
    logs = {
        "ratio": intervals.centre,
        "low": intervals.low,
        "high": intervals.high,
        "noise_low": -band,
        "noise_high": band,
    }
    for name, log in logs.items():
        # With very few pairs an interval is infinite: there is none to show.
        rows[name] = pd.Series(np.where(np.isfinite(log), np.exp(log), np.nan), comparable)
    rows["place"] = pd.Series(place, comparable).reindex(rows.index, fill_value=0)
    rows["change"] = [f"{ratio - 1:+.1%}" if ratio == ratio else "" for ratio in rows["ratio"]]
    rows["trials"] = [feature[metric].tolist() if metric in feature else [] for metric in rows.index]
    return rows


def _with_verdicts(rows: pd.DataFrame) -> pd.DataFrame:
    """Adds the verdicts: of times by their place outside the A/A band, of counts by any difference."""
    counted = rows["kind"] == Kind.COUNT
    moved = rows["place"].where(~counted, np.sign(rows["feature"] - rows["baseline"]))
    gained = moved * np.where(rows["better"] == Better.HIGHER, 1, -1)
    verdicts = {1: Verdict.BETTER, -1: Verdict.WORSE, 0: Verdict.UNDECIDED}
    return rows.assign(verdict=[verdicts[int(gain)] for gain in gained])
