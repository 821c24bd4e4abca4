"""The one template and palette of every figure, and the checks they share.

Figures have transparent backgrounds and no text colour of their own beyond the template's neutral grey: the page sets
`font.color`, so that one figure is legible on a light page, on a dark one and in print. The hues are those of Okabe and
Ito (2008), "Color Universal Design", some a little lighter or darker so that each has a contrast of at least 2.1 to 1
on white and 4 to 1 on a dark page.
"""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import plotly.io as pio

BASELINE = "#8f8f8f"
FEATURE = "#2487cf"
PREFILL = "#e69f00"
DECODE = "#0a9f78"
KV = "#c274a4"
WORSE = "#d9641a"
NEUTRAL = "rgba(140,140,140,0.38)"
BAND = "rgba(140,140,140,0.22)"
GRID = "rgba(128,128,128,0.2)"
SERIES = (BASELINE, FEATURE, PREFILL, KV, DECODE, WORSE, "#7b6fd0")

TEMPLATE_NAME = "lab"
TOP = 84
"""Pixels above the plot for the title and a line of legend."""
LINE = 22
BOTTOM = 52
_AXIS = {
    "gridcolor": GRID,
    "linecolor": "rgba(128,128,128,0.5)",
    "zerolinecolor": GRID,
    "zerolinewidth": 1,
    "automargin": True,
    "ticks": "outside",
    "ticklen": 4,
    "tickcolor": "rgba(128,128,128,0.5)",
    "title": {"standoff": 8, "font": {"size": 12}},
    "tickfont": {"size": 11},
}
TEMPLATE = go.layout.Template(
    layout={
        "autotypenumbers": "strict",
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"color": "#808080", "size": 12, "family": "system-ui, -apple-system, 'Segoe UI', sans-serif"},
        "title": {"x": 0, "xref": "container", "xanchor": "left", "y": 1, "yref": "container", "yanchor": "top",
                  "pad": {"l": 12, "t": 12}, "font": {"size": 16}},
        "legend": {"orientation": "h", "x": 0, "xanchor": "left", "yref": "container", "yanchor": "top",
                   "traceorder": "normal", "bgcolor": "rgba(0,0,0,0)", "font": {"size": 12}},
        "margin": {"l": 64, "r": 24, "t": TOP, "b": BOTTOM},
        "colorway": list(SERIES),
        "hovermode": "closest",
        "xaxis": _AXIS,
        "yaxis": _AXIS,
        "annotationdefaults": {"font": {"size": 12}, "showarrow": False},
    }
)  # fmt: skip


def use_template() -> None:
    """Register the template under `lab`, make it plotly's default, and keep figures as `plotly_mimetype` output."""
    pio.templates[TEMPLATE_NAME] = TEMPLATE
    pio.templates.default = TEMPLATE_NAME
    pio.renderers.default = "plotly_mimetype"


def finish(figure: go.Figure, title: str, height: int, *, legend_lines: int = 1) -> go.Figure:
    """Give a figure the lab's template, its title, room for its legend beneath, and its fixed height in pixels.

    The width follows the page.
    """
    figure.update_layout(template=TEMPLATE, title_text=title, height=height)
    return figure.update_layout(
        showlegend=legend_lines > 0, legend_y=1 - 38 / height, margin_t=TOP + LINE * (legend_lines - 1)
    )


def require(frame: pd.DataFrame, name: str, columns: Iterable[str]) -> None:
    """Check that a frame can be drawn.

    Raises:
        ValueError: a column is missing, or the frame has no rows.
    """
    missing = [column for column in columns if column not in frame.columns]
    if missing:
        raise ValueError(f"the {name} frame lacks {', '.join(missing)}; it has {', '.join(map(str, frame.columns))}")
    if frame.empty:
        raise ValueError(f"the {name} frame has no rows, so there is nothing to draw")


def rounded(values: Iterable[float], digits: int = 4) -> list[float | None]:
    """Plain floats rounded to `digits` decimals (for seconds: to 0.1 ms), None where not finite: smaller files."""
    array = np.asarray(list(values), dtype=float)
    return [float(value) if np.isfinite(value) else None for value in np.round(array, digits)]


def linear_axis(values: Iterable[float]) -> dict[str, Any]:
    """Properties of a linear axis over the values, with a little room on either side."""
    array = np.fromiter(values, dtype=float)
    margin = 0.03 * (array.max() - array.min()) or 0.05 * abs(array.max()) or 1.0
    return {"type": "linear", "range": [float(array.min() - margin), float(array.max() + margin)]}


def log_axis(values: Iterable[float]) -> dict[str, Any]:
    """Properties of a logarithmic axis over positive values: its range, and ticks at 1, 2, 5, 10 written out."""
    array = np.fromiter(values, dtype=float)
    low, high = np.log10(array.min()), np.log10(array.max())
    margin = 0.03 * (high - low) + 0.01
    low, high = float(low - margin), float(high + margin)
    if high - low < 0.5:  # between two such ticks there may be none; plotly's own are fine there
        return {"type": "log", "range": [low, high]}
    steps = (1, 1.5, 2, 3, 5, 7) if high - low < 1 else (1, 2, 5) if high - low < 3.5 else (1,)
    powers = range(math.floor(low), math.ceil(high) + 1)
    ticks = [step * 10.0**power for power in powers for step in steps if low <= math.log10(step * 10.0**power) <= high]
    return {"type": "log", "range": [low, high], "tickvals": ticks, "ticktext": [_plain(tick) for tick in ticks]}


def _plain(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:g}"


def integer_edges(values: np.ndarray, bins: int, *, log: bool = False) -> np.ndarray:
    """Edges of at most `bins` bins over integers, halfway between integers so that no value lies on an edge."""
    low, high = values.min() - 0.5, values.max() + 0.5
    spread = np.geomspace(low, high, bins + 1) if log else np.linspace(low, high, bins + 1)
    return np.unique(np.floor(spread) + 0.5)


def add_marginal(
    figure: go.Figure, values: np.ndarray, edges: np.ndarray, what: str, *, row: int, col: int, upright: bool
) -> None:
    """Add the histogram of `values` as a grey staircase: bars rise (`upright`) or point to the right."""
    counts, _ = np.histogram(values, edges)
    corners, heights = edges.tolist(), [*counts.tolist(), 0]
    figure.add_scatter(
        x=corners if upright else heights, y=heights if upright else corners, mode="lines", showlegend=False,
        line={"shape": "hv" if upright else "vh", "width": 1, "color": BASELINE}, fillcolor=NEUTRAL,
        fill="tozeroy" if upright else "tozerox", row=row, col=col,
        hovertemplate=f"%{{{'y' if upright else 'x'}}} {what}<extra></extra>",
    )  # fmt: skip


def panel_titles(figure: go.Figure) -> None:
    """Set subplot titles flush left over their panels, in a size below the figure's title."""
    for annotation in figure.layout.annotations:
        annotation.update(x=0, xanchor="left", font_size=13)
