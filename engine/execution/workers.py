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
import time
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


class Children:
    """Processes on this host that a process starts, watches, and ends.

    Each is ``python -m module``, with what it is to know, pickled, on its standard input.

    Args:
        module: What they run.
        children: Of each its name in messages, what it is to know, and the file descriptors that it inherits.
    """

    def __init__(self, module: str, children: Sequence[tuple[str, Any, Sequence[int]]]) -> None:
        self.names = tuple(name for name, _, _ in children)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._outputs: list[IO[bytes]] = []
        weakref.finalize(self, _end, self._processes)  # also at exit
        try:
            for _, setup, fds in children:
                self._start(module, setup, fds)
        except BaseException:
            self.kill()
            raise

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by name."""
        return {name: process.pid for name, process in zip(self.names, self._processes, strict=True)}

    def what_ended(self, wait_s: float = 0.0) -> str | None:
        """The first one that has ended, how, and the end of what it printed; None while all are alive."""
        deadline = time.monotonic() + wait_s
        while True:
            for index, process in enumerate(self._processes):
                status = process.poll()
                if status is not None:
                    return self._report(index, status)
            if time.monotonic() >= deadline:
                return None
            time.sleep(0.01)

    def wait(self) -> None:
        """Let them end by themselves for a while, then end them."""
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_S)
        self.kill()

    def kill(self) -> None:
        """End them now."""
        _end(self._processes)

    def _start(self, module: str, setup: Any, fds: Sequence[int]) -> None:
        output = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the worker
        root = str(Path(__file__).parents[2])
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))}
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", module],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            pass_fds=tuple(fds),
            env=environment,
            process_group=0,  # Ctrl-C in a terminal is for the process that started them to act upon
        )
        self._processes.append(process)
        self._outputs.append(output)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended already: what_ended() says why
            pickle.dump(setup, process.stdin)
            process.stdin.flush()

    def _report(self, index: int, status: int) -> str:
        output = self._outputs[index]
        output.seek(0)
        lines = output.read().decode(errors="replace").splitlines()[-_LAST_LINES:]
        how = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
        said = "\n  ".join(lines) if lines else "(it printed nothing)"
        who = f"{self.names[index]} (process {self._processes[index].pid})"
        return f"{who} ended with {how}; make a new engine. Its last lines:\n  {said}"


class LocalWorkers(GroupWorkers):
    """Worker processes on this host, children of this one: ``engine.execution.worker``.

    Args:
        workers: As for ``Children``, from rank 1.
    """

    def __init__(self, workers: Sequence[tuple[str, Any, Sequence[int]]]) -> None:
        super().__init__()
        self._children = Children("engine.execution.worker", workers)

    def check(self) -> None:
        report = self._children.what_ended()
        if report is not None:
            self.abandon(report)
            assert self._why_over is not None
            raise WorkerError(self._why_over)

    def abandon(self, why: str) -> None:
        super().abandon(why)
        self._children.kill()

    def close(self, group: Communicator) -> None:
        super().close(group)
        self._children.wait()


def end_with_the_pipe() -> None:
    """In a child: end the process when its standard input is closed, which no death of the parent can fail to do."""

    def watch() -> None:
        os.read(sys.stdin.fileno(), 1)  # nothing more comes: it returns when the parent's end is closed
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


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
