"""``python -m lab.peers.host MODULE:CLASS``: one peer in its own process, driven by lines of JSON.

A line in is ``{"do": "start" | "replay" | "reset" | "stop", ...}``, a line out ``{"ok": ...}`` or ``{"error": ...}``.
What libraries print goes to the standard error: the real standard output is kept for answers. It needs the standard
library alone, since it runs where nothing of this project is installed.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TextIO

from lab.peers.adapter import Adapter, Settings

Answers = dict[str, dict[str, list[Any]]]


def replay(adapter: Adapter, requests: Sequence[Mapping[str, Any]]) -> Answers:
    """Submit each request when it is due, whatever the peer is doing then, and collect the answers.

    A peer that is busy when a request becomes due gets it as soon as its ``step`` returns; the clock of the request
    started when it was due.

    Args:
        adapter: An idle peer.
        requests: ``id``, ``arrival`` (seconds after the start), ``prompt``, ``max_tokens``, ``ignore_eos``; in order of
            arrival.

    Returns:
        By request: ``tokens``, and ``times`` in seconds after the start.

    Raises:
        RuntimeError: A token came for a request that is unknown or has ended.
    """
    answers: Answers = {request["id"]: {"tokens": [], "times": []} for request in requests}
    waiting, unfinished = deque(requests), set[str]()
    start = time.perf_counter()
    while waiting or unfinished:
        while waiting and waiting[0]["arrival"] <= time.perf_counter() - start:
            due = waiting.popleft()
            unfinished.add(due["id"])
            adapter.submit(due["id"], due["prompt"], due["max_tokens"], due["ignore_eos"])
        if not unfinished:
            time.sleep(max(0.0, start + waiting[0]["arrival"] - time.perf_counter()))
            continue
        for token in adapter.step():
            if token.request_id not in unfinished:
                raise RuntimeError(f"a token came for {token.request_id!r}, which is not running")
            answers[token.request_id]["tokens"].append(token.token_id)
            answers[token.request_id]["times"].append(token.time - start)
            if token.is_last:
                unfinished.remove(token.request_id)
    return answers


def serve(make: Callable[[], Adapter], commands: Iterable[str], answers: TextIO) -> None:
    """Carry out commands until they end; an error is an answer, and the next command is tried all the same."""
    adapter = make()
    actions: dict[str, Callable[..., Any]] = {
        "start": lambda settings: adapter.start(Settings(**settings)),
        "replay": lambda requests: replay(adapter, requests),
        "reset": adapter.reset,
        "stop": adapter.stop,
    }
    for line in commands:
        command = json.loads(line)
        try:
            answer = {"ok": actions[command.pop("do")](**command)}
        except Exception as error:  # whatever a peer raises is the peer's result
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def main() -> None:
    """Serve the adapter that the command line names."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    module, _, name = sys.argv[1].partition(":")
    serve(getattr(importlib.import_module(module), name), sys.stdin, answers)


if __name__ == "__main__":
    main()
