"""What a stage claims and where it comes from: results, gates, paths, provenance and parameters."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from lab.notebook_run import NotebookRun
from lab.parameters import ParameterError, check_parameters, declared_parameters
from lab.paths import ReportPaths, repository_root, stage_name, write_atomic
from lab.provenance import Provenance, collect, git_state
from lab.render import verdict_tiles
from lab.results import Gate, Headline, Kind, Scalar, StageResults, readable
from tests import report_fixtures
from tests.report_fixtures import notebook, origin, put, stage

root = report_fixtures.root


def as_json(results: StageResults) -> str:
    return json.dumps(results.to_dict())


# ---- results -----------------------------------------------------------------------------------------------------


def test_results_are_read_back_as_they_were_written(root: Path) -> None:
    made = stage(
        headline=[Headline("TTFT", 0.42, "s")],
        summary=[{"metric": "ITL p99", "change": "+9 %", "verdict": "worse", "reason": "chunks between decodes"}],
        noise_floor={"ITL p99": 0.03},
    )
    made.save()
    assert as_json(StageResults.load(ReportPaths(root, "stage_7").results)) == as_json(made)
    assert [path.name for path in (root / "reports/stage_7").iterdir() if path.name.startswith(".")] == []
    text = (root / "reports/stage_7/report.md").read_text()
    assert "| tokens | 64 | == 64 | passed | exactness |" in text
    assert "| ITL p99 | +9 % | chunks between decodes |" in text
    assert "| Parameters | requests=4 |" in text


def test_a_stage_fails_by_a_gate_or_by_an_unexplained_loss() -> None:
    worse = {"metric": "ITL p99", "change": "+9 %", "verdict": "worse"}
    assert stage().status == "passed"
    assert stage(Gate("leaks", 3, "== 0", False, "count")).failures == ("gate failed: leaks (observed 3, bound == 0)",)
    assert "no reason" in stage(summary=[worse]).failures[0]
    assert stage(summary=[{**worse, "reason": "  "}]).status == "failed"
    assert stage(summary=[{**worse, "reason": "chunks between decodes"}]).status == "passed"


def test_a_quick_run_judges_no_time_and_touches_no_full_evidence(root: Path) -> None:
    stage().save()
    before = ReportPaths(root, "stage_7").results.read_text()
    slow = Gate("TTFT ratio", 2.0, "<= 1", False, "timing")
    quick = stage(slow, quick=True)
    quick.save()
    assert stage(slow).status == "failed"
    assert quick.gates[0].passed is None and "quick" in quick.gates[0].note
    assert quick.status == "passed"
    assert stage(Gate("leaks", 1, "== 0", False, "count"), quick=True).status == "failed"
    assert ReportPaths(root, "stage_7").results.read_text() == before
    assert as_json(StageResults.load(ReportPaths(root, "stage_7", quick=True).results)) == as_json(quick)


@pytest.mark.parametrize(
    ("kind", "passed", "observed", "message"),
    [
        ("speed", True, 1, "'speed' is none of exactness, count, timing"),
        ("count", None, 1, "say why in its note"),
        ("count", True, float("inf"), "no finite number"),
        ("count", True, [1], "list"),
    ],
)
def test_a_gate_refuses(kind: Kind, passed: bool | None, observed: Scalar, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Gate("g", observed, "b", passed, kind)


def test_results_refuse() -> None:
    gate = Gate("tokens", 1, "1", True, "count")
    with pytest.raises(ValueError, match="cannot fail proves nothing"):
        StageResults(7, "Stage 7", (), origin())
    with pytest.raises(ValueError, match="named twice: tokens"):
        stage(gate, gate)
    with pytest.raises(ValueError, match="'Worse' of 'ITL' is none of"):
        stage(summary=[{"metric": "ITL", "verdict": "Worse"}])
    with pytest.raises(ValueError, match=re.escape("summary of 'ITL', column 'trials': [1.0] (list)")):
        stage(summary=[{"metric": "ITL", "trials": [1.0]}])
    with pytest.raises(ValueError, match="no 'metric'"):
        stage(summary=[{"verdict": "worse"}])


def test_a_results_file_that_was_edited_or_cut_is_refused(root: Path) -> None:
    stage(Gate("leaks", 3, "== 0", False, "count")).save()
    path = ReportPaths(root, "stage_7").results
    honest = path.read_text()
    for text, message in (
        (honest.replace('"failed"', '"passed"'), "the gates say 'failed'"),
        (honest[:200], "results.json"),
        ("{}", "not a stage's results"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            StageResults.load(path)


def test_numbers_are_set_for_people() -> None:
    assert [readable(value) for value in (None, True, 7, 12345, 0.42, 1843.2, 0.00012, 31.0, "64 of 64")] == [
        "–", "True", "7", "12,345", "0.42", "1,843", "0.00012", "31", "64 of 64",
    ]  # fmt: skip


def test_tiles_say_what_is_missing() -> None:
    record = NotebookRun("stage_7", "failed", False, "2026-01-01T00:00:00+00:00", 1.0, "make report", error="boom")
    assert [tile.value for tile in verdict_tiles(None, record)] == ["FAILED", "–", "–", "–", "–"]
    made = stage(
        Gate("a", 1, "1", True, "exactness"),
        Gate("b", 1, "2", False, "exactness"),
        Gate("c", 1, "2", None, "count", "no GPU"),
        summary=[{"metric": "ITL", "verdict": "worse"}, {"metric": "E2E", "verdict": "~"}],
        noise_floor={"ITL": 0.02, "E2E": 0.011},
    )
    tiles = {tile.label: (tile.value, tile.note, tile.state) for tile in verdict_tiles(made, None)}
    assert tiles["Golden"] == ("1 of 2", "exactness gates passed", "failed")
    assert tiles["Gates"] == ("1 of 2", "passed; 1 not judged", "failed")
    assert tiles["Regressions"] == ("1", "1 without a reason", "failed")
    assert tiles["Noise floor"][0] == "±1.1–2.0%"


# ---- paths and provenance ----------------------------------------------------------------------------------------


def test_the_root_is_found_from_inside_and_from_anywhere(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root / "reports" / "design")
    assert repository_root() == root
    assert repository_root(Path("/")) == Path(__file__).resolve().parents[1]
    assert [stage_name(name) for name in (3, "3", "peers")] == ["stage_3", "stage_3", "peers"]
    with pytest.raises(ValueError, match=r"'\.\./x' is neither"):
        stage_name("../x")


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    write_atomic(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomic(path, "\ud800")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_git_tells_commit_and_dirt_but_reports_are_no_dirt(root: Path) -> None:
    def git(*arguments: str) -> None:
        subprocess.run(["git", "-c", "user.name=t", "-c", "user.email=t@t", *arguments], cwd=root, check=True)

    assert git_state(root) == ("unknown (not a git repository)", None)
    git("init", "-q")
    assert git_state(root) == ("none (no commit yet)", True)
    git("add", "pyproject.toml")
    git("commit", "-qm", "first")
    (root / "reports/stage_7.html").write_text("x")
    commit, dirty = git_state(root)
    assert re.fullmatch("[0-9a-f]{40}", commit) and dirty is False
    (root / "pyproject.toml").write_text("[project]")
    assert git_state(root) == (commit, True)


def test_provenance_works_without_git(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(root))
    made = collect(parameters={"rate": 4.0}, seeds=(1, 2), workloads={"mixed": "ab12"}, model="tiny")
    assert made.commit == "unknown (git not found)" and made.dirty is None
    assert Provenance.from_dict(json.loads(json.dumps(made.to_dict()))).rows() == made.rows()
    assert made.cores >= 1 and made.memory_gib > 0 and made.versions["python"].startswith("3.")


# ---- parameters --------------------------------------------------------------------------------------------------


def test_text_becomes_what_the_notebook_declares(root: Path) -> None:
    path = put(root, notebook("# Stage")).notebook
    given = {"quick": "true", "requests": "48", "rate": "3", "model": "8", "sizes": "[4, 8]"}
    assert check_parameters(path, given) == {"quick": True, "requests": 48, "rate": 3.0, "model": "8", "sizes": [4, 8]}
    assert check_parameters(path, {"requests": 48, "rate": 3}) == {"requests": 48, "rate": 3.0}
    assert declared_parameters(path)["rate"].help == "arrivals per second"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"request": "4"},
            "stage_7.ipynb has no parameter request; its parameters: quick, requests, rate, model, sizes",
        ),
        ({"quick": "maybe"}, "parameter quick takes bool (such as true or false; default False), not 'maybe'"),
        ({"requests": "4.5"}, "parameter requests takes int (such as 8; default 24), not '4.5'"),
        ({"requests": True}, "not True"),
        ({"rate": "nan"}, "parameter rate takes float"),
        ({"sizes": "4"}, "parameter sizes takes list[int]"),
        ({"sizes": "[4, 'x']"}, "parameter sizes takes list[int]"),
    ],
)
def test_a_parameter_is_refused(root: Path, given: dict[str, object], message: str) -> None:
    with pytest.raises(ParameterError, match=re.escape(message)):
        check_parameters(put(root, notebook("# Stage")).notebook, given)


def test_a_declaration_must_have_a_type_that_can_be_checked(root: Path) -> None:
    made = notebook("# Stage")
    made.cells[1].source = "when = object()"
    with pytest.raises(ParameterError, match="when is declared as 'an expression'"):
        check_parameters(put(root, made).notebook, {"when": "1"})
