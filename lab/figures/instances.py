"""Two instances side by side: what each computed when, and the KV that travelled between them."""

from collections.abc import Mapping

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from lab.figures.style import BOTTOM, DECODE, KV, PREFILL, TOP, finish, panel_titles, require, rounded

LANE, GAP = 62, 44
"""Pixels of a lane, and between the panels of two runs."""
Run = tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]
"""The steps, scheduled and transfers frames of one run."""
_KINDS = (("holds prompt tokens", PREFILL, True), ("decodes only", DECODE, False))


def instance_lanes(runs: Mapping[str, Run], *, title: str = "The instances over time") -> go.Figure:
    """A lane for each instance of each run, with its steps as bars and the transfers as arrows from lane to lane.

    An arrow leads from the moment of the offer on the prefill instance to the moment at which the KV was there.

    Args:
        runs: label to the frames of a run; all on one time axis.
        title: the figure's title.

    Raises:
        ValueError: no runs, or a column is missing or a frame of steps empty.
    """
    if not runs:
        raise ValueError("no run given; the figure needs at least one")
    for steps, _, _ in runs.values():
        require(steps, "steps", ("step", "instance", "start", "end", "num_tokens"))
    lanes = {
        label: list(dict.fromkeys(sorted(steps["instance"], reverse=True))) for label, (steps, _, _) in runs.items()
    }
    heights = [LANE * len(names) for names in lanes.values()]
    plot = sum(heights) + GAP * (len(heights) - 1)
    figure = make_subplots(
        rows=len(heights), cols=1, shared_xaxes=True, vertical_spacing=GAP / plot, row_heights=heights,
        subplot_titles=[f"<b>{label}</b>" for label in runs],
    )  # fmt: skip
    panel_titles(figure)
    drawn: set[str] = set()
    for row, (label, (steps, scheduled, transfers)) in enumerate(runs.items(), start=1):
        place = {name: float(len(lanes[label]) - 1 - index) for index, name in enumerate(lanes[label])}
        with_prompt = set(scheduled.loc[scheduled["phase"] == "prefill", "step"])
        for name, color, wanted in _KINDS:
            part = steps[steps["step"].isin(with_prompt) == wanted]
            if part.empty:
                continue
            figure.add_bar(
                orientation="h", y=[place[one] for one in part["instance"]], base=rounded(part["start"]),
                x=rounded(part["end"] - part["start"]), width=0.5, name=f"step that {name}", legendgroup=name,
                showlegend=name not in drawn, customdata=part["num_tokens"].tolist(),
                marker={"color": color, "line": {"width": 0.4, "color": "rgba(255,255,255,0.7)"}},
                hovertemplate="%{customdata} tokens in %{x:.3f} s<extra></extra>", row=row, col=1,
            )  # fmt: skip
            drawn.add(name)
        moved = transfers[transfers["completed"].astype(bool) & (transfers["num_blocks"] > 0)]
        if len(moved) and {"prefill", "decode"} <= set(place):
            ends = (place["prefill"] - 0.27, place["decode"] + 0.3)
            figure.add_scatter(
                x=[at for pair in zip(rounded(moved["offered"]), rounded(moved["ended"]), strict=True)
                   for at in (*pair, None)],
                y=[at for _ in range(len(moved)) for at in (*ends, None)],
                mode="lines", line={"color": KV, "width": 1.5}, name="KV on its way", legendgroup="kv",
                showlegend="kv" not in drawn, hoverinfo="skip", row=row, col=1,
            )  # fmt: skip
            figure.add_scatter(
                x=rounded(moved["ended"]), y=[ends[1]] * len(moved), mode="markers", legendgroup="kv", showlegend=False,
                marker={"symbol": "triangle-down", "size": 9, "color": KV},
                customdata=moved[["request_id", "num_blocks", "num_bytes"]].to_numpy().tolist(),
                hovertemplate="%{customdata[0]}: %{customdata[1]} blocks, %{customdata[2]} bytes<extra></extra>",
                row=row, col=1,
            )  # fmt: skip
            drawn.add("kv")
        figure.update_yaxes(
            tickvals=list(place.values()), ticktext=list(place), range=[-0.5, len(place) - 0.5], showgrid=False,
            row=row, col=1,
        )  # fmt: skip
    figure.update_xaxes(title_text="time since the start of the run, s", row=len(heights), col=1)
    figure.update_layout(barmode="overlay", bargap=0)
    return finish(figure, title, plot + TOP + BOTTOM)
