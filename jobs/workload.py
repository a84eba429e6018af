"""How much work a job is: the number of its rows, and tokens per row out of a sample of them."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine import Request, RowError, SamplingParams
from engine.chat import ChatTemplate, chat_template_of
from engine.gguf_file import GgufFile
from engine.hparams import Hparams
from engine.planner import Workload
from engine.tokenizer import Tokenizer
from jobs.columns import bind_columns
from jobs.dataset import RowReader, build_manifest, count_rows, read_schema
from jobs.files import open_file
from jobs.messages import WINDOW_OUTPUTS, StartJob
from jobs.prepare import RowPreparer
from jobs.records import JobSpec, Manifest
from jobs.row_index import is_indexed
from jobs.row_source import TextModel, make_preparer
from jobs.sharing import SampledRow, Sharing, estimate_sharing
from jobs.uris import base_name

SAMPLE_ROWS = 200
SAMPLE_PLACES = 8  # spread over the input
SAMPLE_S = 2.0  # a place deep inside a large row group is slow to reach
EXCERPT_NBYTES = 4 << 20  # of text whose rows nobody has counted


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelText:
    """What of a model makes token ids out of rows."""

    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    context_length: int

    @classmethod
    def of(cls, file: GgufFile, hparams: Hparams, pre_tokenizer: str | None) -> ModelText:
        """Raises TokenizerError."""
        tokenizer = Tokenizer.from_gguf(file, pre_tokenizer=pre_tokenizer)
        return cls(
            tokenizer=tokenizer,
            chat_template=chat_template_of(file, tokenizer),
            context_length=hparams.context_length,
        )


def sample_workload(command: StartJob, model: TextModel) -> Workload:
    """What one of the engines that share a job is to do; see `sample_rows`."""
    created_at = command.created_at
    work = sample_rows(command.spec, command.manifest, model, created_at=created_at).workload
    return part_of(work, command.num_engines)


def part_of(work: Workload, num_engines: int) -> Workload:
    """An even part of the rows."""
    return replace(work, num_rows=-(-work.num_rows // num_engines))


@dataclass(frozen=True, kw_only=True, slots=True)
class RowSample:
    """Some rows of a job.

    num_rows: of the job; about so many where is_estimate
    num_samples: outputs of each
    num_sampled: that were read; num_bad of them cannot run
    prompt_tokens: mean of those that can run
    output_tokens: mean of what each may generate: its max_tokens, as far as the context goes
    expected_share: of that, what is planned for; see `expected_tokens`
    stored_tokens: of each that can run, positions that it may take in the KV cache
    sharing: what need not be computed
    """

    num_rows: int
    num_samples: int
    is_estimate: bool
    num_sampled: int
    num_bad: int
    prompt_tokens: float
    output_tokens: float
    expected_share: float
    stored_tokens: tuple[int, ...]
    sharing: Sharing

    @property
    def workload(self) -> Workload:
        sharing = self.sharing
        return Workload(
            num_rows=max(1, round(self.num_rows * sharing.outputs_per_row)),
            prompt_tokens=sharing.prompt_tokens,
            output_tokens=max(1.0, sharing.output_tokens * self.expected_share),
            reused_tokens=sharing.reused_tokens,
            reused_pages=sharing.reused_pages,
            longest_tokens=max(self.stored_tokens, default=0),
        )


def sample_rows(
    spec: JobSpec, manifest: Manifest, model: TextModel, *, created_at: float
) -> RowSample:
    """Read and tokenise about SAMPLE_ROWS rows, spread over the input.

    Of text files that have no index the first is read from its start, and rows are estimated.

    created_at: of the job, for templates that print the date

    Raises SpecError, DatasetError, TemplateError: the job cannot run on this input and model.
    """
    if manifest.format == "parquet" or is_indexed(manifest):
        return _sample(spec, manifest, model, created_at, nbytes_per_excerpt=None)
    with tempfile.TemporaryDirectory(prefix="ntx-plan-") as folder:
        excerpt, share = _excerpt(spec, manifest, Path(folder))
        return _sample(spec, excerpt, model, created_at, nbytes_per_excerpt=share)


def _sample(
    spec: JobSpec,
    manifest: Manifest,
    model: TextModel,
    created_at: float,
    *,
    nbytes_per_excerpt: float | None,
) -> RowSample:
    binding = bind_columns(spec, read_schema(manifest))
    preparer = make_preparer(spec, binding, manifest, model, created_at)
    in_reach = manifest.num_rows or 0
    total = round(in_reach * (nbytes_per_excerpt or 1.0))
    if spec.limit is not None:
        in_reach, total = min(spec.limit, in_reach), min(spec.limit, total)
    with RowReader(manifest, (), values=binding.values, on_bad_utf8=spec.on_bad_utf8) as reader:
        runs = list(_runs(reader, preparer, in_reach, model.context_length))
    rows = [row for run in runs for row in run]
    good = [row for row in rows if row is not None]
    in_window = min(max(total, len(rows)), WINDOW_OUTPUTS // spec.samples)
    return RowSample(
        num_rows=total,
        num_samples=spec.samples,
        is_estimate=(nbytes_per_excerpt or 1.0) > 1.0 and total != spec.limit,
        num_sampled=len(rows),
        num_bad=len(rows) - len(good),
        prompt_tokens=_mean([len(row.request.token_ids) for row in good]),
        output_tokens=_mean([row.output_tokens for row in good]),
        expected_share=_share(good),
        stored_tokens=tuple(len(row.request.token_ids) + row.output_tokens - 1 for row in good),
        sharing=estimate_sharing(
            runs, num_rows=in_window, num_samples=spec.samples, dedupe=spec.dedupe
        ),
    )


def _runs(
    reader: RowReader, preparer: RowPreparer, num_rows: int, context_length: int
) -> Iterator[list[SampledRow | None]]:
    """The sampled rows, in runs; None for one that cannot run."""
    deadline = time.monotonic() + SAMPLE_S
    for begin, end in sample_ranges(num_rows):
        yield [
            _sampled(preparer, first + offset, values, context_length)
            for first, batch in reader.read(begin, end)
            for offset, values in enumerate(batch.values)
        ]
        if time.monotonic() > deadline:
            return


def _sampled(
    preparer: RowPreparer, row: int, values: dict[str, Any] | RowError, context_length: int
) -> SampledRow | None:
    if isinstance(values, RowError):
        return None
    prepared, facts = preparer.prepare(row, values)
    if not isinstance(prepared, Request):
        return None
    most_new = min(prepared.params.max_tokens, context_length - len(prepared.token_ids))
    return SampledRow(prepared, facts.sampling_params or "", most_new)


def sample_ranges(num_rows: int) -> list[tuple[int, int]]:
    """Row ranges of SAMPLE_ROWS rows in all, in an order in which the first few are spread too."""
    if num_rows <= SAMPLE_ROWS:
        return [(0, num_rows)] if num_rows else []
    length = SAMPLE_ROWS // SAMPLE_PLACES
    order = sorted(range(SAMPLE_PLACES), key=lambda place: f"{place:03b}"[::-1])
    begins = [place * (num_rows - length) // (SAMPLE_PLACES - 1) for place in order]
    return [(begin, begin + length) for begin in begins]


def expected_tokens(params: SamplingParams, most_new: int) -> float:
    """What a row is taken to generate before any has: half of its limit, where it may end before.

    Between an eighth and a half, plans hardly differ, and a row's KV pages are taken as it grows.
    """
    never_ends = params.ignore_eos and not (params.stop or params.stop_token_ids)
    return float(most_new) if never_ends else max(most_new / 2, min(params.min_tokens, most_new))


def _share(rows: list[SampledRow]) -> float:
    limits = sum(row.output_tokens for row in rows)
    expected = sum(expected_tokens(row.request.params, row.output_tokens) for row in rows)
    return expected / limits if limits else 1.0


def _mean(values: list[int]) -> float:
    return sum(values) / len(values) if values else 0.0


def _excerpt(spec: JobSpec, manifest: Manifest, folder: Path) -> tuple[Manifest, float]:
    """The first file's beginning as an indexed input of its own, and how much longer the whole is.

    The last row of it may be torn, which makes it one bad row.
    """
    first = manifest.files[0]
    path = folder / base_name(first.path)
    with open_file(first.path) as source:
        data = source.read(EXCERPT_NBYTES)
    if len(data) < first.nbytes:
        data = data[: data.rfind(b"\n") + 1] or data
    path.write_bytes(data)
    found = build_manifest(
        path,
        encoding=manifest.encoding if manifest.format == "csv" else None,
        delimiter=manifest.delimiter if manifest.format == "csv" else None,
        on_bad_utf8=spec.on_bad_utf8,
    )
    files = tuple(replace(file, partition=first.partition) for file in found.files)
    found = replace(found, files=files, partitions=manifest.partitions)
    share = sum(file.nbytes for file in manifest.files) / max(1, len(data))
    return count_rows(found, folder, spec.on_bad_utf8), share
