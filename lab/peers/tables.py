"""The contest as tables for people, and the bars that it is judged by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd
from pandas.io.formats.style import Styler

from lab.metrics import Better
from lab.peers.catalogue import Peer
from lab.record import RunRecord
from lab.results import Gate, readable


def wide(table: pd.DataFrame, engines: Sequence[str]) -> pd.DataFrame:
    """One workload's ``standings`` with a column for each engine: its median and, of several runs, their range."""
    rows = []
    for metric, part in table.groupby("metric", sort=False):
        if part["value"].isna().all():
            continue
        texts = {str(row["engine"]): _cell(row) for _, row in part.iterrows()}
        cells = {name: texts.get(name, "absent") for name in engines}
        rows.append({"metric": f"{metric}, {part['unit'].iloc[0]}", "better": part["better"].iloc[0], **cells})
    return pd.DataFrame(rows)


def _cell(row: pd.Series) -> str:
    if pd.isna(row["value"]):
        return "–"
    if row["least"] == row["most"]:
        return readable(float(row["value"]))
    return f"{readable(float(row['value']))} ({readable(float(row['least']))} to {readable(float(row['most']))})"


def shown(frame: pd.DataFrame, caption: str) -> Styler:
    """A frame as the reports show it."""
    return frame.style.hide(axis="index").set_caption(caption).format(precision=3, na_rep="–")


def set_up(engines: Mapping[str, Peer], facts: Mapping[str, Mapping[str, str]], absent: Mapping[str, str]) -> Styler:
    """What each engine is and said of itself when it started, or why it is absent; then how it is set up."""
    shared = set.intersection(*(set(peer.variables.items()) for peer in engines.values()))
    rows = []
    for name, peer in engines.items():
        said = [value if key == "versions" else f"{key}: {value}" for key, value in facts.get(name, {}).items()]
        own = [f"{key}={value}" for key, value in peer.variables.items() if (key, value) not in shared]
        rows.append(
            {
                "engine": name,
                "versions and what is in use": "; ".join(said) or f"absent: {absent.get(name, '')}",
                "settings": "; ".join([peer.settings, *([f"environment: {' '.join(own)}"] if own else [])]),
            }
        )
    everyones = " ".join(f"{key}={value}" for key, value in sorted(shared))
    return shown(pd.DataFrame(rows), f"The engines and how each is set up; for all: {everyones}")


def step_costs(record: RunRecord) -> pd.DataFrame:
    """Where this engine's time goes, by what a step computes.

    Returns:
        A row for each number of decoding requests without a prefill, then one for all steps with prompt tokens: step
        (what it computes), steps (how many), share (of the time in steps), median (s), token (s, over all tokens).
    """
    prompt = record.scheduled[record.scheduled["phase"] == "prefill"].groupby("step")["num_tokens"].sum()
    steps = record.steps.assign(seconds=record.steps["end"] - record.steps["start"])
    with_prompt = steps["step"].isin(prompt.index)
    rows = []
    for rows_of_step, part in steps[~with_prompt].groupby("num_tokens"):
        rows.append((f"decode, {rows_of_step} row{'s' if rows_of_step != 1 else ''}", part))
    rows.append((f"with prompt tokens, {prompt.mean():.0f} of them on average", steps[with_prompt]))
    return pd.DataFrame(
        [
            (
                name,
                len(part),
                part["seconds"].sum() / steps["seconds"].sum(),
                part["seconds"].median(),
                part["seconds"].sum() / part["num_tokens"].sum(),
            )
            for name, part in rows
            if len(part)
        ],
        columns=["step", "steps", "share", "median", "token"],
    )


def ahead_of(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of ``standings`` in which another engine is ahead of the baseline.

    By more than the rounds' noise, or, where it ran once and there is no interval, in that run.
    """
    lower = table["better"] == Better.LOWER
    low, high = table["low"].fillna(table["ratio"]), table["high"].fillna(table["ratio"])
    return table[(lower & (high < 1)) | (~lower & (low > 1))]


@dataclass(frozen=True)
class Bar:
    """By how much this engine is to be ahead of another in one metric of one workload."""

    workload: str
    metric: str
    engine: str
    at_least: float

    def advantage(self, table: pd.DataFrame) -> tuple[float, float, float] | None:
        """How many times better this engine is, with its interval; None where the other has no run."""
        row = table[(table["metric"] == self.metric) & (table["engine"] == self.engine)]
        if row.empty or pd.isna(row["ratio"].iloc[0]):
            return None
        ratio, low, high = (float(row[name].iloc[0]) for name in ("ratio", "low", "high"))
        return (ratio, low, high) if row["better"].iloc[0] == Better.LOWER else (1 / ratio, 1 / high, 1 / low)

    def gate(self, table: pd.DataFrame, dtype: str, failed: Mapping[str, str]) -> Gate:
        """The bar as a gate of the report; ``table`` holds the workload's standings."""
        name = f"{dtype}, {self.workload}: {self.metric} against {self.engine}"
        bound = f"at least {self.at_least:g} times better"
        found = self.advantage(table)
        if found is None:
            why = failed.get(self.engine, "the metric has no ratio")
            return Gate(name, "absent", bound, None, "timing", f"{self.engine}: {why}")
        ratio, low, high = found
        interval = "" if pd.isna(low) else f" ({low:.2f} to {high:.2f})"
        return Gate(name, f"{ratio:.2f}×{interval}", bound, ratio >= self.at_least, "timing")
