"""A report as a browser shows it, of a job that an engine ran."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs.control import ensure_runner, stop_runner
from jobs.records import Job
from jobs.store import JobStore
from ntx_batch.report import Price, write_report
from tests.browser import CHROMIUM, Page, open_browser
from tests.runner_helpers import make_home, queue_job, wait_over

PHONE, DESK = 390, 1100
PLOTS = """
Array.from(document.querySelectorAll("svg")).map(svg => {
  const marks = Array.from(svg.querySelectorAll(".line, .bar, .ok, .error"));
  const boxes = marks.map(mark => mark.getBBox());
  const seen = svg.getBoundingClientRect();
  return {
    label: svg.getAttribute("aria-label"), width: seen.width, height: seen.height,
    marked: boxes.filter(box => box.width > 0 && box.height > 0).length,
    inside: boxes.every(box => box.x >= 0 && box.x + box.width <= 360.5 && box.y >= 0),
    words: Array.from(svg.querySelectorAll("text")).map(text => {
      const at = text.getBoundingClientRect();
      return at.width > 0 && at.left >= seen.left - 1 && at.right <= seen.right + 1;
    }),
  };
})
"""

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a real job, some of whose rows fail with long messages."""
    folder = tmp_path_factory.mktemp("report")
    home = make_home(folder / "home")
    prompts: list[str | None] = [f"number {row} " * (row % 30 + 1) for row in range(300)]
    prompts[7], prompts[8], prompts[9] = None, "", "<b>x" * 50_000
    with JobStore(home.state_path) as store:
        job = queue_job(store, folder / "in.parquet", prompts, max_tokens=40)
        ensure_runner(home)
        job = wait_over(store, job)
        stop_runner(home)
        assert (job.state, job.num_error) == ("completed", 3)
        check_points(store, job)
    target = folder / "report.html"
    write_report(home, job.id, target, Price(kwh=0.3, watts=100.0), "0.1.0")
    return target


def check_points(store: JobStore, job: Job) -> None:
    """The course that was kept ends with the job's own sums."""
    last = store.progress_points(job.id)[-1]
    assert (last.num_ok, last.num_error) == (job.num_ok, job.num_error)
    assert last.completion_tokens == job.completion_tokens
    assert 0 < last.sweep_s <= last.work_s
    assert job.record["energy"]["counted"] or job.record["energy"]["left_out"]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with open_browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.mark.parametrize("width", [PHONE, DESK])
def test_every_plot_is_drawn_with_its_words_inside(page: Page, report: Path, width: int) -> None:
    page.show(report, width=width)
    plots = page.value(PLOTS)
    labels = [plot["label"] for plot in plots]
    assert labels == [
        "rows by status",
        "generated tokens over time",
        "read tokens over time",
        "rows by prompt tokens",
        "rows by generated tokens",
    ]
    for plot in plots:
        assert plot["width"] > 250 and plot["height"] > 5, plot
        assert plot["marked"] > 0 and plot["inside"] and all(plot["words"]), plot


@pytest.mark.parametrize("width", [320, PHONE, DESK])
def test_nothing_scrolls_sideways(page: Page, report: Path, width: int) -> None:
    page.show(report, width=width)
    assert page.value("document.documentElement.scrollWidth") <= width
    inner = "Array.from(document.querySelectorAll('.wide')).map(e => e.scrollWidth - e.clientWidth)"
    assert max(page.value(inner)) <= 0


def test_nothing_is_asked_of_the_network(page: Page, report: Path) -> None:
    page.requests.clear()
    page.complaints.clear()
    page.show(report, width=DESK)
    page.value("document.title")
    assert page.requests == [report.as_uri()]
    assert page.complaints == []


def test_text_is_readable_on_a_phone(page: Page, report: Path) -> None:
    page.show(report, width=PHONE)
    texts = "Array.from(document.querySelectorAll('svg text'))"
    heights = page.value(f"{texts}.map(text => text.getBoundingClientRect().height)")
    assert min(heights) >= 10


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_ink_and_paper_follow_the_scheme(page: Page, report: Path, dark: bool) -> None:
    page.show(report, width=DESK, dark=dark)
    paper, ink = (
        page.value(f"getComputedStyle(document.body).{name}.match(/\\d+/g).map(Number)")
        for name in ("backgroundColor", "color")
    )
    assert (sum(paper) < sum(ink)) == dark
    assert abs(sum(paper) - sum(ink)) > 400
