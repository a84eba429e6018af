"""The engine: rows in, finished rows out, one sweep at a time."""

from __future__ import annotations

import functools
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from engine.chat import ChatTemplate, chat_template_of
from engine.devices import chunk_page_tokens, kv_type, open_ops, resolved
from engine.drain import Drain
from engine.gguf_file import GgufFile
from engine.hparams import check_tensors, read_hparams
from engine.kv_cache import KvCache, RowKv, pages_for
from engine.loading import load_model, model_sizes
from engine.model import kv_shape
from engine.params import validate_params
from engine.planner import Budget, Plan, Planner, Rates, Workload
from engine.prefix_tree import pieces_of
from engine.requests import EngineConfig, FinishedRow, Request, RowError
from engine.rows import ActiveRow, WaitingRow, failed_row
from engine.sampler import choose
from engine.scheduler import (
    KEEP_AHEAD,
    LOOK_AHEAD,
    Chunk,
    admission_budget,
    chunk_end,
    compose_sweep,
    spare_pages,
)
from engine.sweep_log import SweepLog
from engine.tokenizer import Tokenizer
from kernels.ops import (
    PAGE_TOKENS,
    Batch,
    Float32,
    KvPool,
    KvType,
    Ops,
    shares_partial_pages,
)
from nvme import Reader, ReadError

MAX_SWEEP_TRIES = 3


@dataclass(slots=True)
class Totals:
    """What an engine has done since it was loaded.

    prompt_tokens: of all rows taken on board; all but `reused_tokens` of them were computed
    reused_tokens: of those, what earlier rows had computed
    """

    num_failed_sweeps: int = 0
    num_preempted: int = 0
    num_rows: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    completion_tokens: int = 0


class Engine:
    """Runs many rows through one model.

    model: GGUF file; of a split one, the first shard
    config: budgets and layouts
    ops: compute backend; None makes the CPU backend
    reader_factory: opens a reader on the model's files; None takes the configured one
    plan: how to divide memory; None takes the best for `rates` and `workload`: what the machine
        does, and what is to be done
    progress: called as (layers loaded, layers) while loading

    Raises GgufError, UnsupportedModelError, TokenizerError, MemoryBudgetError, ReadError.
    """

    def __init__(
        self,
        model: str | Path,
        config: EngineConfig | None = None,
        *,
        ops: Ops | None = None,
        reader_factory: Callable[[Sequence[Path]], Reader] | None = None,
        plan: Plan | None = None,
        rates: Rates | None = None,
        workload: Workload | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        config = config or EngineConfig()
        started = time.perf_counter()
        file = GgufFile.open(Path(model))
        self.hparams = read_hparams(file)
        check_tensors(file, self.hparams)
        self.tokenizer = Tokenizer.from_gguf(file, pre_tokenizer=config.pre_tokenizer)
        self.chat_template: ChatTemplate | None = chat_template_of(file, self.tokenizer)
        self._ops = ops or open_ops(config)
        self.config = resolved(config, self._ops)
        compiled = time.perf_counter()
        loaded = load_model(
            file,
            self.hparams,
            self.config,
            self._ops,
            plan=plan,
            rates=rates,
            workload=workload,
            open_files=reader_factory,
            progress=progress,
        )
        self.plan, self._model, self._reader_name = loaded.plan, loaded.model, loaded.reader_name
        self._read_path, self.rates = loaded.read_path, rates
        pool = self._ops.kv_pool(
            kv_shape(self.hparams),
            num_pages=self.plan.kv_pages,
            kv_type=kv_type(self.config),
            num_rows=self.plan.max_rows,
            num_host_pages=self.plan.host_kv_pages,
        )
        self._page_tokens = chunk_page_tokens(pool.kv_type)
        self._recorded = object()  # what sweeps over this model and this pool are recorded under
        self._cache = KvCache(
            self.plan.total_kv_pages,
            self._ops,
            pool,
            num_host_pages=self.plan.host_kv_pages,
            shares_parts=shares_partial_pages(pool.kv_type),
        )
        stream = self._model.stream
        drains = stream is not None and self._ops.frees_pages
        self._drain = Drain(self._cache, stream, pool.page_nbytes) if stream and drains else None
        self._waiting: deque[WaitingRow] = deque()
        self._rejected: list[FinishedRow] = []
        self._running: dict[int, ActiveRow] = {}
        self._free_slots = list(range(self.plan.max_rows - 1, -1, -1))
        most_pages = min(pages_for(self.context_length), self.plan.total_kv_pages)
        self._page_table = np.full((self.plan.max_rows, most_pages), -1, np.int32)
        self.totals = Totals()
        self.sweeps = SweepLog(
            loaded.model.stream,
            loaded.read_path,
            rates.disk_nbytes_per_s if rates else None,
            kv_travel=functools.partial(self._ops.kv_travel, pool),
        )
        row_nbytes = self._ops.kv_row_nbytes(kv_shape(self.hparams), pool.kv_type)
        self._sizes = model_sizes(file, self.hparams, pool.page_nbytes, row_nbytes)
        self._load_s = {
            "open_s": round(compiled - started, 3),
            "weights_s": round(time.perf_counter() - compiled, 3),
        }

    # ---- facts ---------------------------------------------------------------------------

    @property
    def context_length(self) -> int:
        return self.hparams.context_length

    @property
    def kv_page_nbytes(self) -> int:
        """Bytes of a KV page, 32 tokens of all layers."""
        assert self._cache.pool is not None
        return self._cache.pool.page_nbytes

    @property
    def num_waiting(self) -> int:
        """Rows added that are not on board yet."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Rows on board."""
        return len(self._running)

    @property
    def num_prefilling(self) -> int:
        """Rows on board whose prompt is not all computed."""
        return sum(row.progress().pending > 1 for row in self._running.values())

    @property
    def num_cached_pages(self) -> int:
        """KV pages without a row, kept for prompts that begin alike."""
        return self._cache.num_cached

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting or self._rejected)

    def record(self) -> dict[str, Any]:
        """What this engine runs on and with, as plain JSON values."""
        return {
            "device": self._ops.name,
            "num_threads": self._ops.num_workers,
            "products": self._ops.product_way,
            "reader": self._reader_name,
            "read_path": self._read_path,
            "architecture": self.hparams.architecture,
            "weight_layout": "f32-panels" if self.plan.expand else "gguf-rows",
            "kv_type": self.config.kv_type,
            "reuse_prefixes": self.config.reuse_prefixes,
            "context_length": self.context_length,
            **self.plan.record(),
            **self._load_s,
        }

    def predict(self, workload: Workload) -> dict[str, Any] | None:
        """What the plan should give for some work; None where the machine was not measured."""
        if self.rates is None:
            return None
        planner = Planner(
            self.hparams,
            self.config,
            self._sizes,
            budget=Budget(device_nbytes=0),
            rates=self.rates,
            workload=workload,
        )
        return dict(planner.predicted(self.plan).predicted)

    # ---- rows ----------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a row. One that cannot run comes back from `sweep` as an error row."""
        try:
            self._check(request)
        except RowError as error:
            self._rejected.append(failed_row(request, error))
        else:
            self._waiting.append(WaitingRow(request, self._pieces(request)))

    def sweep(self) -> list[FinishedRow]:
        """Admit what fits, run one pass over all layers, and return the rows that ended."""
        finished, self._rejected = self._rejected, []
        self._divide_memory()
        self.admit()
        rows = (row.progress() for row in self._running.values())
        chunks = compose_sweep(rows, self.plan.sweep_tokens, self._page_tokens)
        if chunks:
            self.sweeps.begin()
            finished += self._run(chunks)
            self.sweeps.end(chunks)
        self.totals.num_rows += len(finished)
        return finished

    def rows_on_board(self) -> list[tuple[int, int]]:
        """Row and sample index of each row that was admitted and has not ended."""
        requests = (row.request for row in self._running.values())
        return [(request.row_index, request.sample_index) for request in requests]

    def cancel_row(self, row_index: int, sample_index: int, error: RowError) -> FinishedRow:
        """End a row on board with an error, between two sweeps.

        Raises KeyError: it is not on board.
        """
        for slot, row in self._running.items():
            if (row.request.row_index, row.request.sample_index) == (row_index, sample_index):
                self._leave(slot)
                return row.fail(error)
        raise KeyError(f"row {row_index} sample {sample_index} is not on board")

    def preempt(self, num_rows: int) -> list[tuple[int, int]]:
        """Take the youngest rows off board, between two sweeps; their pages are free at once.

        They keep what they generated, wait before all others, and go on with the same bytes once
        their tokens are computed again.
        Returns their row and sample indices.
        """
        slots = list(self._running)[max(0, len(self._running) - num_rows) :]
        rows = [self._running[slot] for slot in slots]
        for slot in slots:
            self._leave(slot)
        self._waiting.extendleft(
            WaitingRow(row.request, self._pieces(row.request), row) for row in reversed(rows)
        )
        self.totals.num_preempted += len(rows)
        return [(row.request.row_index, row.request.sample_index) for row in rows]

    def cancel_all(self) -> int:
        """Drop all rows, on board and waiting; returns how many."""
        dropped = len(self._running) + len(self._waiting) + len(self._rejected)
        for slot in list(self._running):
            self._leave(slot)
        self._waiting.clear()
        self._rejected.clear()
        return dropped

    def logits(
        self, token_ids: Sequence[int], kv_type: KvType = "f32", *, first: int = 0
    ) -> Float32:
        """Logits after each token from index `first` on, with a KV cache of its own.

        Returns (num_tokens - first, vocab_size) float32. Raises KernelError: no such KV cache here.
        """
        ids = np.asarray(token_ids, np.int32)
        num_pages = pages_for(len(ids))
        pool = self._ops.kv_pool(
            kv_shape(self.hparams), num_pages=num_pages, kv_type=kv_type, num_rows=1
        )
        out = np.empty((len(ids) - first, self.hparams.vocab_size), np.float32)
        for begin, end in self._logit_chunks(len(ids), first, chunk_page_tokens(kv_type)):
            n, skipped = end - begin, min(max(first - begin, 0), end - begin)
            batch = Batch(
                token_ids=ids[begin:end],
                positions=np.arange(begin, end, dtype=np.int32),
                rows=np.zeros(n, np.int32),
                page_table=np.arange(num_pages, dtype=np.int32)[None],
                segments=np.array([[0, n]], np.int32),
                logit_indices=np.arange(skipped, n, dtype=np.int32),
            )
            logits = self._forward(batch, pool)
            if skipped < n:
                out[begin + skipped - first : end - first] = self._ops.get(logits)
        return out

    def _logit_chunks(
        self, num_tokens: int, first: int, page_tokens: int
    ) -> Iterator[tuple[int, int]]:
        """Token ranges of sweeps: a sweep gives logits of as many tokens as there may be rows."""
        end = 0
        while end < num_tokens:
            begin = end
            most = self.plan.max_rows + max(first - begin, 0)
            end = min(begin + min(self.plan.sweep_tokens, most), num_tokens)
            end = chunk_end(begin, end, page_tokens)
            yield begin, end

    def close(self) -> None:
        """Stop the stream and the backend's workers. Idempotent."""
        self._model.close()
        self._ops.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # ---- one sweep -----------------------------------------------------------------------

    def _check(self, request: Request) -> None:
        num_prompt = len(request.token_ids)
        if num_prompt == 0:
            raise RowError("empty_prompt", "the prompt has no tokens")
        if num_prompt >= self.context_length:
            raise RowError(
                "context_length_exceeded",
                f"the prompt has {num_prompt} tokens; the context window holds "
                f"{self.context_length} and one must be left for the answer",
            )
        if request.token_ids.min() < 0 or request.token_ids.max() >= self.hparams.vocab_size:
            raise RowError(
                "invalid_prompt",
                f"token ids reach from {request.token_ids.min()} to {request.token_ids.max()}; "
                f"the model has ids 0 to {self.hparams.vocab_size - 1}",
            )
        validate_params(request.params, self.tokenizer.num_tokens)
        need, have = pages_for(self._most_stored(request)), self.plan.total_kv_pages
        if need > have:
            raise RowError(
                "kv_cache_exceeded",
                f"the row may need {need} KV pages (prompt {num_prompt} + max_tokens "
                f"{request.params.max_tokens}), the whole cache has {have}; "
                "raise --kv-memory or lower max_tokens",
            )

    def _pieces(self, request: Request) -> Sequence[bytes]:
        return pieces_of(request.token_ids) if self.config.reuse_prefixes else ()

    def _most_new(self, request: Request) -> int:
        return min(request.params.max_tokens, self.context_length - len(request.token_ids))

    def _most_stored(self, request: Request) -> int:
        # The last token generated is never fed back, so it takes no place in the cache.
        return len(request.token_ids) + self._most_new(request) - 1

    def admit(self) -> None:
        """Take on board what the next sweep can; `sweep` does so where it was not done.

        A row waits while another on board computes what it begins with, or all that it lacks;
        rows behind it may go first. Where rows on board need pages that are not there, the
        youngest leave (see `preempt`).
        """
        if self._waiting and self._drain is not None:
            self._drain.give_back()
        self._grow()
        budget = admission_budget(
            (row.progress() for row in self._running.values()), self.plan.sweep_tokens
        )
        self._keep_for_waiting()
        growing = sum(self._pages_to_come(row) > 0 for row in self._running.values())
        passed: list[WaitingRow] = []
        while self._waiting and self._free_slots and budget > 0 and len(passed) < LOOK_AHEAD:
            row = self._waiting.popleft()
            if self._cache.is_coming(row.prompt):
                passed.append(row)
                continue
            kv = self._open(row, spare_pages(growing))
            if kv is None:
                passed.append(row)
                break
            self._take_on_board(row, kv)
            budget -= row.num_tokens - kv.num_tokens
            growing += pages_for(self._most_stored(row.request)) > kv.max_pages
        self._waiting.extendleft(reversed(passed))

    def _open(self, row: WaitingRow, spare: int) -> RowKv | None:
        """Pages for what the row has, and one to grow into."""
        most = min(self._most_stored(row.request), row.num_tokens + PAGE_TOKENS)
        return self._cache.open_row(most, row.prompt, spare=spare)

    def _grow(self) -> None:
        """Give rows the page that their next token needs, those that came first before others."""
        for slot, row in list(self._running.items()):
            while slot in self._running and pages_for(row.num_known) > row.kv.max_pages:
                if not self._cache.grow(row.kv):
                    self.preempt(1)

    def _keep_for_waiting(self) -> None:
        """Where the next sweep may need pages that are cached: not those wanted soon."""
        if self._cache.num_cached and self._cache.num_free < self.plan.sweep_tokens:
            for row in itertools.islice(self._waiting, KEEP_AHEAD):
                self._cache.touch(row.prompt)

    def _take_on_board(self, row: WaitingRow, kv: RowKv) -> None:
        slot, request = self._free_slots.pop(), row.request
        if row.begun is not None:
            row.begun.go_on(slot, kv)
            self._running[slot] = row.begun
            return
        self._running[slot] = ActiveRow(
            request,
            slot=slot,
            kv=kv,
            max_new_tokens=self._most_new(request),
            eog_ids=self.tokenizer.eog_ids,
            token_bytes=self.tokenizer.token_bytes,
        )
        self.totals.prompt_tokens += len(request.token_ids)
        self.totals.reused_tokens += kv.num_reused

    def _run(self, chunks: list[Chunk]) -> list[FinishedRow]:
        rows = [self._running[chunk.slot] for chunk in chunks]
        self._extend(chunks)
        pool = self._cache.pool
        assert pool is not None
        ending = [row for row, chunk in zip(rows, chunks, strict=True) if chunk.wants_logits]
        try:
            chosen = choose(
                self._forward(self._batch(chunks), pool, self._recorded),
                [row.sampler for row in ending],
                num_tokens=self.tokenizer.num_tokens,
                ops=self._ops,
            )
        except BaseException:
            for row, chunk in zip(rows, chunks, strict=True):
                self._cache.truncate(row.kv, chunk.begin)
            raise
        for row in rows:
            self._cache.publish(row.kv)
        finished = []
        for row, choice in zip(ending, chosen, strict=True):
            ended = row.fail(choice) if isinstance(choice, RowError) else row.accept(choice)
            self.totals.completion_tokens += not isinstance(choice, RowError)
            if ended is not None:
                finished.append(ended)
                self._leave(row.slot)
        return finished

    def _extend(self, chunks: list[Chunk]) -> None:
        for chunk in chunks:
            kv = self._running[chunk.slot].kv
            self._cache.extend(kv, chunk.end - chunk.begin)
            self._page_table[chunk.slot, : len(kv.pages)] = kv.pages

    def _forward(self, batch: Batch, pool: KvPool, key: object = None) -> Float32:
        """One pass over the layers; one whose reads fail is run again from its first layer.

        The tokens, their positions and their pages are the same, so what the failed pass wrote
        is written over. Raises ReadError: after the last of `MAX_SWEEP_TRIES`.
        """
        for left in reversed(range(MAX_SWEEP_TRIES)):
            try:
                return self._model.forward(batch, pool, key)
            except ReadError:
                self.totals.num_failed_sweeps += 1
                if left == 0:
                    raise
                self._model.restart_stream()
        raise AssertionError("unreachable")

    def _batch(self, chunks: list[Chunk]) -> Batch:
        lengths = np.array([chunk.end - chunk.begin for chunk in chunks], np.int32)
        ends = np.cumsum(lengths, dtype=np.int32)
        tokens = [self._running[chunk.slot].chunk_tokens(chunk) for chunk in chunks]
        positions = [np.arange(chunk.begin, chunk.end, dtype=np.int32) for chunk in chunks]
        slots = np.array([chunk.slot for chunk in chunks], np.int32)
        wanted = np.array([chunk.wants_logits for chunk in chunks], bool)
        return Batch(
            token_ids=np.concatenate(tokens),
            positions=np.concatenate(positions),
            rows=np.repeat(slots, lengths),
            page_table=self._page_table,
            segments=np.stack([ends - lengths, ends], axis=1),
            logit_indices=ends[wanted] - 1,
        )

    def _divide_memory(self) -> None:
        if self._drain is not None:
            rows = self._running.values()
            self._drain.before_sweep(
                rows_wait=bool(self._waiting),
                sweeps_left=max((row.most_tokens_left for row in rows), default=0),
                pages_to_come=sum(self._pages_to_come(row) for row in rows),
            )

    def _pages_to_come(self, row: ActiveRow) -> int:
        """That the row may still need beyond those it has reserved."""
        return max(0, pages_for(self._most_stored(row.request)) - row.kv.max_pages)

    def _leave(self, slot: int) -> None:
        row = self._running.pop(slot)
        self._cache.close_row(row.kv)
        self._free_slots.append(slot)
