"""Figures of a decode that long prefills interrupt: one victim's tokens over time, and what a chunk size trades."""

from collections.abc import Mapping

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from lab.figures.style import (
    BASELINE,
    BOTTOM,
    DECODE,
    FEATURE,
    PREFILL,
    TOP,
    finish,
    log_axis,
    panel_titles,
    require,
    rounded,
)
from lab.figures.timeline import REQUEST_COLUMNS, Run

TOKENS, CHUNKS, GAP = 110, 60, 30
"""Pixels of the panels of one run, and between panels."""
TRADE_COLUMNS = ("label", "ttft_s", "jitter_ms", "throughput")


def victim_timeline(runs: Mapping[str, Run], victim: str, *, title: str = "One request's tokens") -> go.Figure:
    """The gaps between one request's tokens over time, above the prompt tokens that each step computed for others.

    Args:
        runs: label to the frames of a run; all on one time axis.
        victim: request_id, in every run.
        title: the figure's title.

    Raises:
        ValueError: no runs, a column is missing, or a run lacks the victim.
    """
    if not runs:
        raise ValueError("no run given; the figure needs at least one")
    heights = [TOKENS, CHUNKS] * len(runs)
    plot = sum(heights) + GAP * (len(heights) - 1)
    figure = make_subplots(
        rows=len(heights), cols=1, shared_xaxes=True, vertical_spacing=GAP / plot, row_heights=heights,
        subplot_titles=[text for label in runs for text in (f"<b>{label}</b>", "")],
    )  # fmt: skip
    panel_titles(figure)
    span, longest = [np.inf, -np.inf], 0.0
    for number, (label, (requests, steps, scheduled)) in enumerate(runs.items()):
        require(requests, "requests", REQUEST_COLUMNS)
        found = requests.loc[requests["request_id"] == victim, "token_times"]
        if found.empty:
            raise ValueError(f"the run {label!r} has no request {victim!r}; choose one that is in every run")
        times = np.asarray(found.iloc[0], dtype=float)
        span = [min(span[0], times[0]), max(span[1], times[-1])]
        longest = max(longest, float(np.diff(times).max(initial=0.0)) * 1e3)
        row = 2 * number + 1
        figure.add_scatter(
            x=rounded(times[1:]), y=rounded(np.diff(times) * 1e3, 2), mode="lines+markers", name="gap before the token",
            legendgroup="gap", showlegend=row == 1, line={"color": DECODE, "width": 1}, marker={"size": 4},
            hovertemplate="%{y:.0f} ms before the token at %{x:.3f} s<extra></extra>", row=row, col=1,
        )  # fmt: skip
        prefills = scheduled[scheduled["phase"] == "prefill"].merge(steps[["step", "start", "end"]], on="step")
        middle = (prefills["start"] + prefills["end"]) / 2
        figure.add_bar(
            x=rounded(middle), width=rounded(prefills["end"] - prefills["start"]), y=prefills["num_tokens"].tolist(),
            name="prompt tokens computed in the step", legendgroup="chunks", showlegend=row == 1,
            marker={"color": PREFILL, "line": {"width": 0.5, "color": "rgba(255,255,255,0.6)"}},
            customdata=prefills["request_id"].tolist(),
            hovertemplate="%{y} prompt tokens of %{customdata}<extra></extra>", row=row + 1, col=1,
        )  # fmt: skip
        figure.update_yaxes(title_text="gap, ms", row=row, col=1)
        figure.update_yaxes(title_text="tokens", rangemode="tozero", nticks=3, row=row + 1, col=1)
    for row in range(1, len(heights), 2):  # one scale for every run's gaps
        figure.update_yaxes(range=[0, 1.08 * longest], row=row, col=1)
    margin = 0.02 * (span[1] - span[0])
    figure.update_xaxes(range=[span[0] - margin, span[1] + margin])
    figure.update_xaxes(title_text="time since the start of the run, s", row=len(heights), col=1)
    figure.update_layout(barmode="stack", bargap=0)
    return finish(figure, title, plot + TOP + BOTTOM)


def tradeoff(points: pd.DataFrame, *, title: str = "What the chunk size trades") -> go.Figure:
    """TTFT of the long prompts against the jitter of the others, a point for each chunk size in the frame's order.

    Args:
        points: one row for each setting: `label`, `ttft_s` (seconds), `jitter_ms`, `throughput` (output tokens/s). The
            first row is the baseline, drawn apart.
        title: the figure's title.

    Raises:
        ValueError: a column is missing, or there are no rows.
    """
    require(points, "points", TRADE_COLUMNS)
    figure = go.Figure()
    for part, name, color, mode in (
        (points.iloc[:1], "baseline", BASELINE, "markers+text"),
        (points.iloc[1:], "feature", FEATURE, "lines+markers+text"),
    ):
        figure.add_scatter(
            x=rounded(part["ttft_s"]), y=rounded(part["jitter_ms"], 2), mode=mode, name=name,
            text=part["label"].tolist(), textposition="top right", marker={"size": 9, "color": color},
            line={"color": color, "width": 1.5}, customdata=rounded(part["throughput"], 1),
            hovertemplate="%{text}: TTFT %{x:.2f} s, jitter %{y:.0f} ms, %{customdata} output tokens/s<extra></extra>",
        )  # fmt: skip
    low, high = float(points["ttft_s"].min()), float(points["ttft_s"].max())
    margin = 0.12 * (high - low) or 0.1 * high
    figure.update_xaxes(title_text="TTFT of the long prompts, s (median)", range=[low - margin, high + 2 * margin])
    figure.update_yaxes(
        title_text="jitter, ms (logarithmic)", **log_axis([*points["jitter_ms"] * 0.8, *points["jitter_ms"] * 1.3])
    )
    return finish(figure, title, 420)
