"""Figures of the prefix cache: what was found in it over time, and which prefixes the requests share."""

from collections.abc import Mapping

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from lab.figures.style import (
    BAND,
    BASELINE,
    BOTTOM,
    FEATURE,
    PREFILL,
    TOP,
    finish,
    panel_titles,
    require,
    rounded,
)

PANEL, GAP = 150, 34
"""Pixels of the panel of one run, and between two panels."""
HIT_COLUMNS = ("request_id", "admitted", "num_prompt_tokens", "num_cached_tokens")
TREE_COLUMNS = ("node", "parent", "depth", "tokens", "requests", "hits")


def hits_over_time(runs: Mapping[str, pd.DataFrame], *, title: str = "Prompt tokens found in the cache") -> go.Figure:
    """Cumulative prompt tokens by the time their request was admitted: computed, and found in the prefix cache.

    Args:
        runs: label to the requests frame of a run; a panel each, on the same axes.
        title: the figure's title.

    Raises:
        ValueError: no runs, a column is missing, or a frame is empty.
    """
    if not runs:
        raise ValueError("no run given; the figure needs at least one")
    plot = PANEL * len(runs) + GAP * (len(runs) - 1)
    figure = make_subplots(
        rows=len(runs), cols=1, shared_xaxes=True, shared_yaxes="all", vertical_spacing=GAP / plot,
        subplot_titles=[f"<b>{label}</b>" if label else "" for label in runs],
    )  # fmt: skip
    panel_titles(figure)
    for row, requests in enumerate(runs.values(), start=1):
        require(requests, "requests", HIT_COLUMNS)
        admitted = requests[requests["admitted"].notna()].sort_values("admitted", kind="stable")
        found = admitted["num_cached_tokens"].cumsum()
        computed = admitted["num_prompt_tokens"].cumsum() - found
        for values, name, color in ((computed, "computed", PREFILL), (found, "found in the cache", FEATURE)):
            figure.add_scatter(
                x=rounded(admitted["admitted"]), y=values.tolist(), name=name, legendgroup=name, showlegend=row == 1,
                stackgroup=f"tokens{row}", mode="lines", fillcolor=color,
                line={"shape": "hv", "width": 0, "color": color},
                hovertemplate=f"%{{y:,}} prompt tokens {name}<extra></extra>", row=row, col=1,
            )  # fmt: skip
        figure.update_yaxes(title_text="prompt tokens", rangemode="tozero", nticks=5, row=row, col=1)
    figure.update_xaxes(title_text="time since the start of the run, s", row=len(runs), col=1)
    return finish(figure, title, plot + TOP + BOTTOM)


def prefix_tree(tree: pd.DataFrame, *, title: str = "Prefixes that prompts share") -> go.Figure:
    """The shared prefixes as an icicle: width is tokens times requests, a prefix's continuations lie beneath it.

    Args:
        tree: as `lab.cache_oracle.prefix_tree` returns it.
        title: the figure's title.

    Raises:
        ValueError: a column is missing, or no prefix is shared.
    """
    require(tree, "tree", TREE_COLUMNS)
    share = tree["hits"] / tree["requests"]
    figure = go.Figure()
    figure.add_icicle(
        ids=tree["node"].astype(str).tolist(),
        parents=["" if parent < 0 else str(parent) for parent in tree["parent"]],
        values=(tree["tokens"] * tree["requests"]).tolist(),
        labels=[
            f"{row.tokens} tokens<br>{row.requests} requests, {row.hits} hits"
            for row in tree.itertuples()
        ],
        branchvalues="remainder",
        tiling={"orientation": "v"},
        marker={
            "colors": share.tolist(), "colorscale": [[0, BASELINE], [1, FEATURE]], "cmin": 0, "cmax": 1,
            "colorbar": {"title": {"text": "hits / requests", "side": "right"}, "tickformat": ".0%", "thickness": 12},
            "line": {"width": 1, "color": "rgba(255,255,255,0.7)"},
        },
        textfont={"color": "white"},
        customdata=[[depth, depth + tokens] for depth, tokens in zip(tree["depth"], tree["tokens"], strict=True)],
        hovertemplate="tokens %{customdata[0]} to %{customdata[1]}<br>%{label}<extra></extra>",
        pathbar={"visible": False},
        root={"color": BAND},
    )  # fmt: skip
    return finish(figure, title, 380, legend_lines=0)
