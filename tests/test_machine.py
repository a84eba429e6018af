"""Memory that is free: the system's, less a reserve, and within control groups."""

from __future__ import annotations

from pathlib import Path

import psutil

from engine.machine import (
    all_memory_nbytes,
    cgroup_free_nbytes,
    cgroup_limit_nbytes,
    free_memory_nbytes,
)

GIB = 1 << 30


def make_group(folder: Path, limit: str, used: int, cached: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {cached}\nactive_file 0\n")


def test_the_tightest_of_nested_groups_counts_and_page_cache_is_free(tmp_path: Path) -> None:
    root, membership = tmp_path / "cgroup", tmp_path / "self"
    make_group(root / "outer" / "inner", str(8 * GIB), 2 * GIB, GIB)
    make_group(root / "outer", str(10 * GIB), 9 * GIB, 2 * GIB)
    make_group(root, "max", 50 * GIB, 0)
    membership.write_text("0::/outer/inner\n")
    assert cgroup_free_nbytes(root, membership) == 3 * GIB
    assert cgroup_limit_nbytes(root, membership) == 8 * GIB
    membership.write_text("0::/\n")
    assert cgroup_free_nbytes(root, membership) is None
    assert cgroup_limit_nbytes(root, membership) is None
    assert free_memory_nbytes() < all_memory_nbytes() <= psutil.virtual_memory().total


def test_a_group_past_its_limit_has_nothing_free(tmp_path: Path) -> None:
    make_group(tmp_path, str(GIB), 2 * GIB, 0)
    (tmp_path / "self").write_text("0::/\n")
    assert cgroup_free_nbytes(tmp_path, tmp_path / "self") == 0


def test_without_control_groups_nothing_is_limited(tmp_path: Path) -> None:
    assert cgroup_free_nbytes(tmp_path, tmp_path / "self") is None


def test_a_budget_is_taken_as_asked_and_a_reserve_is_left_otherwise() -> None:
    assert free_memory_nbytes(1 << 20) == 1 << 20
    available = psutil.virtual_memory().available
    assert free_memory_nbytes(1 << 60) > free_memory_nbytes()
    assert free_memory_nbytes() < 0.95 * available
