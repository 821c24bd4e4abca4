"""Engines in turns, A B C A B C: the same requests for each, warmed, several rounds, every metric of every run."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import pandas as pd
from tqdm.auto import tqdm

from lab.intervals import simultaneous_intervals
from lab.metrics import Kind, summarise
from lab.peers.environments import PeerError
from lab.record import RunRecord
from lab.workload import Workload


class Entrant(Protocol):
    """An engine of the contest, as ``lab.peers.process.PeerProcess`` is one."""

    name: str
    facts: Mapping[str, str]

    def replay(self, workload: Workload) -> RunRecord:
        """Replay with nothing known from before."""

    def answer(self, prompts: Mapping[str, Sequence[int]], max_tokens: int) -> dict[str, tuple[int, ...]]:
        """Greedy answers of prompts submitted at once."""

    def reset(self) -> None:
        """Forget every prompt."""

    def close(self) -> None:
        """End it."""


@dataclass(frozen=True)
class Trial:
    """One timed run."""

    engine: str
    workload: str
    round: int
    record: RunRecord


class Field:
    """The engines that started, by name, and why the others are absent. A context manager that ends them all.

    Args:
        starters: By name, what starts the engine; ``PeerError`` makes it absent.
    """

    def __init__(self, starters: Mapping[str, Callable[[], Entrant]]) -> None:
        self._stack = ExitStack()
        self._starters = starters
        self.names = tuple(starters)
        self.absent: dict[str, str] = {}
        self.facts: dict[str, Mapping[str, str]] = {}
        self._entrants: dict[str, Entrant] = {}
        for name in tqdm(starters, desc="starting the engines", unit="engine"):
            self._start(name)

    def present(self) -> Iterator[Entrant]:
        """Those that run, in order; one that failed in the last workload is started anew."""
        for name in self.names:
            if name not in self.absent and name not in self._entrants:
                self._start(name)
            if name in self._entrants:
                yield self._entrants[name]

    def retire(self, entrant: Entrant) -> None:
        """End an engine that failed."""
        del self._entrants[entrant.name]
        entrant.close()

    def _start(self, name: str) -> None:
        try:
            entrant = self._starters[name]()
        except PeerError as error:
            self.absent[name] = str(error)
            return
        self._stack.callback(entrant.close)
        self._entrants[name], self.facts[name] = entrant, entrant.facts

    def __enter__(self) -> Field:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def run_contest(
    field: Field,
    workload: Workload,
    rounds: int,
    once_after_s: float = math.inf,
    keep: Path | None = None,
    settle_s: float = 1.0,
) -> tuple[list[Trial], dict[str, str]]:
    """Every engine ``rounds`` times, in turns.

    An engine that fails leaves the contest; its earlier trials are dropped. One that needs more than ``once_after_s``
    seconds for the workload runs it once. Before each run everybody rests for ``settle_s`` seconds: idle threads of
    some OpenMP runtimes spin on, for up to 0.2 s by default.

    Returns:
        The trials, and by engine why it has none.
    """
    entrants = {entrant.name: entrant for entrant in field.present()}
    running, failed = dict(entrants), dict(field.absent)
    trials: list[Trial] = []
    with tqdm(total=len(entrants) * rounds, desc=workload.name, unit="run") as bar:
        for number in range(rounds):
            for name, entrant in tuple(running.items()):
                bar.set_postfix_str(f"{name}, round {number + 1} of {rounds}")
                time.sleep(settle_s)
                start = time.perf_counter()
                try:
                    record = entrant.replay(workload)
                except PeerError as error:
                    failed[name] = str(error)
                    field.retire(entrant)
                    del running[name], entrants[name]
                    continue
                finally:
                    bar.update()
                trials.append(Trial(name, workload.name, number, record))
                if keep is not None:
                    record.save(keep / f"{workload.name}_{number}_{name.replace(' ', '_')}")
                if time.perf_counter() - start > once_after_s:
                    del running[name]
    return [trial for trial in trials if trial.engine in entrants], failed


def warm_up(field: Field, workload: Workload) -> None:
    """Every engine once, untimed; one that fails is started anew, and will fail where it is timed."""
    for entrant in tqdm(list(field.present()), desc="warm-up", unit="engine"):
        try:
            entrant.replay(workload)
        except PeerError:
            field.retire(entrant)


def measured(trials: Sequence[Trial]) -> pd.DataFrame:
    """Every metric of every trial: columns engine, workload, round, and those of ``lab.metrics.summarise``.

    Queue time is left out: only this engine says when it admits a request.
    """
    parts = [
        summarise(trial.record).assign(engine=trial.engine, workload=trial.workload, round=trial.round)
        for trial in trials
    ]
    frame = pd.concat(parts, ignore_index=True)
    return frame[frame["name"] != "queue_time"].reset_index(drop=True)


def standings(frame: pd.DataFrame, baseline: str) -> pd.DataFrame:
    """Each engine against one of them, metric by metric.

    Args:
        frame: Of one workload, as ``measured`` gives it.
        baseline: The engine that the others are divided by.

    Returns:
        A row for each metric of time and engine: metric, unit, better, engine, value (the median over the rounds),
        least and most, and for the others ratio (engine / baseline, of the same round) with its interval low to
        high, which holds for all metrics of that engine together in 95 of 100 contests; NaN where a value is 0 or
        missing, or where there is one round.
    """
    timed = frame[frame["kind"] == Kind.TIMING]
    order = timed["metric"].drop_duplicates()
    about = timed.drop_duplicates("metric").set_index("metric")[["unit", "better"]]
    values = {
        str(engine): part.pivot(index="round", columns="metric", values="value").reindex(columns=order).astype(float)
        for engine, part in timed.groupby("engine", sort=False)
    }
    tables = []
    for engine, own in values.items():
        table = pd.DataFrame({"value": own.median(), "least": own.min(), "most": own.max()})
        table = about.join(table).assign(engine=engine, ratio=np.nan, low=np.nan, high=np.nan)
        if engine != baseline and baseline in values:
            ratios = (own / values[baseline]).loc[own.index]
            usable = ratios.columns[(ratios.gt(0) & np.isfinite(ratios)).all()]
            table.loc[usable, "ratio"] = ratios[usable].median()
            if len(ratios) > 1 and len(usable):
                interval = simultaneous_intervals(np.log(ratios[usable].to_numpy()))
                for name, logs in (("low", interval.low), ("high", interval.high)):
                    table.loc[usable, name] = np.where(np.isfinite(logs), np.exp(logs), np.nan)
        tables.append(table.rename_axis("metric").reset_index())
    columns = ["metric", "unit", "better", "engine", "value", "least", "most", "ratio", "low", "high"]
    return pd.concat(tables, ignore_index=True)[columns]


def first_differing_token(one: Sequence[int], other: Sequence[int]) -> int | None:
    """The first place at which two answers differ, one that has ended included; None where they are equal."""
    if tuple(one) == tuple(other):
        return None
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def match_rates(trials: Sequence[Trial], baseline: str) -> pd.DataFrame:
    """How many outputs of each engine's first round are the baseline's, token for token, and how far the others agree.

    Columns: engine, requests, equal, and agreed (the mean share of each output before its first difference).
    """
    first = {trial.engine: trial.record.requests.set_index("request_id") for trial in trials if trial.round == 0}
    ours = {str(name): row for name, row in first[baseline].iterrows()}
    rows = []
    for engine, requests in first.items():
        shares = []
        for name, row in requests.iterrows():
            expected, found = (list(one["token_ids"][one["num_prompt_tokens"] :]) for one in (ours[str(name)], row))
            place = first_differing_token(found, expected)
            shares.append(1.0 if place is None else place / len(expected))
        rows.append((engine, len(shares), sum(share == 1 for share in shares), float(np.mean(shares))))
    return pd.DataFrame(rows, columns=["engine", "requests", "equal", "agreed"])


def repeated(trials: Sequence[Trial], engine: str) -> tuple[int, int]:
    """Of an engine's requests, those whose output was the same in every round, and all of them."""
    outputs: dict[tuple[str, str], set[str]] = {}
    for trial in trials:
        if trial.engine == engine:
            for _, row in trial.record.requests.iterrows():
                outputs.setdefault((trial.workload, str(row["request_id"])), set()).add(str(row["output_hash"]))
    return sum(len(hashes) == 1 for hashes in outputs.values()), len(outputs)
