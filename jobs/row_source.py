"""The rows of one job inside the engine actor: read, prepared, and gathered when they are done."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Protocol

from engine import FinishedRow, Request, RowError
from engine.chat import ChatTemplate, PromptTemplate
from engine.tokenizer import Tokenizer
from jobs.columns import bind_columns
from jobs.dataset import RecordBatch, RowReader, RowValues, Schema, read_schema
from jobs.duplicates import Duplicates, copy_of, identity_of
from jobs.expected_length import ExpectedLength
from jobs.isolation import RowLoss
from jobs.messages import WINDOW_OUTPUTS, StartJob
from jobs.prefix_queue import PrefixQueue
from jobs.prepare import RowFacts, RowPreparer, error_row
from jobs.records import Binding, JobSpec, Manifest, RowBatch, Shard, UnreachableError
from jobs.results import ResultRow, build_row_batch, result_schema

# What is held of a row beside its tokens and what it carries.
ROW_NBYTES = 1700
WINDOW_NBYTES = 128 << 20  # of all engines that share a job
ASK_AGAIN_S = 20.0  # a store that does not answer; to ask takes seconds, in which no sweep runs


@dataclass(slots=True)
class _Row:
    """A row between reading and the end of its last output.

    table, offset: where what it carries is; many rows share a table
    replaced: input columns in which bytes that are not UTF-8 were replaced
    samples: indices of its outputs that are still to come
    nbytes: about what it takes while it is held: at first, what it carries
    """

    index: int
    shard: int
    table: RecordBatch
    offset: int
    replaced: tuple[str, ...]
    samples: list[int]
    nbytes: int
    facts: RowFacts = field(default_factory=RowFacts)

    def result(self, finished: FinishedRow, duplicate_of: int | None) -> ResultRow:
        carried = self.table.slice(self.offset, 1)
        return ResultRow(finished, self.facts, carried, self.replaced, duplicate_of)


@dataclass(frozen=True, slots=True)
class Stall:
    """The input's store does not answer. since: of the monotonic clock, and so `asked_at`"""

    error: UnreachableError
    since: float
    asked_at: float = field(default_factory=time.monotonic)

    @property
    def age_s(self) -> float:
        return time.monotonic() - self.since

    @property
    def is_over(self) -> bool:
        """Whether to ask again."""
        return time.monotonic() - self.asked_at > ASK_AGAIN_S


class RowSource:
    """Reads rows ahead of the engine, hands them out in an order that suits it, takes them back.

    What is read and not finished is a window on the input: at most `WINDOW_OUTPUTS` outputs, and
    about `window_nbytes`. Within it rows with a common prefix follow each other, and equal outputs
    are computed once.
    """

    def __init__(
        self,
        reader: RowReader,
        preparer: RowPreparer,
        schema: Schema,
        spec: JobSpec,
        context_length: int,
        window_nbytes: int = WINDOW_NBYTES,
    ) -> None:
        self._reader = reader
        self._preparer = preparer
        self._schema = schema
        self._num_samples = spec.samples
        self._context_length = context_length
        self._window_nbytes = window_nbytes
        self._duplicates = Duplicates() if spec.dedupe else None
        self._expected = ExpectedLength()
        self._shards: deque[Shard] = deque()
        self._unread: Iterator[tuple[_Row, RowValues]] = iter(())
        self._next: tuple[_Row, RowValues] | None = None
        self._reading: Shard | None = None  # that `_unread` is of
        self._read_to = 0  # first row of it that has not come yet
        self.stall: Stall | None = None
        self._queue: PrefixQueue[list[Request]] = PrefixQueue()
        self._num_queued = 0
        self._ready: deque[Request] = deque()
        self._rows: dict[int, _Row] = {}
        self._num_held = self._held_nbytes = 0
        self._unfinished: dict[int, int] = {}
        self._finished: deque[tuple[int, ResultRow]] = deque()
        self._failed: dict[int, RowLoss] = {}

    @classmethod
    def open(cls, command: StartJob, engine: TextModel) -> RowSource:
        """Open a job's input for an engine.

        Raises SpecError, DatasetError, TemplateError: the job cannot run on this input and model.
        """
        spec = command.spec
        schema = read_schema(command.manifest)
        binding = bind_columns(spec, schema)
        preparer = make_preparer(spec, binding, command.manifest, engine, command.created_at)
        reader = RowReader(
            command.manifest,
            binding.carried,
            values=binding.values,
            on_bad_utf8=spec.on_bad_utf8,
        )
        results = result_schema(schema, binding, spec)
        window_nbytes = WINDOW_NBYTES // command.num_engines
        return cls(reader, preparer, results, spec, engine.context_length, window_nbytes)

    def close(self) -> None:
        self._reader.close()

    # ---- rows in -------------------------------------------------------------------------

    def add_shard(self, shard: Shard, failed: Mapping[int, RowLoss]) -> None:
        """Read this shard after those before. failed: rows that only become error rows"""
        self._failed |= failed
        num_outputs = (shard.end - shard.begin) * self._num_samples
        self._unfinished[shard.number] = num_outputs - len(shard.done)
        self._shards.append(shard)

    @property
    def has_unread(self) -> bool:
        """Whether there are rows to read, now, or when others are finished or a store answers."""
        return self._pull() or bool(self._shards)

    def _pull(self) -> bool:
        """Whether the next row is at hand. While a store does not answer it is asked seldom."""
        if self._next is None and self.stall is not None and not self.stall.is_over:
            return False
        while self._next is None:
            try:
                self._next = next(self._unread, None)
            except UnreachableError as error:
                self._stop_reading(error)
                return False
            if self._next is None:
                if not self._shards:
                    return False
                self._reading = self._shards.popleft()
                self._unread = self._read(self._reading)
            else:
                self.stall = None
        return True

    def _stop_reading(self, error: UnreachableError) -> None:
        """Put what is left of the shard at hand back; rows that were read go on."""
        assert self._reading is not None
        self._shards.appendleft(replace(self._reading, begin=self._read_to))
        self._unread = iter(())
        self.stall = Stall(error, self.stall.since if self.stall else time.monotonic())

    def wants_row(self, num_wanted: int) -> bool:
        """Whether to read on now.

        num_wanted: ready outputs without which the engine may soon lack work. Where rows are large
            they are read past the window's bytes, unless what fills it are copies.
        """
        if self._num_held >= WINDOW_OUTPUTS or not self._pull():
            return False
        if self._held_nbytes < self._window_nbytes:
            return True
        copies_wait = self._duplicates is not None and self._duplicates.num_waiting > 0
        return self.num_ready < num_wanted and not copies_wait

    @property
    def next_row(self) -> int:
        """Index of the row that `prepare_row` prepares."""
        assert self._pull() and self._next is not None
        return self._next[0].index

    def prepare_row(self) -> None:
        """Read the next row; its outputs become ready, wait for equal ones, or are error rows."""
        assert self._pull() and self._next is not None
        (row, values), self._next = self._next, None
        loss = self._failed.pop(row.index, None)
        if loss is not None:
            self._let_copies_fail(row, values, loss)
            values = RowError(loss.code, loss.reason)
        if isinstance(values, RowError):
            prepared: Request | FinishedRow = error_row(row.index, values)
        else:
            prepared, row.facts = self._preparer.prepare(row.index, values)
        self._hold(row, prepared)
        if isinstance(prepared, FinishedRow):
            for sample in tuple(row.samples):
                self._end(replace(prepared, sample_index=sample))
            return
        requests = [
            replace(prepared, sample_index=sample) if sample else prepared for sample in row.samples
        ]
        if self._duplicates is not None and row.facts.sampling_params is not None:
            requests = self._without_copies(self._duplicates, requests, row.facts.sampling_params)
        if requests:
            self._queue_up(requests)

    def _queue_up(self, requests: list[Request]) -> None:
        """Outputs of one row are to be computed."""
        token_ids = requests[0].token_ids
        room = self._context_length - len(token_ids)
        expected = self._expected.of(min(requests[0].params.max_tokens, room))
        self._queue.push(requests, token_ids, expected)
        self._num_queued += len(requests)

    def _let_copies_fail(self, row: _Row, values: RowValues, loss: RowLoss) -> None:
        """A row was given up, as one that brings the engine down: those equal to it would, too."""
        if self._duplicates is None or isinstance(values, RowError):
            return
        prepared, facts = self._preparer.prepare(row.index, values)
        if isinstance(prepared, FinishedRow) or facts.sampling_params is None:
            return
        error = error_row(row.index, RowError(loss.code, loss.reason))
        for sample in row.samples:
            request = replace(prepared, sample_index=sample)
            identity = identity_of(request, facts.sampling_params)
            if identity is not None:
                self._duplicates.give_up(identity, replace(error, sample_index=sample))

    def _without_copies(
        self, duplicates: Duplicates, requests: list[Request], sampling_params: str
    ) -> list[Request]:
        """Those of a row's outputs that must be computed; the others are, or will be, copies."""
        first = []
        for request in requests:
            identity = identity_of(request, sampling_params)
            key = (request.row_index, request.sample_index)
            if identity is None:
                first.append(request)
            elif (computed := duplicates.finished(identity)) is not None:
                self._end(copy_of(computed, key), computed.row_index)
            elif duplicates.is_first(identity, request):
                first.append(request)
        return first

    @property
    def num_ready(self) -> int:
        """Outputs that `next_request` can hand out."""
        return self._num_queued + len(self._ready)

    def next_request(self) -> Request | None:
        """The output to compute next; None: there is none ready. Samples of a row come together."""
        if not self._ready:
            if not self._num_queued:
                return None
            self._ready.extend(self._queue.pop())
            self._num_queued -= len(self._ready)
        return self._ready.popleft()

    def _hold(self, row: _Row, prepared: Request | FinishedRow) -> None:
        row.nbytes += ROW_NBYTES * len(row.samples)
        if isinstance(prepared, Request):
            row.nbytes += prepared.token_ids.nbytes
        self._rows[row.index] = row
        self._held_nbytes += row.nbytes
        self._num_held += len(row.samples)

    def _read(self, shard: Shard) -> Iterator[tuple[_Row, RowValues]]:
        num_samples, done = self._num_samples, frozenset(shard.done)
        self._read_to = shard.begin
        for first, batch in self._reader.read(shard.begin, shard.end):
            carried_nbytes = batch.table.nbytes // batch.num_rows
            for offset in range(batch.num_rows):
                self._read_to = first + offset + 1
                output = (first + offset) * num_samples
                samples = [s for s in range(num_samples) if output + s not in done]
                if samples:
                    row = _Row(
                        first + offset,
                        shard.number,
                        batch.table,
                        offset,
                        batch.replaced[offset],
                        samples,
                        carried_nbytes,
                    )
                    yield row, batch.values[offset]

    # ---- rows out ------------------------------------------------------------------------

    def finish(self, row: FinishedRow) -> None:
        """Take an output's outcome, for the next batch, and with it the copies of it.

        How long a row was on board is not in what it says: after a timeout a copy is computed.
        """
        if row.status == "ok":
            self._expected.add(row.completion_tokens)
        self._end(row)
        if self._duplicates is None:
            return
        if row.error_code == "timeout":
            request = self._duplicates.next_in_line(row)
            if request is not None:
                self._queue_up([request])
            return
        for key in self._duplicates.settle(row):
            self._end(copy_of(row, key), row.row_index)

    def _end(self, finished: FinishedRow, duplicate_of: int | None = None) -> None:
        row = self._rows[finished.row_index]
        row.samples.remove(finished.sample_index)
        self._num_held -= 1
        if not row.samples:
            del self._rows[row.index]
            self._held_nbytes -= row.nbytes
        self._finished.append((row.shard, row.result(finished, duplicate_of)))

    @property
    def has_news(self) -> bool:
        """Whether `take_finished` has something to say."""
        return bool(self._finished) or 0 in self._unfinished.values()

    @property
    def num_finished(self) -> int:
        """Outputs for the next batches."""
        return len(self._finished)

    def take_finished(self, max_rows: int) -> tuple[RowBatch | None, tuple[int, ...]]:
        """Outputs finished since the last call, not too many, and shards complete with them."""
        rows: list[ResultRow] = []
        while self._finished and len(rows) < max_rows:
            shard, row = self._finished.popleft()
            self._unfinished[shard] -= 1
            rows.append(row)
        shards = tuple(number for number, left in self._unfinished.items() if left == 0)
        for number in shards:
            del self._unfinished[number]
        return (build_row_batch(self._schema, rows) if rows else None), shards


class TextModel(Protocol):
    """What of an engine makes token ids out of rows."""

    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def chat_template(self) -> ChatTemplate | None: ...
    @property
    def context_length(self) -> int: ...


def make_preparer(
    spec: JobSpec, binding: Binding, manifest: Manifest, model: TextModel, created_at: float
) -> RowPreparer:
    """The preparer of a job's rows. created_at: of the job, Unix seconds

    Raises SpecError, TemplateError: the job cannot run on this input and model.
    """
    return RowPreparer(
        spec,
        binding,
        tokenizer=model.tokenizer,
        chat_template=_chat_template(spec, model, created_at),
        context_length=model.context_length,
        prompt_template=_prompt_template(spec),
        params_are_text=manifest.format == "csv",
    )


def _chat_template(spec: JobSpec, model: TextModel, created_at: float) -> ChatTemplate | None:
    """The job's or the model's, with the date of the submit: a resume must not change prompts."""
    own = spec.chat_template
    source = own or (model.chat_template.source if model.chat_template else None)
    if source is None:
        return None
    tokenizer = model.tokenizer
    return ChatTemplate(
        source,
        bos_token=_token_text(tokenizer, tokenizer.bos_id),
        eos_token=_token_text(tokenizer, tokenizer.eos_id),
        now=datetime.fromtimestamp(created_at),
        defer_errors=own is None,
    )


def _token_text(tokenizer: Tokenizer, token_id: int | None) -> str:
    return "" if token_id is None else tokenizer.token_text(token_id)


def _prompt_template(spec: JobSpec) -> PromptTemplate | None:
    return None if spec.prompt_template is None else PromptTemplate(spec.prompt_template)
