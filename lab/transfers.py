"""What travelled between the two instances of a disaggregated engine, from the records: bytes, speed, the handover."""

from __future__ import annotations

import numpy as np
import pandas as pd

from lab.record import RunRecord


def bytes_unaccounted(record: RunRecord, bytes_per_block: int) -> int:
    """Bytes that travelled beyond, or below, the blocks that did times the bytes of a block: 0."""
    moved = record.transfers
    return int(moved["num_bytes"].sum() - moved["num_blocks"].sum() * bytes_per_block)


def blocks_unaccounted(record: RunRecord, block_size: int) -> int:
    """Prompt blocks of completed transfers that neither travelled nor were there already: 0."""
    done = record.transfers[record.transfers["completed"]]
    prompts = done.merge(record.requests[["request_id", "num_prompt_tokens"]], on="request_id")
    needed = -(-prompts["num_prompt_tokens"] // block_size)
    return int((needed - prompts["num_blocks"] - prompts["num_blocks_hit"]).abs().sum())


def handovers(record: RunRecord) -> pd.DataFrame:
    """One row for each completed transfer.

    Returns:
        request_id, num_bytes, seconds (of the channel), gbytes_per_s, ttft (seconds; ends before anything travels), gap
        (seconds between the first and the second token), waited (offered to begun), travelled (begun to ended), and
        rest (the gap less these two: the step that the second token comes from, and messages).
    """
    done = record.transfers[record.transfers["completed"]]
    requests = record.completed[record.completed["num_output_tokens"] > 1]
    rows = done.merge(requests[["request_id", "arrival", "first_token", "token_times"]], on="request_id")
    gap = np.array([times[1] - times[0] for times in rows["token_times"]], dtype=float)
    waited, travelled = rows["begun"] - rows["offered"], rows["ended"] - rows["begun"]
    return pd.DataFrame(
        {
            "request_id": rows["request_id"],
            "num_bytes": rows["num_bytes"],
            "seconds": rows["seconds"],
            "gbytes_per_s": rows["num_bytes"] / rows["seconds"].where(rows["seconds"] > 0) / 1e9,
            "ttft": rows["first_token"] - rows["arrival"],
            "gap": gap,
            "waited": waited,
            "travelled": travelled,
            "rest": gap - waited - travelled,
        }
    )
