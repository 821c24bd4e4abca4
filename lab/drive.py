"""The open-loop driver: replays a workload through an engine and records what happened.

Arrivals are fixed before the run and never wait for the system (no coordinated omission): a request's clock starts when
it was due, not when the loop got round to adding it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from tqdm.auto import tqdm

from engine.core import ENGINE, Core, StepStats
from engine.request import Request, RequestError, SamplingParams
from lab.record import CACHE, REQUESTS, SCHEDULED, STEPS, TRANSFERS, RunRecord, hash_tokens
from lab.sources import Prompt
from lab.workload import Workload, WorkloadRequest

Encode = Callable[[Prompt], tuple[int, ...]]
_NEVER = float("nan")


def drive(
    core: Core,
    workload: Workload,
    encode: Encode | None = None,
    *,
    meta: dict[str, Any] | None = None,
    save_to: Path | None = None,
    desc: str | None = None,
) -> RunRecord:
    """Replay a workload to its end.

    Args:
        core: An idle engine.
        workload: What to ask and when; requests the engine refuses are recorded as ``refused``.
        encode: Text or chat messages to token ids, for workloads that hold them; done before the clock starts.
        meta: Kept with the records, beside the workload's name, seed and hashes.
        save_to: Folder for the records; after an interrupt the partial ones are saved too.
        desc: Show a progress bar with this title.

    Raises:
        ValueError: The engine is not idle, or the workload holds text and ``encode`` is None.
        KeyboardInterrupt: As it came, once the requests are aborted and the partial records saved.
    """
    if core.has_unfinished:
        raise ValueError("the engine is not idle: let its requests end or abort them before driving a workload")
    prompts = [_token_ids(request, encode) for request in workload.requests]
    info = {"workload": workload.name, "seed": workload.seed, "content_hash": workload.content_hash, **(meta or {})}
    run = _Run(core, workload.requests, prompts)
    try:
        with tqdm(total=len(prompts), desc=desc, unit="request", disable=desc is None) as bar:
            run.replay(bar.update)
    except BaseException:
        run.abort_all()
        if save_to is not None:
            run.record(info | {"partial": True}).save(save_to)
        raise
    record = run.record(info)
    if save_to is not None:
        record.save(save_to)
    return record


class _Run:
    """One replay: what was asked, what the engine did, on one clock."""

    def __init__(self, core: Core, asked: Sequence[WorkloadRequest], prompts: Sequence[tuple[int, ...]]) -> None:
        self._core, self._asked, self._prompts = core, asked, prompts
        self._requests: list[Request] = []
        self._refused: set[str] = set()
        self._steps: list[tuple[StepStats, float]] = []
        self._start = 0.0

    def replay(self, finished: Callable[[int], Any]) -> None:
        self._start = time.perf_counter()
        while True:
            self._add_due()
            all_added = len(self._requests) == len(self._asked)
            due = None if all_added else self._start + self._asked[len(self._requests)].arrival_s
            output = self._core.step(due)
            if output is None:
                if due is None:
                    return
                time.sleep(max(0.0, due - time.perf_counter()))
                continue
            # Appending is all that happens while the run is timed; the frames are built afterwards.
            if output.stats is not None:
                self._steps.append((output.stats, time.perf_counter()))
            ended = len(output.failed) + sum(request.finish_reason is not None for request in output.sampled)
            if ended:
                finished(ended)

    def abort_all(self) -> None:
        for request in self._requests:
            self._core.abort(request.request_id)

    def record(self, meta: dict[str, Any]) -> RunRecord:
        return RunRecord(
            requests=_frame(REQUESTS.names, map(self._request_row, self._requests)),
            steps=_frame(STEPS.names, map(self._step_row, range(len(self._steps)))),
            scheduled=_frame(SCHEDULED.names, self._scheduled_rows()),
            meta=meta,
            cache=_frame(CACHE.names, self._cache_rows()),
            transfers=_frame(TRANSFERS.names, self._transfer_rows()),
        )

    def _add_due(self) -> None:
        elapsed = time.perf_counter() - self._start
        while len(self._requests) < len(self._asked):
            asked = self._asked[len(self._requests)]
            if asked.arrival_s > elapsed:
                return
            params = SamplingParams(max_tokens=asked.max_tokens, ignore_eos=asked.ignore_eos)
            prompt = self._prompts[len(self._requests)]
            request = Request(asked.request_id, prompt, params, self._start + asked.arrival_s)
            self._requests.append(request)
            try:
                self._core.add(request)
            except RequestError:
                self._refused.add(request.request_id)

    def _request_row(self, request: Request) -> tuple[Any, ...]:
        times = [stamp - self._start for stamp in request.token_times]
        reason: str | None = "refused" if request.request_id in self._refused else request.finish_reason
        return (
            request.request_id,
            request.arrival_time - self._start,
            _NEVER if request.admitted_time is None else request.admitted_time - self._start,
            times[0] if times else _NEVER,
            _NEVER if request.finish_time is None else request.finish_time - self._start,
            request.num_prompt_tokens,
            request.num_output_tokens,
            reason,
            times,
            request.num_cached_tokens,
            hash_tokens(request.token_ids[request.num_prompt_tokens :]),
            request.token_ids,
        )

    def _step_row(self, index: int) -> tuple[Any, ...]:
        stats, observed = self._steps[index]
        # A step of another process ended when it says; one of this process once it was recorded, too.
        elsewhere = stats.instance != ENGINE
        return (
            index,
            stats.instance,
            stats.start - self._start,
            (stats.end if elsewhere else observed) - self._start,
            stats.num_tokens,
            len(stats.scheduled),
            stats.num_running,
            stats.num_waiting,
            stats.num_blocks_held,
            stats.num_blocks_free,
            stats.num_blocks_cached,
            stats.schedule_s,
            stats.forward_s,
            stats.sample_s,
            stats.cache.seconds,
            0.0 if elsewhere else observed - stats.end,
        )

    def _scheduled_rows(self) -> Iterable[tuple[Any, ...]]:
        for index, (stats, _) in enumerate(self._steps):
            for item in stats.scheduled:
                phase = "prefill" if item.is_prefill else "decode"
                yield index, item.request.request_id, item.num_tokens, item.start, phase

    def _cache_rows(self) -> Iterable[tuple[Any, ...]]:
        for index, (stats, _) in enumerate(self._steps):
            for event in stats.cache.events:
                yield index, event.kind, event.request_id, event.index, event.block

    def _transfer_rows(self) -> Iterable[tuple[Any, ...]]:
        for stats, _ in self._steps:
            for one in stats.transfers:
                times = (stamp - self._start for stamp in (one.offered, one.begun, one.ended))
                counts = (one.num_blocks, one.num_blocks_hit, one.num_bytes)
                yield one.transfer_id, one.request_id, *counts, one.seconds, *times, one.completed


def _frame(columns: Sequence[str], rows: Iterable[tuple[Any, ...]]) -> pd.DataFrame:
    return pd.DataFrame(list(rows), columns=list(columns))


def _token_ids(request: WorkloadRequest, encode: Encode | None) -> tuple[int, ...]:
    if request.prompt_token_ids is not None:
        return request.prompt_token_ids
    if encode is None:
        raise ValueError(f"request {request.request_id} holds text; give encode to turn it into token ids")
    return encode(request.prompt)
