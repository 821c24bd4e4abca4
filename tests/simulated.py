"""Runs of a system that exists only on a simulated clock, as the records that a real one would leave."""

from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd

from lab.record import REQUESTS, SCHEDULED, STEPS, RunRecord, hash_tokens

Lengths = Sequence[tuple[int, int]]  # prompt and output tokens of each request

LENGTHS: Lengths = [(16 + 7 * i % 40, 2 + 5 * i % 17) for i in range(12)]


def output_hash(seed: int, request: int, num_tokens: int) -> str:
    """The hash of the simulated model's answer."""
    return hash_tokens((seed * 1000 + request + token) % 97 for token in range(num_tokens))


def simulate(
    lengths: Lengths = LENGTHS,
    seed: int = 0,
    batch: int = 4,
    step_s: Callable[[int], float] = lambda step: 0.01,
    arrival: Callable[[int], float] = lambda request: 0.001 * request,
) -> RunRecord:
    """Static batching: `batch` requests at a time, once they have all arrived; whole prompts, then a token a step.

    A step lasts `step_s(step)`, ten times that if it prefills.
    """
    requests: list[list[object]] = []
    steps: list[list[object]] = []
    scheduled: list[list[object]] = []
    now = 0.0
    for first in range(0, len(lengths), batch):
        group = range(first, min(first + batch, len(lengths)))
        times: dict[int, list[float]] = {request: [] for request in group}
        admitted = now = max(now, arrival(group[-1]))
        for token in range(max(lengths[request][1] for request in group)):
            rows = [request for request in group if token < lengths[request][1]]
            number, start = len(steps), now
            duration = step_s(number) * (1 if token else 10)
            now += duration
            for request in rows:
                prompt = lengths[request][0]
                tokens, before, phase = (1, prompt + token - 1, "decode") if token else (prompt, 0, "prefill")
                scheduled.append([number, f"r{request:03d}", tokens, before, phase])
                times[request].append(now)
            total = sum(row[2] for row in scheduled[-len(rows) :])  # type: ignore[misc]
            shares = [share * duration for share in (0.01, 0.9, 0.05, 0.0, 0.002)]
            waiting = len(lengths) - first - len(group)
            steps.append([number, "engine", start, now, total, len(rows), len(group), waiting, 10, 90, 0, *shares])
        for request in group:
            prompt, output = lengths[request]
            requests.append(
                [
                    f"r{request:03d}", arrival(request), admitted, times[request][0], times[request][-1],
                    prompt, output, "length", times[request], 0, output_hash(seed, request, output),
                    [0] * (prompt + output),
                ]
            )  # fmt: skip
    return RunRecord(
        pd.DataFrame(requests, columns=REQUESTS.names),
        pd.DataFrame(steps, columns=STEPS.names),
        pd.DataFrame(scheduled, columns=SCHEDULED.names),
        {"seed": seed},
    )


def fail(record: RunRecord, request_id: str, reason: str = "refused") -> RunRecord:
    """The same run with one request refused before it was admitted."""
    requests = record.requests.set_index("request_id", drop=False)
    for column in ("admitted", "first_token", "finish"):
        requests.loc[request_id, column] = np.nan
    requests.at[request_id, "token_times"] = np.empty(0)
    requests.loc[request_id, ["num_output_tokens"]] = 0
    requests.at[request_id, "token_ids"] = np.zeros(requests.at[request_id, "num_prompt_tokens"], np.int64)
    requests.loc[request_id, ["finish_reason", "output_hash"]] = [reason, None]
    scheduled = record.scheduled[record.scheduled["request_id"] != request_id]
    planned = scheduled.groupby("step")["num_tokens"].agg(["sum", "size"])
    steps = record.steps.assign(
        num_tokens=planned["sum"].reindex(record.steps["step"], fill_value=0).to_numpy(),
        num_seqs=planned["size"].reindex(record.steps["step"], fill_value=0).to_numpy(),
    )
    return RunRecord(requests.reset_index(drop=True), steps, scheduled.reset_index(drop=True), record.meta)
