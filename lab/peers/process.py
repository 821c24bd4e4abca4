"""A peer's process: started in its environment, asked by lines of JSON."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from engine.models.hub import resolve_model
from lab.peers.adapter import Settings
from lab.peers.catalogue import Peer
from lab.peers.environments import PeerError, preloaded, python_of
from lab.peers.gguf_file import cached_gguf
from lab.record import REQUESTS, SCHEDULED, STEPS, RunRecord, hash_tokens
from lab.workload import Workload

START_S, REPLAY_S = 1800.0, 7200.0
_NEVER = float("nan")


class PeerProcess:
    """One engine, loaded and idle between calls. A context manager.

    Args:
        peer: Which one.
        settings: What every engine is asked for; the peer's own options are added.
        root: The repository, whose ``.venv-peers`` is used.
        logs: Folder for what the process prints.

    Raises:
        PeerError: It cannot be installed or started; from later calls, too, when it fails or does not answer in time.
    """

    def __init__(self, peer: Peer, settings: Settings, root: Path, logs: Path) -> None:
        self.name = peer.name
        logs.mkdir(parents=True, exist_ok=True)
        self._log = logs / f"{peer.name.replace(' ', '_')}.log"
        gguf = _gguf_of(settings) if peer.needs_gguf else ""
        python = python_of(peer, root)
        variables = dict(peer.variables)
        if libraries := preloaded(peer, root):
            variables["LD_PRELOAD"] = ":".join(map(str, libraries))
        with self._log.open("w", encoding="utf-8") as log:
            self._process = subprocess.Popen(
                [python, "-m", "lab.peers.host", peer.adapter],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=root,
                env=os.environ | variables,
                start_new_session=True,  # Ctrl-C ends the peers through `close`, not in the middle of a line
            )
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()
        options = {**peer.options, **settings.options}
        try:
            facts: Mapping[str, str] = self._ask(
                "start", START_S, settings=asdict(replace(settings, options=options, gguf=gguf))
            )
        except BaseException:
            self.close()
            raise
        names = {"preloaded": " ".join(path.name for path in libraries)} if peer.preload else {}
        self.facts = {**facts, **names}

    def replay(self, workload: Workload) -> RunRecord:
        """Replay a workload of token ids, with nothing known from before. Queue times are not known of a peer."""
        self.reset()
        requests = [
            {
                "id": one.request_id,
                "arrival": one.arrival_s,
                "prompt": one.prompt_token_ids,
                "max_tokens": one.max_tokens,
                "ignore_eos": one.ignore_eos,
            }
            for one in workload.requests
        ]
        answers = self._ask("replay", REPLAY_S, requests=requests)
        rows = []
        for one in workload.requests:
            prompt = one.prompt_token_ids
            assert prompt is not None
            tokens, times = answers[one.request_id]["tokens"], answers[one.request_id]["times"]
            if one.ignore_eos and len(tokens) != one.max_tokens:
                raise PeerError(f"{one.request_id} got {len(tokens)} tokens, {one.max_tokens} were asked for")
            reason = "length" if len(tokens) == one.max_tokens else "stop"
            output = hash_tokens(tokens)
            rows.append(
                (
                    one.request_id, one.arrival_s, _NEVER, times[0], times[-1], len(prompt), len(tokens), reason, times,
                    0, output, [*prompt, *tokens],
                )
            )  # fmt: skip
        meta = {"workload": workload.name, "seed": workload.seed, "content_hash": workload.content_hash}
        steps, scheduled = (pd.DataFrame(columns=schema.names) for schema in (STEPS, SCHEDULED))
        return RunRecord(pd.DataFrame(rows, columns=REQUESTS.names), steps, scheduled, meta | {"engine": self.name})

    def answer(self, prompts: Mapping[str, Sequence[int]], max_tokens: int) -> dict[str, tuple[int, ...]]:
        """The greedy answers of prompts that are submitted at once, in the mapping's order."""
        requests = [
            {"id": name, "arrival": 0.0, "prompt": list(prompt), "max_tokens": max_tokens, "ignore_eos": False}
            for name, prompt in prompts.items()
        ]
        answers = self._ask("replay", REPLAY_S, requests=requests)
        return {name: tuple(answer["tokens"]) for name, answer in answers.items()}

    def reset(self) -> None:
        """Let the engine forget every prompt."""
        self._ask("reset", START_S)

    def close(self) -> None:
        """End the process, kindly at first."""
        if self._process.poll() is None:
            with contextlib.suppress(PeerError):
                self._ask("stop", 20.0)
            self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        try:
            for line in self._process.stdout:
                self._answers.put(line)
        except ValueError:
            pass  # closed while it was read
        self._answers.put("")

    def _ask(self, do: str, patience_s: float, **arguments: Any) -> Any:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self._process.stdin.flush()
            line = self._answers.get(timeout=patience_s)
        except queue.Empty:
            self._process.kill()
            raise PeerError(f"{do}: no answer within {patience_s:.0f} s (see {self._log})") from None
        except OSError:
            line = ""
        if not line:
            raise PeerError(f"{do}: the process ended with status {self._process.wait()}: {self._last_words()}")
        answer = json.loads(line)
        if "error" in answer:
            raise PeerError(f"{do}: {answer['error']}"[:500])
        return answer["ok"]

    def _last_words(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1].strip()[:300] if lines else "it printed nothing"


def _gguf_of(settings: Settings) -> str:
    try:
        return str(cached_gguf(resolve_model(settings.model), settings.dtype))
    except ValueError as error:
        raise PeerError(f"no GGUF file of the model: {error}") from error


def starters(
    chosen: Iterable[Peer], settings: Settings, root: Path, logs: Path
) -> dict[str, Callable[[], PeerProcess]]:
    """What starts each of these peers, by name."""
    return {peer.name: partial(PeerProcess, peer, settings, root, logs) for peer in chosen}
