"""The report of a job: what is counted, how it is told, and that text of users stays text."""

from __future__ import annotations

import html.parser
import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.home import Home
from jobs.progress_log import ProgressPoint
from jobs.records import Job
from jobs.store import JobStore
from ntx_batch.report import facts, plots, words
from ntx_batch.report.lengths import MAX_BARS, Lengths
from ntx_batch.report.power import Price, energy_of
from ntx_batch.report.rows import COLUMNS, sum_rows
from ntx_batch.report.scale import ticks
from ntx_batch.report.svg import tick_texts
from ntx_batch.report.timeline import spans_of
from tests.cli_helpers import Ran, queue_job, run_here, write_prompts
from tests.job_factories import bad_row, finish_rows, ok_row
from tests.test_results import publish

Command = Callable[..., Ran]
EVIL = "<script>alert(1)</script>&\"'</table>"
POINTS = [
    ProgressPoint(at=1010.0, work_s=10.0, prompt_tokens=100, completion_tokens=50, energy_j=500.0),
    ProgressPoint(at=1020.0, work_s=20.0, prompt_tokens=100, completion_tokens=250, energy_j=900.0),
    ProgressPoint(at=2000.0, work_s=25.0, prompt_tokens=200, completion_tokens=250, energy_j=1e3),
]
STREAMED = {
    "device": "cuda",
    "device_name": "NVIDIA H200",
    "device_nbytes": 141 << 30,
    "driver_version": "550.54",
    "cuda_runtime": "12.4",
    "kv_type": "f16",
    "placement": "rrhhd d",
    "read_path": "direct",
    "energy": {"counted": ["board (NVML)"], "left_out": ["processor: none"]},
    "predicted": {"job_s": 20.0, "tokens_per_s": 12.5, "sweep_s": 0.5, "limited_by": "link"},
    "achieved": {
        "job_s": 25.0,
        "tokens_per_s": 10.0,
        "sweep_s": 0.6,
        "sweeps_s": 24.0,
        "streamed_nbytes": 3 << 30,
        "direct_nbytes": 1 << 30,
        "buffered_nbytes": 0,
        "disk_nbytes_per_s": 1.3e9,
        "probe_share": 0.9,
        "read_nbytes_per_s": 2e9,
        "copy_nbytes_per_s": 50e9,
        "wait_s": 6.0,
    },
}


# ---- rows ------------------------------------------------------------------------------------


def result_table(**columns: list[object]) -> pa.Table:
    num_rows = len(columns["status"])
    whole = {name: [None] * num_rows for name in COLUMNS} | {"row_index": list(range(num_rows))}
    types = {"prompt_tokens": pa.int32(), "completion_tokens": pa.int32(), "truncated": pa.bool_()}
    return pa.table(
        {
            f"p_{name}": pa.array(
                values, types.get(name, pa.int64() if name == "row_index" else pa.string())
            )
            for name, values in (whole | columns).items()
        }
    )


def test_rows_are_counted_by_status_ending_and_code() -> None:
    table = result_table(
        row_index=[9, 2, 4, 1, 0],
        status=["error", "ok", "error", "error", "cancelled"],
        finish_reason=[None, "stop", None, None, None],
        prompt_tokens=[7, 20, None, None, None],
        completion_tokens=[None, 3, None, None, None],
        truncated=[None, True, None, False, None],
        error_code=["timeout", None, "empty_prompt", "timeout", None],
        error_message=["later", None, None, "first", None],
    )
    figures = sum_rows(ds.dataset(table), "p_")
    assert figures.statuses == {"error": 3, "ok": 1, "cancelled": 1}
    assert figures.endings == {"stop": 1} and figures.num_truncated == 1
    assert (figures.prompts.num_tokens, figures.answers.num_tokens) == (20, 3)
    found = [
        (each.code, each.num_rows, each.row_index, each.message) for each in figures.by_count()
    ]
    assert found == [("timeout", 2, 1, "first"), ("empty_prompt", 1, 4, "")]


@given(st.lists(st.lists(st.integers(0, 5000), max_size=20), max_size=5))
def test_lengths_are_those_of_the_rows_and_each_is_in_one_bar(batches: list[list[int]]) -> None:
    lengths, values = Lengths(), sorted(itertools.chain(*batches))
    for batch in batches:
        lengths.add(np.array(batch, np.int64))
    bars = lengths.bars()
    assert sum(bar.num_rows for bar in bars) == lengths.num_texts == len(values)
    if not values:
        return
    assert lengths.num_tokens == sum(values)
    assert (lengths.quantile(0), lengths.quantile(1)) == (values[0], values[-1])
    assert lengths.quantile(0.5) == values[(len(values) - 1) // 2]
    assert len(bars) <= MAX_BARS + 1
    for bar in bars:
        inside = [v for v in values if bar.begin <= v and (bar.end is None or v < bar.end)]
        assert len(inside) == bar.num_rows


def test_a_few_texts_that_are_longer_by_far_share_the_last_bar() -> None:
    lengths = Lengths()
    lengths.add(np.array([*range(100)] * 10 + [90_000, 120_000], np.int64))
    *others, last = lengths.bars()
    assert last.end is None and last.num_rows == 2
    assert others[-1].end == last.begin <= 105
    svg = plots.histogram(lengths, label="prompt tokens", kind="first")
    assert f"last bar: {last.begin} and more" in svg


# ---- the course ------------------------------------------------------------------------------


def test_spans_are_work_and_pauses_take_nothing_from_their_rates() -> None:
    first, second, third = spans_of(POINTS)
    assert (first.begin_s, first.end_s, first.tokens_per_s, first.watts) == (0, 10, 5.0, 50.0)
    assert (second.tokens_per_s, second.prompt_tokens_per_s, second.pause_s) == (20.0, 0.0, 0.0)
    assert (third.end_s - third.begin_s, third.pause_s) == (5, 975.0)
    assert (third.prompt_tokens_per_s, third.watts) == (20.0, 20.0)


def test_points_without_work_between_them_make_no_span() -> None:
    assert spans_of([]) == []
    assert len(spans_of([POINTS[0], replace(POINTS[0], at=1500.0)])) == 1


def test_energy_that_was_not_read_is_not_guessed() -> None:
    points = [*POINTS[:2], replace(POINTS[2], energy_j=None)]
    energy = energy_of(STREAMED, points, Price(kwh=0.3))
    assert energy is not None and energy.joules is None
    assert facts.energy_facts(energy, Price(kwh=0.3)) == []
    assert spans_of(points)[2].watts is None


def test_energy_is_counted_from_the_first_row_and_priced() -> None:
    price = Price(kwh=360.0, currency="EUR")
    energy = energy_of(STREAMED, POINTS, price)
    assert energy is not None
    assert (energy.begin_at, energy.end_at, energy.sources) == (1000.0, 2000.0, ("board (NVML)",))
    found = dict(facts.energy_facts(energy, price))
    assert plain(found["energy"]) == "0.278 Wh" and plain(found["mean power"]) == "40 W"
    assert plain(found["cost of the job"]) == "0.10 EUR"
    assert plain(found["cost per million tokens generated"]) == "400.00 EUR"
    assert plain(found["cost per million tokens in all"]) == "222.22 EUR"


def test_watts_that_are_told_go_before_what_was_counted() -> None:
    energy = energy_of(STREAMED, POINTS, Price(watts=144.0))
    assert energy is not None
    assert energy.joules == 3600.0 and energy.left_out == ()
    assert "144 W" in energy.sources[0]


def test_figures_are_set_beside_what_was_predicted() -> None:
    found = {each.name: each for each in facts.comparisons(STREAMED)}
    assert list(found) == ["time of work", "generated tokens per second", "time of a pass"]
    assert (found["time of work"].predicted, found["time of work"].ratio) == (
        "20 s".replace(" ", words.THIN_SPACE),
        "1.25",
    )
    assert facts.comparisons({}) == []


def test_links_are_told_where_weights_were_streamed() -> None:
    found = {name: plain(text) for name, text in facts.stream_facts(STREAMED)}
    assert found["weights streamed"] == "3 GiB"
    assert found["link to the device, while it copied"] == "50 GB/s"
    assert found["as a share of the passes"] == "25 %"
    assert facts.stream_facts({"achieved": {"wait_s": 0}}) == []


def test_the_engine_is_told_with_device_kv_type_and_plan() -> None:
    found = dict(facts.engine_facts(STREAMED))
    assert plain(found["device"]) == "NVIDIA H200, 141 GiB, driver 550.54, CUDA 12.4"
    assert found["KV type"] == "f16"
    assert found["layers"] == "2 resident, 2 in host memory, 1 on disk; the head on disk"
    assert facts.engine_facts({}) == []


# ---- words and axes --------------------------------------------------------------------------


def plain(text: str) -> str:
    return text.replace(words.THIN_SPACE, " ")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.5, "0.5"),
        (1.234, "1.23"),
        (99.96, "100"),
        (12345.6, "12 346"),
        (1e-5, "0.00001"),
    ],
)
def test_numbers_are_short_and_have_no_exponents(value: float, text: str) -> None:
    assert plain(words.number(value)) == text


@given(st.floats(1e-9, 1e12))
def test_numbers_are_right_to_three_digits(value: float) -> None:
    text = words.number(value).replace(words.THIN_SPACE, "")
    assert "e" not in text and abs(float(text) - value) <= 0.005 * value


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0679, "67.9 ms"),
        (0.9999, "1 s"),
        (59.4, "59.4 s"),
        (59.99, "60 s"),
        (245, "4 min 05 s"),
        (3599.7, "1 h 00 min"),
        (11_250, "3 h 08 min"),
        (187_200, "2 d 04 h"),
    ],
)
def test_durations_take_the_two_units_that_matter(seconds: float, text: str) -> None:
    assert plain(words.duration(seconds)) == text


def test_shares_are_never_rounded_to_none_or_all() -> None:
    said = [plain(words.share(part, 10_000)) for part in (0, 1, 130, 9_999, 10_000)]
    assert said == ["0 %", "< 0.1 %", "1.3 %", "> 99.9 %", "100 %"]
    assert words.share(0, 0) == "-"


def test_times_name_their_zone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d \S+", words.moment(1_796_060_556.0))


@given(st.floats(1e-6, 1e12), st.integers(2, 8))
def test_ticks_are_few_and_reach_past_the_highest(highest: float, most: int) -> None:
    found = ticks(highest, most)
    assert found[0] == 0 and found[-1] >= highest * (1 - 1e-6)
    assert len(found) <= most + 2
    assert len(set(tick_texts(found))) == len(found)


def test_ticks_of_one_axis_have_one_unit() -> None:
    assert tick_texts([0.0, 5000.0, 10_000.0]) == ["0", "5k", "10k"]
    assert plain(" ".join(tick_texts([0.0, 500.0, 1000.0]))) == "0 500 1 000"


# ---- the page --------------------------------------------------------------------------------


@pytest.fixture
def ntx(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Command:
    monkeypatch.setenv("NTX_HOME", str(tmp_path / "home"))
    return lambda *arguments: run_here(capsys, *arguments)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[JobStore]:
    with JobStore(Home.open(tmp_path / "home").state_path) as opened:
        yield opened


@pytest.fixture
def job(store: JobStore, tmp_path: Path) -> Job:
    """A streamed job of 30 rows, 10 of them in a part; those that failed say something evil."""
    (tmp_path / "<b>in").mkdir()
    prompts = write_prompts(tmp_path / "<b>in" / "pro&mpts.parquet", ["x"] * 30)
    job = queue_job(tmp_path / "home", prompts)
    rows = [
        ok_row(row, EVIL, completion_tokens=row) if row % 5 else bad_row(row, message=EVIL)
        for row in range(30)
    ]
    store.claim_job()
    publish(store, job)
    store.commit_batch(job.id, finish_rows(job, rows[:10]))
    publish(store, job)
    store.commit_batch(job.id, finish_rows(job, rows[10:]))
    for point in POINTS:
        streamed = replace(point, sweep_s=point.work_s, wait_s=point.work_s / 4)
        streamed = replace(streamed, streamed_nbytes=int(point.work_s * 1e9))
        store.set_record(job.id, STREAMED | {"device_reason": EVIL}, streamed)
    store.set_state(job.id, "completed", reason=EVIL)
    return store.job(job.id)


class Outline(html.parser.HTMLParser):
    """The elements of a page, which must nest, and its text."""

    VOID = ("meta", "link", "line", "rect", "path", "br")

    def __init__(self, page: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(page)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.attributes += attrs
        if tag not in ("meta", "link"):
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def write(ntx: Command, job: Job, folder: Path, *options: str) -> tuple[str, Outline]:
    target = folder / "page.html"
    ran = ntx("report", job.id, "-o", target, *options)
    assert ran.code == 0, ran.err
    assert ran.out.strip() == str(target)
    page = target.read_text()
    return page, Outline(page)


def test_the_page_has_every_section_with_its_figures(
    ntx: Command, job: Job, tmp_path: Path
) -> None:
    options = ("--kwh-price", "0.30", "--currency", "EUR")
    page, outline = write(ntx, job, tmp_path, *options)
    text = plain(outline.text)
    for title in (
        "Rows",
        "Failed rows by code",
        "Throughput",
        "Lengths",
        "Links and stalls",
        "Predicted and achieved",
        "Not computed again",
        "Energy and cost",
        "Engine",
        "Job",
    ):
        assert f"<h2>{title}</h2>" in page
    for figure in (
        "80 %",
        "empty_prompt",
        "row 0: ",
        "by: board (NVML)",
        "0.30 EUR",
        "NVIDIA H200",
    ):
        assert figure in text, figure
    assert outline.names.count("svg") == 8  # status, rates, lengths, link and stalls, power
    assert "stood still for 16 min 15 s" in text


def test_text_of_users_never_becomes_markup(ntx: Command, job: Job, tmp_path: Path) -> None:
    page, outline = write(ntx, job, tmp_path, "--kwh-price", "1", "--currency", EVIL)
    assert "script" not in outline.names
    assert outline.names.count("b") == outline.names.count("li")
    assert EVIL not in page and outline.text.count(EVIL) >= 5
    assert "pro&mpts.parquet" in outline.text


def test_the_page_asks_for_nothing_and_runs_nothing(ntx: Command, job: Job, tmp_path: Path) -> None:
    page, outline = write(ntx, job, tmp_path)
    assert not {"script", "img", "iframe", "object", "form"} & set(outline.names)
    assert not [name for name, _ in outline.attributes if name.startswith("on") or name == "src"]
    assert [value for name, value in outline.attributes if name == "href"] == ["data:,"]
    assert "url(" not in page and "@import" not in page and "//" not in page.split("<body>")[0]
    assert "default-src 'none'" in page


def test_a_job_that_has_not_begun_has_a_page(ntx: Command, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "prompts.parquet", ["x"] * 3)
    job = queue_job(tmp_path / "home", prompts)
    _, outline = write(ntx, job, tmp_path)
    assert "remaining" in outline.text
    assert "no figures were kept" in outline.text


def test_energy_that_is_not_measured_says_why(
    ntx: Command, store: JobStore, job: Job, tmp_path: Path
) -> None:
    record = STREAMED | {"energy": {"counted": [], "left_out": ["processor: no counter"]}}
    unread = replace(POINTS[2], at=2001.0, work_s=26.0, energy_j=None)
    store.set_record(job.id, record, unread)
    _, outline = write(ntx, job, tmp_path, "--kwh-price", "0.3")
    assert "Energy was not measured" in outline.text
    assert "Processor: no counter" in outline.text and "--watts" in outline.text
    _, outline = write(ntx, job, tmp_path, "--kwh-price", "0.3", "--watts", "100")
    assert "cost of the job" in outline.text and "100 W" in plain(outline.text)


def test_the_page_is_never_written_over_the_jobs_own_files(ntx: Command, job: Job) -> None:
    before = Path(job.spec.input).read_bytes()
    assert ntx("report", job.id, "-o", job.spec.input).code == 2
    assert Path(job.spec.input).read_bytes() == before
    assert ntx("report", job.id, "-o", Path(job.results_dir) / "x.html").code == 2
    assert ntx("report", job.id, "-o", "/no/such/folder/x.html").code == 2


def test_the_newest_job_and_a_name_of_its_own_are_taken(
    ntx: Command, job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ran = ntx("report")
    assert ran.out.strip() == f"report-{job.id}.html"
    assert (tmp_path / ran.out.strip()).exists()
