"""One job as one HTML page that needs nothing else: no script, no request, no font."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import PurePath
from typing import Any

import jinja2
from markupsafe import Markup

from jobs.progress_log import ProgressPoint
from jobs.records import Job
from jobs.uris import base_name
from ntx_batch.report import facts, plots, words
from ntx_batch.report.lengths import Lengths
from ntx_batch.report.power import Energy, Price, energy_of
from ntx_batch.report.rows import RowFigures
from ntx_batch.report.timeline import Span, spans_of

STATUSES = ("ok", "error", "cancelled", "remaining")
_QUANTILES = (
    ("shortest", 0.0),
    ("median", 0.5),
    (f"90{words.THIN_SPACE}% have at most", 0.9),
    (f"99{words.THIN_SPACE}% have at most", 0.99),
    ("longest", 1.0),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """All that a page shows.

    rows: of the job's results, its retries' rows among them
    points: how the job itself went
    version: of this program
    made_at: Unix seconds
    """

    job: Job
    rows: RowFigures
    points: Sequence[ProgressPoint]
    price: Price
    version: str
    made_at: float


def render(report: Report) -> str:
    """The page as text. What comes from users is escaped wherever it stands."""
    files = resources.files(__package__)
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"count": words.count, "duration": words.duration}
    template = environment.from_string((files / "page.html").read_text(encoding="utf-8"))
    css = Markup((files / "page.css").read_text(encoding="utf-8"))
    return template.render(css=css, **_values(report))


def _values(report: Report) -> dict[str, Any]:
    job, rows, spans = report.job, report.rows, spans_of(report.points)
    energy = energy_of(job.record, report.points, report.price)
    statuses = _statuses(job, rows)
    return {
        "job": job,
        "input_name": base_name(job.spec.input),
        "model_name": PurePath(job.spec.model).name,
        "made_at": words.moment(report.made_at),
        "version": report.version,
        "headline": [*_headline(job, rows, report.points, energy, report.price)],
        "statuses": statuses,
        "status_strip": Markup(
            plots.strip([(name, num) for name, num, _ in statuses], "rows by status")
        ),
        "failures": [
            (each, words.share(each.num_rows, sum(num for _, num, _ in statuses)))
            for each in rows.by_count()
        ],
        "endings": sorted(rows.endings.items()),
        "num_truncated": rows.num_truncated,
        "has_pauses": any(span.pause_s for span in spans),
        "rate_plots": [*_rate_plots(job, spans)],
        "stream_plots": [*_stream_plots(spans)],
        "histograms": [*_histograms(rows)],
        "stream": facts.stream_facts(job.record),
        "comparisons": facts.comparisons(job.record),
        "saved": facts.saved_facts(job),
        "energy": energy,
        "energy_facts": facts.energy_facts(energy, report.price) if energy else [],
        "power_plots": [*_power_plots(spans)],
        "energy_span": _span_text(energy) if energy else "",
        "num_points": len(report.points),
        "price": report.price,
        "engine": facts.engine_facts(job.record),
        "job_facts": facts.job_facts(job),
    }


def _headline(
    job: Job,
    rows: RowFigures,
    points: Sequence[ProgressPoint],
    energy: Energy | None,
    price: Price,
) -> Iterator[tuple[str, str]]:
    yield words.count(rows.statuses["ok"]), "rows with an answer"
    yield words.count(rows.statuses["error"]), "rows failed"
    if points and points[-1].work_s:
        last = points[-1]
        generated = words.number(last.completion_tokens / last.work_s)
        yield generated, "tokens/s generated, pauses left out"
        yield words.number(last.prompt_tokens / last.work_s), "tokens/s read, likewise"
        yield words.duration(last.work_s), "of work"
    if energy is not None and energy.kwh is not None:
        if price.kwh is not None:
            cost = energy.kwh * price.kwh
            small = f"< 0.01{words.THIN_SPACE}{price.currency}"
            yield small if 0 < cost < 0.01 else words.price(cost, price.currency), "for energy"
        else:
            yield words.energy(energy.kwh), "of energy"


def _statuses(job: Job, rows: RowFigures) -> list[tuple[str, int, str]]:
    """Name, rows and share of each status, of all that the job will have."""
    counts = {name: rows.statuses[name] for name in STATUSES}
    counts["remaining"] = max(0, (job.total or 0) - rows.statuses.total())
    whole = sum(counts.values())
    return [(name, num, words.share(num, whole)) for name, num in counts.items() if num]


def _rate_plots(job: Job, spans: Sequence[Span]) -> Iterator[Markup]:
    if not spans:
        return
    predicted = (job.record.get("predicted") or {}).get("tokens_per_s")
    yield Markup(
        plots.over_time(
            spans,
            lambda span: span.tokens_per_s,
            label="generated tokens",
            unit="tokens/s generated",
            kind="first",
            expected=predicted,
        )
    )
    yield Markup(
        plots.over_time(
            spans,
            lambda span: span.prompt_tokens_per_s,
            label="read tokens",
            unit="tokens/s read",
            kind="second",
        )
    )


def _stream_plots(spans: Sequence[Span]) -> Iterator[Markup]:
    if not any(span.streamed_nbytes_per_s for span in spans):
        return
    yield Markup(
        plots.over_time(
            spans,
            lambda span: span.streamed_nbytes_per_s / 1e9,
            label="weights streamed",
            unit="GB/s of weights",
            kind="first",
        )
    )
    yield Markup(
        plots.over_time(
            spans,
            lambda span: 100 * span.wait_share,
            label="waiting for weights",
            unit="% of pass time waited",
            kind="warn",
        )
    )


def _power_plots(spans: Sequence[Span]) -> Iterator[Markup]:
    counted = [span for span in spans if span.watts is not None]
    if counted:
        yield Markup(
            plots.over_time(
                counted, lambda span: span.watts or 0.0, label="power", unit="W", kind="first"
            )
        )


def _histograms(rows: RowFigures) -> Iterator[tuple[Markup, list[tuple[str, str]]]]:
    for lengths, label, kind in (
        (rows.prompts, "prompt tokens", "second"),
        (rows.answers, "generated tokens", "first"),
    ):
        if lengths.num_texts:
            plot = Markup(plots.histogram(lengths, label=label, kind=kind))
            yield plot, _length_facts(lengths)


def _length_facts(lengths: Lengths) -> list[tuple[str, str]]:
    found = [(name, words.count(lengths.quantile(share))) for name, share in _QUANTILES]
    return [*found, ("mean", words.number(lengths.mean)), ("sum", words.count(lengths.num_tokens))]


def _span_text(energy: Energy) -> str:
    return f"{words.moment(energy.begin_at)} to {words.moment(energy.end_at)}"
