"""kill -9 of each process below a runner, in the middle of a job, and what comes of it.

`python -m scripts.chaos --model FILE [--rows N] [--times N]` runs one job, kills each of engine
actor, driver, raylet and GCS in turn while rows are on board, and reports for each kill the seconds
until the next row was committed and whether anything of the dead instance was left. In the end it
compares the rows with those of a job that nobody disturbed.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq

import ntx_batch
from jobs.control import stop_runner
from jobs.home import Home
from jobs.processes import ProcessId, find_instance, read_leader

ROLES = ("EngineActor", "driver", "raylet", "gcs_server")
NEW_ROWS = 10  # between the way back and the next kill
GO_ON_S, GONE_S = 30.0, 60.0
COMPILE_S = 600.0


@dataclass(frozen=True, slots=True)
class Kill:
    """go_on_s: until the next row was committed; num_left: processes of the dead instance then"""

    role: str
    go_on_s: float
    num_left: int


def instance(home: Home) -> set[ProcessId]:
    """The driver of a state folder and all below it."""
    leader = read_leader(home.driver_path)
    return find_instance(f"{home.key}-", [leader] if leader else [])


def process_of(home: Home, role: str) -> ProcessId | None:
    """The process of this role, once there is one."""
    if role == "driver":
        return read_leader(home.driver_path)
    for process in instance(home):
        try:
            if role in psutil.Process(process.pid).name():
                return process
        except psutil.NoSuchProcess:
            continue
    return None


def wait_until(condition: Callable[[], Any], timeout_s: float) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not so after {timeout_s:.0f} s")
        time.sleep(0.05)
    return value


def kill_one(job: ntx_batch.JobHandle, role: str) -> Kill:
    """Kill a process of the job's instance, and wait until the job goes on."""
    doomed = wait_until(lambda: process_of(job.home, role), GO_ON_S)
    before = instance(job.home)
    assert job.snapshot().state == "running", "the job is too short for so many kills"
    os.kill(doomed.pid, signal.SIGKILL)
    killed_at = time.monotonic()
    # What was on its way to the store when the process died may still arrive.
    wait_until(lambda: not doomed.is_running(), GO_ON_S)
    wait_until(lambda: not any(p.is_running() for p in before), GONE_S)
    num_done = job.snapshot().num_ok
    wait_until(lambda: job.snapshot().num_ok > num_done, GONE_S)
    go_on_s = time.monotonic() - killed_at
    num_left = sum(process.is_running() for process in before)
    num_done = job.snapshot().num_ok
    wait_until(lambda: job.snapshot().num_ok >= num_done + NEW_ROWS, GONE_S)
    return Kill(role, go_on_s, num_left)


def run_job(
    model: Path, home: Path, prompts: Path, max_tokens: int, roles: list[str]
) -> tuple[pa.Table, list[Kill]]:
    """A job whose instance loses these processes one after the other."""
    job = ntx_batch.submit(
        prompts,
        model=model,
        home=home,
        max_tokens=max_tokens,
        ignore_eos=True,
        sweep_tokens=64,
        kv_memory="64MiB",
    )
    wait_until(lambda: job.snapshot().num_ok >= NEW_ROWS, COMPILE_S)
    kills = [kill_one(job, role) for role in roles]
    code = job.wait()
    assert code == 0, f"the job ended with {code}: {job.snapshot().reason}"
    return job.results(), kills


def check_rows(table: pa.Table, undisturbed: pa.Table) -> None:
    """Each row once, and with the same text."""
    rows = table["row_index"].to_pylist()
    assert rows == undisturbed["row_index"].to_pylist(), "a row is missing or there twice"
    assert table["generated_text"].equals(undisturbed["generated_text"]), "a text has changed"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--times", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ntx-chaos-") as folder:
        prompts = Path(folder) / "prompts.parquet"
        texts = [f"prompt number {row}" for row in range(options.rows)]
        pq.write_table(pa.table({"prompt": texts}), prompts)
        home = Path(folder) / "home"
        roles = [role for role in ROLES for _ in range(options.times)]
        try:
            undisturbed, _ = run_job(options.model, home, prompts, options.max_tokens, [])
            table, kills = run_job(options.model, home, prompts, options.max_tokens, roles)
        finally:
            stop_runner(Home.open(home))
        check_rows(table, undisturbed)
    print("killed,goes_on_after_s,processes_left")
    for kill in kills:
        print(f"{kill.role},{kill.go_on_s:.1f},{kill.num_left}")
    worst = max(kill.go_on_s for kill in kills)
    print(f"{options.rows} rows once each, texts as undisturbed; slowest return {worst:.1f} s")
    return 0 if worst <= GO_ON_S else 1


if __name__ == "__main__":
    sys.exit(main())
