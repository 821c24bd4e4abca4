"""The request timeline: a Gantt of every request over what the steps computed, on one time axis."""

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from lab.figures.steps import STEP_COLUMNS, add_stack, composition, outline, pool, pool_note, pool_over_time, pool_size
from lab.figures.style import (
    BOTTOM,
    DECODE,
    NEUTRAL,
    PREFILL,
    TOP,
    WORSE,
    finish,
    panel_titles,
    require,
    rounded,
)

Run = tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]
"""The requests, steps and scheduled frames of one run."""

REQUEST_COLUMNS = (
    "request_id", "arrival", "admitted", "first_token", "finish", "finish_reason",
    "num_prompt_tokens", "num_output_tokens", "num_cached_tokens", "token_times",
)  # fmt: skip
FACTS = ("request_id", "num_prompt_tokens", "num_cached_tokens", "num_output_tokens")
# In the order a request passes through them: (phase, colour, the column in which it begins, what hovering tells).
PHASES = (
    ("queued", NEUTRAL, "arrival", ""),
    ("prefill", PREFILL, "admitted", "<br>%{customdata[1]} prompt tokens, %{customdata[2]} cached"),
    ("decode", DECODE, "first_token", "<br>%{customdata[3]} output tokens"),
)
COMPLETED = ("stop", "length")
MAX_ROWS = 40
"""Up to this many requests a row is tall enough to stand apart, and to show each token as a tick."""
MAX_TICKS = 400
"""Token ticks nearer to each other than this fraction of the time axis, about two pixels, would only darken the bar."""
STRIP, GAP = 66, 28
"""Pixels of a panel of step composition, and between two panels."""


def timeline(
    requests: pd.DataFrame, steps: pd.DataFrame, scheduled: pd.DataFrame, *, title: str = "Request timeline"
) -> go.Figure:
    """Every request as a bar (queued, prefill, decode), in order of arrival, and what the steps computed beneath.

    Up to 40 requests carry a tick for each output token where ticks lie far enough apart. Of more than 1,200 steps the
    panels beneath show the mean over time of every few consecutive ones (the axis says of how many).

    Args:
        requests: one row per request; times in seconds from the start of the run, NaN where never reached.
        steps: one row per step, in order.
        scheduled: one row per request in a step.
        title: the figure's title.

    Raises:
        ValueError: a column is missing or a frame is empty, or as `composition` does.
    """
    return timelines({"": (requests, steps, scheduled)}, title=title)


def timelines(runs: Mapping[str, Run], *, title: str = "Request timelines") -> go.Figure:
    """Several runs (label to frames) one above the other on one time axis, each drawn as `timeline` does.

    Raises:
        ValueError: no runs, a column is missing or a frame is empty, or as `composition` does.
    """
    if not runs:
        raise ValueError("no run given; a timeline needs at least one")
    for requests, steps, _ in runs.values():
        require(requests, "requests", REQUEST_COLUMNS)
        require(steps, "steps", STEP_COLUMNS)
    longest = max(len(requests) for requests, _, _ in runs.values())
    gantt = min(max(15 * longest, 120), 480 if len(runs) == 1 else 280)
    heights = [gantt, STRIP, STRIP] * len(runs)
    plot = sum(heights) + GAP * (len(heights) - 1)
    figure = make_subplots(
        rows=len(heights), cols=1, shared_xaxes=True, vertical_spacing=GAP / plot, row_heights=heights,
        subplot_titles=[text for label in runs for text in (f"<b>{label}</b>" if label else "", "", "")],
    )  # fmt: skip
    panel_titles(figure)
    span = max(float(steps["end"].max()) for _, steps, _ in runs.values())
    for number, (requests, steps, scheduled) in enumerate(runs.values()):
        top = 3 * number + 1
        counts = composition(steps, scheduled)
        ordered = requests.sort_values("arrival", kind="stable")
        _add_gantt(figure, ordered, float(steps["end"].max()), top)
        if len(requests) <= MAX_ROWS and _median_gap(ordered["token_times"]) >= span / MAX_TICKS:
            _add_ticks(figure, ordered["token_times"], top)
        rows = [len(requests) + 0.5, 0.5]  # the first to arrive on top
        figure.update_yaxes(title_text="request, by arrival", range=rows, showgrid=False, row=top, col=1)
        size = pool_size(steps)
        pooled = pool(steps[["start", "end"]], size, {"start": "first", "end": "last"})
        for row, (unit, values) in enumerate(counts.items(), start=top + 1):
            times, corners = outline(pooled, pool_over_time(values, steps["end"] - steps["start"], size))
            add_stack(figure, times, corners, unit, row=row, legend=False)
            name = f"{unit}<br>per step{pool_note(size, 'mean')}"
            figure.update_yaxes(title_text=name, title_font_size=11, rangemode="tozero", nticks=4, row=row, col=1)
    figure.update_xaxes(title_text="time since the start of the run, s", row=len(heights), col=1)
    figure.update_layout(barmode="overlay", bargap=0)
    return finish(figure, title, plot + TOP + BOTTOM)


def _spans(requests: pd.DataFrame, end_of_run: float) -> list[tuple[pd.Series, pd.Series]]:
    """Begin and end of each phase, NaN where it never began; a phase that never ended lasts as long as the run."""
    milestones = requests[["arrival", "admitted", "first_token", "finish"]].astype(float)
    # A run that was cut short may end before its last requests arrive.
    ends = milestones.bfill(axis="columns").fillna(max(end_of_run, float(milestones["arrival"].max())))
    return [(milestones[begin], ends.iloc[:, i + 1]) for i, (_, _, begin, _) in enumerate(PHASES)]


def _add_gantt(figure: go.Figure, requests: pd.DataFrame, end_of_run: float, row: int) -> None:
    rows = np.arange(1, len(requests) + 1)
    width = 0.78 if len(requests) <= MAX_ROWS else 1.0
    spans = _spans(requests, end_of_run)
    for (phase, color, _, detail), (begin, end) in zip(PHASES, spans, strict=True):
        entered = begin.notna().to_numpy()
        duration = rounded((end - begin)[entered])
        facts = requests.loc[entered, list(FACTS)].to_numpy().tolist()
        figure.add_bar(
            orientation="h", name=phase, legendgroup=phase, showlegend=row == 1, width=width,
            y=rows[entered].tolist(), base=rounded(begin[entered]), x=duration,
            customdata=[[*fact, seconds] for fact, seconds in zip(facts, duration, strict=True)],
            hovertemplate=f"%{{customdata[0]}}: {phase} %{{customdata[4]:.3f}} s{detail}<extra></extra>",
            marker={"color": color, "line": {"width": 0}}, row=row, col=1,
        )  # fmt: skip
    unfinished = ~requests["finish_reason"].isin(COMPLETED).to_numpy()
    if unfinished.any():
        figure.add_scatter(
            x=rounded(spans[-1][1][unfinished]), y=rows[unfinished].tolist(), mode="markers", name="not completed",
            legendgroup="not completed", showlegend=all(trace.name != "not completed" for trace in figure.data),
            marker={"symbol": "x-thin", "size": 6, "line": {"color": WORSE, "width": 2}},
            customdata=requests.loc[unfinished, ["request_id", "finish_reason"]].astype(str).to_numpy().tolist(),
            hovertemplate="%{customdata[0]}: not completed (%{customdata[1]})<extra></extra>", row=row, col=1,
        )  # fmt: skip


def _median_gap(token_times: Iterable[Sequence[float]]) -> float:
    gaps = [gap for times in token_times for gap in np.diff(times)]
    return float(np.median(gaps)) if gaps else math.inf


def _add_ticks(figure: go.Figure, token_times: Iterable[Sequence[float]], row: int) -> None:
    """Mark every output token on its request's bar, so that a stalled decode shows as a gap between ticks."""
    figure.add_scatter(
        x=rounded([time for times in token_times for time in times]),
        y=[number for number, times in enumerate(token_times, start=1) for _ in times],
        mode="markers", name="output token", legendgroup="decode", showlegend=False, hoverinfo="skip",
        marker={"symbol": "line-ns", "size": 5, "line": {"color": "rgba(0,0,0,0.3)", "width": 1}}, row=row, col=1,
    )  # fmt: skip
