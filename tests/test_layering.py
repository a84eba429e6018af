"""Imports point down, and each heavy library has one home."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAY_IMPORT = {
    "ntx_batch": {"jobs", "engine", "kernels", "nvme"},
    "jobs": {"engine", "kernels", "nvme"},
    "engine": {"kernels", "nvme"},
    "kernels": set(),
    "nvme": set(),
}
HOMES = {
    "ray": {"jobs/driver.py", "jobs/engine_actor.py", "jobs/fleet.py", "jobs/ray_nodes.py"},
    "pyarrow": {
        "jobs/columns.py",
        "jobs/dataset.py",
        "jobs/export.py",
        "jobs/formats/",
        "jobs/merge.py",
        "jobs/publish.py",
        "jobs/remote.py",
        "jobs/results.py",
        "jobs/results_dataset.py",
        "ntx_batch/report/rows.py",
    },
    "duckdb": {"ntx_batch/results_sql.py"},
    "croniter": {"jobs/schedule.py"},
    "sqlite3": {"jobs/database.py"},
    "typer": {
        "ntx_batch/cli.py",
        "ntx_batch/cli_options.py",
        "ntx_batch/report_cli.py",
        "ntx_batch/schedule_cli.py",
    },
    "cupy": {"kernels/cuda/", "engine/cuda_link.py"},
}


def imported_modules(tree: ast.AST, *, package: str = "") -> Iterator[tuple[str, int]]:
    """(dotted module, line) of each import in a file, those inside functions included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (
                (f"{package}.{node.module or ''}" if node.level else node.module or ""),
                node.lineno,
            )


def imports_of(path: Path) -> list[tuple[str, int]]:
    package = path.relative_to(ROOT).parts[0]
    return list(imported_modules(ast.parse(path.read_text(), str(path)), package=package))


def sources() -> list[Path]:
    return [path for package in MAY_IMPORT for path in sorted((ROOT / package).rglob("*.py"))]


def upward_imports(package: str, modules: list[tuple[str, int]]) -> list[str]:
    allowed = MAY_IMPORT[package] | {package}
    tops = [(module.partition(".")[0], line) for module, line in modules]
    return [f"line {line}: {top}" for top, line in tops if top in MAY_IMPORT and top not in allowed]


def strays(file: str, modules: list[tuple[str, int]]) -> list[str]:
    found = []
    for module, line in modules:
        homes = HOMES.get(module.partition(".")[0])
        if homes is not None and not any(file.startswith(home) for home in homes):
            found.append(f"line {line}: {module} belongs to {', '.join(sorted(homes))}")
    return found


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down_and_heavy_ones_stay_at_home(path: Path) -> None:
    file, modules = str(path.relative_to(ROOT)), imports_of(path)
    assert upward_imports(Path(file).parts[0], modules) == []
    assert strays(file, modules) == []


def test_each_package_has_sources() -> None:
    assert {path.relative_to(ROOT).parts[0] for path in sources()} == set(MAY_IMPORT)


def test_the_check_sees_imports_inside_functions() -> None:
    tree = ast.parse("def f():\n    import jobs.store\n    from ray import get\n")
    modules = list(imported_modules(tree))
    assert modules == [("jobs.store", 2), ("ray", 3)]
    assert upward_imports("engine", modules) == ["line 2: jobs"]
    assert strays("engine/engine.py", modules) == [
        "line 3: ray belongs to jobs/driver.py, jobs/engine_actor.py, jobs/fleet.py, "
        "jobs/ray_nodes.py"
    ]


def test_no_test_only_switches_in_product_code() -> None:
    """Nothing in the packages asks whether it is under test."""
    for path in sources():
        text = path.read_text()
        assert "PYTEST_CURRENT_TEST" not in text, path
        assert not any(
            module.partition(".")[0] in {"pytest", "unittest"} for module, _ in imports_of(path)
        )
