"""A synthetic stage for the report's tests: its notebook, a repository to run it in, and one built report."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import nbformat
import pytest
from nbformat import v4

from lab.paths import ReportPaths, repository_root
from lab.provenance import Provenance, collect
from lab.results import Gate, StageResults

PARAMETERS = """quick: bool = False  # small sizes, timing not judged
requests: int = 24  # requests in the workload
rate: float = 4.0  # arrivals per second
model: str = "tiny"  # model name or folder
sizes: list[int] = [1, 2]  # batch sizes
"""
FIGURES = """import numpy as np, pandas as pd, plotly.graph_objects as go
from plotly.subplots import make_subplots
from lab.figures.style import use_template, finish, BASELINE, FEATURE, PREFILL, DECODE, NEUTRAL
use_template()
rng = np.random.default_rng(0)
"""
BARS = """bars = go.Figure([
    go.Bar(name="static", x=["TTFT", "ITL", "E2E"], y=np.array([1.0, 1.0, 1.0]), marker_color=BASELINE),
    go.Bar(name='continuous, "on"', x=["TTFT", "ITL", "E2E"], y=np.array([0.42, 0.97, 0.61]), marker_color=FEATURE,
           error_y=dict(type="data", array=[0.03, 0.02, 0.04], arrayminus=[0.02, 0.02, 0.03]))])
bars.update_yaxes(title="ratio to static").update_xaxes(title="metric")
finish(bars, "Paired ratios with 95 % intervals", 360)
"""
TIMELINE = """start = np.sort(rng.exponential(2, 24).cumsum() / 8)
panels = make_subplots(rows=2, shared_xaxes=True, row_heights=[0.7, 0.3], vertical_spacing=0.06)
phases = (("queued", NEUTRAL, 0, 0.4), ("prefill", PREFILL, 0.4, 0.2), ("decode", DECODE, 0.6, 1.8))
for name, colour, offset, length in phases:
    panels.add_bar(orientation="h", name=name, base=start + offset, x=np.full(24, length), y=np.arange(24),
                   marker_color=colour, row=1, col=1)
panels.add_scatter(x=start, y=rng.integers(1, 16, 24), name="running", line_shape="hv", row=2, col=1)
panels.update_layout(barmode="overlay").update_xaxes(title="time, s", row=2).update_yaxes(title="request", row=1)
finish(panels, "Each request from arrival to its last token", 520).show()
"""
HEATMAP = """cells = go.Heatmap(x=["off", "on"], y=["TP 1", "TP 2"], z=np.array([[0, 0], [1, 2]]), colorscale="Viridis")
heat = go.Figure(cells.update(colorbar_title="differences"))
finish(heat, "Golden matrix", 280)
"""
TABLES = """wide = pd.DataFrame({"metric": ["TTFT p50", "ITL p99", "throughput"], "unit": ["s", "ms", "tokens/s"],
    **{f"condition {k}": rng.random(3) * 10 ** k for k in range(14)}, "reason": "a sentence that says why it is so"})
wide.style.hide(axis="index").format(precision=3).set_caption("Every metric, under every condition")
"""
TRACE = """from lab.trace import TraceDownload
TraceDownload({"traceEvents": [{"ph": "X", "pid": 1, "tid": 1, "name": "step", "ts": 0, "dur": 5}]})
"""
SAVE = """from lab.paths import ReportPaths
from lab.provenance import collect
from lab.results import Gate, Headline, StageResults
StageResults(
    stage=7, title="Stage 7: a synthetic stage", quick=quick,
    provenance=collect(parameters=dict(requests=requests, rate=rate)),
    gates=[Gate("tokens equal to golden", "64 of 64", "all", GOLDEN, "exactness"),
           Gate("requests finished", requests, "== requests", True, "count"),
           Gate("TTFT p50 ratio", 0.42, "<= 0.8", True, "timing")],
    headline=[Headline("TTFT p50", 0.42, "× static", "95 % interval 0.40 – 0.45"),
              Headline("Throughput", 1843.2, "tokens/s")],
    summary=[dict(metric="TTFT p50", unit="s", static=2.41, on=1.01, change="-58 %", verdict="better"),
             dict(metric="ITL p99", unit="ms", static=31.0, on=33.9, change="+9 %", verdict="worse",
                  reason="prompts are computed between decodes")],
    noise_floor={"TTFT p50": 0.012, "ITL p99": 0.034},
).save()
"""


def notebook(*cells: str, last: str = SAVE.replace("GOLDEN", "True")) -> nbformat.NotebookNode:
    """Markdown where a cell starts with '#', a space and a capital (or '##'); code elsewhere."""
    head = v4.new_code_cell(PARAMETERS, metadata={"tags": ["parameters"]})
    body = [v4.new_markdown_cell(cell) if re.match(r"#+ [A-Z]", cell) else v4.new_code_cell(cell) for cell in cells]
    made = v4.new_notebook(
        cells=[*body[:1], head, *body[1:], v4.new_code_cell(last, metadata={"tags": ["remove-input"]})]
    )
    made.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return made


FULL = (
    "# Stage 7: synthetic\n\nA stage made for the tests: what it measures, in one paragraph.",
    FIGURES,
    "## Latency\n\nEach pair ran in ABBA order; see [tables](#Tables).\n\n### Ratios",
    BARS,
    "### Timeline",
    TIMELINE,
    "## Golden",
    HEATMAP,
    "## Tables\n\nEvery metric is here, better or worse.",
    TABLES,
    TRACE,
    "import sys; print('a warning for the log', file=sys.stderr); print('a line of output')",
)
NOTE = "# Design note\n\nOne loop, four substitutions.\n\n" + "## Part\n\nA paragraph about the design.\n\n" * 4


def repository(folder: Path) -> Path:
    """A repository's skeleton: the project file and folders, no notebook yet."""
    for name in ("notebooks", "reports/design"):
        (folder / name).mkdir(parents=True)
    (folder / "pyproject.toml").write_text('[project]\nname = "paged-attention-lab"\n')
    return folder


def put(root: Path, made: nbformat.NotebookNode, name: str = "stage_7") -> ReportPaths:
    nbformat.write(made, root / "notebooks" / f"{name}.ipynb")
    return ReportPaths(root, name)


def origin(**changes: object) -> Provenance:
    return replace(collect(parameters={"requests": 4}), **changes)  # type: ignore[arg-type]


def stage(*gates: Gate, **fields: object) -> StageResults:
    gates = gates or (Gate("tokens", 64, "== 64", True, "exactness"),)
    return StageResults(stage=7, title="Stage 7", gates=gates, provenance=origin(), **fields)  # type: ignore[arg-type]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty repository in which the test, and the kernels it starts, work."""
    monkeypatch.chdir(repository(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(repository_root(Path(__file__).parent)))
    monkeypatch.delenv("QUICK", raising=False)
    return tmp_path


@cache
def full_report(base: Path) -> tuple[Path, str]:
    """The repository with a full report of the synthetic stage, and what the command printed; made once a session."""
    folder = repository(base / "built")
    put(folder, notebook(*FULL))
    (folder / "reports/design/stage_7.md").write_text(NOTE)
    environment = {**os.environ, "PYTHONPATH": str(repository_root(Path(__file__).parent)), "QUICK": ""}
    command = [sys.executable, "-m", "lab", "report", "-p", "requests", "48"]
    done = subprocess.run(command, cwd=folder / "notebooks", env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    return full_report(tmp_path_factory.getbasetemp())
