"""Turns an executed notebook and its results into one HTML file that needs nothing else, and all reports into an index.

plotly.js travels inside the page, once and gzipped (2 MB instead of 5); figures stay as plotly's MIME type in the
notebook, so JupyterLab and the page draw the same data.
"""

from __future__ import annotations

import base64
import gzip
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import nbformat
import plotly
from nbconvert import HTMLExporter
from nbconvert.filters import markdown2html
from traitlets.config import Config

from lab.notebook_run import NotebookRun
from lab.paths import ReportPaths
from lab.provenance import collect
from lab.results import Gate, StageResults, readable

FIGURE_MIME = "application/vnd.plotly.v1+json"
_HERE = Path(__file__).parent
_PAPERMILL_MARKER = "papermill-error-cell-tag"
_STATES = {"passed": "passed", "failed": "failed", "FAILED": "failed", "interrupted": "warned", "not judged": "idle"}


@dataclass(frozen=True)
class Tile:
    """One badge of the verdict strip; ``state`` (passed, failed, warned, idle) is its colour."""

    label: str
    value: str
    note: str
    state: str


def verdict_tiles(results: StageResults | None, record: NotebookRun | None) -> list[Tile]:
    """Verdict, golden, gates, regressions and noise floor, in this order; each says so where it has no value."""
    return [
        _verdict(results, record),
        _golden(results),
        _gates(results),
        _regressions(results),
        _noise(results),
    ]


def render_stage(paths: ReportPaths, notebook: nbformat.NotebookNode, record: NotebookRun) -> str:
    """The stage's report as HTML. ``notebook`` may have stopped anywhere: a failed run is shown as far as it came."""
    results = StageResults.load(paths.results) if record.status == "passed" else _results_if_valid(paths.results)
    notebook, title = _take_title(notebook)
    has_figure = any(
        FIGURE_MIME in output.get("data", {}) for cell in notebook.cells for output in cell.get("outputs", [])
    )
    report = {
        "eyebrow": f"Paged Attention Lab · {paths.name.replace('_', ' ')}",
        "title": results.title if results else title or paths.name,
        "meta": _meta(record, results),
        "verdict": record.status,
        "tiles": verdict_tiles(results, record),
        "failures": _failures(results, record),
        "has_error": any(o.output_type == "error" for cell in notebook.cells for o in cell.get("outputs", [])),
        "headline": [
            {"name": n.name, "value": readable(n.value), "unit": n.unit, "note": n.note}
            for n in (results.headline if results else ())
        ],
        "gates": [_gate_row(gate) for gate in (results.gates if results else ())],
        "losses": [(x.metric, x.change, x.reason or "none written") for x in (results.losses if results else ())],
        "provenance": results.provenance.rows() if results else _bare_provenance(paths, record),
        "links": _links(paths),
        "design_note": _design_note(paths),
        "plotly": _plotly_gzip() if has_figure else "",
    }
    exporter = HTMLExporter(
        template_name="template",
        extra_template_basedirs=[str(_HERE)],
        config=Config({"CoalesceStreamsPreprocessor": {"enabled": True}, "HTMLExporter": {"embed_images": False}}),
    )
    page, _ = exporter.from_notebook_node(notebook, {"metadata": {"name": paths.name}, "report": report})
    return str(page)


def render_index(root: Path) -> str:
    """The overview: a card for every stage that has a notebook, results or a run, then peers and GPU if they exist."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE / "template"), autoescape=True, undefined=jinja2.StrictUndefined
    )
    cards = [card for name in report_names(root) if (card := _card(root, name))]
    return environment.get_template("overview.html.j2").render(cards=cards)


def report_names(root: Path) -> list[str]:
    """Stages in order, then any other report that has results ("gpu", "peers")."""
    found = {path.stem for path in (root / "notebooks").glob("stage_*.ipynb")}
    for pattern in ("reports/*/results.json", "reports/quick/*/results.json"):
        found |= {path.parent.name for path in root.glob(pattern)}
    found |= {path.stem for path in (root / "reports" / "runs").glob("*.json")}
    return sorted(found, key=lambda name: (not name.startswith("stage_"), len(name), name))


def _card(root: Path, name: str) -> dict[str, Any] | None:
    """Full evidence where there is some, else the quick run's; the latest run is named where it differs."""
    full, quick = ReportPaths(root, name), ReportPaths(root, name, quick=True)
    paths = next((p for p in (full, quick) if p.results.exists()), full)
    results = _results_if_valid(paths.results)
    record = _record_if_valid(full)
    if results is None and record is None and not full.notebook.exists():
        return None
    shown = record if record and (results is None or record.quick == results.quick) else None
    return {
        "name": name,
        "title": results.title if results else name.replace("_", " ").capitalize(),
        "mode": "quick run" if results and results.quick else "",
        "tiles": verdict_tiles(results, shown) if results or record else [],
        "headline": [{"name": n.name, "value": readable(n.value), "unit": n.unit} for n in results.headline]
        if results
        else [],
        "date": _date(results.provenance.created if results else record.started if record else ""),
        "commit": results.provenance.revision if results else "",
        "error": record.error if record and record.status != "passed" else "",
        "latest": _latest(record) if record and not shown else "",
        "links": ([("Report", f"{name}.html")] if full.html.exists() else []) + _links(paths),
    }


def _latest(record: NotebookRun) -> str:
    mode = "quick" if record.quick else "full"
    return f"The report shows a later {mode} run: {record.status}, {_date(record.started)}"


def _date(iso: str) -> str:
    """An ISO time stamp in UTC for people, to the minute."""
    return f"{iso[:16].replace('T', ' ')} UTC" if iso else ""


def _links(paths: ReportPaths) -> list[tuple[str, str]]:
    """(label, address relative to the reports folder) of what exists beside the page."""
    candidates = [
        ("Notebook", paths.notebook),
        ("Executed notebook", paths.executed),
        ("results.json", paths.results),
        ("report.md", paths.summary),
        ("Raw records", paths.records),
    ]
    present = [(label, path) for label, path in candidates if path.is_file() or (path.is_dir() and any(path.iterdir()))]
    return [(label, _relative(path, paths)) for label, path in present]


def _relative(path: Path, paths: ReportPaths) -> str:
    inside = path.is_relative_to(paths.reports)
    return path.relative_to(paths.reports).as_posix() if inside else f"../{path.relative_to(paths.root).as_posix()}"


def _verdict(results: StageResults | None, record: NotebookRun | None) -> Tile:
    status = record.status if record else results.status if results else "failed"
    quick = record.quick if record else bool(results and results.quick)
    mode = "quick run: timing not judged" if quick else "full run"
    return Tile("Verdict", status.upper(), mode, _STATES[status])


def _golden(results: StageResults | None) -> Tile:
    gates = [gate for gate in results.gates if gate.kind == "exactness"] if results else []
    judged = [gate for gate in gates if gate.passed is not None]
    if not judged:
        return Tile("Golden", "–", "no exactness gate was judged", "idle")
    passed = sum(gate.passed is True for gate in judged)
    state = "passed" if passed == len(judged) else "failed"
    return Tile("Golden", f"{passed} of {len(judged)}", "exactness gates passed", state)


def _gates(results: StageResults | None) -> Tile:
    if results is None:
        return Tile("Gates", "–", "no results were written", "idle")
    judged = [gate for gate in results.gates if gate.passed is not None]
    passed = sum(gate.passed is True for gate in judged)
    left = len(results.gates) - len(judged)
    note = f"passed; {left} not judged" if left else "passed"
    state = "failed" if passed < len(judged) else "passed" if judged else "idle"
    return Tile("Gates", f"{passed} of {len(judged)}", note, state)


def _regressions(results: StageResults | None) -> Tile:
    verdicts = [row["verdict"] for row in results.summary if "verdict" in row] if results else []
    if results is None or not verdicts:
        return Tile("Regressions", "–", "nothing was compared", "idle")
    if all(verdict == "not judged" for verdict in verdicts):
        return Tile("Regressions", "–", f"{len(verdicts)} metrics, not judged", "idle")
    losses = results.losses
    unexplained = sum(not loss.reason for loss in losses)
    if not losses:
        return Tile("Regressions", "0", f"of {len(verdicts)} metrics", "passed")
    note = f"{unexplained} without a reason" if unexplained else "each with its reason"
    return Tile("Regressions", str(len(losses)), note, "failed" if unexplained else "warned")


def _noise(results: StageResults | None) -> Tile:
    band = sorted(results.noise_floor.values()) if results else []
    if not band:
        return Tile("Noise floor", "–", "not measured", "idle")
    low, high = f"{100 * band[0]:.1f}", f"{100 * band[-1]:.1f}"
    return Tile("Noise floor", f"±{low}%" if low == high else f"±{low}–{high}%", "A/A, by metric", "idle")


def _gate_row(gate: Gate) -> dict[str, str]:
    return {
        "name": gate.name,
        "observed": readable(gate.observed),
        "bound": gate.bound,
        "verdict": gate.verdict,
        "state": _STATES[gate.verdict],
        "kind": gate.kind,
        "note": gate.note,
    }


def _failures(results: StageResults | None, record: NotebookRun) -> Sequence[str]:
    if record.status == "failed" and results and results.failures:
        return results.failures
    return (record.error,) if record.error else ()


def _meta(record: NotebookRun, results: StageResults | None) -> list[str]:
    parts = [_date(record.started), f"ran {record.seconds:,.1f} s"]
    if results:
        parts.append(f"commit {results.provenance.revision}")
    return [*parts, "quick run" if record.quick else "full run"]


def _bare_provenance(paths: ReportPaths, record: NotebookRun) -> list[tuple[str, str]]:
    """What is known of a run that left no results."""
    known = collect(parameters=record.parameters, root=paths.root)
    return replace(known, command=record.command, created=record.started).rows()


def _results_if_valid(path: Path) -> StageResults | None:
    try:
        return StageResults.load(path)
    except (OSError, ValueError):
        return None


def _record_if_valid(paths: ReportPaths) -> NotebookRun | None:
    try:
        return NotebookRun.load(paths)
    except (OSError, ValueError, TypeError):
        return None


def _take_title(notebook: nbformat.NotebookNode) -> tuple[nbformat.NotebookNode, str]:
    """A copy without papermill's banners and without its first heading, which the page's head shows; the heading."""
    copy = nbformat.from_dict(notebook)
    copy.cells = [cell for cell in copy.cells if _PAPERMILL_MARKER not in cell.metadata.get("tags", [])]
    for cell in copy.cells:
        first, _, rest = cell.source.partition("\n")
        if cell.cell_type == "markdown" and first.startswith("# "):
            cell.source = rest.lstrip("\n")
            return copy, first[2:].strip()
    return copy, ""


def _design_note(paths: ReportPaths) -> str:
    return markdown2html(paths.design_note.read_text(encoding="utf-8")) if paths.design_note.exists() else ""


@cache
def _plotly_gzip() -> str:
    """plotly.js, gzipped, as base64 text."""
    script = Path(plotly.__file__).parent / "package_data" / "plotly.min.js"
    return base64.b64encode(gzip.compress(script.read_bytes(), 9, mtime=0)).decode("ascii")
