"""The report command: judged runs, bad input, and what it leaves behind."""

import html
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import nbformat
import pytest

from lab.__main__ import COMMANDS, main
from lab.notebook_run import NotebookRun
from lab.paths import ReportPaths
from lab.render import render_index
from lab.results import StageResults
from tests import report_fixtures
from tests.report_fixtures import SAVE, notebook, put, stage

built, root = report_fixtures.built, report_fixtures.root


# ---- bad input to the command ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--stage", "8"], "stage_8.ipynb does not exist; notebooks there: stage_7"),
        (["-p", "speed", "3"], "no parameter speed"),
        (["--quick", "-p", "quick", "false"], "quick is given twice"),
    ],
)
def test_wrong_usage_is_told_before_anything_runs(
    root: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    put(root, notebook("# Stage"))
    stage().save()
    assert main(["report", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert ReportPaths(root, "stage_7").results.exists()


def test_a_file_that_is_no_notebook_is_told(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "notebooks/stage_7.ipynb").write_text("{")
    assert main(["report"]) == 2
    assert "stage_7.ipynb is no notebook that can be read" in capsys.readouterr().err


def test_a_bad_quick_variable_and_an_unwritable_folder(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    put(root, notebook("# Stage"))
    monkeypatch.setenv("QUICK", "yes please")
    assert main(["report"]) == 2
    assert "QUICK='yes please'" in capsys.readouterr().err
    monkeypatch.delenv("QUICK")
    (root / "reports/design").rmdir()
    (root / "reports").rmdir()
    (root / "reports").write_text("a file where the folder should be")
    assert main(["report"]) == 2
    assert "reports is not writable" in capsys.readouterr().err


@pytest.mark.parametrize("command", [command.name for command in COMMANDS])
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    assert f"usage: python -m lab {command}" in capsys.readouterr().out


# ---- judged runs -------------------------------------------------------------------------------------------------

KILLED = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (notebook("# Stage", "raise ValueError('3 <b>of</b> 4')"), "cell [2] raised ValueError: 3 <b>of</b> 4"),
        (notebook("# Stage", KILLED), "DeadKernelError: Kernel died (in code cell 2, under 'Stage')"),
        (notebook("# Stage", last="1"), "ended without writing reports/stage_7/results.json"),
        (notebook("# Stage", last=SAVE.replace("GOLDEN", "False")), "gate failed: tokens equal to golden"),
    ],
    ids=["a cell raises", "the kernel is killed", "no results", "a gate fails"],
)
def test_a_run_that_went_wrong_is_reported_as_failed(
    root: Path, capsys: pytest.CaptureFixture[str], made: nbformat.NotebookNode, message: str
) -> None:
    paths = put(root, made)
    stage().save()
    paths.html.write_text("stale")
    assert main(["report", "--stage", "7"]) == 1
    page = paths.html.read_text()
    assert message in capsys.readouterr().err
    assert "FAILED" in page and message in html.unescape(page) and "<b>of</b>" not in page
    assert NotebookRun.load(paths).status == "failed"
    assert message in html.unescape((root / "reports/index.html").read_text())
    if paths.results.exists():
        assert StageResults.load(paths.results).title == "Stage 7: a synthetic stage", "not the stale one"


def test_a_quick_report_is_marked_and_leaves_full_evidence_alone(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = put(root, notebook("# Stage"))
    stage().save()
    before = paths.results.read_text()
    monkeypatch.setenv("QUICK", "1")
    assert main(["report"]) == 0
    quick = StageResults.load(replace(paths, quick=True).results)
    assert quick.quick and [gate.passed for gate in quick.gates if gate.kind == "timing"] == [None]
    assert paths.results.read_text() == before
    assert "quick run: timing not judged" in paths.html.read_text()
    assert "The report shows a later quick run: passed" in (root / "reports/index.html").read_text()


def test_a_run_clears_the_records_of_the_last_and_not_what_that_kept_for_it(root: Path) -> None:
    paths = put(root, notebook("# Stage"))
    for folder in (paths.records, paths.kept, replace(paths, quick=True).kept):
        folder.mkdir(parents=True)
        (folder / "old").write_text(folder.name)
    assert main(["report"]) == 0
    assert not (paths.records / "old").exists() and (paths.kept / "old").exists()
    assert (replace(paths, quick=True).kept / "old").read_text() != (paths.kept / "old").read_text()


def test_ctrl_c_keeps_what_was_recorded_and_exits_with_130(root: Path) -> None:
    paths = put(
        root,
        notebook(
            "# Stage",
            "from lab.paths import ReportPaths\nimport time\nrecords = ReportPaths.of(7).records\n"
            "try:\n    (records / 'started').write_text('')\n    time.sleep(60)\n"
            "except KeyboardInterrupt:\n    (records / 'partial').write_text('3 requests')\n    raise",
        ),
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "lab", "report", "--stage", "7"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # as from a terminal
    )
    try:
        for _ in range(1200):
            if (paths.records / "started").exists() or process.poll() is not None:
                break
            time.sleep(0.1)
        os.kill(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 130, errors
    assert (paths.records / "partial").read_text() == "3 requests"
    assert "Traceback" not in errors
    assert NotebookRun.load(paths).status == "interrupted"
    assert "INTERRUPTED" in paths.html.read_text()


def test_plain_papermill_runs_the_same_notebook_from_its_own_folder(root: Path) -> None:
    paths = put(root, notebook("# Stage"))
    command = [sys.executable, "-m", "papermill", "stage_7.ipynb", str(root / "out.ipynb"), "-p", "quick", "True"]
    subprocess.run(command, cwd=root / "notebooks", check=True, capture_output=True)
    results = StageResults.load(replace(paths, quick=True).results)
    assert results.quick and "papermill stage_7.ipynb" in results.provenance.command
    assert not paths.results.exists()


def test_the_overview_adds_other_reports_only_where_results_exist(root: Path) -> None:
    put(root, notebook("# Stage"), "stage_10")
    put(root, notebook("# Stage"), "stage_9")
    assert re.findall(r'article class="card" id="(\w+)"', render_index(root)) == ["stage_9", "stage_10"]
    replace(stage(), stage="peers").save()
    replace(stage(), stage=9, quick=True).save()
    page = render_index(root)
    assert re.findall(r'article class="card" id="(\w+)"', page) == ["stage_9", "stage_10", "peers"]
    assert "quick run" in page and "not run yet" in page


def test_a_full_report_says_where_it_comes_from(built: tuple[Path, str]) -> None:
    root, printed = built
    paths = ReportPaths(root, "stage_7")
    record, results = NotebookRun.load(paths), StageResults.load(paths.results)
    page = paths.html.read_text()
    assert record.status == "passed" and record.parameters == {"requests": 48}
    assert results.provenance.parameters["requests"] == 48
    assert "-m lab report -p requests 48" in results.provenance.command
    assert results.provenance.command in page.replace("&#x27;", "'") and "requests=48" in page
    assert len(re.findall(r"^stage_7  \[", printed, re.MULTILINE)) == 10, (
        "one line for each code cell, injected ones too"
    )
    assert page.count('id="plotly-gzip"') == 1 and len(page) < 3_500_000
    assert not re.search(r"""(?:src|href)=["']https?:""", page)
    assert re.search(r'celltag_injected-parameters"[^>]*>\s*</div>', page), "the injected cell shows no code"
    index = (root / "reports/index.html").read_text()
    for address in ("stage_7.html", "../notebooks/stage_7.ipynb", "runs/stage_7.ipynb", "stage_7/results.json"):
        assert f'href="{address}"' in index
        assert (root / "reports" / address).exists()
    assert "Golden: 1 of 1" in index and "1,843" in index
