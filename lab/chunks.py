"""What chunked prefill did, counted from the records: stalled decodes, KV that is read again, long prompts' TTFT."""

from __future__ import annotations

import numpy as np
import pandas as pd

from lab.record import RunRecord


def kv_tokens_read(record: RunRecord) -> int:
    """Tokens whose K and V the attention of prefills reads: each chunk reads all that came before it, too.

    A whole prompt of n tokens reads n; in chunks it is the sum over its chunks of all tokens up to the chunk's end.
    """
    prefills = record.scheduled[record.scheduled["phase"] == "prefill"]
    return int((prefills["num_computed_before"] + prefills["num_tokens"]).sum())


def prefill_tokens(record: RunRecord) -> int:
    """Prompt tokens that were computed."""
    return int(record.scheduled.loc[record.scheduled["phase"] == "prefill", "num_tokens"].sum())


def prefill_steps(record: RunRecord, prefix: str) -> pd.Series:
    """In how many steps each prompt of a class was computed, by request_id."""
    mine = record.scheduled[record.scheduled["request_id"].str.startswith(prefix)]
    return mine[mine["phase"] == "prefill"].groupby("request_id").size()


def gaps(record: RunRecord, prefix: str) -> np.ndarray:
    """Seconds between two tokens of a request, pooled over the requests of a class."""
    mine = record.completed[record.completed["request_id"].str.startswith(prefix)]
    return np.concatenate([np.diff(times) for times in mine["token_times"]])


def stalled_share(record: RunRecord, prefix: str) -> float:
    """The share of a class's decode steps in which prompt tokens of others were computed too."""
    with_prefill = set(record.scheduled.loc[record.scheduled["phase"] == "prefill", "step"])
    mine = record.scheduled[
        record.scheduled["request_id"].str.startswith(prefix) & (record.scheduled["phase"] == "decode")
    ]
    return float(mine["step"].isin(with_prefill).mean())


def ttft(record: RunRecord, prefix: str) -> np.ndarray:
    """Seconds to the first token of each request of a class."""
    mine = record.completed[record.completed["request_id"].str.startswith(prefix)]
    return (mine["first_token"] - mine["arrival"]).to_numpy()


def starved_steps(record: RunRecord) -> int:
    """Steps in which a running request that decodes got no token: 0, as every running request moves in every step."""
    decodes = record.scheduled[record.scheduled["phase"] == "decode"]
    spans = decodes.groupby("request_id")["step"].agg(["min", "max", "size"])
    return int((spans["max"] - spans["min"] + 1 - spans["size"]).sum())
