"""`ntx-batch schedule`: job files that run by the clock; `runner install`, so that one is there."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Annotated, Any

import typer
from rich.table import Table

from ntx_batch import render, schedules, systemd
from ntx_batch.cli_options import App, AsJson

Name = Annotated[
    str,
    typer.Argument(metavar="NAME", help="Name of the schedule.", show_default=False),
]

schedule_app = App(help="Run job files by the clock: every night, every hour.")


@schedule_app.command()
def add(
    cron: Annotated[
        str,
        typer.Argument(
            metavar="CRON",
            help="Minute, hour, day of month, month, weekday, like '0 2 * * *'; or @daily, "
            "@hourly, @weekly, @monthly, @yearly.",
            show_default=False,
        ),
    ],
    job_file: Annotated[
        str,
        typer.Argument(
            metavar="JOB.toml",
            help="Job file, read anew for each run. Its input, output and prompt template may "
            "have {date} and {run}.",
            show_default=False,
        ),
    ],
    tz: Annotated[
        str | None,
        typer.Option(
            metavar="ZONE",
            help="Zone of the clock, like Europe/Madrid. Default: this machine's.",
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Default: the job file's name.")
    ] = None,
    overlap: Annotated[
        str,
        typer.Option(
            metavar="skip|queue|allow",
            help="While the run before is not over: make no run, make it after that (one waits), "
            "or make it at once. Default: skip.",
            show_default=False,
        ),
    ] = "skip",
    catch_up: Annotated[
        bool,
        typer.Option(
            "--catch-up/--no-catch-up",
            help="Make one run for all that came up while no runner was there. Default: on.",
            show_default=False,
        ),
    ] = True,
    new_only: Annotated[
        bool,
        typer.Option("--new-only", help="Only input files that no run has done before."),
    ] = False,
    id_column: Annotated[
        str | None,
        typer.Option(
            metavar="C", help="With --new-only: only rows whose value in column C is new."
        ),
    ] = None,
    keep_runs: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Remove the jobs of all but the last N runs, with their results; never an -o "
            "folder. Default: keep all.",
        ),
    ] = None,
    window: Annotated[
        str | None,
        typer.Option(
            metavar="HH:MM-HH:MM",
            help="Run its jobs in this part of the day; outside they are paused at the end of a "
            "sweep, and go on in the next one.",
        ),
    ] = None,
    max_runtime: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Pause a job that has run for this long, like 6h or 90m; it goes on when the "
            "next run is due.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run a job file again and again.

    A time that the clock jumps over runs when it jumps; one that it shows twice runs once. Of
    every hour, runs go by elapsed time.

    Example: ntx-batch schedule add "0 2 * * *" nightly.toml --tz Europe/Madrid --new-only
    """
    added = schedules.add(
        cron,
        job_file,
        tz=tz,
        name=name,
        overlap=overlap,
        catch_up=catch_up,
        new_only=new_only,
        id_column=id_column,
        keep_runs=keep_runs,
        window=window,
        max_runtime=max_runtime,
        say=render.note,
    )
    if as_json:
        render.print_json(added)
        return
    typer.echo(added["schedule"])
    render.note(f"{added['cron']} {added['tz']}; next runs: {', '.join(added['next'])}")


@schedule_app.command("list")
def list_command(as_json: AsJson = False) -> None:
    """List schedules with their next three runs and what became of the last one.

    Example: ntx-batch schedule list
    """
    found = schedules.list()
    if as_json:
        render.print_json(found)
    else:
        _print_schedules(found)
    if count := schedules.unserved():
        render.note(f"warning: {unserved_text(count)}")


@schedule_app.command()
def run(name: Name) -> None:
    """Make a run now, whatever its time, and print the id of its job.

    Example: ntx-batch schedule run nightly
    """
    made = schedules.run(name)
    if made["job"] is not None:
        typer.echo(made["job"])
        held = f"{made['state']}: {made['reason']}" if made["reason"] else made["state"]
        render.note(f"{held}; follow it with: ntx-batch watch {made['job']}")
    else:
        render.note(f"nothing to do: {made['reason']}")


@schedule_app.command()
def history(
    name: Name,
    limit: Annotated[
        int, typer.Option(metavar="N", min=1, help="The last N only. Default: 50.")
    ] = 50,
    as_json: AsJson = False,
) -> None:
    """Show what became of each occurrence, the newest first: its job, or why there is none.

    Example: ntx-batch schedule history nightly
    """
    runs = schedules.history(name, limit=limit)
    if as_json:
        render.print_json(runs)
    else:
        _print_history(runs)


@schedule_app.command()
def pause(name: Name) -> None:
    """Make no more runs until `resume`; a job that is there goes on.

    Example: ntx-batch schedule pause nightly
    """
    render.note(schedules.pause(name))


@schedule_app.command()
def resume(name: Name) -> None:
    """Go on with a paused schedule; what came up meanwhile is not caught up with.

    Example: ntx-batch schedule resume nightly
    """
    render.note(schedules.resume(name))


@schedule_app.command()
def rm(name: Name) -> None:
    """Forget a schedule with its history; its jobs and their results stay.

    Example: ntx-batch schedule rm nightly
    """
    render.note(schedules.rm(name))


def install(
    show: Annotated[
        bool, typer.Option("--print", help="Print the unit and write nothing.")
    ] = False,
) -> None:
    """Write a systemd user unit, so that a runner is there after each start of the machine.

    Schedules are then served without anybody logging in. It says how to switch that on.

    Example: ntx-batch runner install --print
    """
    if show:
        typer.echo(systemd.unit_text(os.environ), nl=False)
        return
    path = systemd.install(os.environ)
    render.note(f"wrote {path}; switch it on with:")
    for command in systemd.ENABLE_COMMANDS:
        typer.echo(command)


def add_schedules(app: App, runner_app: App) -> None:
    """Give the command line what is here."""
    app.add_typer(schedule_app, name="schedule")
    runner_app.command("install")(install)


def unserved_text(count: int) -> str:
    """That schedules wait for a runner, and what to do."""
    waits = "1 schedule waits" if count == 1 else f"{count} schedules wait"
    return (
        f"{waits} for a runner, and none is there: start one with `ntx-batch runner start`; "
        "`ntx-batch runner install` has one after each start of the machine"
    )


def _print_schedules(found: Iterable[dict[str, Any]]) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for title in ("SCHEDULE", "CRON", "ZONE", "NEXT", "RUNS", "LAST", "JOB FILE"):
        table.add_column(title, overflow="fold" if title == "JOB FILE" else "ellipsis")
    for schedule in found:
        is_paused = schedule["state"] == "paused"
        following = "paused" if is_paused else "\n".join(map(_short, schedule["next"]))
        last = schedule["last"]
        table.add_row(
            schedule["schedule"],
            schedule["cron"],
            schedule["tz"],
            following,
            str(schedule["runs"]),
            "-" if last is None else last["state"],
            schedule["job_file"],
        )
    render.print_table(table)


def _print_history(runs: Iterable[dict[str, Any]]) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for title in ("RUN", "DUE", "DECIDED", "STATE", "MISSED", "JOB", "WHY"):
        table.add_column(title, overflow="fold" if title == "WHY" else "ellipsis")
    for run in runs:
        table.add_row(
            "-" if run["run"] is None else str(run["run"]),
            _short(run["scheduled_at"]) if run["scheduled_at"] else "-",
            _short(run["decided_at"]),
            run["state"],
            str(run["missed"] or "-"),
            run["job"] or "-",
            run["reason"] or "",
        )
    render.print_table(table)


def _short(iso: str) -> str:
    """2026-03-29T03:00:00+02:00 as 2026-03-29 03:00 +02:00."""
    return f"{iso[:10]} {iso[11:16]} {iso[19:]}"
