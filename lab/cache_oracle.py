"""An independent count of prefix-cache hits, from the log of what a run published, evicted and admitted.

Nothing here hashes chains or shares code with `engine.kv.prefix_cache`: a prefix is its tokens themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd

from lab.record import RunRecord


def replay_hits(record: RunRecord, block_size: int, salts: Mapping[str, str] | None = None) -> pd.DataFrame:
    """Replay the cache's log and count the hits that each admission must have had.

    Args:
        record: A run's records with its cache log; the cache was empty when the run began.
        block_size: Tokens per block.
        salts: request_id to cache salt; "" where missing.

    Returns:
        One row for each admission, in order: request_id, num_prompt_tokens, hit_tokens (by this replay), recorded (by
        the engine), and ideal (by a cache that never forgets and knows every earlier request of the log at once).
    """
    tokens = {row.request_id: np.asarray(row.token_ids, np.int64) for row in _rows(record.requests)}
    prompts = record.requests.set_index("request_id")["num_prompt_tokens"]
    recorded = record.requests.set_index("request_id")["num_cached_tokens"]
    known: dict[bytes, set[int]] = {}
    prefix_of: dict[int, bytes] = {}
    everything: set[bytes] = set()
    rows = []

    def prefix(request_id: str, blocks: int) -> bytes:
        return (salts or {}).get(request_id, "").encode() + b"/" + tokens[request_id][: blocks * block_size].tobytes()

    def longest(request_id: str, among: Mapping[bytes, Any] | set[bytes]) -> int:
        limit, count = (int(prompts[request_id]) - 1) // block_size, 0
        while count < limit and prefix(request_id, count + 1) in among:
            count += 1
        return count * block_size

    for event in _rows(record.cache):
        if event.kind == "admit":
            name = event.request_id
            rows.append(
                (name, int(prompts[name]), longest(name, known), int(recorded[name]), longest(name, everything))
            )
            everything.update(prefix(name, blocks + 1) for blocks in range(len(tokens[name]) // block_size))
        elif event.kind == "publish":
            key = prefix(event.request_id, int(event.index) + 1)
            known.setdefault(key, set()).add(int(event.block))
            prefix_of[int(event.block)] = key
        else:
            key = prefix_of.pop(int(event.block))
            known[key].remove(int(event.block))
            if not known[key]:
                del known[key]
    return pd.DataFrame(rows, columns=["request_id", "num_prompt_tokens", "hit_tokens", "recorded", "ideal"])


def prefix_tree(record: RunRecord, block_size: int) -> pd.DataFrame:
    """The tree of prompt prefixes that at least two requests share, as maximal runs of blocks without a fork.

    Returns:
        One row for each run of blocks: node (a number), parent (a node, or -1), depth (tokens before it), tokens (its
        length), requests (whose prompts hold it), and hits (requests that found all of it in the cache).
    """
    rows: list[dict[str, int]] = []
    prompts = [
        (np.asarray(row.token_ids[: row.num_prompt_tokens], np.int64), int(row.num_cached_tokens))
        for row in _rows(record.requests)
    ]

    def grow(members: list[tuple[np.ndarray, int]], depth: int, parent: int) -> None:
        groups: dict[bytes, list[tuple[np.ndarray, int]]] = {}
        for prompt, cached in members:
            if len(prompt) >= depth + block_size:
                groups.setdefault(prompt[depth : depth + block_size].tobytes(), []).append((prompt, cached))
        for group in groups.values():
            if len(group) < 2:
                continue
            end = depth + block_size
            while all(len(prompt) >= end + block_size for prompt, _ in group) and (
                len({prompt[end : end + block_size].tobytes() for prompt, _ in group}) == 1
            ):
                end += block_size
            node = len(rows)
            hits = sum(cached >= end for _, cached in group)
            size = {"node": node, "parent": parent, "depth": depth, "tokens": end - depth}
            rows.append(size | {"requests": len(group), "hits": hits})
            grow(group, end, node)

    grow(prompts, 0, -1)
    return pd.DataFrame(rows, columns=["node", "parent", "depth", "tokens", "requests", "hits"])


def _rows(frame: pd.DataFrame) -> Iterable[Any]:
    return frame.itertuples()
