"""The SQL of the store as text: the schema, the steps that lead to it, and the queries by name."""

from __future__ import annotations

import re
from importlib import resources

_NAME = re.compile(r"^-- (\w+) --$", re.MULTILINE)


def parse_queries(text: str) -> dict[str, str]:
    """Queries by name: each follows a line `-- name --` and is kept with its description."""
    pieces = _NAME.split(text)
    names, bodies = pieces[1::2], pieces[2::2]
    queries = {name: body.strip() for name, body in zip(names, bodies, strict=True)}
    assert len(queries) == len(names), "two queries have one name"
    return queries


def _read(name: str) -> str:
    return (resources.files(__name__) / name).read_text(encoding="utf-8")


def _read_steps() -> tuple[str, ...]:
    files = resources.files(__name__).iterdir()
    return tuple(_read(name) for name in sorted(f.name for f in files if f.name[:5] == "step_"))


QUERIES = parse_queries("".join(map(_read, ("queries.sql", "schedules.sql", "hooks.sql"))))
SCHEMA = _read("schema.sql")
# Step n (from 1) turns a database of version n - 1 into version n.
STEPS = _read_steps()
