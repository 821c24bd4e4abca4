"""What one run leaves behind: frames of requests, of steps, of who was scheduled in which step, and of the cache.

Times are float seconds on one clock (`time.perf_counter`), counted from the run's start. A frame of a run that was
interrupted holds what there was until then; what never happened is NaN.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

COMPLETED = ("stop", "length")
FAILED = ("abort", "refused", "error")
PHASES = ("prefill", "decode")

REQUESTS = pa.schema(
    {
        "request_id": pa.string(),
        "arrival": pa.float64(),
        "admitted": pa.float64(),
        "first_token": pa.float64(),
        "finish": pa.float64(),
        "num_prompt_tokens": pa.int64(),
        "num_output_tokens": pa.int64(),
        "finish_reason": pa.string(),  # COMPLETED or FAILED; null while unfinished
        "token_times": pa.list_(pa.float64()),  # one for each output token
        "num_cached_tokens": pa.int64(),  # prompt tokens found in the prefix cache
        "output_hash": pa.string(),  # `hash_tokens` of the output
        "token_ids": pa.list_(pa.int64()),  # prompt and output
    }
)
STEPS = pa.schema(
    {
        "step": pa.int64(),
        "instance": pa.string(),  # whose step: "engine", or "prefill" and "decode" where they run apart
        "start": pa.float64(),
        "end": pa.float64(),
        "num_tokens": pa.int64(),
        "num_seqs": pa.int64(),
        "running": pa.int64(),
        "waiting": pa.int64(),
        "blocks_held": pa.int64(),
        "blocks_free": pa.int64(),
        "blocks_cached": pa.int64(),  # of the free ones, those that hold known prefixes
        "schedule_s": pa.float64(),
        "forward_s": pa.float64(),
        "sample_s": pa.float64(),
        "cache_s": pa.float64(),  # the prefix cache's part of schedule_s
        "observer_s": pa.float64(),  # what recording this step cost
    }
)
SCHEDULED = pa.schema(
    {
        "step": pa.int64(),
        "request_id": pa.string(),
        "num_tokens": pa.int64(),
        "num_computed_before": pa.int64(),
        "phase": pa.string(),  # one of PHASES
    }
)
CACHE = pa.schema(
    {
        "step": pa.int64(),
        "kind": pa.string(),  # admit, publish, evict: see `engine.kv.prefix_cache.CacheEvent`; in order
        "request_id": pa.string(),
        "index": pa.int64(),
        "block": pa.int64(),
    }
)
TRANSFERS = pa.schema(
    {
        "transfer_id": pa.int64(),
        "request_id": pa.string(),
        "num_blocks": pa.int64(),  # that travelled
        "num_blocks_hit": pa.int64(),  # of the prompt, that the receiver had
        "num_bytes": pa.int64(),
        "seconds": pa.float64(),  # for which the channel was at it
        "offered": pa.float64(),
        "begun": pa.float64(),
        "ended": pa.float64(),
        "completed": pa.bool_(),
    }
)
SCHEMAS = {
    "requests": REQUESTS,
    "steps": STEPS,
    "scheduled": SCHEDULED,
    "cache": CACHE,
    "transfers": TRANSFERS,
}
_NULLABLE = ("admitted", "first_token", "finish", "finish_reason", "output_hash")
_NULLABLE_EVENT = ("request_id", "index", "block")
_META = "meta.json"
_CLOCK_S = 1e-9  # differences below this are rounding, not order


class RecordError(ValueError):
    """Records that do not follow the schema, or that contradict themselves."""


def hash_tokens(token_ids: Iterable[int]) -> str:
    """SHA-256 over the output's token ids as little-endian int64."""
    return hashlib.sha256(np.fromiter(token_ids, dtype="<i8").tobytes()).hexdigest()


def _no_events() -> pd.DataFrame:
    return pd.DataFrame(columns=CACHE.names)


def _no_transfers() -> pd.DataFrame:
    return pd.DataFrame(columns=TRANSFERS.names)


@dataclass(frozen=True)
class RunRecord:
    """The records of one run; the frames are brought to their schema (as in `SCHEMAS`) on creation.

    meta: anything that JSON can hold; `partial: true` marks a run that was interrupted.

    Raises RecordError for a missing or unknown column, or values of another type than the schema's.
    """

    requests: pd.DataFrame
    steps: pd.DataFrame
    scheduled: pd.DataFrame
    meta: dict[str, Any] = field(default_factory=dict)
    cache: pd.DataFrame = field(default_factory=_no_events)
    transfers: pd.DataFrame = field(default_factory=_no_transfers)

    def __post_init__(self) -> None:
        for name in SCHEMAS:
            table = _to_table(getattr(self, name), name, f"the {name} frame")
            object.__setattr__(self, name, table.to_pandas())

    @property
    def partial(self) -> bool:
        return bool(self.meta.get("partial", False))

    @property
    def completed(self) -> pd.DataFrame:
        """The requests that ended by themselves or at their limit; only these enter the metrics."""
        return self.requests[self.requests["finish_reason"].isin(COMPLETED)]

    def save(self, folder: Path) -> Path:
        """Writes a Parquet file for each frame and, last, `meta.json`. Returns `folder`."""
        meta = json.dumps(self.meta, indent=2, sort_keys=True, allow_nan=False)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _META).unlink(missing_ok=True)  # its presence says that the frames beside it are whole
        for name in SCHEMAS:
            pq.write_table(_to_table(getattr(self, name), name, f"the {name} frame"), folder / f"{name}.parquet")
        (folder / _META).write_text(meta + "\n", encoding="utf-8")
        return folder

    @classmethod
    def load(cls, folder: Path) -> "RunRecord":
        """Reads what `save` wrote. Raises RecordError for a missing or broken file or another schema."""
        try:
            meta = json.loads((folder / _META).read_text(encoding="utf-8"))
            tables = {name: pq.read_table(folder / f"{name}.parquet") for name in SCHEMAS}
        except FileNotFoundError as error:
            raise RecordError(
                f"{error.filename or error}: missing, so the run was not saved whole; run it again"
            ) from error
        except (OSError, ValueError, pa.ArrowException) as error:
            raise RecordError(f"{folder}: the records cannot be read ({error}); run it again") from error
        if not isinstance(meta, dict):
            raise RecordError(f"{folder / _META}: holds {type(meta).__name__}, must be an object; run it again")
        for name, table in tables.items():
            if not table.schema.equals(SCHEMAS[name]):
                raise RecordError(
                    f"{folder / name}.parquet: the columns are\n{table.schema.to_string(show_schema_metadata=False)}\n"
                    f"but must be\n{SCHEMAS[name]}\nThey are from another version; run it again"
                )
        return cls(**{name: table.to_pandas() for name, table in tables.items()}, meta=meta)

    def check(self) -> list[str]:
        """The contradictions in the records, in words; none in a sound run. A partial run may stop anywhere."""
        return [*_check_requests(self), *_check_steps(self), *_check_scheduled(self)]


def _to_table(frame: pd.DataFrame, name: str, what: str) -> pa.Table:
    schema = SCHEMAS[name]
    if set(frame.columns) != set(schema.names):
        missing, unknown = (
            sorted(set(schema.names) - set(frame.columns)),
            sorted(set(frame.columns) - set(schema.names)),
        )
        raise RecordError(
            f"{what}: missing columns {missing}, unknown columns {unknown}; it has {', '.join(schema.names)}"
        )
    try:
        table = pa.Table.from_pandas(frame, schema=schema, preserve_index=False)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise RecordError(f"{what} does not follow its schema: {error}") from error
    for column in schema.names:
        nullable = _NULLABLE_EVENT if name == "cache" else _NULLABLE
        if column not in nullable and table[column].null_count:
            raise RecordError(f"{what}: {column} is missing in {table[column].null_count} rows; only {nullable} may be")
    return table.replace_schema_metadata(None)


def _check_requests(record: RunRecord) -> Iterator[str]:
    requests = record.requests
    if not record.partial and (unfinished := int(requests["finish_reason"].isna().sum())):
        yield f"{unfinished} requests are unfinished, but the run is not marked partial"
    for name in requests["request_id"][requests["request_id"].duplicated()]:
        yield f"request {name}: recorded more than once"
    rows: Iterable[Any] = requests.itertuples()
    for row in rows:
        times = np.asarray(row.token_times)
        stamps = [stamp for stamp in (row.arrival, row.admitted, row.first_token, *times, row.finish) if stamp == stamp]
        reason = row.finish_reason if isinstance(row.finish_reason, str) else None
        if len(row.token_ids) != row.num_prompt_tokens + row.num_output_tokens:
            yield f"request {row.request_id}: {len(row.token_ids)} tokens recorded, not its prompt and output"
        if len(times) != row.num_output_tokens:
            yield f"request {row.request_id}: {row.num_output_tokens} output tokens reported, {len(times)} delivered"
        if not np.isfinite([*stamps, *times]).all() or not row.arrival >= 0:
            yield f"request {row.request_id}: times must be finite and at least 0, found {stamps}"
        if (np.diff(stamps) < -_CLOCK_S).any():
            yield f"request {row.request_id}: arrival, admitted, first_token, token_times, finish go back in time"
        if len(times) and not abs(times[0] - row.first_token) <= _CLOCK_S:
            yield f"request {row.request_id}: first_token is {row.first_token}, its first token came at {times[0]}"
        if not 0 <= row.num_cached_tokens < max(1, row.num_prompt_tokens):
            yield f"request {row.request_id}: {row.num_cached_tokens} of {row.num_prompt_tokens} prompt tokens cached"
        if reason not in (None, *COMPLETED, *FAILED):
            yield f"request {row.request_id}: finish_reason {reason!r} is none of {', '.join(COMPLETED + FAILED)}"
        if reason in COMPLETED and (row.num_output_tokens < 1 or np.isnan([row.admitted, row.finish]).any()):
            yield f"request {row.request_id}: finished by {reason} without a token, an admission or a finish"
        if reason in COMPLETED and not isinstance(row.output_hash, str):
            yield f"request {row.request_id}: finished by {reason} without an output hash"
        if reason == "refused" and (row.num_output_tokens or not np.isnan(row.admitted)):
            yield f"request {row.request_id}: refused, yet admitted or answered"


def _check_steps(record: RunRecord) -> Iterator[str]:
    steps = record.steps
    start, end = steps["start"].to_numpy(), steps["end"].to_numpy()
    if (np.diff(steps["step"]) != 1).any():
        yield "steps: the step numbers do not count up by 1"
    for _, own in steps.groupby("instance", sort=False):
        starts, ends = own["start"].to_numpy(), own["end"].to_numpy()
        if (ends < starts).any() or (starts[1:] < ends[:-1] - _CLOCK_S).any():
            yield "steps: a step ends before it starts, or starts before the last one ended"
    parts = steps[["schedule_s", "forward_s", "sample_s", "observer_s"]].to_numpy()
    if (parts < 0).any() or (parts.sum(axis=1) > end - start + _CLOCK_S).any():
        yield "steps: schedule_s, forward_s, sample_s and observer_s are negative or exceed the step"
    if not (steps["blocks_cached"].between(0, steps["blocks_free"]) & (steps["cache_s"] <= steps["schedule_s"])).all():
        yield "steps: blocks_cached exceeds blocks_free, or cache_s exceeds schedule_s"
    if ((steps["blocks_held"] + steps["blocks_free"]).groupby(steps["instance"]).nunique() > 1).any():
        yield "steps: blocks_held + blocks_free changes"
    planned = record.scheduled.groupby("step")["num_tokens"].agg(["sum", "size"]).reindex(steps["step"], fill_value=0)
    for reported, delivered in (("num_tokens", "sum"), ("num_seqs", "size")):
        wrong = planned[delivered].to_numpy() != steps[reported].to_numpy()
        if wrong.any():
            yield f"steps {steps['step'][wrong].tolist()[:5]}: {reported} differs from what was scheduled"


def _check_scheduled(record: RunRecord) -> Iterator[str]:
    requests, scheduled = record.requests.drop_duplicates("request_id"), record.scheduled
    names = requests["request_id"].to_numpy()
    owner = pd.Index(names).get_indexer(scheduled["request_id"])  # each row's request, -1 where unknown
    for column, is_known in (("request_id", owner >= 0), ("step", scheduled["step"].isin(record.steps["step"]))):
        if unknown := scheduled[column][~is_known].unique().tolist():
            yield f"scheduled: {column} {unknown[:5]} is not recorded elsewhere"
    if scheduled.duplicated(["step", "request_id"]).any():
        yield "scheduled: a request is listed twice in one step"
    if (scheduled["num_tokens"] < 1).any():
        yield "scheduled: a request is listed with no tokens"
    if unknown := sorted(set(scheduled["phase"]) - set(PHASES)):
        yield f"scheduled: phase {unknown} is none of {', '.join(PHASES)}"
    order = np.lexsort((scheduled["step"], owner))
    order = order[owner[order] >= 0]
    owner = owner[order]
    before, tokens = (scheduled[name].to_numpy()[order] for name in ("num_computed_before", "num_tokens"))
    after = before + tokens
    prompt, output, cached = (
        requests[name].to_numpy() for name in ("num_prompt_tokens", "num_output_tokens", "num_cached_tokens")
    )
    begins = np.diff(owner, prepend=-1) != 0
    stood = np.where(begins, cached[owner], np.roll(after, 1))
    is_prefill = (scheduled["phase"] == "prefill").to_numpy()[order]
    for wrong, what in (
        (before != stood, "does not go on where it stood"),
        (is_prefill != (before < prompt[owner]), "has a phase unlike its computed tokens"),
    ):
        for name in names[np.unique(owner[wrong])]:
            yield f"scheduled: request {name} {what}"
    computed = np.zeros(len(names), np.int64)
    computed[owner] = after  # the last of a request's rows stays
    total = prompt + output - 1
    for i in np.flatnonzero(requests["finish_reason"].isin(COMPLETED).to_numpy() & (computed != total)):
        yield f"scheduled: request {names[i]} computed {computed[i]} tokens, must be prompt + output - 1 = {total[i]}"
