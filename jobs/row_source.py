"""The rows of one job inside the engine actor: read, prepared, and gathered when they are done."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

from engine import FinishedRow, Request, RowError
from engine.chat import ChatTemplate, PromptTemplate
from engine.tokenizer import Tokenizer
from jobs.columns import bind_columns
from jobs.dataset import InputBatch, RecordBatch, RowReader, Schema, read_schema
from jobs.isolation import RowLoss
from jobs.messages import StartJob
from jobs.prepare import RowFacts, RowPreparer, error_row
from jobs.records import Binding, JobSpec, Manifest, RowBatch, Shard
from jobs.results import ResultRow, build_row_batch, result_schema


@dataclass(slots=True)
class _Pending:
    """A row between reading and its result."""

    shard: int
    facts: RowFacts
    carried: RecordBatch
    replaced: tuple[str, ...]


@dataclass(slots=True)
class _InputRow:
    """A row as read. values: those needed to run it, or why there are none"""

    index: int
    values: dict[str, Any] | RowError
    carried: RecordBatch
    replaced: tuple[str, ...]
    shard: int


class RowSource:
    """Hands out requests shard by shard and takes back finished rows.

    Nothing is read before it is asked for, and at most one record batch is held beside the rows
    that are in the engine.
    """

    def __init__(self, reader: RowReader, preparer: RowPreparer, schema: Schema) -> None:
        self._reader = reader
        self._preparer = preparer
        self._schema = schema
        self._shards: deque[Shard] = deque()
        self._rows: Iterator[_InputRow] = iter(())
        self._next: _InputRow | None = None
        self._pending: dict[int, _Pending] = {}
        self._unfinished: dict[int, int] = {}
        self._finished: list[ResultRow] = []
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
        return cls(reader, preparer, result_schema(schema, binding, spec))

    def close(self) -> None:
        self._reader.close()

    # ---- rows in -------------------------------------------------------------------------

    def add_shard(self, shard: Shard, failed: Mapping[int, RowLoss]) -> None:
        """Read this shard after those before. failed: rows that only become error rows"""
        self._failed |= failed
        self._unfinished[shard.number] = shard.end - shard.begin - len(shard.done)
        self._shards.append(shard)

    @property
    def has_unread(self) -> bool:
        """Whether `next_request` has more."""
        while self._next is None:
            self._next = next(self._rows, None)
            if self._next is None:
                if not self._shards:
                    return False
                self._rows = self._read(self._shards.popleft())
        return True

    @property
    def next_row(self) -> int:
        """Index of the row that `next_request` prepares."""
        assert self.has_unread and self._next is not None
        return self._next.index

    def next_request(self) -> Request | None:
        """The next row to run; None where it turned out to be an error row, which is kept."""
        assert self.has_unread and self._next is not None
        row, self._next = self._next, None
        loss = self._failed.pop(row.index, None)
        values = RowError(loss.code, loss.reason) if loss else row.values
        if isinstance(values, RowError):
            prepared: Request | FinishedRow = error_row(row.index, values)
            facts = RowFacts()
        else:
            prepared, facts = self._preparer.prepare(row.index, values)
        self._pending[row.index] = _Pending(row.shard, facts, row.carried, row.replaced)
        if isinstance(prepared, Request):
            return prepared
        self.finish(prepared)
        return None

    def _read(self, shard: Shard) -> Iterator[_InputRow]:
        done = frozenset(shard.done)
        for first, batch in self._reader.read(shard.begin, shard.end):
            for offset in range(batch.num_rows):
                if first + offset not in done:
                    yield _input_row(first, batch, offset, shard)

    # ---- rows out ------------------------------------------------------------------------

    def finish(self, row: FinishedRow) -> None:
        """Take a row's outcome, for the next batch."""
        pending = self._pending.pop(row.row_index)
        self._unfinished[pending.shard] -= 1
        self._finished.append(ResultRow(row, pending.facts, pending.carried, pending.replaced))

    @property
    def has_news(self) -> bool:
        """Whether `take_finished` has something to say."""
        return bool(self._finished) or 0 in self._unfinished.values()

    @property
    def num_finished(self) -> int:
        """Rows for the next batch."""
        return len(self._finished)

    def take_finished(self) -> tuple[RowBatch | None, tuple[int, ...]]:
        """Finished rows since the last call, and the shards that are complete with them."""
        rows, self._finished = self._finished, []
        shards = tuple(number for number, left in self._unfinished.items() if left == 0)
        for number in shards:
            del self._unfinished[number]
        return (build_row_batch(self._schema, rows) if rows else None), shards


def _input_row(first: int, batch: InputBatch, offset: int, shard: Shard) -> _InputRow:
    return _InputRow(
        index=first + offset,
        values=batch.values[offset],
        carried=batch.table.slice(offset, 1),
        replaced=batch.replaced[offset],
        shard=shard.number,
    )


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
