"""Chains, priorities and hooks through the real runner, Ray and engine, on a tiny model.

One runner serves the module: a start of Ray takes seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import ntx_batch
from jobs.control import stop_runner
from jobs.home import Home
from tests.cli_helpers import MODEL, write_prompts
from tests.hook_helpers import Receiver, receiving
from tests.runner_helpers import make_home, wait_until

OPTIONS: dict[str, Any] = {"model": MODEL, "max_tokens": 6, "ignore_eos": True}
PROMPTS = ["one", "", "three", "four and more", "five"]


@dataclass
class World:
    """A state folder, a folder for files, and a server that is told of ends."""

    home: Home
    folder: Path
    receiver: Receiver

    def submit(self, input: Path | None = None, **options: Any) -> ntx_batch.JobHandle:
        return ntx_batch.submit(input, home=self.home.path, **OPTIONS | options)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("chain")
    home = make_home(folder / "home")
    with receiving() as receiver:
        try:
            yield World(home, folder, receiver)
        finally:
            stop_runner(home)


def told(world: World, job: ntx_batch.JobHandle) -> dict[str, Any]:
    """What the server got of a job, once it did."""
    found = wait_until(
        lambda: [body for _, _, body in world.receiver.posts if body["job"] == job.id]
    )
    assert len(found) == 1
    body: dict[str, Any] = found[0]
    return body


def test_three_stages_run_one_after_the_other_and_their_end_is_told(world: World) -> None:
    prompts = write_prompts(world.folder / "in.parquet", PROMPTS, id=[f"r{n}" for n in range(5)])
    note = world.folder / "note.json"
    first = world.submit(prompts, on_failure=world.receiver.url())
    second = world.submit(
        after=first,
        prompt_template="Shorten {{ id }}: {{ generated_text }}",
        output_prefix="short_",
        on_finish=f"sh -c 'cat > {note}'",
    )
    third = world.submit(
        after=second,
        prompt_template="{{ generated_text }} | {{ short_generated_text }}",
        keep=["id", "short_generated_text"],
        on_finish=world.receiver.url(),
    )
    assert third.wait(180) == 0
    assert [job.status()["exit_code"] for job in (first, second, third)] == [3, 0, 0]
    record = second.status()["record"]["after"]
    assert record == {"job": first.id, "rows": 5, "not_ok": 1, "left_out": 1}
    texts = dict(zip(*(first.results().column(n).to_pylist() for n in COLUMNS), strict=True))
    rows = third.results().to_pylist()
    assert [row["row_index"] for row in rows] == [0, 1, 2, 3]
    assert [row["id"] for row in rows] == ["r0", "r2", "r3", "r4"]
    assert second.results().column("short_row_index").to_pylist() == [0, 2, 3, 4]
    assert all(texts[row["id"]] is not None for row in rows)
    body = told(world, third)
    assert (body["state"], body["ok"], body["after"]) == ("completed", 4, second.id)
    wait_until(note.exists)
    wait_until(lambda: second.status()["hooks"][0]["state"] == "delivered")
    # The first had a failed row, and did not fail.
    assert first.status()["hooks"][0]["state"] == "idle"


COLUMNS = ("id", "generated_text")


def test_a_stage_has_the_text_of_a_job_over_the_results_in_a_file(world: World) -> None:
    prompts = write_prompts(world.folder / "b.parquet", PROMPTS, id=[f"r{n}" for n in range(5)])
    template = {"prompt_template": "{{ id }} {{ generated_text }}", "temperature": 1.0, "seed": 3}
    first = world.submit(prompts)
    chained = world.submit(after=first, **template)
    assert chained.wait(120) == 0
    first.export(world.folder / "exported.parquet")
    apart = world.submit(world.folder / "exported.parquet", keep=["id"], **template)
    apart.wait(120)
    names = ["id", "row_index", "generated_text"]
    wanted = [row for row in apart.results().select(names).to_pylist() if row["row_index"] != 1]
    assert chained.results().select(names).to_pylist() == wanted


def test_a_stage_that_fails_stops_the_chain_and_is_told_of(world: World) -> None:
    prompts = write_prompts(world.folder / "c.parquet", ["", ""])
    first = world.submit(prompts)
    second = world.submit(
        after=first, prompt_template="{{ generated_text }}", on_failure=world.receiver.url()
    )
    third = world.submit(
        after=second, prompt_template="{{ generated_text }}", on_finish=world.receiver.url()
    )
    assert [job.wait(120) for job in (first, second, third)] == [1, 1, 1]
    for job in (second, third):
        assert f"its chain stopped: job {first.id} failed" in told(world, job)["reason"]


def test_the_job_of_the_highest_priority_runs_next(world: World) -> None:
    prompts = write_prompts(world.folder / "d.parquet", ["a"] * 40)
    running = world.submit(prompts, max_tokens=300, dedupe=False)
    wait_until(lambda: running.status()["state"] == "running")
    low, high = (world.submit(prompts, max_tokens=1, priority=n) for n in (0, 7))
    assert running.status()["state"] == "running"
    for job in (running, low, high):
        job.wait(120)
    started = [job.snapshot().started_at for job in (running, high, low)]
    assert started == sorted(started, key=float)  # type: ignore[arg-type]
    finished = running.snapshot().finished_at
    assert finished is not None and started[1] is not None and finished <= started[1]
