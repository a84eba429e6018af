"""Rows that bring the engine down, or fail its sweeps: they end as error rows, alone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pytest

from engine import Engine, EngineConfig, Request, SamplingParams
from jobs.driver_process import clear_leftovers
from jobs.home import HOME_VARIABLE, Home
from jobs.processes import INSTANCE_VARIABLE
from jobs.results import read_results
from jobs.store import JobStore
from tests.faulty_engine import EATS, KILLS, RAISES
from tests.runner_helpers import MODEL, make_home, queue_job, wait_over

ROOT = Path(__file__).parents[1]
NUM_ROWS = 24
MEMORY_NBYTES = 700 << 20


@contextmanager
def faulty_runner(home: Home, module: str = "tests.faulty_engine") -> Iterator[None]:
    environment = {key: v for key, v in os.environ.items() if key != INSTANCE_VARIABLE}
    environment |= {HOME_VARIABLE: str(home.path), "PYTHONPATH": str(ROOT)}
    with home.log_path.open("ab") as log:
        runner = subprocess.Popen(
            [sys.executable, "-m", "tests.faulty_runner", home.path, module],
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield
    finally:
        runner.terminate()
        runner.wait(30)
        clear_leftovers(home)


def undisturbed(prompts: list[str], config: EngineConfig, max_tokens: int) -> list[str]:
    texts: dict[int, str] = {}
    with Engine(MODEL, config) as engine:
        for row, prompt in enumerate(prompts):
            params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
            token_ids = pa.array(engine.tokenizer.encode(prompt), pa.int32()).to_numpy()
            engine.add(Request(row_index=row, token_ids=token_ids, params=params))
        while engine.has_work:
            texts |= {row.row_index: row.text for row in engine.sweep()}
    return [texts[row] for row in range(len(prompts))]


@pytest.mark.slow
def test_rows_that_kill_raise_or_take_all_memory_end_as_errors_and_no_others(
    tmp_path: Path,
) -> None:
    """Case 71: limited retries, half the rows each time, then an error row; the log says why."""
    home = make_home(tmp_path / "home")
    prompts = [f"p{row}" for row in range(NUM_ROWS)]
    config = EngineConfig(kv_memory_nbytes=8 << 20, sweep_tokens=2, memory_nbytes=MEMORY_NBYTES)
    with JobStore(home.state_path) as store, faulty_runner(home):
        path = tmp_path / "in.parquet"
        job = queue_job(store, path, list(prompts), engine=config, max_tokens=6)
        job = wait_over(store, job, 150)
        table = read_results(store.finished(job.id))
    codes = {KILLS: "worker_crashed", RAISES: "internal_error", EATS: "out_of_memory"}
    assert (job.state, job.num_error, job.num_ok) == ("completed", 3, NUM_ROWS - 3)
    found = table["error_code"].to_pylist()
    assert {row: code for row, code in enumerate(found) if code} == codes
    messages = table["error_message"].to_pylist()
    assert "3 times with this row alone" in messages[KILLS]
    assert "not to my taste" in messages[RAISES]
    assert "ran out of memory" in messages[EATS]
    texts = table["generated_text"].to_pylist()
    alone = undisturbed(prompts, config, 6)
    good = [row for row in range(NUM_ROWS) if row not in codes]
    assert [texts[row] for row in good] == [alone[row] for row in good]
    log = home.job_log_path(job.id).read_text()
    assert f"row {KILLS} is given up: worker_crashed" in log
    assert f"row {EATS} is given up: out_of_memory" in log
    assert "at most 1 at once" in log


@pytest.mark.slow
def test_a_row_that_kills_an_engine_on_another_machine_ends_alone(tmp_path: Path) -> None:
    """There nobody sees its process from here; a keeper beside it knows the rows on board."""
    home = make_home(tmp_path / "home")
    prompts = [f"p{row}" for row in range(RAISES)]
    config = EngineConfig(kv_memory_nbytes=8 << 20, sweep_tokens=2)
    with JobStore(home.state_path) as store, faulty_runner(home, "tests.far_engine"):
        path = tmp_path / "in.parquet"
        job = queue_job(store, path, list(prompts), engine=config, max_tokens=6)
        job = wait_over(store, job, 150)
        table = read_results(store.finished(job.id))
    assert (job.state, job.num_error, job.num_ok) == ("completed", 1, RAISES - 1)
    assert table["error_code"].to_pylist()[KILLS] == "worker_crashed"
    assert "3 times with this row alone" in table["error_message"].to_pylist()[KILLS]
