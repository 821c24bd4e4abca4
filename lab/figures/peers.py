"""Engines side by side: what each reached on each workload, and whose answers depend on their company."""

from collections.abc import Mapping, Sequence

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from lab.figures.style import BASELINE, FEATURE, KV, LINE, TOP, finish, panel_titles, require, rounded

RACE_COLUMNS = ("engine", "workload", "metric", "unit", "better", "value")
COUNT_COLUMNS = ("engine", "composition", "equal", "prompts")
ROW, GAP, AXIS = 24, 62, 46
"""Pixels of an engine's row, between panels, and of the lowest panel's axis."""


def race(
    frame: pd.DataFrame, metrics: Mapping[str, str], engines: Sequence[str], *, title: str = "Engines side by side"
) -> go.Figure:
    """One panel for each workload: each run of each engine a dot, the median a bar, the first engine in colour.

    Args:
        frame: a row for each run and metric with `engine`, `workload`, `metric`, `unit`, `better` and `value`.
        metrics: workload to the metric that its panel shows.
        engines: the rows of every panel, from the top; one without a run is marked absent.
        title: the figure's title.

    Raises:
        ValueError: a column is missing, or there are no rows for a workload's metric.
    """
    require(frame, "runs", RACE_COLUMNS)
    panels = {}
    for workload, metric in metrics.items():
        panels[workload] = frame[(frame["workload"] == workload) & (frame["metric"] == metric)]
        if panels[workload].empty:
            raise ValueError(f"no run of {workload} has {metric!r}; leave it out")
    plot = ROW * len(engines) * len(panels) + GAP * (len(panels) - 1)
    figure = make_subplots(
        rows=len(panels), cols=1, vertical_spacing=GAP / plot,
        subplot_titles=[_panel_title(workload, runs) for workload, runs in panels.items()],
    )  # fmt: skip
    panel_titles(figure)
    for row, runs in enumerate(panels.values(), start=1):
        values = {name: runs.loc[runs["engine"] == name, "value"].dropna() for name in engines}
        present = [name for name in engines if len(values[name])]
        medians = [float(values[name].median()) for name in present]
        unit = runs["unit"].iloc[0]
        figure.add_bar(
            orientation="h", y=present, x=rounded(medians), width=0.62, showlegend=row == 1, name="median",
            marker={"color": [FEATURE if name == engines[0] else BASELINE for name in present], "opacity": 0.75},
            hovertemplate=f"%{{y}}: median %{{x:.4g}} {unit}<extra></extra>", row=row, col=1,
        )  # fmt: skip
        dots = [(name, value) for name in present for value in values[name]]
        figure.add_scatter(
            y=[name for name, _ in dots], x=rounded(value for _, value in dots), mode="markers", name="each run",
            marker={"color": KV, "size": 6, "opacity": 0.9, "line": {"width": 0.5, "color": "white"}},
            showlegend=row == 1, hovertemplate=f"%{{y}}: %{{x:.4g}} {unit}<extra></extra>", row=row, col=1,
        )  # fmt: skip
        top = max(float(values[name].max()) for name in present)
        for name in engines:
            missing = not len(values[name])
            end = 0.0 if missing else float(values[name].max())
            text = "absent" if missing else f"{values[name].median():.3g}"
            figure.add_annotation(x=end, y=name, text=text, xanchor="left", xshift=8, row=row, col=1)
        figure.update_xaxes(range=[0, 1.12 * top], title_text=unit, row=row, col=1)
        order = list(reversed(engines))
        figure.update_yaxes(
            type="category", categoryorder="array", categoryarray=order, range=[-0.6, len(engines) - 0.4],
            showgrid=False, ticks="", row=row, col=1,
        )  # fmt: skip
    figure.update_layout(bargap=0.2, margin_b=AXIS)
    return finish(figure, title, TOP + LINE + plot + AXIS, legend_lines=2)


def _panel_title(workload: str, runs: pd.DataFrame) -> str:
    metric, better = runs["metric"].iloc[0], runs["better"].iloc[0]
    return f"<b>{workload}</b>: {metric}, {'less' if better == 'lower' else 'more'} is better"


def exactness(
    counts: pd.DataFrame, engines: Sequence[str], *, title: str = "The same answer in any company"
) -> go.Figure:
    """A square for each engine and composition: how many prompts got the answer that they get alone.

    Args:
        counts: a row for each engine and composition with `engine`, `composition`, `equal` and `prompts`.
        engines: the rows, from the top; a square without a count stays empty.
        title: the figure's title.

    Raises:
        ValueError: a column is missing, or there are no rows.
    """
    require(counts, "counts", COUNT_COLUMNS)
    compositions = list(dict.fromkeys(counts["composition"]))
    share = counts.assign(share=counts["equal"] / counts["prompts"])
    table = share.pivot(index="engine", columns="composition", values="share").reindex(
        list(engines), columns=compositions
    )
    figure = go.Figure()
    figure.add_heatmap(
        x=compositions, y=list(engines), z=[rounded(line) for line in table.to_numpy(float)], zmin=0, zmax=1,
        colorscale=[[0, "rgba(217,100,26,0.75)"], [0.999, "rgba(230,159,0,0.3)"], [1, "rgba(10,159,120,0.5)"]],
        showscale=False, xgap=3, ygap=3, hoverongaps=False,
        hovertemplate="%{y}, %{x}: %{z:.1%} as alone<extra></extra>",
    )  # fmt: skip
    texts = [f"{row.equal}/{row.prompts}" for row in counts.itertuples()]
    figure.add_scatter(
        x=counts["composition"].tolist(), y=counts["engine"].tolist(), mode="text", text=texts, showlegend=False,
        textfont={"size": 11}, hoverinfo="skip",
    )  # fmt: skip
    for name, color in (("all as alone", "rgba(10,159,120,0.5)"), ("some differ", "rgba(230,159,0,0.45)")):
        figure.add_scatter(
            x=[None], y=[None], mode="markers", name=name, marker={"symbol": "square", "size": 12, "color": color}
        )
    figure.update_xaxes(side="top", showgrid=False, ticks="", type="category")
    figure.update_yaxes(autorange="reversed", showgrid=False, ticks="", type="category")
    figure.update_layout(margin_b=24)
    return finish(figure, title, 84 + 24 + 36 + 36 * len(engines))
