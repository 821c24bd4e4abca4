"""A stage's design note must print on one A4 page: checked on paper, as Chromium prints the report's section."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import nbformat

from lab.browser import BrowserError, count_pdf_pages, find_chromium, open_page
from lab.notebook_run import NotebookRun
from lab.paths import ReportPaths
from lab.render import render_stage


def design_note_pages(paths: ReportPaths, record: NotebookRun) -> int:
    """A4 pages that ``paths.design_note`` fills when printed on its own from the report.

    Raises ``lab.browser.BrowserError`` where Chromium is missing or does not answer.
    """
    page_html = render_stage(paths, nbformat.v4.new_notebook(), record)
    with tempfile.TemporaryDirectory(prefix="lab-note-") as folder, open_page() as page:
        file = Path(folder) / "note.html"
        file.write_text(page_html, encoding="utf-8")
        page.open(f"{file.as_uri()}#only-note", ready="document.documentElement.dataset.drawn === 'done'")
        return count_pdf_pages(page.print_pdf())


def design_note_problem(paths: ReportPaths, record: NotebookRun, say: Callable[[str], None]) -> str:
    """What is wrong with the design note, or "". Says so when there is none, or no Chromium to check with."""
    note = paths.design_note.relative_to(paths.root)
    if not paths.design_note.exists():
        say(f"{paths.name}  no design note ({note})\n")
        return ""
    if find_chromium() is None:
        say(f"{paths.name}  {note} was not checked for length: no Chromium found\n")
        return ""
    try:
        pages = design_note_pages(paths, record)
    except BrowserError as error:
        say(f"{paths.name}  {note} was not checked for length: {error}\n")
        return ""
    return "" if pages == 1 else f"{note} prints on {pages} A4 pages; shorten it to one"
