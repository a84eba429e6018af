"""The `ntx-batch` command: options to one client call to one rendering."""

from __future__ import annotations

import functools
import itertools
import signal
import sys
import time
from typing import Annotated, Any, NoReturn

import typer

from engine import EngineError
from jobs.records import (
    ChangedError,
    DatasetError,
    JobError,
    JobNotFoundError,
    OutputError,
    SpecError,
    StorageError,
    UnreachableError,
)
from ntx_batch import __version__, actions, client, render, render_plan, report_cli
from ntx_batch.cli_options import App, AsJson, JobId, JobOrNewest, takes_job_options
from ntx_batch.interrupts import Interrupts
from ntx_batch.schedule_cli import add_schedules
from ntx_batch.status import input_warnings, status_record

NOT_PLANNED = (
    *("output", "key", "overwrite", "verify", "max_errors", "row_timeout", "keep"),
    *("after", "after_errors", "priority", "on_finish", "on_failure"),
)
TABLE_ROWS = 20  # of `results` without --head
EXIT_FAILED, EXIT_USAGE, EXIT_TIMEOUT, EXIT_INTERRUPTED = 1, 2, 124, 130
# What the command names is wrong; anything else that is in the way has EXIT_FAILED.
USAGE_ERRORS = (
    SpecError,
    JobNotFoundError,
    ChangedError,
    DatasetError,
    OutputError,
    EngineError,
    StorageError,
)
EPILOG = (
    "Exit codes: 0 done, 1 something else is in the way, 2 an option, job, input, model or file "
    "that the command names is wrong. Of a waiting command: 0 all rows ok, 1 the job failed, "
    "3 finished with failed rows, 4 cancelled, 5 paused, 124 wait --timeout ran out, "
    "130 interrupted."
)

app = App(
    name="ntx-batch",
    help="Run a dataset of prompts through a GGUF model and lose no row.",
    epilog=EPILOG,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
runner_app = App(help="Start, stop and look at the process that runs jobs.")
app.add_typer(runner_app, name="runner")
report_cli.add_to(app)


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        typer.echo(f"ntx-batch {__version__}")
        raise typer.Exit


@app.command()
@takes_job_options
def submit(
    options: dict[str, Any],
    wait: Annotated[
        bool,
        typer.Option("--wait", help="Stay until the job is over, and show progress."),
    ] = False,
) -> None:
    """Check a job, queue it, and print its id.

    A background runner does the work and outlives this terminal.

    With --after it reads the results of another job, when that has completed: a chain.

    Example: ntx-batch submit prompts.parquet --model model.gguf --chat --max-tokens 128 --wait
    """
    job = _queue(options)
    job.ensure_runner()
    if wait:
        _wait(job)
    render.note(f"follow it with: ntx-batch watch {job.id}")


@app.command()
@takes_job_options
def run(options: dict[str, Any]) -> None:
    """Submit a job and stay with it. Ctrl-C pauses the job; `ntx-batch resume` goes on with it.

    Example: ntx-batch run prompts.parquet --model model.gguf --limit 10
    """
    # A batch system that takes the machine back says so with SIGTERM.
    with Interrupts(signal.SIGINT, signal.SIGTERM) as interrupts:
        job = _queue(options)
        try:
            job.ensure_runner()
            _wait(job, leave_running=False)
        except KeyboardInterrupt:
            _pause(job, interrupts)


@app.command()
@functools.partial(takes_job_options, without=NOT_PLANNED)
def plan(options: dict[str, Any], as_json: AsJson = False) -> None:
    """Predict a job without running it: memory, placement, tokens per second, hours.

    It reads some rows and measures this machine for a few seconds. Answers are counted with
    half of --max-tokens, where rows may end before it: the time may come to twice as much.

    Example: ntx-batch plan prompts.parquet --model model.gguf --memory 16GiB
    """
    report = client.plan(**options)
    if as_json:
        render.print_json(report)
    else:
        render_plan.print_plan(report)


@app.command()
def status(job: JobOrNewest = None, as_json: AsJson = False) -> None:
    """Show where a job stands.

    Example: ntx-batch status d254e --json
    """
    found = _job_or_newest(job).snapshot()
    if as_json:
        render.print_json(status_record(found, time.time()))
    else:
        render.print_status(found, time.time())


@app.command("list")
def list_command(as_json: AsJson = False) -> None:
    """List all jobs, the newest first.

    Example: ntx-batch list
    """
    jobs = client.snapshots()
    if as_json:
        render.print_json([status_record(job, time.time()) for job in jobs])
    else:
        render.print_jobs(jobs, time.time())


@app.command()
def watch(job: JobOrNewest = None) -> None:
    """Show a job's progress: rows, tokens per second, time left. Ctrl-C leaves it running.

    Example: ntx-batch watch d254e
    """
    _wait(_job_or_newest(job))


@app.command()
def wait(
    job: JobOrNewest = None,
    timeout: Annotated[
        float | None,
        typer.Option(
            metavar="S", help="Give up after S seconds with exit code 124. Default: never."
        ),
    ] = None,
) -> None:
    """Wait for a job to be over, print its outcome on stderr, and exit with its code.

    Example: ntx-batch wait d254e --timeout 3600 && echo all rows ok
    """
    _wait(_job_or_newest(job), timeout_s=timeout, quiet=True)


@app.command()
def results(
    job: JobOrNewest = None,
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Write a .parquet, .jsonl or .csv file, by path or URI, instead of a table.",
        ),
    ] = None,
    head: Annotated[
        int | None,
        typer.Option(
            "--head",
            metavar="N",
            min=1,
            help="The first N rows only. Default: 20 in a table, all in a file.",
        ),
    ] = None,
    errors: Annotated[
        bool,
        typer.Option("--errors", help="Failed rows only, with their codes and messages."),
    ] = False,
    sql: Annotated[
        str | None,
        typer.Option(
            metavar="SELECT",
            help="Show what a query finds in the table `results`. Needs the extra `sql`.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show or export the rows finished so far, in input order. Works while the job runs.

    Example: ntx-batch results d254e -o answers.parquet
    """
    handle = _job_or_newest(job)
    if sql is not None and errors:
        raise SpecError("--errors is not for --sql: say WHERE status = 'error'")
    if output is not None:
        num_rows = (
            handle.export(output, head=head, errors=errors)
            if sql is None
            else handle.export_sql(sql, output, head=head)
        )
        render.note(f"wrote {num_rows} rows to {output}")
    elif as_json:
        render.print_json_rows(*handle.rows(errors=errors, head=head, sql=sql))
    elif sql is not None:
        _print_found(handle, sql, head)
    else:
        _print_rows(handle, errors, head)


def _print_rows(handle: client.JobHandle, errors: bool, head: int | None) -> None:
    names, rows = handle.rows(errors=errors, head=head or TABLE_ROWS)
    prefix = handle.snapshot().spec.output_prefix
    render.print_results(names, rows, prefix=prefix, errors=errors)
    if head is None and (num_rows := handle.num_rows(errors=errors)) > TABLE_ROWS:
        what = "failed rows" if errors else "rows"
        render.note(f"{TABLE_ROWS} of {num_rows} {what}; --head N or -o FILE gives more")


def _print_found(handle: client.JobHandle, sql: str, head: int | None) -> None:
    names, rows = handle.rows(sql=sql, head=head)
    shown = list(itertools.islice(rows, head or TABLE_ROWS))
    render.print_rows(names, shown)
    if more := sum(1 for _ in rows):
        render.note(f"{len(shown)} of {len(shown) + more} rows; --head N or -o FILE gives more")


@app.command()
def cancel(job: JobId) -> None:
    """End a job for good; its finished rows are kept. A running one ends after its sweep.

    Example: ntx-batch cancel d254e
    """
    render.note(client.job(job).cancel())


@app.command()
def pause(job: JobId) -> None:
    """Make a job wait for `resume`; its finished rows are kept.

    Example: ntx-batch pause d254e
    """
    render.note(client.job(job).pause())


@app.command()
def resume(job: JobId) -> None:
    """Go on with a paused, cancelled or failed job: its unfinished rows only.

    Refused where its input, its model or the program has changed; the differences are listed.

    Example: ntx-batch resume d254e
    """
    render.note(client.job(job).resume())


@app.command(context_settings={"ignore_unknown_options": True})
def priority(
    job: JobId,
    number: Annotated[
        int, typer.Argument(metavar="N", help="Higher runs first; 0 is usual.", show_default=False)
    ],
) -> None:
    """Change the order of waiting jobs: of the highest priority the oldest runs next.

    A running job runs on, whatever waits.

    Example: ntx-batch priority d254e 10
    """
    render.note(client.job(job).set_priority(number))


@app.command()
def retry(
    job: JobId,
    wait: Annotated[
        bool,
        typer.Option("--wait", help="Stay until the retry is over, and show progress."),
    ] = False,
    all_rows: Annotated[
        bool,
        typer.Option("--all", help="Rows too that their input alone makes fail."),
    ] = False,
) -> None:
    """Run a job's failed rows again, as a new job whose id it prints.

    `results` of the first job shows the rows that succeeded now. Rows that their input makes
    fail, such as those with an empty prompt, are left out.

    Example: ntx-batch retry d254e --wait
    """
    handle = client.job(job)
    codes = handle.error_codes()
    again = handle.retry(hopeless=all_rows)
    _print_id(again)
    if said := actions.hopeless_rows(codes, run=all_rows):
        render.note(f"warning: {said}")
    if wait:
        _wait(again)
    render.note(f"{again.snapshot().total} rows queued; follow with: ntx-batch watch {again.id}")


@app.command()
def rm(job: JobId) -> None:
    """Forget a job, and delete its log and results. Never touches a folder named with -o.

    A retry takes the rows that it brought out of the first job's results.

    Example: ntx-batch rm d254e
    """
    render.note(client.job(job).remove())


@app.command()
def logs(job: JobOrNewest = None) -> None:
    """Print what the runner logged about a job.

    Example: ntx-batch logs d254e
    """
    typer.echo(_job_or_newest(job).logs(), nl=False)


@app.command("inspect")
def inspect_command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="GGUF file.", show_default=False)],
    tokenize: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="Show the token ids of TEXT, BOS by the model's rule."),
    ] = None,
    pre_tokenizer: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Use this pre-tokenizer whatever the file names."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show what a model file holds: metadata, layers, bytes per type.

    Example: ntx-batch inspect model.gguf --tokenize "Hello there" --json
    """
    found = client.inspect(model, tokenize=tokenize, pre_tokenizer=pre_tokenizer)
    if as_json:
        render.print_json(found)
    elif tokenize is None:
        render.print_model(found)
    else:
        render.print_tokens(found)


@app.command()
def doctor(
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            metavar="FILE",
            help="Measure the disk of this GGUF file, and say whether it fits.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure disk, memory and cores, and check what a job needs. Exits with 1 if a check fails.

    Example: ntx-batch doctor --model model.gguf
    """
    report = client.doctor(model)
    if as_json:
        render.print_json(report)
    else:
        render_plan.print_checks(report)
    raise typer.Exit(0 if report["ok"] else EXIT_FAILED)


@runner_app.command()
def start(
    idle_exit: Annotated[
        float | None,
        typer.Option(metavar="S", help="End after S seconds without a job. Default: 600."),
    ] = None,
    unload_after: Annotated[
        float | None,
        typer.Option(
            metavar="S", help="Unload the model after S seconds without a job. Default: 300."
        ),
    ] = None,
) -> None:
    """Start the runner; unfinished jobs go on. Does nothing where one runs.

    Example: ntx-batch runner start --unload-after 60
    """
    started = client.start_runner(idle_exit_s=idle_exit, unload_after_s=unload_after)
    render.note(f"runner {started.pid}")


@runner_app.command()
def stop() -> None:
    """Stop the runner; a running job goes on when the next one starts.

    Example: ntx-batch runner stop
    """
    render.note("runner stopped" if client.stop_runner() else "no runner to stop")


@runner_app.command("status")
def runner_status(as_json: AsJson = False) -> None:
    """Show whether a runner runs, and its process id.

    Example: ntx-batch runner status --json
    """
    found = client.runner_status()
    if as_json:
        render.print_json(found)
    else:
        render.print_facts(found)


add_schedules(app, runner_app)


def _job_or_newest(job: str | None) -> client.JobHandle:
    return client.newest_job() if job is None else client.job(job)


def _queue(options: dict[str, Any]) -> client.JobHandle:
    """Queue a job and print its id; what was bound and what to know goes to stderr."""
    job = client.queue(**options, say=render.note)
    _print_id(job)
    return job


def _print_id(job: client.JobHandle) -> None:
    typer.echo(job.id)
    sys.stdout.flush()


def _wait(
    job: client.JobHandle,
    *,
    timeout_s: float | None = None,
    quiet: bool = False,
    leave_running: bool = True,
) -> NoReturn:
    """Stay with a job until it is over and exit with its code.

    leave_running: an interrupt leaves the job as it is; else it is the caller's
    """
    snapshots = job.follow(timeout_s=timeout_s)
    try:
        *_, last = snapshots if quiet else render.show_progress(snapshots)
    except TimeoutError as error:
        render.note(str(error))
        raise typer.Exit(EXIT_TIMEOUT) from None
    except KeyboardInterrupt:
        if not leave_running:
            raise
        render.note(f"job {job.id} goes on; see it with: ntx-batch watch {job.id}")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    render.note(render.summary(last, time.time()))
    for warning in input_warnings(last):
        render.note(f"warning: {warning}")
    if last.num_error:
        render.note(f"failed rows: ntx-batch results {job.id} --errors")
    raise typer.Exit(last.exit_code or 0)


def _pause(job: client.JobHandle, interrupts: Interrupts) -> NoReturn:
    """Pause a job whose command was interrupted; the next interrupt only ends the waiting."""
    asked = job.pause(wait=False)
    interrupts.renew()
    try:
        render.note(job.pause())
    except KeyboardInterrupt:
        render.note(asked)
    raise typer.Exit(EXIT_INTERRUPTED)


def main(args: list[str] | None = None) -> NoReturn:
    """Entry point. Errors a user can act on are one message and an exit code, never a traceback."""
    try:
        app(args=args, prog_name="ntx-batch")
    except (JobError, EngineError, OSError) as error:
        render.error(str(error))
        is_usage = isinstance(error, USAGE_ERRORS) and not isinstance(error, UnreachableError)
        sys.exit(EXIT_USAGE if is_usage else EXIT_FAILED)
    sys.exit(0)


def command_tree() -> Any:
    """The commands as Typer builds them, for the generated reference."""
    return typer.main.get_command(app)
