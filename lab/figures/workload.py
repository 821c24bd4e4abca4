"""The figure of a workload: how long its prompts and its outputs are."""

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from lab.figures.style import FEATURE, add_marginal, finish, integer_edges, linear_axis, log_axis, require

LENGTH_COLUMNS = ("num_prompt_tokens", "num_output_tokens")
MAX_POINTS = 1500
"""Beyond this many requests dots would cover each other: their number per cell is shown instead."""


def length_scatter(lengths: pd.DataFrame, *, title: str = "Workload lengths", log: bool = False) -> go.Figure:
    """Prompt against output length of every request, with the distribution of each along its axis.

    Args:
        lengths: one row per request with `num_prompt_tokens` and `num_output_tokens`.
        title: the figure's title.
        log: logarithmic axes, for lengths that span orders of magnitude.

    Raises:
        ValueError: a column is missing, there are no rows, or with log a length is not positive.
    """
    require(lengths, "lengths", LENGTH_COLUMNS)
    x, y = (lengths[column].to_numpy() for column in LENGTH_COLUMNS)
    if log and min(x.min(), y.min()) <= 0:
        raise ValueError(f"the shortest length is {min(x.min(), y.min())}, which log=True cannot show; use log=False")
    figure = make_subplots(
        rows=2, cols=2, shared_xaxes="columns", shared_yaxes="rows", row_heights=[0.2, 0.8], column_widths=[0.86, 0.14],
        vertical_spacing=0.035, horizontal_spacing=0.035,
    )  # fmt: skip
    dense = len(lengths) > MAX_POINTS
    if dense:
        _add_density(figure, x, y, log)
    else:
        figure.add_scatter(
            x=x.tolist(), y=y.tolist(), mode="markers", name="request", row=2, col=1,
            marker={"color": FEATURE, "size": 6, "opacity": 0.55},
            hovertemplate="%{x} prompt tokens, %{y} output tokens<extra></extra>",
        )  # fmt: skip
    bins = int(np.clip(2 * np.sqrt(len(lengths)), 8, 50))
    add_marginal(figure, x, integer_edges(x, bins, log=log), "requests", row=1, col=1, upright=True)
    add_marginal(figure, y, integer_edges(y, bins, log=log), "requests", row=2, col=2, upright=False)
    axis = log_axis if log else linear_axis
    figure.update_xaxes(**axis(x), col=1)
    figure.update_yaxes(**axis(y), row=2)
    figure.update_xaxes(title_text=f"prompt tokens (median {np.median(x):,.0f})", row=2, col=1)
    figure.update_yaxes(title_text=f"output tokens (median {np.median(y):,.0f})", row=2, col=1)
    figure.update_yaxes(title_text="requests", nticks=3, rangemode="tozero", row=1, col=1)
    figure.update_xaxes(title_text="requests", nticks=3, rangemode="tozero", row=2, col=2)
    note = "; colour: how many per cell" if dense else ""
    return finish(figure, f"{title} ({len(lengths):,} requests{note})", 440, legend_lines=0)


def _add_density(figure: go.Figure, x: np.ndarray, y: np.ndarray, log: bool) -> None:
    counts, x_edges, y_edges = np.histogram2d(x, y, [integer_edges(x, 70, log=log), integer_edges(y, 50, log=log)])
    shade = np.where(counts > 0, np.log10(np.maximum(counts, 1)) + 0.3, np.nan)
    figure.add_heatmap(
        x=x_edges.tolist(), y=y_edges.tolist(), z=np.round(shade.T, 3).tolist(), text=counts.T.astype(int).tolist(),
        colorscale=[[0, "rgba(36,135,207,0.12)"], [1, FEATURE]], zmin=0, showscale=False, hoverongaps=False,
        hovertemplate="%{text} requests: about %{x} prompt tokens, %{y} output tokens<extra></extra>", row=2, col=1,
    )  # fmt: skip
