"""What the commands share: how their help looks, and the options of a job."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Container, Iterator
from typing import Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

from ntx_batch.options import OPTIONS

Function = TypeVar("Function", bound=Callable[..., Any])

JobId = Annotated[
    str,
    typer.Argument(metavar="JOB", help="Job id, or a unique prefix of it.", show_default=False),
]
JobOrNewest = Annotated[
    str | None,
    typer.Argument(
        metavar="JOB",
        help="Job id, or a unique prefix of it; without it, the newest job.",
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON alone on stdout.")]


class Command(TyperCommand):
    """A command whose usage says JOB, not {JOB}."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [piece.strip("{}") for piece in super().collect_usage_pieces(ctx)]

    def get_params(self, ctx: Any) -> Any:
        return _without_bool(super().get_params(ctx))


class Group(TyperGroup):
    def get_params(self, ctx: Any) -> Any:
        return _without_bool(super().get_params(ctx))


def _without_bool(parameters: list[Any]) -> list[Any]:
    """The same parameters, with no <bool> after flags in their help."""
    for parameter in parameters:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    return parameters


class App(typer.Typer):
    """A Typer whose commands are of the classes above."""

    def __init__(self, **values: Any) -> None:
        super().__init__(cls=Group, no_args_is_help=True, **values)

    def command(self, name: str | None = None, **values: Any) -> Callable[[Function], Function]:
        return super().command(name, cls=Command, **values)


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
    return value is None or value == []


def _job_arguments() -> list[inspect.Parameter]:
    def arguments(
        input: Annotated[
            str | None,
            typer.Argument(
                metavar="INPUT",
                help="Parquet, JSON lines or CSV: file, folder, pattern or URI; or JOB.toml.",
                show_default=False,
            ),
        ] = None,
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
                help="Results folder or its URI, empty or absent. Default: the job's own.",
                show_default=False,
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
                help=option.full_help,
                show_default=False,
                rich_help_panel=panel,
            )
            yield inspect.Parameter(
                option.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=Annotated[option.kind | None, info],
            )
