"""The `ntx-batch` command: options to one client call to one rendering."""

from __future__ import annotations

import functools
import inspect
import signal
import sys
import time
from collections.abc import Callable, Container, Iterator
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from engine import EngineError
from jobs.records import ChangedError, JobError, JobNotFoundError, RunnerError, SpecError
from ntx_batch import __version__, client, render, render_plan
from ntx_batch.options import OPTIONS
from ntx_batch.status import input_warnings, status_record

NOT_PLANNED = ("output", "key", "overwrite", "verify", "max_errors", "row_timeout", "keep")
TABLE_ROWS = 20  # of `results` without --head
EXIT_FAILED, EXIT_USAGE, EXIT_TIMEOUT, EXIT_INTERRUPTED = 1, 2, 124, 130
EPILOG = (
    "Exit codes of a waiting command: 0 all rows ok, 1 the job failed, 2 usage, 3 finished with "
    "failed rows, 4 cancelled, 5 paused, 124 wait --timeout ran out, 130 interrupted."
)

app = typer.Typer(
    name="ntx-batch",
    help="Run a dataset of prompts through a GGUF model and lose no row.",
    epilog=EPILOG,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
runner_app = typer.Typer(
    help="Start, stop and look at the process that runs jobs.", no_args_is_help=True
)
app.add_typer(runner_app, name="runner")

JobId = Annotated[str, typer.Argument(help="Job id, or a unique prefix of it.", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON alone on stdout.")]


def takes_job_options(
    command: Callable[..., None], *, without: Container[str] = ()
) -> Callable[..., None]:
    """Give `command` job options; it gets those that were used as one dict, `options`.

    without: options that mean nothing to it
    """
    own = inspect.signature(command, eval_str=True).parameters.values()
    shared = [p for p in (*_job_arguments(), *_job_options()) if p.name not in without]

    @functools.wraps(command)
    def wrapper(**values: Any) -> None:
        options = {parameter.name: values.pop(parameter.name) for parameter in shared}
        command({name: value for name, value in options.items() if not _is_absent(value)}, **values)

    parameters = [*shared, *(parameter for parameter in own if parameter.name != "options")]
    parameters = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters
    ]
    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    del wrapper.__wrapped__
    return wrapper


def _is_absent(value: Any) -> bool:
    return value is None or value is False or value == []


def _job_arguments() -> list[inspect.Parameter]:
    def arguments(
        input: Annotated[
            str,
            typer.Argument(
                help="Parquet, JSON lines or CSV: file, folder, pattern; or a job file, JOB.toml.",
                show_default=False,
            ),
        ],
        model: Annotated[
            str | None,
            typer.Option(
                "--model",
                "-m",
                metavar="FILE",
                help="GGUF file; of a split one, the first shard. A job file may name it.",
                show_default=False,
            ),
        ] = None,
        output: Annotated[
            str | None,
            typer.Option(
                "--output",
                "-o",
                metavar="DIR",
                help="Results folder, empty or absent.",
                show_default="the job's own",
            ),
        ] = None,
    ) -> None: ...

    return list(inspect.signature(arguments, eval_str=True, globals=globals()).parameters.values())


def _job_options() -> Iterator[inspect.Parameter]:
    """Typer's parameter for each row of the table of options."""
    for panel, options in OPTIONS.items():
        for option in options:
            info = typer.Option(
                option.flag,
                metavar=option.metavar,
                help=option.help,
                show_default=option.default or False,
                rich_help_panel=panel,
            )
            is_flag = option.kind is bool
            yield inspect.Parameter(
                option.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=False if is_flag else None,
                annotation=Annotated[option.kind if is_flag else option.kind | None, info],
            )


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
        bool, typer.Option("--wait", help="Stay until the job is over, and show progress.")
    ] = False,
) -> None:
    """Check a job, queue it, and print its id.

    A background runner does the work and outlives this terminal.

    Example: ntx-batch submit prompts.parquet --model model.gguf --chat --max-tokens 128 --wait
    """
    job = _submit(options)
    if wait:
        _wait(job)
    render.note(f"queued; follow it with: ntx-batch watch {job.id}")


@app.command()
@takes_job_options
def run(options: dict[str, Any]) -> None:
    """Submit a job and stay with it: Ctrl-C stops the job.

    Example: ntx-batch run prompts.parquet --model model.gguf --limit 10
    """
    job = _submit(options)
    # A batch system that takes the machine back says so with SIGTERM.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    _wait(job, stop_on_interrupt=True)


@app.command()
@functools.partial(takes_job_options, without=NOT_PLANNED)
def plan(options: dict[str, Any], as_json: AsJson = False) -> None:
    """Predict a job without running it: memory, placement, tokens per second, hours.

    It reads some rows and measures this machine for a few seconds. Answers are counted with
    all of --max-tokens, so the time is an upper limit where rows end earlier.

    Example: ntx-batch plan prompts.parquet --model model.gguf --memory 16GiB
    """
    try:
        report = client.plan(**options)
    except (JobError, EngineError) as error:
        _fail(error, EXIT_USAGE)
    if as_json:
        render.print_json(report)
    else:
        render_plan.print_plan(report)


@app.command()
def status(
    job: Annotated[
        str | None,
        typer.Argument(help="Job id or prefix; the newest job without it.", show_default=False),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show where a job stands.

    Example: ntx-batch status d254e --json
    """
    found = client.job(job).snapshot() if job else client.newest_job().snapshot()
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
def watch(job: JobId) -> None:
    """Show a job's progress: rows, tokens per second, time left. Ctrl-C leaves it running.

    Example: ntx-batch watch d254e
    """
    _wait(client.job(job))


@app.command()
def wait(
    job: JobId,
    timeout: Annotated[
        float | None,
        typer.Option(
            metavar="S", help="Give up after S seconds with exit code 124.", show_default="never"
        ),
    ] = None,
) -> None:
    """Wait for a job to be over, in silence, and exit with its code.

    Example: ntx-batch wait d254e --timeout 3600 && echo all rows ok
    """
    _wait(client.job(job), timeout_s=timeout, quiet=True)


@app.command()
def results(
    job: JobId,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Write a .parquet, .jsonl or .csv file instead of a table.",
        ),
    ] = None,
    head: Annotated[
        int | None,
        typer.Option(
            "--head",
            metavar="N",
            min=1,
            help="The first N rows only.",
            show_default="20 in a table, all in a file",
        ),
    ] = None,
    errors: Annotated[
        bool, typer.Option("--errors", help="Failed rows only, with their codes and messages.")
    ] = False,
) -> None:
    """Show or export the rows finished so far, in input order. Works while the job runs.

    Example: ntx-batch results d254e -o answers.parquet
    """
    handle = client.job(job)
    if output is not None:
        num_rows = handle.export(output, head=head, errors=errors)
        render.note(f"wrote {num_rows} rows to {output}")
    else:
        names, rows = handle.rows(errors=errors, head=head or TABLE_ROWS)
        prefix = handle.snapshot().spec.output_prefix
        render.print_results(names, rows, prefix=prefix, errors=errors)


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


@app.command()
def retry(
    job: JobId,
    wait: Annotated[
        bool, typer.Option("--wait", help="Stay until the retry is over, and show progress.")
    ] = False,
) -> None:
    """Run a job's failed rows again, as a new job whose id it prints.

    `results` of the first job shows the rows that succeeded now.

    Example: ntx-batch retry d254e --wait
    """
    again = client.job(job).retry()
    typer.echo(again.id)
    sys.stdout.flush()
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
def logs(job: JobId) -> None:
    """Print what the runner logged about a job.

    Example: ntx-batch logs d254e
    """
    typer.echo(client.job(job).logs(), nl=False)


@app.command("inspect")
def inspect_command(
    model: Annotated[str, typer.Argument(help="GGUF file.", show_default=False)],
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
        typer.Option(metavar="S", help="End after S seconds without a job.", show_default="600"),
    ] = None,
    unload_after: Annotated[
        float | None,
        typer.Option(
            metavar="S", help="Unload the model after S seconds without a job.", show_default="300"
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


def _submit(options: dict[str, Any]) -> client.JobHandle:
    """Submit and print the job's id; what was bound and what to know goes to stderr."""
    try:
        job = client.submit(**options, say=render.note)
    except RunnerError:
        raise
    except (JobError, EngineError) as error:
        _fail(error, EXIT_USAGE)
    typer.echo(job.id)
    sys.stdout.flush()
    return job


def _wait(
    job: client.JobHandle,
    *,
    timeout_s: float | None = None,
    quiet: bool = False,
    stop_on_interrupt: bool = False,
) -> NoReturn:
    """Stay with a job until it is over and exit with its code."""
    snapshots = job.follow(timeout_s=timeout_s)
    try:
        *_, last = snapshots if quiet else render.show_progress(snapshots)
    except TimeoutError as error:
        render.note(str(error))
        raise typer.Exit(EXIT_TIMEOUT) from None
    except KeyboardInterrupt:
        _interrupted(job, stop=stop_on_interrupt)
    render.note(render.summary(last, time.time()))
    for warning in input_warnings(last):
        render.note(f"warning: {warning}")
    if last.num_error:
        render.note(f"failed rows: ntx-batch results {job.id} --errors")
    raise typer.Exit(last.exit_code or 0)


def _interrupted(job: client.JobHandle, *, stop: bool) -> NoReturn:
    if stop:
        try:
            job.pause()
            render.note(f"job {job.id} stopped; its finished rows are kept")
        except KeyboardInterrupt:
            render.note(f"the runner stops job {job.id}; its finished rows are kept")
    else:
        render.note(f"job {job.id} goes on; see it with: ntx-batch watch {job.id}")
    raise typer.Exit(EXIT_INTERRUPTED)


def _fail(error: BaseException, code: int) -> NoReturn:
    render.error(str(error))
    raise typer.Exit(code)


def main(args: list[str] | None = None) -> NoReturn:
    """Entry point. Errors a user can act on are one message and an exit code, never a traceback."""
    try:
        app(args=args, prog_name="ntx-batch")
    except (JobError, EngineError, OSError) as error:
        render.error(str(error))
        usage = isinstance(error, (SpecError, JobNotFoundError, ChangedError))
        sys.exit(EXIT_USAGE if usage else EXIT_FAILED)
    sys.exit(0)


def command_tree() -> Any:
    """The commands as Typer builds them, for the generated reference."""
    return typer.main.get_command(app)
