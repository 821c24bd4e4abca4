"""The lab's metrics, each defined once: what it is, its unit, its formula and which way is better.

Only completed requests (finish_reason `stop` or `length`) enter a statistic; every other one is counted in the table.
Percentiles interpolate linearly between order statistics (numpy's default). A p99 needs `P99_SAMPLES` samples: below
that the maximum takes its place, and is called so.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

import numpy as np
import pandas as pd

from lab.record import FAILED, RunRecord

P99_SAMPLES = 100


class Better(StrEnum):
    """Which way a metric improves."""

    LOWER = "lower"
    HIGHER = "higher"


class Kind(StrEnum):
    """What a value is: a time measured with noise, or a count that is exact."""

    TIMING = "timing"
    COUNT = "count"


@dataclass(frozen=True)
class SLO:
    """Service level objectives in seconds; a request meets them if each of its values is at most the given one."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    def __post_init__(self) -> None:
        given = {name: value for name, value in vars(self).items() if value is not None}
        if not given:
            raise ValueError("an SLO needs at least one of ttft_s, tpot_s, e2e_s")
        if wrong := {name: value for name, value in given.items() if not 0 < value < float("inf")}:
            raise ValueError(f"SLO {wrong}: must be finite seconds above 0; raise them")


@dataclass(frozen=True)
class Samples:
    """A run's completed requests as arrays, and the objectives: the input of every metric (seconds, tokens).

    arrival, admitted, first, last: shape [requests]; last is the last token's time. finish: when the request ended.
    gaps: the times between consecutive tokens of a request, pooled over requests.
    """

    arrival: np.ndarray
    admitted: np.ndarray
    first: np.ndarray
    last: np.ndarray
    finish: np.ndarray
    prompt_tokens: np.ndarray
    output_tokens: np.ndarray
    gaps: np.ndarray
    slo: SLO | None

    @classmethod
    def of(cls, record: RunRecord, slo: SLO | None = None) -> "Samples":
        done = record.completed
        times: Sequence[np.ndarray] = [np.asarray(t, np.float64) for t in done["token_times"]]
        columns = ("arrival", "admitted", "first_token", "finish", "num_prompt_tokens", "num_output_tokens")
        arrival, admitted, first, finish, prompt_tokens, output_tokens = (done[name].to_numpy() for name in columns)
        last = np.array([t[-1] for t in times], np.float64)
        gaps = np.concatenate([np.empty(0), *(np.diff(t) for t in times)])
        return cls(arrival, admitted, first, last, finish, prompt_tokens, output_tokens, gaps, slo)

    @property
    def duration(self) -> float:
        """From the first arrival to the last finish, seconds; NaN without requests."""
        return float(self.finish.max() - self.arrival.min()) if len(self.finish) else float("nan")


PERCENTILES = ("p50", "p95", "p99")


@dataclass(frozen=True)
class Metric:
    """One metric of the registry.

    compute: the samples, float64 of shape [n], that `statistics` summarise; a float where the run has a single value.
    """

    name: str
    label: str
    unit: str
    better: Better
    formula: str
    statistics: tuple[str, ...]
    definition: str
    compute: Callable[[Samples], np.ndarray | float]


METRICS: dict[str, Metric] = {}


_Compute = TypeVar("_Compute", bound=Callable[[Samples], np.ndarray | float])


def _metric(
    label: str, unit: str, better: Better, formula: str, statistics: tuple[str, ...] = ("value",)
) -> Callable[[_Compute], _Compute]:
    def register(compute: _Compute) -> _Compute:
        definition = " ".join((compute.__doc__ or "").split())
        name = compute.__name__
        METRICS[name] = Metric(name, label, unit, better, formula, statistics, definition, compute)
        return compute

    return register


# ------------------------------------------------------------------------------------------------------------- registry


@_metric("TTFT", "s", Better.LOWER, "first token − arrival", PERCENTILES)
def ttft(run: Samples) -> np.ndarray:
    """Time to first token of each request. It counts from arrival, so waiting in the queue is part of it."""
    return run.first - run.arrival


@_metric("ITL", "s", Better.LOWER, "token − the token before it", (*PERCENTILES, "std", "max"))
def itl(run: Samples) -> np.ndarray:
    """Inter-token latency: every gap between two consecutive tokens of a request, pooled over all requests."""
    return run.gaps


@_metric("Jitter", "s", Better.LOWER, "p99(ITL) − p50(ITL)", ("p99 − p50",))
def jitter(run: Samples) -> np.ndarray:
    """How far the slow gaps between tokens lie above the usual one."""
    return run.gaps


@_metric("TPOT", "s", Better.LOWER, "(last token − first token) / (output tokens − 1)", PERCENTILES)
def tpot(run: Samples) -> np.ndarray:
    """Time per output token of each request after its first; requests with a single token have none."""
    several = run.output_tokens > 1
    return (run.last[several] - run.first[several]) / (run.output_tokens[several] - 1)


@_metric("E2E", "s", Better.LOWER, "last token − arrival", PERCENTILES)
def e2e(run: Samples) -> np.ndarray:
    """End-to-end latency of each request, from its arrival to its last token."""
    return run.last - run.arrival


@_metric("Normalised latency", "s/token", Better.LOWER, "E2E / output tokens", PERCENTILES)
def normalised_latency(run: Samples) -> np.ndarray:
    """End-to-end latency of each request per token it generated, so that long and short answers compare."""
    return e2e(run) / run.output_tokens


@_metric("Queue time", "s", Better.LOWER, "admission − arrival", PERCENTILES)
def queue_time(run: Samples) -> np.ndarray:
    """How long each request waited before the scheduler admitted it."""
    return run.admitted - run.arrival


@_metric("Output throughput", "tokens/s", Better.HIGHER, "output tokens / (last finish − first arrival)")
def output_throughput(run: Samples) -> float:
    """Tokens generated per second of the run."""
    return float(run.output_tokens.sum() / run.duration)


@_metric("Total throughput", "tokens/s", Better.HIGHER, "(prompt + output tokens) / (last finish − first arrival)")
def total_throughput(run: Samples) -> float:
    """Tokens taken in and generated per second of the run; cached prompt tokens count, as they were asked for."""
    return float((run.prompt_tokens.sum() + run.output_tokens.sum()) / run.duration)


@_metric("Goodput", "requests/s", Better.HIGHER, "requests that meet every SLO / (last finish − first arrival)")
def goodput(run: Samples) -> float:
    """Requests per second that met every service level objective. A single-token answer has no TPOT to miss."""
    slo = run.slo
    if slo is None:
        return float("nan")
    per_token = (run.last - run.first) / np.maximum(run.output_tokens - 1, 1)
    met = np.ones(len(run.arrival), bool)
    for values, limit in ((ttft(run), slo.ttft_s), (per_token, slo.tpot_s), (e2e(run), slo.e2e_s)):
        if limit is not None:
            met &= values <= limit
    return float(met.sum() / run.duration)


# ------------------------------------------------------------------------------------------------------------- tables


def _statistic(wanted: str, values: np.ndarray) -> tuple[str, float]:
    """The value of a statistic and its name, which differs from the wanted one where the maximum replaces the p99."""
    tail = "p99" if len(values) >= P99_SAMPLES else "max"
    name = wanted.replace("p99", tail)
    if not len(values):
        return name, float("nan")
    match name.split(" − "):
        case ["value"]:
            return name, float(values[0])
        case ["std"]:
            return name, float(values.std())
        case terms:
            points = [100.0 if term == "max" else float(term.removeprefix("p")) for term in terms]
            quantiles = np.percentile(values, points)
            return name, float(quantiles[0] - quantiles[1:].sum())


def summarise(record: RunRecord, slo: SLO | None = None) -> pd.DataFrame:
    """Every metric of a run, a row for each value.

    Columns: metric (a label, unique, such as "TTFT p50"), name and statistic (keys, such as "ttft" and "p50"), kind
    (`Kind`), value, unit, better (`Better`), n (samples behind the value) and note. Goodput is listed where an SLO is
    given. The rows "Requests completed", "failed" and "unfinished" count what the other rows leave out.
    """
    run = Samples.of(record, slo)
    rows = [
        row
        for metric in METRICS.values()
        if slo is not None or metric.compute is not goodput
        for row in _rows(metric, run)
    ]
    return pd.DataFrame([*rows, *_counts(record)])


def _rows(metric: Metric, run: Samples) -> list[dict[str, Any]]:
    computed = metric.compute(run)
    values = np.atleast_1d(computed)
    rows = {}  # by name: where the maximum replaces the p99, it may be among the statistics already
    for wanted in metric.statistics:
        statistic, value = _statistic(wanted, values)
        rows[statistic] = {
            "metric": metric.label if statistic == "value" else f"{metric.label} {statistic}",
            "name": metric.name,
            "statistic": statistic,
            "kind": Kind.TIMING,
            "value": value,
            "unit": metric.unit,
            "better": metric.better,
            "n": len(run.arrival) if np.isscalar(computed) else len(values),
            "note": "" if statistic == wanted else f"p99 needs {P99_SAMPLES} samples",
        }
    return list(rows.values())


def _counts(record: RunRecord) -> list[dict[str, Any]]:
    reasons = record.requests["finish_reason"]
    failed = {reason: int((reasons == reason).sum()) for reason in FAILED}
    counts = (
        ("completed", len(record.completed), Better.HIGHER, ""),
        ("failed", sum(failed.values()), Better.LOWER, ", ".join(f"{n} {reason}" for reason, n in failed.items() if n)),
        ("unfinished", int(reasons.isna().sum()), Better.LOWER, ""),
    )
    return [
        {
            "metric": f"Requests {name}",
            "name": "requests",
            "statistic": name,
            "kind": Kind.COUNT,
            "value": float(value),
            "unit": "requests",
            "better": better,
            "n": len(reasons),
            "note": note,
        }
        for name, value, better, note in counts
    ]


def glossary() -> pd.DataFrame:
    """Every metric's definition for the report: metric, unit, better, formula, definition."""
    columns = ("label", "unit", "better", "formula", "definition")
    rows = [[getattr(metric, column) for column in columns] for metric in METRICS.values()]
    return pd.DataFrame(rows, columns=["metric", *columns[1:]]).astype(str)
