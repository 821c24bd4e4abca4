"""Request by request: who got slower under a feature, by how much, and what the records say about why."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from lab.comparison import Contrast
from lab.record import RunRecord

_PER_SIDE = ["latency", "queue", "decode", "rows", "prefill_tokens"]


def request_medians(experiment: Path) -> pd.DataFrame:
    """Each request's medians over the trials that an experiment kept (``run_experiment(keep=...)``).

    Returns:
        One row for each contrast, seed, request_id and side (0 is the baseline). Columns: latency (normalised: seconds
        from arrival to finish over output tokens), queue (seconds until admitted), decode (seconds from the first token
        to the last over the gaps), rows and prefill_tokens (means over its decode steps: the batch's rows, and the
        prompt tokens that were computed in the same step).
    """
    parts = []
    for folder in sorted(path for path in experiment.iterdir() if path.is_dir()):
        record = RunRecord.load(folder)
        place = record.meta["experiment"]
        parts.append(_facts(record).assign(**{name: place[name] for name in ("contrast", "seed", "side")}))
    trials = pd.concat(parts)
    medians: pd.DataFrame = trials.groupby(["contrast", "seed", "request_id", "side"], sort=False)[_PER_SIDE].median()
    return medians


def slower_requests(experiment: Path) -> tuple[pd.DataFrame, float, int]:
    """The requests whose normalised latency got worse by more than the noise, worst first.

    The noise is the largest change that the baseline shows against itself in 95 of 100 requests, or 1 where it was not
    measured, in quick mode.

    Returns:
        The table (seed, request, baseline and feature in ms a token, change, reason); the noise as a ratio; and how
        many requests were compared.
    """
    medians = request_medians(experiment).unstack("side")
    feature = medians.loc[str(Contrast.FEATURE)]
    change = feature["latency"][1] / feature["latency"][0]
    bound = 1.0
    if str(Contrast.NOISE) in medians.index:
        noise = medians.loc[str(Contrast.NOISE)]
        bound = float(np.exp(np.quantile(np.abs(np.log(noise["latency"][1] / noise["latency"][0])), 0.95)))
    worst_first = change[change > bound].sort_values(ascending=False)
    worse = feature.loc[worst_first.index]
    table = pd.DataFrame(
        {
            "seed": worse.index.get_level_values("seed"),
            "request": worse.index.get_level_values("request_id"),
            "baseline, ms a token": worse["latency"][0].to_numpy() * 1e3,
            "feature, ms a token": worse["latency"][1].to_numpy() * 1e3,
            "change": [f"{ratio - 1:+.1%}" for ratio in worst_first],
            "reason": [_reason(row) for _, row in worse.iterrows()],
        }
    )
    return table, bound, len(feature)


def _facts(record: RunRecord) -> pd.DataFrame:
    requests = record.completed
    steps = record.scheduled.groupby("step").agg(rows=("request_id", "size")).reset_index()
    prefills = record.scheduled[record.scheduled["phase"] == "prefill"].groupby("step")["num_tokens"].sum()
    steps["prefill_tokens"] = steps["step"].map(prefills).fillna(0)
    decodes = record.scheduled[record.scheduled["phase"] == "decode"].merge(steps, on="step")
    beside = decodes.groupby("request_id")[["rows", "prefill_tokens"]].mean()
    gaps = requests["token_times"].map(lambda times: (times[-1] - times[0]) / max(1, len(times) - 1))
    facts = pd.DataFrame(
        {
            "request_id": requests["request_id"],
            "latency": (requests["finish"] - requests["arrival"]) / requests["num_output_tokens"],
            "queue": requests["admitted"] - requests["arrival"],
            "decode": gaps,
        }
    )
    return facts.merge(beside, left_on="request_id", right_index=True, how="left").fillna(0.0)


def _reason(row: pd.Series) -> str:
    """The larger of the two ways to lose time, with the numbers of the records."""
    waited = row["queue"][1] - row["queue"][0]
    slower = row["decode"][1] - row["decode"][0]
    parts = []
    if waited > 0:
        parts.append(f"waited {row['queue'][1]:.2f} s for a seat instead of {row['queue'][0]:.2f} s")
    if slower > 0:
        parts.append(
            f"each token took {row['decode'][1] * 1e3:.0f} ms instead of {row['decode'][0] * 1e3:.0f}: its steps held "
            f"{row['rows'][1]:.1f} rows and {row['prefill_tokens'][1]:.0f} prompt tokens on average, not "
            f"{row['rows'][0]:.1f} and {row['prefill_tokens'][0]:.0f}"
        )
    if not parts:
        parts.append(
            "its own prefill took longer: it joined beside decoding requests, "
            f"{row['rows'][1]:.1f} rows a step instead of {row['rows'][0]:.1f}"
        )
    return "; ".join(parts)
