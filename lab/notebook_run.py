"""Executes one notebook and says, without trusting the notebook, whether it did its work.

papermill reports ``completed`` even after its kernel was killed, so the verdict comes from the results file that the
notebook's last cell writes; whatever an earlier run left is deleted first.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

import nbformat
from papermill import execute_notebook
from papermill.engines import NBClientEngine, papermill_engines
from papermill.exceptions import PapermillExecutionError

from lab.paths import ReportPaths, write_atomic
from lab.results import StageResults

Say = Callable[[str], None]
Status = Literal["passed", "failed", "interrupted"]

# A kernel's own log would mix into the progress lines; what goes wrong in it is judged and told here.
_QUIET_KERNEL = ["--log-level=CRITICAL"]


class ReportError(Exception):
    """The report cannot be made at all; the message says why and what to do."""


@dataclass(frozen=True)
class NotebookRun:
    """What happened in one run. ``error`` is one line ("" when all went well), ``seconds`` is wall time."""

    name: str
    status: Status
    quick: bool
    started: str
    seconds: float
    command: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""

    def save(self, paths: ReportPaths) -> None:
        write_atomic(paths.run_record, json.dumps(asdict(self), indent=1, default=str) + "\n")

    @classmethod
    def load(cls, paths: ReportPaths) -> NotebookRun:
        return cls(**json.loads(paths.run_record.read_text(encoding="utf-8")))


def clear_stale(paths: ReportPaths) -> None:
    """Removes what an earlier run wrote and makes the folders for this one.

    Raises :class:`ReportError` when the reports folder cannot be written.
    """
    stale = (paths.results, paths.summary, paths.html, paths.executed, paths.run_record)
    try:
        for path in stale:
            path.unlink(missing_ok=True)
        if paths.records.is_dir():
            shutil.rmtree(paths.records)
        paths.records.mkdir(parents=True)
        write_atomic(paths.executed.with_suffix(".probe"), "")
        paths.executed.with_suffix(".probe").unlink()
    except OSError as error:
        raise ReportError(
            f"the reports folder {paths.reports} is not writable ({error}); make it a folder this user may write"
        ) from error


def run_notebook(paths: ReportPaths, parameters: Mapping[str, Any], command: str, say: Say) -> NotebookRun:
    """Executes ``paths.notebook`` from the repository's root and judges it. Nothing raised by the run escapes.

    Keeps the executed notebook, as far as it came. On Ctrl-C the kernel is interrupted
    first and gets a few seconds to save its partial records; the status is then ``interrupted``.
    """
    started, clock = datetime.now(UTC).isoformat(timespec="seconds"), time.perf_counter()
    status: Status = "failed"
    progress = _Progress(paths.name, say)
    try:
        execute_notebook(
            paths.notebook,
            paths.executed,
            dict(parameters),
            engine_name=_ProgressEngine.NAME,
            kernel_name="python3",
            progress_bar=False,
            cwd=paths.root,
            progress=progress,
            extra_arguments=_QUIET_KERNEL,
        )
        error = _judge(paths)
        status = "failed" if error else "passed"
    except KeyboardInterrupt:
        status, error = "interrupted", "interrupted (Ctrl-C); what was recorded until then is kept"
    except PapermillExecutionError as failure:
        error = f"cell [{failure.exec_count}] raised {failure.ename}: {failure.evalue}".split("\n", 1)[0]
    except Exception as failure:  # a killed kernel, no kernel, an unreadable notebook: each ends as a FAILED report
        error = f"{type(failure).__name__}: {failure}".split("\n", 1)[0] + progress.where
    return NotebookRun(
        name=paths.name,
        status=status,
        quick=paths.quick,
        started=started,
        seconds=round(time.perf_counter() - clock, 1),
        command=command,
        parameters=dict(parameters),
        error=error,
    )


def executed_notebook(paths: ReportPaths) -> nbformat.NotebookNode:
    """The notebook as far as it ran; the source where nothing was saved, or half a file when the run was ended."""
    try:
        return nbformat.read(paths.executed, as_version=4)
    except (OSError, ValueError):
        return nbformat.read(paths.notebook, as_version=4)


def _judge(paths: ReportPaths) -> str:
    """Why the run fails although the notebook ended, or ""."""
    if not paths.results.exists():
        return f"the notebook ended without writing {paths.results.relative_to(paths.root)}"
    try:
        results = StageResults.load(paths.results)
    except (ValueError, OSError) as error:
        return str(error)
    return "; ".join(results.failures)


class _Progress:
    """One line per code cell, named after the heading above it: started without an end, ended with its time."""

    def __init__(self, name: str, say: Say) -> None:
        self.name, self.say = name, say
        self.heading, self.done, self.begin = "", 0, 0.0

    @property
    def where(self) -> str:
        return f" (in code cell {self.done}, under {self.heading!r})" if self.done else ""

    def start(self, cell: nbformat.NotebookNode, code_cells: int) -> None:
        if cell.cell_type == "markdown":
            headings = [line.lstrip("# ") for line in cell.source.splitlines() if line.startswith("#")]
            self.heading = headings[-1] if headings else self.heading
            return
        self.done, self.begin = self.done + 1, time.perf_counter()
        self.say(f"{self.name}  [{self.done:>2}/{code_cells}]  {self.heading[:64]:<64} ")

    def end(self, cell: nbformat.NotebookNode) -> None:
        if cell.cell_type == "code":
            self.say(f"{time.perf_counter() - self.begin:8.1f} s\n")


class _Announcing:
    """papermill's execution manager, with each cell's start and end also told to ``progress``."""

    def __init__(self, manager: Any, progress: _Progress) -> None:
        self._manager, self._progress = manager, progress
        self._code_cells = sum(cell.cell_type == "code" for cell in manager.nb.cells)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)

    def cell_start(self, cell: nbformat.NotebookNode, cell_index: int) -> None:
        self._progress.start(cell, self._code_cells)
        self._manager.cell_start(cell, cell_index)

    def cell_complete(self, cell: nbformat.NotebookNode, cell_index: int) -> None:
        self._manager.cell_complete(cell, cell_index=cell_index)
        self._progress.end(cell)


class _ProgressEngine(NBClientEngine):
    NAME = "lab"

    @classmethod
    def execute_managed_notebook(cls, nb_man: Any, kernel_name: str, *, progress: _Progress, **options: Any) -> Any:
        return super().execute_managed_notebook(_Announcing(nb_man, progress), kernel_name, **options)


papermill_engines.register(_ProgressEngine.NAME, _ProgressEngine)
