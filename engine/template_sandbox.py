"""Jinja as chat templates expect it, for templates that nobody has read.

Attributes that lead out of the sandbox are refused by Jinja's own ImmutableSandboxedEnvironment.
Cost is bounded by rewriting what is parsed: loops, literals, `~`, filters and tests all pass
through a budget, and operators, calls and captured output do by the hooks that Jinja has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from engine.requests import TemplateError
from engine.template_filters import CONCAT, MEASURED, TICKING, paid_filters, paid_tests
from engine.template_limits import (
    LimitError,
    TemplateLimits,
    budget,
    check_add,
    check_braces,
    check_multiply,
    check_percent,
    check_power,
    check_str_method,
    limited,
)

TEMPLATE_FILENAME = "<template>"  # what Jinja calls a template made from a string
COMPILER_ARGUMENTS = ("_loop_vars", "_block_vars")  # what Jinja's compiler adds to calls
LEFT_OUT_METHODS = frozenset({"encode", "translate", "maketrans"})


class RefusedError(jinja2.TemplateError):
    """The template itself called raise_exception."""


class CompiledTemplate:
    """A template that is compiled, within limits.

    what: how messages call it, such as "chat template"
    undefined: what a name that is not there becomes
    finalize: applied to each printed value
    options: further arguments of the Jinja environment

    Raises TemplateError: too long, or does not compile; names the line.
    """

    def __init__(
        self,
        source: str,
        *,
        what: str,
        limits: TemplateLimits | None = None,
        undefined: type[jinja2.Undefined] = jinja2.Undefined,
        finalize: Callable[[Any], Any] = lambda value: value,
        **options: Any,
    ) -> None:
        self._what = what
        self._limits = limits or TemplateLimits()
        if len(source) > self._limits.max_source_chars:
            raise TemplateError(
                f"the {what} has {len(source)} characters; {self._limits.max_source_chars} are "
                "allowed"
            )
        environment = _Environment(undefined=undefined, finalize=_printed(finalize), **options)
        with limited(self._limits):
            try:
                self._template = environment.from_string(source)
            except Exception as error:
                raise self._translated(error) from error

    def render(self, variables: Mapping[str, Any]) -> str:
        """Raises TemplateError: the template refuses, fails, or passes its limits."""
        with limited(self._limits):
            try:
                return self._template.render(variables)
            except Exception as error:
                raise self._translated(error) from error

    def _translated(self, error: Exception) -> TemplateError:
        line = _line_of(error)
        where = f"{self._what}, line {line}" if line else self._what
        match error:
            case RefusedError():
                return TemplateError(f"the {self._what} refuses this input: {error}")
            case LimitError():
                return TemplateError(f"{where}: stopped: {error}")
            case SecurityError():
                return TemplateError(f"{where}: not allowed in the sandbox: {error}")
            case jinja2.TemplateError():
                return TemplateError(f"{where}: {error}")
            case RecursionError():
                return TemplateError(f"{where}: nested too deeply")
        return TemplateError(f"{where}: {type(error).__name__}: {error}")


def raise_exception(message: Any) -> None:
    """How a template refuses its input."""
    raise RefusedError(str(message))


def _line_of(error: Exception) -> int | None:
    if isinstance(error, jinja2.TemplateSyntaxError):
        return error.lineno
    line = None
    trace: TracebackType | None = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == TEMPLATE_FILENAME:
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def _printed(finalize: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def printed(value: Any) -> Any:
        value = finalize(value)
        if not isinstance(value, str):
            budget().weigh(value)
        return value

    return printed


# ---- the environment -----------------------------------------------------------------------


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(extensions=[_Generation, loopcontrols], optimized=False, **options)
        del self.globals["lipsum"]
        self.filters = paid_filters(self.filters)
        self.tests = paid_tests(self.tests)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = Parser(self, source, name, filename).parse()
        return _Rewriter().visit(tree)  # type: ignore[no-any-return]

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, int | float | bytes) or attr in LEFT_OUT_METHODS:
            return False
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        format_safely = super().wrap_str_format(value)
        if format_safely is None:
            return None

        def checked(*args: Any, **kwargs: Any) -> str:
            check_braces(value.__self__, (args, kwargs))
            return format_safely(*args, **kwargs)

        return checked

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        match operator:
            case "+":
                check_add(left, right)
            case "*":
                check_multiply(left, right)
            case "**":
                check_power(left, right)
            case "%":
                check_percent(left, right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        budget().tick()
        named = [value for name, value in kwargs.items() if name not in COMPILER_ARGUMENTS]
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            if __obj.__name__ == "join" and args:
                args = (list(budget().ticking(args[0])),)
            check_str_method(owner, __obj.__name__, (*args, *named))
        elif isinstance(__obj, Macro):
            for value in (*args, *named):
                budget().measured(value)
        elif isinstance(__obj, LoopContext) and args:
            args = (budget().ticking(args[0]), *args[1:])
        return budget().measured(super().call(__context, __obj, *args, **kwargs))

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """Join output: of the template, a macro, or a captured block."""
        pieces = []
        size = 0
        for part in parts:
            pieces.append(part)
            size += len(part)
            budget().check_size(size)
        budget().spend(size)
        return "".join(pieces)


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}`: the model's turns, for training; nothing here."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Rewriter(NodeTransformer):
    """Sends loops, literals and `~` through the budget."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _filtered(node.iter, TICKING)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), CONCAT)

    def visit_List(self, node: nodes.Literal) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, MEASURED)

    visit_Dict = visit_List

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, MEASURED) if node.ctx == "load" else node


def _filtered(node: nodes.Node, name: str) -> nodes.Filter:
    filtered = nodes.Filter(node, name, [], [], None, None)
    filtered.set_lineno(node.lineno)
    return filtered
