"""Figures of the engine's steps: what each one computed, and how many KV blocks were held."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from lab.figures.style import (
    BAND,
    BASELINE,
    DECODE,
    FEATURE,
    KV,
    NEUTRAL,
    PREFILL,
    add_marginal,
    finish,
    integer_edges,
    require,
    rounded,
)

STEP_COLUMNS = ("step", "start", "end")
SCHEDULED_COLUMNS = ("step", "request_id", "num_tokens", "phase")
# Drawn from the bottom up: decodes form the steady floor that prefills stand on.
PHASE_COLORS = {"decode": DECODE, "prefill": PREFILL}
MAX_STEPS = 1200
"""More steps than this are narrower than a pixel: consecutive ones are drawn as one."""


def composition(steps: pd.DataFrame, scheduled: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Count what each step computed.

    Returns:
        `tokens` and `sequences`: frames with one row per row of `steps` and the columns `decode` and `prefill`.

    Raises:
        ValueError: a column is missing, `scheduled` names a step that `steps` lacks, or a phase is unknown.
    """
    require(steps, "steps", STEP_COLUMNS)
    require(scheduled, "scheduled", SCHEDULED_COLUMNS)
    if unknown := sorted(set(scheduled["phase"]) - PHASE_COLORS.keys()):
        raise ValueError(f"unknown phase {', '.join(map(repr, unknown))}; a phase is 'prefill' or 'decode'")
    if orphans := sorted(set(scheduled["step"]) - set(steps["step"])):
        raise ValueError(f"scheduled names step {orphans[0]}, which the steps frame lacks ({len(orphans)} such steps)")
    groups = scheduled.groupby(["step", "phase"])["num_tokens"]
    counts = {"tokens": groups.sum(), "sequences": groups.size()}
    return {
        name: series.unstack(fill_value=0).reindex(index=steps["step"], columns=list(PHASE_COLORS), fill_value=0)
        for name, series in counts.items()
    }


def pool_size(steps: pd.DataFrame) -> int:
    """How many consecutive steps are drawn as one."""
    return -(-len(steps) // MAX_STEPS)


def pool(frame: pd.DataFrame, size: int, how: str | dict[str, str]) -> pd.DataFrame:
    """Aggregate every `size` consecutive rows into one; rows stay as they are where `size` is 1."""
    frame = frame.reset_index(drop=True)
    return frame if size == 1 else frame.groupby(np.arange(len(frame)) // size).agg(how)


def pool_over_time(values: pd.DataFrame, seconds: pd.Series, size: int) -> pd.DataFrame:
    """Mean of every `size` consecutive rows, weighted with how long each lasted, so that areas over time stay true."""
    if size == 1:
        return values.reset_index(drop=True)
    weights = seconds.reset_index(drop=True)
    weighted = pool(values.reset_index(drop=True).mul(weights, axis="index"), size, "sum")
    return weighted.div(pool(weights.to_frame("seconds"), size, "sum")["seconds"], axis="index")


def pool_note(size: int, how: str) -> str:
    """What an axis title adds where steps were pooled."""
    return f"<br>({how} of {size})" if size > 1 else ""


def outline(steps: pd.DataFrame, values: pd.DataFrame) -> tuple[list[float | None], pd.DataFrame]:
    """Corners of a staircase over time: each step's values from its start, zero while the engine is idle.

    Gaps between steps narrower than a thousandth of the run, about a pixel, are not idleness one could see.
    """
    starts, ends = steps["start"].to_numpy(), steps["end"].to_numpy()
    resolution = (ends[-1] - starts[0]) / 1000
    times: list[float] = []
    rows: list[int] = []
    for i, (start, end) in enumerate(zip(starts, ends, strict=True)):
        times.append(start)
        rows.append(i)
        if i + 1 == len(starts) or starts[i + 1] - end > resolution:
            times.append(end)
            rows.append(-1)
    padded = pd.concat([values.reset_index(drop=True), pd.DataFrame(0, index=[-1], columns=values.columns)])
    return rounded(times), padded.loc[rows]


def add_stack(
    figure: go.Figure, x: Sequence[float | None], values: pd.DataFrame, unit: str, *, row: int, legend: bool
) -> None:
    """Add the phases of `values` (one row per entry of `x`) as a stacked staircase to one panel."""
    for phase, color in PHASE_COLORS.items():
        figure.add_scatter(
            x=x, y=rounded(values[phase], 2), name=phase, legendgroup=phase, showlegend=legend, mode="lines",
            line={"shape": "hv", "width": 0, "color": color}, fillcolor=color, stackgroup=f"steps{row}",
            hovertemplate=f"%{{y}} {phase} {unit}<extra></extra>", row=row, col=1,
        )  # fmt: skip


def batch_composition(steps: pd.DataFrame, scheduled: pd.DataFrame, *, title: str = "Batch composition") -> go.Figure:
    """Tokens and sequences of every step by phase, their distribution over the steps beside them, the queue beneath.

    Of more than 1,200 steps the staircases show the mean of every few consecutive ones (the axis says of how many); the
    distributions count every step.

    Args:
        steps: one row per step, in order, with `step`, `start`, `end` (seconds) and `waiting` (requests).
        scheduled: one row per request in a step, with `step`, `request_id`, `num_tokens` and `phase`.
        title: the figure's title.

    Raises:
        ValueError: as `composition` does.
    """
    require(steps, "steps", (*STEP_COLUMNS, "waiting"))
    counts = composition(steps, scheduled)
    size = pool_size(steps)
    note = pool_note(size, "mean")
    numbers = [*steps["step"].iloc[::size].tolist(), int(steps["step"].iloc[-1]) + 1]
    figure = make_subplots(
        rows=3, cols=2, shared_xaxes="columns", shared_yaxes="rows", row_heights=[0.42, 0.36, 0.22],
        column_widths=[0.87, 0.13], vertical_spacing=0.06, horizontal_spacing=0.025,
    )  # fmt: skip
    for row, (unit, values) in enumerate(counts.items(), start=1):
        add_stack(figure, numbers, _closed(pool(values, size, "mean")), unit, row=row, legend=row == 1)
        totals = values.sum(axis="columns").to_numpy()
        add_marginal(figure, totals, integer_edges(totals, 30), "steps", row=row, col=2, upright=False)
        figure.update_yaxes(title_text=f"{unit} per step{note}", rangemode="tozero", row=row, col=1)
    figure.add_scatter(
        x=numbers, y=rounded(_closed(pool(steps[["waiting"]], size, "mean"))["waiting"], 2), name="waiting requests",
        mode="lines", fill="tozeroy", fillcolor=NEUTRAL, line={"shape": "hv", "width": 1, "color": BASELINE},
        hovertemplate="%{y} waiting<extra></extra>", row=3, col=1,
    )  # fmt: skip
    figure.update_yaxes(title_text="waiting", rangemode="tozero", nticks=4, row=3, col=1)
    figure.update_xaxes(title_text="step", row=3, col=1)
    figure.update_xaxes(nticks=3, rangemode="tozero", showticklabels=True, matches=None, col=2)
    figure.update_xaxes(title_text="steps", row=2, col=2)
    if size > 1:  # single steps reach higher than the means beside them
        figure.update_yaxes(matches=None, showticklabels=True, side="right", rangemode="tozero", col=2)
    return finish(figure, title, 480)


def _closed(values: pd.DataFrame) -> pd.DataFrame:
    """Repeat the last row, so that a staircase shows the last step as wide as the others."""
    return pd.concat([values, values.iloc[-1:]])


def kv_occupancy(steps: pd.DataFrame, *, title: str = "KV cache occupancy") -> go.Figure:
    """KV blocks held, free but known to the prefix cache, and free over time, and the highest share held.

    Of more than 1,200 steps the staircase shows the highest of every few consecutive ones (the axis says of how many).

    Args:
        steps: one row per step, in order, with `start` and `end` (seconds), `blocks_held`, `blocks_free`, and
            `blocks_cached`, which of the free ones hold known prefixes.
        title: the figure's title.

    Raises:
        ValueError: a column is missing, or there are no steps.
    """
    require(steps, "steps", (*STEP_COLUMNS, "blocks_held", "blocks_free", "blocks_cached"))
    size = pool_size(steps)
    how = {"blocks_held": "max", "blocks_free": "min", "blocks_cached": "min"}
    blocks = _closed(pool(steps[list(how)], size, how))
    blocks["blocks_free"] -= blocks["blocks_cached"]
    times = rounded([*steps["start"].iloc[::size], steps["end"].iloc[-1]])
    figure = go.Figure()
    parts = (("blocks_held", "held", KV), ("blocks_cached", "free, known", FEATURE), ("blocks_free", "free", BAND))
    for column, name, color in parts:
        if column == "blocks_cached" and not blocks[column].any():
            continue
        figure.add_scatter(
            x=times, y=blocks[column].tolist(), name=name, stackgroup="blocks", mode="lines", fillcolor=color,
            line={"shape": "hv", "width": 0, "color": color}, hovertemplate=f"%{{y}} blocks {name}<extra></extra>",
        )  # fmt: skip
    total = steps["blocks_held"] + steps["blocks_free"]
    share = steps["blocks_held"] / total
    peak = int(share.to_numpy().argmax())
    at, held = float(steps["start"].iloc[peak]), int(steps["blocks_held"].iloc[peak])
    in_first_half = at < (steps["start"].iloc[0] + steps["end"].iloc[-1]) / 2
    figure.add_annotation(
        x=round(at, 4), y=held, xanchor="left" if in_first_half else "right", yanchor="bottom", yshift=2,
        text=f"peak {share.iloc[peak]:.0%}: {held:,} of {int(total.iloc[peak]):,} blocks",
    )  # fmt: skip
    figure.update_xaxes(title_text="time since the start of the run, s")
    figure.update_yaxes(title_text=f"KV blocks{pool_note(size, 'highest')}", range=[0, 1.08 * int(total.max())])
    return finish(figure, title, 320)
