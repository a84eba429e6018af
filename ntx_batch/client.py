"""The Python API: the same words as the command line.

import ntx_batch

job = ntx_batch.submit("prompts.parquet", model="model.gguf", max_tokens=128)
job.wait()
table = job.results()  # a pyarrow.Table in input order
"""

from __future__ import annotations

import importlib.util
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jobs import control
from jobs.home import Home
from jobs.records import (
    FinishedRows,
    Job,
    JobError,
    JobNotFoundError,
    RunnerError,
    SpecError,
)
from jobs.store import JobStore
from jobs.temp_folder import space_warnings
from jobs.uris import names_store
from ntx_batch import actions
from ntx_batch.interrupts import Interrupts
from ntx_batch.status import status_record

POLL_INTERVAL_S = 0.2
RUNNER_GRACE_S = 10.0  # a waiting command gives up when no runner was there for this long


@dataclass(frozen=True, slots=True)
class JobHandle:
    """A job by its id. Each call reads the state of that moment."""

    id: str
    home: Home = field(repr=False)

    def snapshot(self) -> Job:
        """The job as the store has it now."""
        with JobStore(self.home.state_path) as store:
            return actions.current_job(store, self.home, self.id)

    def status(self) -> dict[str, Any]:
        """What `ntx-batch status --json` prints: counts, rates, times, exit code."""
        return status_record(self.snapshot(), time.time())

    def follow(self, *, timeout_s: float | None = None) -> Iterator[Job]:
        """Yield the job again and again; the last one is over, or paused.

        Raises TimeoutError: it is not over after `timeout_s` seconds; it goes on.
        Raises RunnerError: there is no runner to go on with it.
        """
        started = runner_seen = time.monotonic()
        while (job := self.snapshot()).exit_code is None:
            yield job
            now = time.monotonic()
            if timeout_s is not None and now - started >= timeout_s:
                raise TimeoutError(f"job {self.id} is still {job.state} after {timeout_s:g} s")
            if control.runner_status(self.home).state != "absent":
                runner_seen = now
            elif now - runner_seen > RUNNER_GRACE_S:
                raise RunnerError(
                    f"job {self.id} {_state_text(job)} and there is no runner to go on with it; "
                    f"see {self.home.log_path} and start one with `ntx-batch runner start`"
                )
            time.sleep(POLL_INTERVAL_S)
        yield job

    def ensure_runner(self) -> None:
        """Start a runner for the job, where it is not over and there is none.

        Raises RunnerError: none could be started; the job waits for one.
        """
        if self.snapshot().exit_code is None:
            control.ensure_runner(self.home)

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait until the job is over and return its exit code; 0 is all rows ok.

        Raises TimeoutError, RunnerError: as `follow`.
        """
        *_, last = self.follow(timeout_s=timeout_s)
        assert last.exit_code is not None
        return last.exit_code

    def cancel(self) -> str:
        """End the job; finished rows are kept. Says what it did; done twice, it does no harm."""
        return actions.cancel(self.home, self.id)

    def pause(self, *, wait: bool = True) -> str:
        """Make the job wait for `resume`; finished rows are kept. Says what it did.

        wait: until it is paused; else it is only asked for, and done when the sweep ends
        """
        return actions.pause(self.home, self.id, wait=wait)

    def resume(self) -> str:
        """Put a paused, cancelled or failed job back into the queue. Says what it did.

        Raises ChangedError: its input, its model or the program has changed.
        """
        return actions.resume(self.home, self.id)

    def set_priority(self, priority: int) -> str:
        """Let the job run before those of lower priority, where it still waits. Says what it did.

        Raises SpecError: it is no whole number.
        """
        from ntx_batch.submission import parse_priority

        return actions.set_priority(self.home, self.id, parse_priority(priority))

    def retry(self, *, hopeless: bool = False) -> JobHandle:
        """A new job of the failed rows; `results` of this one shows what it brings.

        hopeless: rows too that their input alone makes fail

        Raises SpecError: there are no such rows, or the job is not over.
        """
        return JobHandle(actions.retry(self.home, self.id, hopeless=hopeless).id, self.home)

    def remove(self) -> str:
        """Forget the job and delete its results, unless `output` named their folder.

        Raises StoreError: it is running, or another job has yet to read its results.
        """
        return actions.remove(self.home, self.id)

    def results(self, *, errors: bool = False, head: int | None = None) -> Any:
        """A pyarrow.Table of the rows finished so far, in input order.

        errors: failed rows only
        head: the first rows only
        """
        from jobs.results import read_results

        return read_results(self._finished(), errors=errors, head=head)

    def dataset(self) -> Any:
        """A pyarrow.dataset.Dataset of the rows of `results`, in no order, read as needed."""
        from jobs.results_dataset import open_dataset

        return open_dataset(self._finished())

    def to_pandas(self) -> Any:
        """`results` as a pandas.DataFrame. Raises JobError: pandas is not installed."""
        if importlib.util.find_spec("pandas") is None:
            raise JobError("to_pandas needs pandas: pip install pandas")
        return self.results().to_pandas()

    def sql(self, query: str) -> Any:
        """What a SELECT finds in the table `results`, which has no order, as a pyarrow.Table.

        Raises SpecError: it is not one SELECT, or DuckDB refuses it.
        Raises JobError: DuckDB is not installed.
        """
        from ntx_batch.results_sql import query_dataset

        return query_dataset(self.dataset(), query)

    def export_sql(self, query: str, path: str | Path, *, head: int | None = None) -> int:
        """Write what `sql` finds to a file as `export` does; returns the number of rows."""
        from jobs.export import check_target, export_tables

        job = self.snapshot()
        check_target(path, job)
        table = self.sql(query).slice(0, head)
        export_tables(job, path, table.schema, [table])
        return int(table.num_rows)

    def export(self, path: str | Path, *, errors: bool = False, head: int | None = None) -> int:
        """Write `results` to a .parquet, .jsonl or .csv file; returns the number of rows."""
        from jobs.export import export_results

        return export_results(self._finished(), path, errors=errors, head=head)

    def rows(
        self, *, errors: bool = False, head: int | None = None, sql: str | None = None
    ) -> tuple[list[str], Iterator[tuple[Any, ...]]]:
        """Column names and rows of `results`, or of `sql`, as values that JSON has."""
        from jobs.export import plain_rows

        if sql is None:
            table = self.results(errors=errors, head=head)
        else:
            table = self.sql(sql).slice(0, head)
        return table.column_names, plain_rows(table)

    def num_rows(self, *, errors: bool = False) -> int:
        """How many rows `results` has."""
        if errors:
            return self.error_codes().total()
        job = self.snapshot()
        return job.num_ok + job.num_error + job.num_cancelled

    def error_codes(self) -> Counter[str]:
        """How many failed rows there are of each error_code."""
        return actions.error_codes(self._finished())

    def _finished(self) -> FinishedRows:
        with JobStore(self.home.state_path) as store:
            return store.finished(self.id)

    def logs(self) -> str:
        """The job's log so far."""
        path = self.home.job_log_path(self.id)
        return path.read_text(errors="replace") if path.exists() else ""


def submit(
    input: str | Path | None = None,
    *,
    model: str | Path | None = None,
    key: str | None = None,
    overwrite: bool | None = None,
    home: str | Path | None = None,
    say: Callable[[str], None] = lambda _: None,
    **options: Any,
) -> JobHandle:
    """Check a job, queue it, and make sure that a runner is there to run it.

    input: Parquet, JSON lines or CSV: a file, a folder, a pattern, or the URI of one; or a job
        file; None with `after`, the job, or its id, whose results are the input
    model: GGUF file
    key: where a job was submitted with this key before, that one is returned and none is queued
    overwrite: remove the parts of other jobs, and nothing else, from the folder `output`
    home: state folder; None takes $NTX_HOME, else the platform's
    say: gets each note about what was bound or is worth knowing
    options: those of `ntx-batch submit`, dashes as underscores: max_tokens, chat, after, ...

    Raises SpecError, DatasetError, OutputError, EngineError: the job cannot run as asked.
    Raises RunnerError: no runner could be started; the job waits for one.
    """
    given = {"model": model, "key": key, "overwrite": overwrite, **options}
    job = queue(input, home=home, say=say, **given)
    job.ensure_runner()
    return job


def queue(
    input: str | Path | None = None,
    *,
    home: str | Path | None = None,
    say: Callable[[str], None] = lambda _: None,
    **options: Any,
) -> JobHandle:
    """Check a job and queue it, for a runner that is there or comes. Takes what `submit` takes."""
    from ntx_batch.submission import queue_job, read_submission

    if isinstance(after := options.get("after"), JobHandle):
        options["after"] = after.id
    submission = read_submission(input, options)
    place = Home.open(home)
    stores = names_store(submission.spec.input, submission.spec.output)
    control.check_environment(control.runner_status(place), os.environ, stores=stores)
    for warning in space_warnings(os.environ):
        say(f"warning: {warning}")
    with JobStore(place.state_path) as store:
        return JobHandle(queue_job(store, submission, say).id, place)


def run(input: str | Path | None = None, **options: Any) -> JobHandle:
    """Submit a job and wait for it; an interrupt pauses it. Takes what `submit` takes."""
    job = submit(input, **options)
    with Interrupts(signal.SIGINT) as interrupts:
        try:
            job.wait()
        except KeyboardInterrupt:
            job.pause(wait=False)
            interrupts.renew()
            job.pause()
            raise
    return job


def job(id_prefix: str, *, home: str | Path | None = None) -> JobHandle:
    """The job whose id begins so. Raises JobNotFoundError: none does, or several do."""
    if not id_prefix:
        raise JobNotFoundError("the job's id is empty; `ntx-batch list` shows all jobs")
    place = Home.open(home)
    with JobStore(place.state_path) as store:
        return JobHandle(store.find_job(id_prefix).id, place)


def _state_text(job: Job) -> str:
    return f"is {job.state}" + (f" ({job.reason})" if job.reason else "")


def list_jobs(*, home: str | Path | None = None) -> list[JobHandle]:
    """All jobs, the newest first."""
    place = Home.open(home)
    with JobStore(place.state_path) as store:
        return [JobHandle(job.id, place) for job in reversed(store.list_jobs())]


def snapshots(*, home: str | Path | None = None) -> list[Job]:
    """All jobs as the store has them now, the newest first."""
    place = Home.open(home)
    with JobStore(place.state_path) as store:
        for job in store.list_jobs():
            if job.state == "running":
                # Looking at it notes the end of a runner that was killed.
                actions.current_job(store, place, job.id)
        return store.list_jobs()[::-1]


def newest_job(*, home: str | Path | None = None) -> JobHandle:
    """The job submitted last. Raises JobNotFoundError: there is none."""
    jobs = list_jobs(home=home)
    if not jobs:
        raise JobNotFoundError("there are no jobs yet; `ntx-batch submit` makes one")
    return jobs[0]


def inspect(
    model: str | Path, *, tokenize: str | None = None, pre_tokenizer: str | None = None
) -> dict[str, Any]:
    """What a model file holds; with `tokenize`, the token ids of that text instead.

    Raises GgufError, TokenizerError: the file cannot be read, or its vocabulary not be built.
    """
    from engine.gguf_file import GgufFile
    from ntx_batch import model_info

    file = GgufFile.open(model)
    if tokenize is None:
        return model_info.describe(file)
    return model_info.tokenize(file, tokenize, pre_tokenizer=pre_tokenizer)


def plan(
    input: str | Path | None = None,
    *,
    model: str | Path | None = None,
    home: str | Path | None = None,
    **options: Any,
) -> dict[str, Any]:
    """What `ntx-batch plan --json` prints: where memory would go, and how long the job would take.

    Takes what `submit` takes; queues nothing.

    Raises SpecError, DatasetError, EngineError: the job cannot run as asked.
    """
    from ntx_batch.planning import make_report
    from ntx_batch.submission import read_submission

    submission = read_submission(input, {"model": model, **options})
    if submission.spec.after is not None:
        raise SpecError("a job that reads another's results cannot be planned: they are its input")
    return make_report(submission.spec, Home.open(home))


def doctor(model: str | Path | None = None, *, home: str | Path | None = None) -> dict[str, Any]:
    """What `ntx-batch doctor --json` prints: checks, each with what to do, and measured rates."""
    from ntx_batch.doctor import Doctor

    return Doctor(home, model).examine()


def start_runner(
    *,
    home: str | Path | None = None,
    idle_exit_s: float | None = None,
    unload_after_s: float | None = None,
) -> control.RunnerStatus:
    """Start the runner where none runs. Raises RunnerError: it does not start.

    idle_exit_s, unload_after_s: it, or the engine alone, ends after this long without a job
    """
    return control.ensure_runner(
        Home.open(home), idle_exit_s=idle_exit_s, unload_after_s=unload_after_s
    )


def stop_runner(*, home: str | Path | None = None) -> bool:
    """Stop the runner; False where none runs. Its job goes on when the next one starts."""
    return control.stop_runner(Home.open(home))


def runner_status(*, home: str | Path | None = None) -> dict[str, Any]:
    """What `ntx-batch runner status --json` prints."""
    place = Home.open(home)
    status = control.runner_status(place)
    return {"pid": status.pid, "state": status.state, "home": str(place.path)}
