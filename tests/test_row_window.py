"""The window on a job's rows: samples, equal rows, order and bounds, on a real engine."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from engine import Engine, FinishedRow, Request, RowError, SamplingParams
from jobs.dataset import build_manifest
from jobs.isolation import RowLoss
from jobs.messages import AddShard, BatchDone, StartJob
from jobs.records import JobSpec, Shard
from jobs.results import blob_table
from jobs.row_source import RowSource
from kernels.ops import PAGE_TOKENS
from tests.job_factories import write_input
from tests.runner_helpers import MODEL, SMALL_ENGINE
from tests.test_engine_loop import Loop

WARM_UP_ROWS = 1  # of each loop
WARM = SamplingParams(max_tokens=6, ignore_eos=True, temperature=1.5)
GREEDY = SamplingParams(max_tokens=6, ignore_eos=True, logprobs=1)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(MODEL, SMALL_ENGINE) as engine:
        yield engine


def start(path: Path, columns: Mapping[str, Any], **spec: Any) -> StartJob:
    write_input(path, columns)
    values = {"model": str(MODEL), "params": GREEDY, "engine": SMALL_ENGINE}
    return StartJob(1, JobSpec(input=str(path), **values | spec), build_manifest(path), 0.0)


def run(engine: Engine, command: StartJob, done: tuple[int, ...] = ()) -> list[dict[str, Any]]:
    """All result rows of a job in order; `done` are outputs that it leaves out."""
    loop = Loop(lambda command: (engine, {}))
    loop.send(command)
    loop.send(AddShard(1, Shard(number=0, begin=0, end=command.manifest.num_rows or 0, done=done)))
    return rows_of(loop.until_shards(1))


def rows_of(batches: list[BatchDone]) -> list[dict[str, Any]]:
    tables = [blob_table(event.batch.ipc) for event in batches if event.batch]
    rows: list[dict[str, Any]] = pa.concat_tables(tables).to_pylist()
    return sorted(rows, key=lambda row: (row["row_index"], row["sample_index"]))


def open_source(engine: Engine, command: StartJob) -> RowSource:
    source = RowSource.open(command, engine)
    source.add_shard(Shard(number=0, begin=0, end=command.manifest.num_rows or 0), {})
    return source


def read(source: RowSource) -> int:
    """Read what the window has room for; returns how many rows that were."""
    num_read = 0
    while source.wants_row(0):
        source.prepare_row()
        num_read += 1
    return num_read


def requests_of(source: RowSource) -> list[Request]:
    requests = []
    while (request := source.next_request()) is not None:
        requests.append(request)
    return requests


# ---- samples -----------------------------------------------------------------------------


def test_each_row_has_its_samples_each_as_if_it_ran_alone(engine: Engine, tmp_path: Path) -> None:
    prompts = ["once upon a time", "the end"]
    command = start(tmp_path / "in.parquet", {"prompt": prompts}, params=WARM, samples=3, seed=5)
    rows = run(engine, command)
    keys = [(row["row_index"], row["sample_index"]) for row in rows]
    assert keys == [(row, sample) for row in range(2) for sample in range(3)]
    assert len({row["generated_text"] for row in rows}) == 6
    for row in rows:
        ids = np.array(engine.tokenizer.encode(prompts[row["row_index"]]), np.int32)
        engine.add(
            Request(
                row_index=row["row_index"],
                sample_index=row["sample_index"],
                token_ids=ids,
                params=WARM,
                job_seed=5,
            )
        )
        alone = engine.sweep()
        while engine.has_work:
            alone = engine.sweep()
        assert row["generated_text"] == alone[0].text


def test_samples_that_are_finished_are_not_run_again(engine: Engine, tmp_path: Path) -> None:
    command = start(tmp_path / "in.parquet", {"prompt": ["a", "b"]}, params=WARM, samples=3)
    whole = run(engine, command)
    rest = run(engine, command, done=(1, 3, 4, 5))
    assert [outcome(row) for row in rest] == [outcome(whole[0]), outcome(whole[2])]


def outcome(row: dict[str, Any]) -> tuple[int, int, str]:
    return row["row_index"], row["sample_index"], row["generated_text"]


def test_samples_of_a_row_are_one_prefill(engine: Engine, tmp_path: Path) -> None:
    prompt = "samples share the prompt " * 12
    command = start(tmp_path / "in.parquet", {"prompt": [prompt]}, params=WARM, samples=8)
    before = computed_tokens(engine)
    rows = run(engine, command)
    length = rows[0]["prompt_tokens"]
    # The last prompt token is computed for each sample: its logits are wanted. Warm-up runs 2.
    assert length <= computed_tokens(engine) - before <= length + 7 + 2
    assert all(row["reused_tokens"] == length - 1 for row in rows[1:])


def computed_tokens(engine: Engine) -> int:
    return engine.totals.prompt_tokens - engine.totals.reused_tokens


def test_a_bad_row_has_an_error_for_each_sample(engine: Engine, tmp_path: Path) -> None:
    columns = {"prompt": pa.array(["a", None], pa.string())}
    rows = run(engine, start(tmp_path / "in.parquet", columns, params=WARM, samples=2))
    assert [row["error_code"] for row in rows] == [None, None, "invalid_prompt", "invalid_prompt"]
    assert [row["sample_index"] for row in rows] == [0, 1, 0, 1]


# ---- equal rows --------------------------------------------------------------------------


def test_equal_rows_are_computed_once_and_marked(engine: Engine, tmp_path: Path) -> None:
    prompts = ["same", "other", "same", "same"]
    columns = {"id": list("abcd"), "prompt": prompts}
    before = engine.totals.num_rows
    loop = Loop(lambda command: (engine, {}))
    loop.send(start(tmp_path / "in.parquet", columns))
    loop.send(AddShard(1, Shard(number=0, begin=0, end=4)))
    batches = loop.until_shards(1)
    rows = rows_of(batches)
    assert engine.totals.num_rows - before == 2 + WARM_UP_ROWS
    assert [row["duplicate_of"] for row in rows] == [None, None, 0, 0]
    assert [row["id"] for row in rows] == list("abcd")
    for name in ("generated_text", "finish_reason", "completion_tokens", "logprobs"):
        assert rows[2][name] == rows[3][name] == rows[0][name]
    counts = [event.batch for event in batches if event.batch]
    assert sum(batch.completion_tokens for batch in counts) == 12, "of the two that were computed"
    assert sum(batch.num_copied for batch in counts) == 2
    assert sum(batch.num_ok for batch in counts) == 4


def test_no_dedupe_computes_all_with_the_same_answers(engine: Engine, tmp_path: Path) -> None:
    columns = {"prompt": ["same", "same", "same"]}
    before = engine.totals.num_rows
    rows = run(engine, start(tmp_path / "in.parquet", columns, dedupe=False))
    assert engine.totals.num_rows - before == 3 + WARM_UP_ROWS
    assert [row["duplicate_of"] for row in rows] == [None] * 3
    assert len({row["generated_text"] for row in rows}) == 1


def test_rows_that_draw_by_their_index_are_not_equal(engine: Engine, tmp_path: Path) -> None:
    columns = {
        "prompt": ["same"] * 6,
        "seed": pa.array([None, None, 3, 3, 3, 4], pa.int64()),
        "max_tokens": [6, 6, 6, 6, 5, 6],
    }
    path = tmp_path / "in.parquet"
    names = ("seed", "max_tokens")
    rows = run(engine, start(path, columns, params=WARM, param_columns=names))
    assert [row["duplicate_of"] for row in rows] == [None, None, None, 2, None, None]
    assert rows[0]["generated_text"] != rows[1]["generated_text"]
    assert [json.loads(row["sampling_params"])["seed"] for row in rows[2:4]] == [3, 3]
    alone = run(engine, start(path, columns, params=WARM, param_columns=names, dedupe=False))
    texts = [row["generated_text"] for row in rows]
    assert texts == [row["generated_text"] for row in alone]


def test_samples_of_a_greedy_row_are_copies_of_its_first(engine: Engine, tmp_path: Path) -> None:
    columns = {"prompt": ["same", "same"], "temperature": [0.0, 1.5]}
    rows = run(
        engine,
        start(tmp_path / "in.parquet", columns, samples=2, param_columns=("temperature",)),
    )
    assert [row["duplicate_of"] for row in rows] == [None, 0, None, None]


def test_a_row_equal_to_a_finished_one_has_its_answer(engine: Engine, tmp_path: Path) -> None:
    source = open_source(engine, start(tmp_path / "in.parquet", {"prompt": ["same"] * 3}))
    source.prepare_row()
    (request,) = requests_of(source)
    source.finish(FinishedRow(row_index=0, text="answer", completion_tokens=2))
    assert read(source) == 2
    assert requests_of(source) == []
    batch, shards = source.take_finished(100)
    assert batch is not None and shards == (0,)
    assert (batch.row_indices, batch.completion_tokens) == ((0, 1, 2), 2)
    assert blob_table(batch.ipc)["generated_text"].to_pylist() == ["answer"] * 3
    assert request.row_index == 0


def test_copies_share_an_error_and_come_with_it(engine: Engine, tmp_path: Path) -> None:
    """A copy is handed over in the batch of its original or later, never before."""
    source = open_source(engine, start(tmp_path / "in.parquet", {"prompt": ["same"] * 3}))
    read(source)
    (request,) = requests_of(source)
    assert source.take_finished(100) == (None, ())
    error = RowError("kv_cache_exceeded", "too long")
    source.finish(
        FinishedRow(row_index=0, status="error", error_code=error.code, error_message=str(error))
    )
    first, shards = source.take_finished(1)
    assert first is not None and (first.row_indices, shards) == ((0,), ())
    rest, shards = source.take_finished(100)
    assert rest is not None and (rest.row_indices, shards) == ((1, 2), (0,))
    table = blob_table(rest.ipc)
    assert table["error_code"].to_pylist() == ["kv_cache_exceeded"] * 2
    assert table["duplicate_of"].to_pylist() == [0, 0]
    assert request.row_index == 0


def test_after_a_timeout_the_next_of_equal_rows_is_computed(engine: Engine, tmp_path: Path) -> None:
    """How long a row was on board is not of its prompt: no copy ends so without having run."""
    source = open_source(engine, start(tmp_path / "in.parquet", {"prompt": ["same"] * 4}))
    read(source)
    requests = requests_of(source)
    for row in range(2):
        source.finish(FinishedRow(row_index=row, status="error", error_code="timeout"))
        requests += requests_of(source)
    assert [request.row_index for request in requests] == [0, 1, 2]
    assert len({request.token_ids.tobytes() for request in requests}) == 1
    source.finish(FinishedRow(row_index=2, text="answer"))
    assert requests_of(source) == []
    batch, shards = source.take_finished(100)
    assert batch is not None and shards == (0,)
    table = blob_table(batch.ipc)
    assert table["error_code"].to_pylist() == ["timeout", "timeout", None, None]
    assert table["duplicate_of"].to_pylist() == [None, None, None, 2]


def test_a_timeout_without_copies_is_the_end_of_it(engine: Engine, tmp_path: Path) -> None:
    source = open_source(engine, start(tmp_path / "in.parquet", {"prompt": ["one", "two"]}))
    read(source)
    assert len(requests_of(source)) == 2
    for row in range(2):
        source.finish(FinishedRow(row_index=row, status="error", error_code="timeout"))
    assert requests_of(source) == []
    assert source.take_finished(100)[1] == (0,)


def test_copies_of_a_row_that_is_given_up_do_not_try_again(engine: Engine, tmp_path: Path) -> None:
    """Equal rows bring the engine down alike; one by one they would end the whole job."""
    loop = Loop(lambda command: (engine, {}))
    loop.send(start(tmp_path / "in.parquet", {"prompt": ["same", "other", "same"]}))
    failed = {0: RowLoss("worker_crashed", "it died")}
    loop.send(AddShard(1, Shard(number=0, begin=0, end=3), failed))
    rows = rows_of(loop.until_shards(1))
    rows.sort(key=lambda row: row["row_index"])
    assert [row["error_code"] for row in rows] == ["worker_crashed", None, "worker_crashed"]
    assert [row["duplicate_of"] for row in rows] == [None, None, 0]


# ---- order and bounds --------------------------------------------------------------------


def template_prompts(num_templates: int, num_rows: int) -> list[str]:
    """Rows of templates of different lengths, in random order."""
    rng = np.random.default_rng(7)
    words = ["red", "blue", "bird", "tree", "house", "over", "under", "runs", "sees", "little"]
    heads = [" ".join(rng.choice(words, 160 + 3 * n)) for n in range(num_templates)]
    prompts = [f"{head} {n}" for head in heads for n in range(num_rows)]
    return [prompts[n] for n in rng.permutation(len(prompts))]


def test_no_prefix_of_a_shuffled_input_is_computed_twice(tmp_path: Path) -> None:
    """40 templates of 50 rows, in a KV cache that holds a few of them."""
    prompts = template_prompts(40, 50)
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    with Engine(MODEL, SMALL_ENGINE) as engine:
        rows = run(engine, start(tmp_path / "in.parquet", {"prompt": prompts}, params=params))
        computed = computed_tokens(engine) - 2  # of the warm-up
        ids = sorted(engine.tokenizer.encode(prompt) for prompt in prompts)
    total = sum(len(tokens) for tokens in ids)
    distinct = total - sum(itertools.starmap(common_tokens, itertools.pairwise(ids)))
    assert computed <= 1.02 * distinct < 0.1 * total
    assert sum(row["reused_tokens"] for row in rows) == total - computed
    first = [row for row in rows if row["prompt_tokens"] - row["reused_tokens"] > PAGE_TOKENS]
    assert len(first) == 40, "one row of each computes what they share"
    assert [row["row_index"] for row in rows] == list(range(len(prompts)))


def common_tokens(a: list[int], b: list[int]) -> int:
    pairs = enumerate(zip(a, b, strict=False))
    return next((n for n, (x, y) in pairs if x != y), min(len(a), len(b)))


def test_rows_of_a_prefix_follow_each_other(engine: Engine, tmp_path: Path) -> None:
    prompts = template_prompts(5, 20)
    source = open_source(engine, start(tmp_path / "in.parquet", {"prompt": prompts}))
    read(source)
    heads = [prompts[request.row_index][:200] for request in requests_of(source)]
    changes = sum(a != b for a, b in itertools.pairwise(heads))
    assert (len(heads), changes) == (100, 4)


def test_the_window_holds_so_many_outputs(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jobs.row_source.WINDOW_OUTPUTS", 10)
    prompts = [f"prompt {row}" for row in range(40)]
    source = open_source(
        engine, start(tmp_path / "in.parquet", {"prompt": prompts}, samples=2, params=WARM)
    )
    assert (read(source), source.num_ready) == (5, 10)
    first = source.next_request()
    assert first is not None and source.num_ready == 9
    source.finish(FinishedRow(row_index=first.row_index, text="x"))
    assert read(source) == 1


def test_large_rows_fill_the_window_but_do_not_starve_the_engine(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jobs.row_source.WINDOW_NBYTES", 200_000)
    columns = {"prompt": [f"prompt {n // 2}" for n in range(60)], "note": ["x" * 50_000] * 60}
    source = open_source(engine, start(tmp_path / "in.parquet", columns, dedupe=False))
    assert read(source) == 4
    assert source.wants_row(num_wanted=5) and not source.wants_row(num_wanted=4)
    source = open_source(engine, start(tmp_path / "in.parquet", columns))
    read(source)
    assert not source.wants_row(num_wanted=5), "copies fill it: rows on board must end first"
