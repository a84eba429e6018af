"""The command `report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ntx_batch import __version__, client
from ntx_batch.cli_options import App, JobOrNewest


def add_to(app: App) -> None:
    """Give the program the command."""
    app.command()(report)


def report(
    job: JobOrNewest = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Where to write the page. Default: report-JOB.html here.",
        ),
    ] = None,
    kwh_price: Annotated[
        float | None,
        typer.Option(metavar="PRICE", min=0, help="What a kWh costs, to say what the job did."),
    ] = None,
    currency: Annotated[
        str, typer.Option(metavar="NAME", help="Of that price.", show_default=True)
    ] = "EUR",
    watts: Annotated[
        float | None,
        typer.Option(
            metavar="W",
            min=0,
            help="What the machine draws while it works, as a meter at the wall tells. "
            "Default: the counters of its parts, where they can be read.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Write one HTML page of how a job went: throughput, lengths, errors, stalls, energy, cost.

    It needs nothing else, no network and no script, and works while the job runs.

    Example: ntx-batch report d254e -o report.html --kwh-price 0.30 --currency EUR
    """
    from ntx_batch.report import Price, write_report

    handle = client.newest_job() if job is None else client.job(job)
    target = output or Path(f"report-{handle.id}.html")
    price = Price(kwh=kwh_price, currency=currency, watts=watts)
    write_report(handle.home, handle.id, target, price, __version__)
    typer.echo(target)
