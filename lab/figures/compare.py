"""Figures that compare: distributions, and paired trials of a feature against its baseline."""

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from lab.figures.style import (
    BAND,
    BASELINE,
    FEATURE,
    SERIES,
    WORSE,
    finish,
    linear_axis,
    log_axis,
    require,
    rounded,
)

MAX_ECDF_POINTS = 1500
ECDF_TAIL = 200
INTERVAL_COLUMNS = ("low", "high", "noise_low", "noise_high")
COMPARISON_COLUMNS = ("metric", "unit", "ratio", *INTERVAL_COLUMNS, "verdict", "trials")
VERDICTS = {"better": ("▲ better", FEATURE), "worse": ("▼ worse", WORSE), "~": ("~ undecided", None)}
# The rounder first: an axis takes, in this order, those that lie in its range and leave room for their labels.
RATIO_TICKS = (
    1, 0.1, 10, 0.01, 100, 0.5, 2, 0.2, 5, 0.05, 20, 0.02, 50, 0.8, 1.25, 0.3, 3, 0.7, 1.5, 0.9, 1.1, 0.6, 0.95, 1.05,
    0.98, 1.02, 0.97, 1.03, 0.96, 1.04, 0.99, 1.01,
)  # fmt: skip


def ecdf(samples: Mapping[str, Iterable[float]], title: str, unit: str, *, log_x: bool = False) -> go.Figure:
    """The share of values at or below x, one staircase per label: the first (the baseline) grey, the second the accent.

    The legend gives each sample's size and median, and how many values are missing (NaN: a request without one). Of a
    sample of over 1,500 values the curve keeps evenly spaced ranks and every one of the highest 200.

    Args:
        samples: label to values.
        title: the figure's title.
        unit: the unit of the values, as in "ms".
        log_x: a logarithmic x axis, for values that span orders of magnitude.

    Raises:
        ValueError: no samples, a sample without a finite value, or with log_x a value that is not positive.
    """
    if not samples:
        raise ValueError("no samples given; an ECDF needs at least one")
    arrays = {label: np.asarray(list(values), dtype=float) for label, values in samples.items()}
    finite = {label: np.sort(array[np.isfinite(array)]) for label, array in arrays.items()}
    for label, values in finite.items():
        if not len(values):
            raise ValueError(f"{label!r} has no finite value among its {len(arrays[label])}; leave it out")
        if log_x and values[0] <= 0:
            raise ValueError(f"{label!r} has the value {values[0]:g}, which log_x=True cannot show; use log_x=False")
    ends = [end for values in finite.values() for end in (values[0], values[-1])]
    axis = log_axis(ends) if log_x else linear_axis(ends)
    left, right = (10**end if log_x else end for end in axis["range"])
    figure = go.Figure()
    for number, (label, values) in enumerate(finite.items()):
        ranks = _kept_ranks(len(values))
        missing = f", {len(arrays[label]) - len(values):,} missing" if len(values) < len(arrays[label]) else ""
        figure.add_scatter(
            x=[_significant(x) for x in (left, *values[ranks], right)],
            y=[0.0, *rounded((ranks + 1) / len(values), 5), 1.0],
            name=f"{label} (n = {len(values):,}{missing}, median {np.median(values):.3g} {unit})", mode="lines",
            line={"shape": "hv", "width": 1.8, "color": SERIES[number % len(SERIES)]},
            hovertemplate=f"%{{y:.1%}} at or below %{{x:.4g}} {unit}<extra>{label}</extra>",
        )  # fmt: skip
    figure.update_xaxes(title_text=f"{title}, {unit}", **axis)
    figure.update_yaxes(title_text="share of values at or below", tickformat=".0%", range=[-0.015, 1.02])
    return finish(figure, title, 380, legend_lines=max(1, len(samples) - 1))


def _kept_ranks(count: int) -> np.ndarray:
    if count <= MAX_ECDF_POINTS:
        return np.arange(count)
    body = np.linspace(0, count - ECDF_TAIL, MAX_ECDF_POINTS - ECDF_TAIL, endpoint=False, dtype=int)
    return np.concatenate([body, np.arange(count - ECDF_TAIL, count)])


def _significant(value: float) -> float:
    return float(f"{value:.5g}")


def paired_bars(comparison: pd.DataFrame, *, title: str = "Feature against baseline") -> go.Figure:
    """One row per metric: each trial's ratio as a dot, their mean and interval above, over the A/A noise band.

    Args:
        comparison: one row per metric with `metric`, `unit`, `ratio` (feature / baseline), its interval `low` to
            `high`, the A/A band `noise_low` to `noise_high`, `verdict` ("better", "worse", or shown as it is) and
            `trials` (the ratio of each pair). An interval or band of NaN is left out.
        title: the figure's title.

    Raises:
        ValueError: a column is missing, there are no rows, or a ratio is not positive.
    """
    require(comparison, "comparison", COMPARISON_COLUMNS)
    metrics = comparison["metric"].tolist()
    rows = list(range(1, len(metrics) + 1))
    means = np.array([_positive(value, metric) for metric, value in zip(metrics, comparison["ratio"], strict=True)])
    trials = [
        (row, _positive(value, metric))
        for row, metric, values in zip(rows, metrics, comparison["trials"], strict=True)
        for value in values
    ]
    low, high, noise_low, noise_high = (comparison[name].astype(float).to_numpy() for name in INTERVAL_COLUMNS)
    figure = go.Figure()
    figure.add_bar(
        orientation="h", y=rows, base=rounded(noise_low), x=rounded(noise_high - noise_low), width=0.86,
        name="A/A noise band", marker={"color": BAND, "line": {"width": 0}}, customdata=_ends(noise_low, noise_high),
        hovertemplate="A/A noise %{customdata[0]} to %{customdata[1]}<extra></extra>",
    )  # fmt: skip
    figure.add_scatter(
        x=rounded(value for _, value in trials), y=_spread([row for row, _ in trials]), name="trial (one pair)",
        mode="markers", marker={"color": FEATURE, "size": 6, "opacity": 0.5},
        hovertemplate="trial %{x:.3f}×<extra></extra>",
    )  # fmt: skip
    figure.add_scatter(
        x=rounded(means), y=[row - 0.17 for row in rows], name="mean ratio and its interval", mode="markers",
        marker={"color": FEATURE, "size": 10, "symbol": "diamond"},
        error_x={"type": "data", "symmetric": False, "array": rounded(high - means), "arrayminus": rounded(means - low),
                 "color": FEATURE, "thickness": 2.5, "width": 5},
        customdata=_ends(low, high),
        hovertemplate="mean %{x:.3f}× (%{customdata[0]} to %{customdata[1]})<extra></extra>",
    )  # fmt: skip
    for row, mean, verdict in zip(rows, means, comparison["verdict"], strict=True):
        text, color = VERDICTS.get(verdict, (verdict, None))
        figure.add_annotation(
            x=1.012, xref="paper", xanchor="left", y=row, text=f"{_ratio(mean)}  <b>{text}</b>", font={"color": color},
        )  # fmt: skip
    extent = np.concatenate([means, low, high, noise_low, noise_high, [value for _, value in trials], [1.0]])
    _ratio_axis(figure, extent[np.isfinite(extent) & (extent > 0)])
    names = [f"{metric}, {unit}" if unit else metric for metric, unit in zip(metrics, comparison["unit"], strict=True)]
    figure.update_yaxes(tickvals=rows, ticktext=names, range=[len(rows) + 0.55, 0.45], showgrid=False, ticks="")
    figure.add_vline(x=1, line={"color": BASELINE, "width": 1.5})
    figure.update_layout(barmode="overlay", margin_r=156)
    return finish(figure, title, 84 + 60 + 44 * len(rows))


def _positive(value: float, metric: str) -> float:
    if not value > 0 or not math.isfinite(value):
        raise ValueError(f"{metric} has the ratio {value}; a ratio is positive and finite, so leave the metric out")
    return float(value)


def _ratio(value: float) -> str:
    return f"{value:.3f}×"


def _ends(low: np.ndarray, high: np.ndarray) -> list[list[str]]:
    return [[_ratio(a), _ratio(b)] for a, b in zip(low.tolist(), high.tolist(), strict=True)]


def _spread(rows: Sequence[int]) -> list[float]:
    """Place dots beneath their row's interval, in three alternating lanes so that near ratios stay apart."""
    return [row + (0.13, 0.21, 0.29)[i % 3] for i, row in enumerate(rows)]


def _ratio_axis(figure: go.Figure, extent: np.ndarray) -> None:
    low, high = math.log10(extent.min()), math.log10(extent.max())
    margin = 0.04 * (high - low) + 0.002
    low, high = low - margin, high + margin
    ticks: list[float] = []
    for tick in RATIO_TICKS:
        apart = min((abs(math.log10(tick / other)) for other in ticks), default=math.inf)
        if low <= math.log10(tick) <= high and apart >= (high - low) / 11:
            ticks.append(tick)
    ticks.sort()
    figure.update_xaxes(
        type="log", range=[low, high], tickvals=ticks, ticktext=[f"{tick:g}×" for tick in ticks],
        title_text="feature / baseline (logarithmic)",
    )  # fmt: skip
