"""A run's records as a trace that Perfetto (https://ui.perfetto.dev) and chrome://tracing open.

Format: "Trace Event Format" (Duffy and others, Google): JSON object form, complete events (``ph`` X), counters (C) and
metadata (M); times in microseconds. One lane for each request, one for the engine's steps, counters for batch and KV.
"""

from __future__ import annotations

import argparse
import base64
import gzip
import html
import json
import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from lab.paths import write_atomic

Event = dict[str, Any]
ENGINE, REQUESTS = 1, 2  # process ids: viewers group lanes by process
STEPS, FIRST_REQUEST = 10, 20  # thread ids, in lane order; one equal to its process id would be set first, as "main"
_PHASES = {"X": {"ts", "dur", "pid", "tid", "name"}, "C": {"ts", "pid", "name", "args"}, "M": {"pid", "name", "args"}}
_COLUMNS: Mapping[str, tuple[str, ...]] = {
    "requests": (
        "request_id", "arrival", "admitted", "first_token", "finish",
        "num_prompt_tokens", "num_output_tokens", "finish_reason", "num_cached_tokens",
    ),
    "steps": (
        "step", "start", "end", "num_tokens", "num_seqs", "running", "waiting", "blocks_held", "blocks_free",
        "schedule_s", "forward_s", "sample_s", "observer_s",
    ),
    "scheduled": ("step", "request_id", "num_tokens", "num_computed_before", "phase"),
}  # fmt: skip


class TraceError(ValueError):
    """Records that cannot become a trace, or a trace that breaks the format's rules."""


def to_trace(requests: pd.DataFrame, steps: pd.DataFrame, scheduled: pd.DataFrame) -> dict[str, Any]:
    """The trace as a JSON-ready object.

    Frames as :mod:`lab` records them (times are float seconds on one clock). A request's lane shows ``queued`` until
    its first step, one ``prefill`` slice for each chunk and one ``decode`` slice from its first to its last decode
    step; exact stamps (arrival, admitted, first token, finish) are in the slices' arguments. Raises
    :class:`TraceError` when columns are missing, a step is scheduled that was not recorded, or a time is not finite.
    """
    for name, frame in (("requests", requests), ("steps", steps), ("scheduled", scheduled)):
        if missing := [column for column in _COLUMNS[name] if column not in frame.columns]:
            raise TraceError(f"the {name} records lack {', '.join(missing)}; they have {', '.join(frame.columns)}")
    if unknown := set(scheduled["step"]) - set(steps["step"]):
        raise TraceError(f"steps {sorted(unknown)[:5]} are in the scheduled records but not in the steps records")
    end = max([*steps["end"], *requests["arrival"]], default=0.0)
    work = scheduled.merge(steps[["step", "start", "end"]], on="step").sort_values("step", kind="stable")
    by_request = {str(key): rows for key, rows in work.groupby("request_id", sort=False)}
    instances = list(dict.fromkeys(steps.get("instance", default=[])))
    lanes = {name: lane for lane, name in enumerate(instances, start=STEPS)} if len(instances) > 1 else {}
    events = [
        _process(ENGINE, "engine"),
        *(_lane(ENGINE, lane, f"steps, {name}") for name, lane in lanes.items()),
        *([] if lanes else [_lane(ENGINE, STEPS, "steps")]),
        *_step_events(steps, lanes),
        _process(REQUESTS, "requests"),
    ]
    ordered = requests.sort_values("arrival", kind="stable").to_dict("records")
    for lane, request in enumerate(ordered, start=FIRST_REQUEST):
        request_id = str(request["request_id"])
        events.append(_lane(REQUESTS, lane, request_id))
        events.extend(_request_events(lane, request, by_request.get(request_id, work.iloc[:0]), end))
    trace = {"traceEvents": events, "displayTimeUnit": "ms"}
    check_trace(trace)
    return trace


def check_trace(trace: Mapping[str, Any]) -> None:
    """Raises :class:`TraceError` where ``trace`` breaks a rule of the format.

    Checked: known phases with their fields, finite times and durations >= 0, numeric counters, and that the slices of a
    lane are one inside or beside the other (viewers drop or stretch slices that cross).
    """
    lanes: dict[tuple[int, int], list[Event]] = {}
    for event in trace["traceEvents"]:
        fields = _PHASES.get(event.get("ph", ""))
        if fields is None or not fields <= event.keys():
            raise TraceError(f"event {event} has an unknown phase or lacks one of its fields {sorted(fields or ())}")
        times = [event[key] for key in ("ts", "dur") if key in event]
        if not all(math.isfinite(time) for time in times) or event.get("dur", 0) < 0:
            raise TraceError(f"event {event} has a time that is not finite, or a negative duration")
        if event["ph"] == "C" and not all(isinstance(value, int | float) for value in event["args"].values()):
            raise TraceError(f"counter {event} has a value that is no number")
        if event["ph"] == "X":
            lanes.setdefault((event["pid"], event["tid"]), []).append(event)
    for slices in lanes.values():
        _check_nesting(slices)


def read_records(folder: Path) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """The requests, steps and scheduled frames from ``folder``'s Parquet files.

    Raises :class:`TraceError` naming the file that is missing or unreadable.
    """
    return _read(folder, "requests"), _read(folder, "steps"), _read(folder, "scheduled")


@dataclass(frozen=True)
class TraceDownload:
    """Shown as a cell's result: a link that saves the trace, in JupyterLab and, embedded, in the HTML report."""

    trace: Mapping[str, Any]
    file_name: str = "trace.json.gz"
    label: str = "Perfetto trace"

    def _repr_html_(self) -> str:
        packed = gzip.compress(_to_json(self.trace).encode(), 9, mtime=0)
        address = f"data:application/gzip;base64,{base64.b64encode(packed).decode('ascii')}"
        label = f"{self.label} ({len(self.trace['traceEvents']):,} events, {len(packed) / 1e3:,.0f} kB)"
        name, text = html.escape(self.file_name), html.escape(label)
        return f'<a class="lab-download" download="{name}" href="{address}">{text}</a>'


def add_command(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Registers ``trace``."""
    parser = subparsers.add_parser(
        "trace",
        description="Reads requests.parquet, steps.parquet and scheduled.parquet from a records folder and writes a "
        "trace for https://ui.perfetto.dev or chrome://tracing: a lane for each request, counters for batch and KV.",
    )
    parser.add_argument("records", type=Path, metavar="RECORDS_DIR", help="folder of a run's Parquet records")
    parser.add_argument("-o", "--output", type=Path, default=Path("trace.json"), help="file to write (%(default)s)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Writes the trace and returns the exit status."""
    try:
        trace = to_trace(*read_records(arguments.records))
        write_atomic(arguments.output, _to_json(trace))
    except (TraceError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{arguments.output}: {len(trace['traceEvents']):,} events; open it in https://ui.perfetto.dev")
    return 0


def _step_events(steps: pd.DataFrame, lanes: Mapping[str, int]) -> Iterable[Event]:
    for step in steps.sort_values("start", kind="stable").to_dict("records"):
        start = _microseconds(step["start"])
        seconds = {key: step[key] for key in ("schedule_s", "forward_s", "sample_s", "observer_s")}
        of = f", {step['instance']}" if lanes else ""
        yield _slice(
            ENGINE, lanes[step["instance"]] if lanes else STEPS, "step", step["start"], step["end"],
            {"step": step["step"], "num_tokens": step["num_tokens"], "num_seqs": step["num_seqs"], **seconds},
        )  # fmt: skip
        yield _counter(start, f"batch size{of}", {"running": step["running"], "waiting": step["waiting"]})
        yield _counter(start, f"KV blocks{of}", {"held": step["blocks_held"], "free": step["blocks_free"]})


def _request_events(lane: int, request: Mapping[Any, Any], work: pd.DataFrame, end: float) -> Iterable[Event]:
    stamps = {key: request[key] for key in ("arrival", "admitted", "first_token", "finish")}
    counts = {key: request[key] for key in ("num_prompt_tokens", "num_output_tokens", "num_cached_tokens")}
    joined = float(work["start"].min()) if len(work) else end
    # A request is admitted inside the step that first computes it, so its wait ends, at the latest, where that begins.
    yield _slice(REQUESTS, lane, "queued", request["arrival"], max(joined, request["arrival"]), {**stamps, **counts})
    for chunk in work[work["phase"] == "prefill"].to_dict("records"):
        arguments = {key: chunk[key] for key in ("step", "num_tokens", "num_computed_before")}
        yield _slice(REQUESTS, lane, "prefill", chunk["start"], chunk["end"], arguments)
    decode = work[work["phase"] == "decode"]
    if len(decode):
        arguments = {**stamps, **counts, "finish_reason": request["finish_reason"], "steps": len(decode)}
        yield _slice(REQUESTS, lane, "decode", decode["start"].min(), decode["end"].max(), arguments)


def _slice(pid: int, tid: int, name: str, start: float, end: float, args: Mapping[str, Any]) -> Event:
    begin = _microseconds(start)
    return {
        "ph": "X", "pid": pid, "tid": tid, "name": name, "ts": begin, "dur": round(_microseconds(end) - begin, 3),
        "args": {key: _json_value(value) for key, value in args.items()},
    }  # fmt: skip


def _counter(microseconds: float, name: str, series: Mapping[str, Any]) -> Event:
    values = {key: _json_value(value) for key, value in series.items()}
    return {"ph": "C", "pid": ENGINE, "name": name, "ts": microseconds, "args": values}


def _process(pid: int, name: str) -> Event:
    return {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}}


def _lane(pid: int, tid: int, name: str) -> Event:
    return {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": name}}


def _microseconds(seconds: float) -> float:
    return round(float(seconds) * 1e6, 3)


def _json_value(value: Any) -> Any:
    value = value.item() if hasattr(value, "item") else value
    return None if value is None or value is pd.NA or (isinstance(value, float) and math.isnan(value)) else value


def _to_json(trace: Mapping[str, Any]) -> str:
    return json.dumps(trace, separators=(",", ":"), allow_nan=False)


def _check_nesting(slices: list[Event]) -> None:
    tolerance = 0.002  # microseconds: start and duration are rounded to a nanosecond each
    open_ends: list[float] = []
    for event in sorted(slices, key=lambda event: (event["ts"], -event["dur"])):
        begin, finish = event["ts"], event["ts"] + event["dur"]
        while open_ends and open_ends[-1] <= begin + tolerance:
            open_ends.pop()
        if open_ends and finish > open_ends[-1] + tolerance:
            raise TraceError(f"slice {event} crosses the end of the slice it lies in ({open_ends[-1]} us)")
        open_ends.append(finish)


def _read(folder: Path, name: str) -> pd.DataFrame:
    path = folder / f"{name}.parquet"
    if not path.exists():
        raise TraceError(f"{path} does not exist; give a folder with requests, steps and scheduled .parquet records")
    try:
        return pd.read_parquet(path)
    except (OSError, ValueError) as error:
        raise TraceError(f"{path} is no readable Parquet file: {error}") from error
