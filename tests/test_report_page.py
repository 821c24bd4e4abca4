"""The page as a reader sees it: headless Chromium with the network off, light, dark and on paper."""

import csv
import gzip
import io
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.__main__ import main
from lab.browser import Page, count_pdf_pages, find_chromium, open_page
from lab.design_note import design_note_pages
from lab.notebook_run import NotebookRun
from tests import report_fixtures
from tests.report_fixtures import NOTE, notebook, put

built, root = report_fixtures.built, report_fixtures.root
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(find_chromium() is None, reason="no Chromium on PATH to look at the page"),
]

CSV_BUTTONS = "document.querySelectorAll('.figure .csv')"
DRAWN = "document.documentElement.dataset.drawn === 'done'"
# WCAG contrast of every visible text element's colour against the first opaque background behind it.
CONTRASTS = """(() => {
  const parts = (colour) => {
    const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const luminance = (colour) => {
    const [r, g, b] = colour.slice(0, 3).map((v) => (v <= 10.3 ? v / 3294.6 : ((v / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const colour = parts(getComputedStyle(node).backgroundColor);
      if (colour[3] === 255) return colour;
    }
    return [255, 255, 255, 255];
  };
  const texts = 'p, td, th, dt, dd, h1, h2, h3, li, strong, em, .badge, summary, figcaption button';
  return [...document.querySelectorAll(`main :is(${texts}), nav a, nav button`)]
    .filter((node) => node.textContent.trim() && node.checkVisibility())
    .map((node) => {
      const [low, high] = [parts(getComputedStyle(node).color), behind(node)].map(luminance).sort((a, b) => a - b);
      return (high + 0.05) / (low + 0.05);
    });
})()"""
PRINT_PROBE = """addEventListener('beforeprint', () => { window.onPaper = {
  theme: document.documentElement.dataset.theme,
  closedPanels: document.querySelectorAll('details.panel:not([open])').length,
  widths: plots().map((plot) => plot._fullLayout.width), heights: plots().map((plot) => plot._fullLayout.height),
}; })"""


@pytest.fixture(scope="module")
def chromium() -> Iterator[Page]:
    with open_page() as page:
        yield page


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_shows_every_figure_with_the_network_off(built: tuple[Path, str], scheme: str) -> None:
    with open_page() as page:
        page.emulate("dark" if scheme == "dark" else "light")
        page.open((built[0] / "reports/stage_7.html").as_uri(), ready=DRAWN)
        assert page.evaluate("document.documentElement.dataset.figures") == "3/3"
        assert page.evaluate("document.querySelectorAll('.figure .main-svg').length") >= 3
        assert page.evaluate("document.documentElement.dataset.theme") == scheme
        contrasts = page.evaluate(CONTRASTS)
        assert min(contrasts) >= 4.5, contrasts
        page.evaluate("document.getElementById('theme').click()")
        assert page.evaluate("document.documentElement.dataset.theme") != scheme
        assert page.evaluate("document.querySelector('.plot')._fullLayout.font.color") == page.evaluate(
            "token('--ink')"
        )
        assert page.console == []
        assert {url.split(":")[0] for url in page.requests} <= {"file", "data"}


def test_nothing_on_the_page_is_clipped(built: tuple[Path, str], chromium: Page) -> None:
    for width in (1280, 700):
        chromium.emulate("light", width)
        chromium.open((built[0] / "reports/stage_7.html").as_uri(), ready=DRAWN)
        assert chromium.evaluate("document.documentElement.scrollWidth <= innerWidth"), "the page scrolls sideways"
        wide = chromium.evaluate(
            "[...document.querySelectorAll('.jp-RenderedHTML')].filter((box) => box.scrollWidth > box.clientWidth + 1)"
            ".map((box) => getComputedStyle(box).overflowX)"
        )
        assert wide == ["auto"], "the wide table scrolls in its own box"
        numbers = "[...document.querySelectorAll('.jp-RenderedHTML tbody tr:first-child td')].map((cell) => "
        assert chromium.evaluate(numbers + "getComputedStyle(cell).textAlign)") == ["left"] * 2 + ["right"] * 14 + [
            "left"
        ]


def test_a_figures_data_comes_out_as_csv(built: tuple[Path, str], chromium: Page) -> None:
    chromium.open((built[0] / "reports/stage_7.html").as_uri(), ready=DRAWN)
    capture = "save = (name, content) => { window.saved = content; }"
    bars, timeline, heat = (
        list(csv.reader(io.StringIO(chromium.evaluate(f"({capture}, {CSV_BUTTONS}[{k}].click(), window.saved)"))))
        for k in range(3)
    )
    assert bars[0] == ["trace", "metric", "ratio to static", "error_y_plus", "error_y_minus"]
    assert bars[4] == ['continuous, "on"', "TTFT", "0.42", "0.03", "0.02"]
    assert len(timeline) == 1 + 4 * 24
    assert heat[1:] == [
        ["trace 1", "off", "TP 1", "0"], ["trace 1", "on", "TP 1", "0"],
        ["trace 1", "off", "TP 2", "1"], ["trace 1", "on", "TP 2", "2"],
    ]  # fmt: skip


def test_csv_and_trace_are_downloaded(built: tuple[Path, str], tmp_path: Path) -> None:
    with open_page() as page:
        page.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
        page.open((built[0] / "reports/stage_7.html").as_uri(), ready=DRAWN)
        assert page.evaluate("document.querySelector('#downloads a').textContent").startswith(
            "Perfetto trace (1 events"
        )
        page.evaluate("document.querySelector('#downloads a').click()")
        page.evaluate(f"{CSV_BUTTONS}[0].click()")
        wanted = [tmp_path / "trace.json.gz", tmp_path / "paired-ratios-with-95-intervals.csv"]
        for _ in range(600):
            if all(path.exists() for path in wanted):
                break
            time.sleep(0.05)
    assert json.loads(gzip.decompress(wanted[0].read_bytes()))["traceEvents"][0]["name"] == "step"
    assert wanted[1].read_text().startswith("trace,metric,ratio to static")


def test_contents_follow_the_reader(built: tuple[Path, str], chromium: Page) -> None:
    chromium.emulate("light")
    chromium.open((built[0] / "reports/stage_7.html").as_uri(), ready=DRAWN)
    headings = chromium.evaluate("[...document.querySelectorAll('#headings a')].map((link) => link.textContent)")
    assert headings == ["Latency", "Ratios", "Timeline", "Golden", "Tables", "Design note"]
    chromium.evaluate("document.getElementById('Timeline').scrollIntoView({behavior: 'instant'})")
    chromium.wait_for("document.querySelector('#headings a[aria-current]')?.textContent === 'Timeline'")
    assert chromium.evaluate("[...document.querySelectorAll('details.code')].every((code) => !code.open)")
    chromium.evaluate("document.getElementById('code').click()")
    assert chromium.evaluate("[...document.querySelectorAll('details.code')].every((code) => code.open)")


def test_the_report_prints_light_and_whole(built: tuple[Path, str], chromium: Page) -> None:
    chromium.emulate("dark")
    chromium.open((built[0] / "reports/stage_7.html").as_uri(), ready=DRAWN)
    chromium.evaluate(PRINT_PROBE)
    pages = count_pdf_pages(chromium.print_pdf())
    assert 3 <= pages <= 7
    on_paper = chromium.evaluate("window.onPaper")
    assert on_paper["theme"] == "light" and on_paper["closedPanels"] == 0
    assert max(on_paper["widths"]) <= 700 and max(on_paper["heights"]) <= 900, "figures fit a sheet"
    assert chromium.evaluate("document.documentElement.dataset.theme") == "dark", "the screen is as before"


def test_the_design_note_must_print_on_one_page(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = put(root, notebook("# Stage"))
    paths.design_note.write_text(NOTE)
    record = NotebookRun("stage_7", "failed", False, "2026-01-01T00:00:00+00:00", 1.0, "make report")
    assert design_note_pages(paths, record) == 1
    paths.design_note.write_text(NOTE * 6)
    assert design_note_pages(paths, record) > 1
    assert main(["report"]) == 1
    assert "reports/design/stage_7.md prints on" in capsys.readouterr().err
    assert "FAILED" in paths.html.read_text()


def test_the_overview_opens_clean(built: tuple[Path, str]) -> None:
    with open_page() as page:
        page.open((built[0] / "reports/index.html").as_uri())
        assert page.evaluate("document.querySelectorAll('article.card .badge').length") == 5
        page.evaluate("document.getElementById('theme').click()")
        assert page.console == []
