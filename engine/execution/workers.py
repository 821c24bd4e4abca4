"""The processes of the other ranks as rank 0 sees them: watched while it waits for them, ended whatever happens.

Each worker's standard input is a pipe from rank 0. Its set-up comes through it, and its end, which no death of rank 0
can fail to bring about, ends the worker. Nothing has a name in the file system, so nothing can be left there.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from engine.execution.communicator import Communicator

_LAST_LINES = 15
_GRACE_S = 5.0


class WorkerError(RuntimeError):
    """A rank has failed, so no other can go on; the message names it and shows the end of what it printed."""


class Workers:
    """No process to look after: there is one rank, or the ranks are somebody else's children."""

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Around what every rank takes part in."""
        yield

    def check(self) -> None:
        """Called while rank 0 waits for the others.

        Raises:
            WorkerError: One of them has ended.
        """

    def close(self, group: Communicator) -> None:
        """End the other ranks and the group."""


class GroupWorkers(Workers):
    """Ranks that must stay in step: a failure on rank 0 ends the group, and an interrupt waits for the step's end."""

    def __init__(self) -> None:
        self._why_over: str | None = None

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        if self._why_over is not None:
            raise WorkerError(self._why_over)
        with _interrupts_wait():
            try:
                yield
            except BaseException as error:
                self.abandon(f"the ranks have ended after: {type(error).__name__}: {error}")
                raise

    def abandon(self, why: str) -> None:
        """Give the group up: the ranks are no longer in step."""
        self._why_over = self._why_over or why

    def close(self, group: Communicator) -> None:
        if self._why_over is None:
            self._why_over = "the engine is closed; make a new one"
            with contextlib.suppress(RuntimeError):  # a rank that died meanwhile is no reason not to close
                group.broadcast(np.empty(0, np.int64))
        group.close()


class LocalWorkers(GroupWorkers):
    """Worker processes on this host, children of this one.

    Args:
        setups: What each worker is to know (``engine.execution.worker.Setup``), from rank 1.
        pass_fds: File descriptors that the workers inherit.
    """

    def __init__(self, setups: Sequence[Any], pass_fds: Sequence[int] = ()) -> None:
        super().__init__()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._outputs: list[IO[bytes]] = []
        weakref.finalize(self, _end, self._processes)  # also at exit
        try:
            for setup in setups:
                self._start(setup, pass_fds)
        except BaseException:
            _end(self._processes)
            raise

    def check(self) -> None:
        for rank, process in enumerate(self._processes, start=1):
            status = process.poll()
            if status is not None:
                self.abandon(self._report(rank, status))
                assert self._why_over is not None
                raise WorkerError(self._why_over)

    def abandon(self, why: str) -> None:
        super().abandon(why)
        _end(self._processes)

    def close(self, group: Communicator) -> None:
        super().close(group)
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_S)
        _end(self._processes)

    def _start(self, setup: Any, pass_fds: Sequence[int]) -> None:
        output = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the worker
        root = str(Path(__file__).parents[2])
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))}
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "engine.execution.worker"],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            pass_fds=tuple(pass_fds),
            env=environment,
            process_group=0,  # Ctrl-C in a terminal is for rank 0 to act upon
        )
        self._processes.append(process)
        self._outputs.append(output)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended already: check() says why
            pickle.dump(setup, process.stdin)
            process.stdin.flush()

    def _report(self, rank: int, status: int) -> str:
        output = self._outputs[rank - 1]
        output.seek(0)
        lines = output.read().decode(errors="replace").splitlines()[-_LAST_LINES:]
        how = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
        said = "\n  ".join(lines) if lines else "(it printed nothing)"
        pid = self._processes[rank - 1].pid
        return f"rank {rank} (process {pid}) ended with {how}; make a new engine. Its last lines:\n  {said}"


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()


@contextlib.contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Put an interrupt (SIGINT) off until the end of the block; the second one is not put off."""
    act = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(act):
        yield
        return
    interrupted = False

    def note(signum: int, frame: Any) -> None:
        nonlocal interrupted
        if interrupted:
            act(signum, frame)
        interrupted = True

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, act)
    if interrupted:
        act(signal.SIGINT, None)
