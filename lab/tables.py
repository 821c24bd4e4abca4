"""Tables as the reports show them, narrow enough for a page."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from typing import Any

import pandas as pd
from pandas.io.formats.style import Styler


def comparison_table(table: pd.DataFrame, caption: str) -> Styler:
    """Every metric of a comparison (`lab.comparison.Experiment.compare`), better or worse, a row each."""
    rows: Iterable[Any] = table.itertuples()
    shown = pd.DataFrame(
        [
            {
                "metric": f"{row.metric}, {row.unit}",
                "baseline": _number(row.baseline),
                "feature": _number(row.feature),
                "change": row.change,
                "interval": _interval(row.low, row.high),
                "A/A band": _interval(row.noise_low, row.noise_high),
                "verdict": row.verdict,
                "reason or note": "; ".join(filter(None, (row.reason, row.note))),
            }
            for row in rows
        ]
    )
    right: list[Hashable] = ["baseline", "feature", "change", "interval", "A/A band"]
    return shown.style.hide(axis="index").set_caption(caption).set_properties(subset=right, **{"text-align": "right"})


def matrix_table(cells: pd.DataFrame, caption: str = "What each cell showed") -> Styler:
    """The golden matrix (`lab.golden.run_matrix`), a row for each cell."""
    shown = pd.DataFrame(
        {
            "cell": [f"{row.row}, {row.column}" for row in cells.itertuples()],
            "status": cells["status"],
            "equal": [f"{row.num_equal} of {row.num_prompts}" for row in cells.itertuples()],
            "what it showed": cells["detail"],
        }
    )
    return shown.style.hide(axis="index").set_caption(caption)


def _number(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _interval(low: float, high: float) -> str:
    return "–" if math.isnan(low) or math.isnan(high) else f"{low:.2f}–{high:.2f}×"
