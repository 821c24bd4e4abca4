"""The golden matrix as a heat map: which cells equal the reference, bit for bit."""

import pandas as pd
import plotly.graph_objects as go

from lab.figures.style import finish, require

CELL_COLUMNS = ("row", "column", "status", "detail")
# status: (code of the colour, colour, what stands in the cell, what the legend says)
STATUSES = {
    "equal": (0, "rgba(10,159,120,0.5)", "=", "equal"),
    "different": (1, "rgba(217,100,26,0.75)", "≠", "different"),
    "reference": (2, "rgba(143,143,143,0.55)", "ref", "reference"),
    "absent": (3, "rgba(140,140,140,0.08)", "–", "does not exist yet"),
}


def golden_heatmap(cells: pd.DataFrame, *, title: str = "Golden matrix") -> go.Figure:
    """One square per cell of the golden matrix, rows and columns in the order of their first appearance.

    Args:
        cells: one row per cell with `row` and `column` (labels), `status` ("equal", "different", "reference" or
            "absent") and `detail` (shown on hovering). A combination that is not listed stays empty.
        title: the figure's title.

    Raises:
        ValueError: a column is missing, there are no rows, a status is unknown, or a cell is listed twice.
    """
    require(cells, "cells", CELL_COLUMNS)
    if unknown := sorted(set(cells["status"]) - STATUSES.keys()):
        raise ValueError(f"unknown status {', '.join(map(repr, unknown))}; use one of {', '.join(STATUSES)}")
    if (twice := cells.duplicated(["row", "column"])).any():
        first = cells[twice].iloc[0]
        raise ValueError(f"the cell {first['row']!r}, {first['column']!r} is listed more than once")
    rows, columns = (list(dict.fromkeys(cells[name])) for name in ("row", "column"))

    def grid(values: pd.Series) -> list[list[object]]:
        value_of = dict(zip(zip(cells["row"], cells["column"], strict=True), values, strict=True))
        return [[value_of.get((row, column)) for column in columns] for row in rows]

    scale = [[(code + side) / len(STATUSES), color] for code, color, _, _ in STATUSES.values() for side in (0, 1)]
    figure = go.Figure()
    figure.add_heatmap(
        x=columns, y=rows, z=grid(cells["status"].map(lambda status: STATUSES[status][0])),
        customdata=grid(cells["status"] + "<br>" + cells["detail"].astype(str)), zmin=-0.5, zmax=len(STATUSES) - 0.5,
        colorscale=scale, showscale=False, xgap=3, ygap=3, hoverongaps=False,
        hovertemplate="%{y}, %{x}: %{customdata}<extra></extra>",
    )  # fmt: skip
    # The marks are a trace of their own: a heat map's texts would be black or white, not in the page's colour.
    figure.add_scatter(
        x=cells["column"].tolist(), y=cells["row"].tolist(), mode="text", showlegend=False, hoverinfo="skip",
        text=[STATUSES[status][2] for status in cells["status"]], textfont={"size": 14},
    )  # fmt: skip
    for status in STATUSES:
        count = int((cells["status"] == status).sum())
        if count:
            figure.add_scatter(
                x=[None], y=[None], mode="markers", name=f"{STATUSES[status][3]} ({count})",
                marker={"symbol": "square", "size": 12, "color": STATUSES[status][1]},
            )  # fmt: skip
    figure.update_xaxes(side="top", showgrid=False, ticks="", type="category")
    figure.update_yaxes(autorange="reversed", showgrid=False, ticks="", type="category")
    figure.update_layout(margin_b=24)
    return finish(figure, title, 84 + 24 + 36 + 40 * len(rows))
