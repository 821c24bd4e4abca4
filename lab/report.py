"""``python -m lab report``: runs the stages' notebooks and writes their HTML reports and the overview."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lab.paths import ReportPaths, repository_root, stage_name

if TYPE_CHECKING:
    from lab.notebook_run import NotebookRun

INTERRUPTED = 130


def add_command(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Registers ``report``."""
    parser = subparsers.add_parser(
        "report",
        description="Executes notebooks/stage_N.ipynb, judges it by the results its last cell writes, and writes "
        "reports/stage_N.html and reports/index.html. Exit status: 0 all passed, 1 a report failed, 2 wrong usage, "
        "130 interrupted.",
    )
    parser.add_argument(
        "--stage",
        action="append",
        metavar="N",
        type=_stage,
        help="a stage's number, or another notebook's name; may be repeated (default: every notebooks/stage_*.ipynb)",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="small sizes, timing not judged, results under reports/quick/ (also: QUICK=1 in the environment)",
    )
    parser.add_argument(
        "-p",
        "--parameter",
        nargs=2,
        action="append",
        default=[],
        metavar=("NAME", "VALUE"),
        help="a parameter of the notebook, checked against its declared type; may be repeated",
    )
    parser.set_defaults(run=run)


def _stage(text: str) -> str:
    try:
        return stage_name(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def run(arguments: argparse.Namespace) -> int:
    """Makes the reports that ``arguments`` ask for and returns the exit status."""
    from lab.notebook_run import ReportError
    from lab.parameters import ParameterError, check_parameters

    try:
        root = repository_root()
        names = _names(root, arguments.stage)
        parameters = _given(arguments.parameter, quick=arguments.quick or _quick_from_environment())
        for name in names:  # a typing error must not show after the first notebook's hour
            check_parameters(ReportPaths(root, name).notebook, parameters)
        records = []
        for name in names:
            record = build_report(root, name, parameters)
            records.append(record)
            if record.status == "interrupted":
                return INTERRUPTED
    except (ReportError, ParameterError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0 if all(record.status == "passed" for record in records) else 1


def build_report(root: Path, name: str, parameters: Mapping[str, object]) -> NotebookRun:
    """Runs one notebook and writes its report and the overview, whatever the run's outcome.

    Raises ``ParameterError`` for parameters the notebook does not take and ``ReportError`` when the reports folder
    cannot be written; nothing has run then.
    """
    from lab.design_note import design_note_problem
    from lab.notebook_run import clear_stale, executed_notebook, run_notebook
    from lab.parameters import check_parameters, effective
    from lab.paths import write_atomic
    from lab.provenance import command_line
    from lab.render import render_index, render_stage

    notebook = ReportPaths(root, name).notebook
    checked = check_parameters(notebook, parameters)
    paths = ReportPaths(root, name, quick=bool(effective(notebook, checked, "quick")))
    clear_stale(paths)
    record = run_notebook(paths, checked, command_line(), _say)
    if record.status == "passed" and (problem := design_note_problem(paths, record, _say)):
        record = replace(record, status="failed", error=problem)
    record.save(paths)
    write_atomic(paths.html, render_stage(paths, executed_notebook(paths), record))
    write_atomic(paths.reports / "index.html", render_index(root))
    _say(f"{name}  {record.status.upper()} after {record.seconds:.1f} s: {paths.html}\n")
    if record.error:
        print(f"{name}: {record.error}", file=sys.stderr)
    return record


def _say(text: str) -> None:
    print(text, end="", flush=True)


def _quick_from_environment() -> bool:
    from lab.parameters import TRUTH, ParameterError

    value = os.environ.get("QUICK", "").lower() or "0"
    if value not in TRUTH:
        raise ParameterError(f"QUICK={value!r} in the environment is none of {', '.join(TRUTH)}")
    return TRUTH[value]


def _names(root: Path, asked: Sequence[str] | None) -> list[str]:
    present = sorted((path.stem for path in (root / "notebooks").glob("stage_*.ipynb")), key=lambda n: (len(n), n))
    if asked is None and not present:
        raise FileNotFoundError(f"{root / 'notebooks'} holds no stage_*.ipynb")
    for name in asked or ():
        path = ReportPaths(root, name).notebook
        if not path.exists():
            raise FileNotFoundError(f"{path} does not exist; notebooks there: {', '.join(present) or 'none'}")
    return list(dict.fromkeys(asked or present))


def _given(pairs: Sequence[tuple[str, str]], quick: bool) -> dict[str, Any]:
    """``-p`` pairs as a mapping, ``--quick`` among them. Raises ``ParameterError`` for a name given twice."""
    from lab.parameters import ParameterError

    given: dict[str, Any] = {"quick": True} if quick else {}
    for name, value in pairs:
        if name in given:
            raise ParameterError(f"parameter {name} is given twice: {given[name]!r} and {value!r}")
        given[name] = value
    return given
