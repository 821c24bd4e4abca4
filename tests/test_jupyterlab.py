"""A notebook run inside JupyterLab, driven by a real browser, shows the figures that its report shows."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lab.browser import find_chromium, open_page
from tests.report_fixtures import FULL, notebook, put, repository

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(find_chromium() is None, reason="no Chromium found; install one to test JupyterLab"),
]
FIGURES = 3
RUN_ALL = "window.jupyterapp.commands.execute('notebook:run-all-cells')"
DRAWN = "document.querySelectorAll('.js-plotly-plot .gtitle').length"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """JupyterLab on loopback, serving a repository with one small notebook."""
    root = repository(tmp_path_factory.mktemp("jupyterlab"))
    put(root, notebook(*FULL))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--expose-app-in-browser"]
    command += ["--ip=127.0.0.1", f"--port={port}", "--IdentityProvider.token=", f"--ServerApp.root_dir={root}"]
    with (root / "jupyterlab.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=root)
        try:
            address = f"http://127.0.0.1:{port}"
            _wait_until(lambda: process.poll() is not None or _answers(address), "JupyterLab answers")
            assert process.poll() is None, f"JupyterLab ended:\n{(root / 'jupyterlab.log').read_text()[-2000:]}"
            yield address, root
        finally:
            process.terminate()
            process.wait(20)


def test_the_notebook_draws_its_figures_in_jupyterlab(server: tuple[str, Path]) -> None:
    address, root = server
    with open_page(timeout_s=90) as page:
        page.emulate(width=1400, height=3000)  # tall: JupyterLab draws only the cells in view
        page.open(
            f"{address}/lab/tree/notebooks/stage_7.ipynb",
            offline=False,
            ready="window.jupyterapp && document.querySelector('.jp-Notebook')",
        )
        _wait_until(lambda: _kernel_is_idle(address), "the notebook's kernel is idle")
        assert page.evaluate(f"{RUN_ALL}.then(() => true)"), "every cell ran"
        page.wait_for(f"{DRAWN} >= {FIGURES}")
        titles = page.evaluate("[...document.querySelectorAll('.js-plotly-plot .gtitle')].map(t => t.textContent)")
    assert set(titles) == {
        "Paired ratios with 95 % intervals",
        "Each request from arrival to its last token",
        "Golden matrix",
    }
    results = json.loads((root / "reports" / "stage_7" / "results.json").read_text())
    assert results["status"] == "passed", "the notebook's last cell ran inside JupyterLab too"


def _kernel_is_idle(address: str) -> bool:
    with urllib.request.urlopen(f"{address}/api/sessions", timeout=5) as answer:
        return any(session["kernel"]["execution_state"] == "idle" for session in json.load(answer))


def _answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/api/status", timeout=5):
            return True
    except OSError:
        return False


def _wait_until(condition: Callable[[], bool], what: str, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.2)
