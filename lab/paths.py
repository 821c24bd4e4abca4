"""Where the lab's files lie. Every path starts at the repository's root, never at the working directory."""

from __future__ import annotations

import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

_PROJECT = 'name = "paged-attention-lab"'
_NAME = re.compile(r"[a-z][a-z0-9_]*")


def repository_root(start: Path | None = None) -> Path:
    """The nearest folder at or above ``start`` (default: the working directory) whose pyproject.toml is this project's.

    Where none does, the folder of the installed package is searched in the same way, so that notebooks run from
    anywhere. Raises ``FileNotFoundError`` when neither leads to a repository.
    """
    origins = (start or Path.cwd(), Path(__file__))
    for origin in origins:
        for folder in (origin.resolve(), *origin.resolve().parents):
            project = folder / "pyproject.toml"
            if project.is_file() and _PROJECT in project.read_text(encoding="utf-8"):
                return folder
    raise FileNotFoundError(
        f"no pyproject.toml with {_PROJECT} at or above {origins[0]} or {origins[1]}; "
        "run from inside a clone, or install the clone with `pip install -e .`"
    )


def stage_name(stage: int | str) -> str:
    """``3`` and ``"3"`` are ``"stage_3"``; other reports ("peers", "gpu") go by their own name."""
    name = f"stage_{stage}" if str(stage).isdecimal() else str(stage)
    if not _NAME.fullmatch(name):
        raise ValueError(f"stage {stage!r} is neither a number nor a name like 'peers' (small letters, digits, _)")
    return name


@dataclass(frozen=True)
class ReportPaths:
    """The files of one report: its source, what a run of it writes, and the evidence that is committed.

    A quick run keeps its results apart (``reports/quick/``, not committed): it must never overwrite full evidence.
    """

    root: Path
    name: str
    quick: bool = False

    @classmethod
    def of(cls, stage: int | str, quick: bool = False, root: Path | None = None) -> ReportPaths:
        return cls(root or repository_root(), stage_name(stage), quick)

    @property
    def reports(self) -> Path:
        return self.root / "reports"

    @property
    def notebook(self) -> Path:
        return self.root / "notebooks" / f"{self.name}.ipynb"

    @property
    def html(self) -> Path:
        return self.reports / f"{self.name}.html"

    @property
    def results_dir(self) -> Path:
        return self.reports / "quick" / self.name if self.quick else self.reports / self.name

    @property
    def results(self) -> Path:
        return self.results_dir / "results.json"

    @property
    def summary(self) -> Path:
        return self.results_dir / "report.md"

    @property
    def executed(self) -> Path:
        return self.reports / "runs" / f"{self.name}.ipynb"

    @property
    def run_record(self) -> Path:
        return self.reports / "runs" / f"{self.name}.json"

    @property
    def records(self) -> Path:
        """Raw per-request and per-step records of the latest run (not committed)."""
        return self.reports / "runs" / self.name

    @property
    def kept(self) -> Path:
        """What a run leaves for the next one, which does not clear it (not committed)."""
        return self.reports / "kept" / (f"quick_{self.name}" if self.quick else self.name)

    @property
    def design_note(self) -> Path:
        return self.reports / "design" / f"{self.name}.md"


def write_atomic(path: Path, text: str) -> None:
    """Writes ``text`` so that a reader, or an interrupted writer, never leaves half a file behind."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
