"""A long job of short rows, and how the memory of each process goes with the rows that are done.

    python -m scripts.bench_long --model MODEL [--rows 200000] [--prompts N] [--json FILE]

`--prompts N` makes N different prompts and repeats them, so that most rows are copies of others.
Once a second it notes the resident and the unshared memory of the runner, the driver, the engine
actor, Ray's processes and the server of schedules, which a schedule beside the job wants each
minute. After the warm-up a straight line through a process's resident memory, by rows, is its
slope. The exit status is 1 where one is above the bar. Nothing here is a timing.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from jobs.home import Home
from jobs.processes import ProcessId
from jobs.schedule_watch import SERVER_MODULE
from jobs.store import JobStore
from ntx_batch import client, schedules
from ntx_batch.client import JobHandle
from ntx_batch.submission import queue_job, read_submission
from scripts.bench_report import machine_facts
from scripts.chaos import instance

BAR_MIB = 1.0  # of resident memory, per STEP_ROWS
STEP_ROWS = 10_000
WARM_UP_SHARE = 0.25
SAMPLE_S = 1.0
MIN_SAMPLES = 10
MAX_TOKENS = 4
# What tells processes apart, of their names and command lines; a raylet's names its agents too.
_ROLES = (
    ("raylet", "raylet"),
    ("gcs_server", "gcs"),
    ("ray::EngineActor", "engine actor"),
    ("ray::DashboardAgent", "dashboard agent"),
    ("ray::RuntimeEnvAgent", "runtime env agent"),
    ("dashboard/agent", "dashboard agent"),
    ("runtime_env/agent", "runtime env agent"),
    ("log_monitor", "log monitor"),
    ("jobs.driver", "driver"),
    (SERVER_MODULE, "schedule server"),
    ("jobs.runner", "runner"),
)


@dataclass(frozen=True, slots=True)
class Sample:
    """Memory of one process when this many rows were done. rss_nbytes: with what is swapped out"""

    role: str
    num_rows: int
    rss_nbytes: int
    uss_nbytes: int


@dataclass(frozen=True, slots=True)
class Growth:
    """Of one role's processes after the warm-up; slopes in MiB per 10,000 rows."""

    role: str
    num_samples: int
    first_mib: float
    last_mib: float
    slope_mib: float
    unshared_slope_mib: float

    @property
    def is_flat(self) -> bool:
        return self.slope_mib <= BAR_MIB


def role_of(process: psutil.Process) -> str:
    name, command = process.name(), " ".join(process.cmdline())
    for mark, role in _ROLES:
        if mark in name or (mark in command and name not in ("raylet", "gcs_server")):
            return role
    return "other: " + " ".join(word.rpartition("/")[2] for word in command.split())[:40]


def take_samples(home: Home, runner_pid: int, num_rows: int) -> list[Sample]:
    """Of every process of the state folder; of several in one role, the largest."""
    largest: dict[str, Sample] = {}
    runner = psutil.Process(runner_pid)
    pids = {process.pid for process in instance(home)}
    pids |= {runner_pid, *(child.pid for child in runner.children())}
    for pid in pids:
        try:
            process = psutil.Process(pid)
            role, memory = role_of(process), process.memory_full_info()
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        resident = memory.rss + memory.swap
        if role not in largest or resident > largest[role].rss_nbytes:
            largest[role] = Sample(role, num_rows, resident, memory.uss)
    return list(largest.values())


def growth(
    role: str, samples: Sequence[Sample], warm_up_rows: int, min_samples: int
) -> Growth | None:
    """None: there are too few samples after the warm-up to say."""
    kept = [sample for sample in samples if sample.num_rows >= warm_up_rows]
    if len(kept) < min_samples or kept[0].num_rows == kept[-1].num_rows:
        return None
    rows = np.array([sample.num_rows for sample in kept]) / STEP_ROWS
    resident = np.array([sample.rss_nbytes for sample in kept]) / 2**20
    unshared = np.array([sample.uss_nbytes for sample in kept]) / 2**20
    return Growth(
        role,
        len(kept),
        float(resident[0]),
        float(resident[-1]),
        float(np.polyfit(rows, resident, 1)[0]),
        float(np.polyfit(rows, unshared, 1)[0]),
    )


def write_prompts(path: Path, num_rows: int, num_prompts: int) -> None:
    texts = [f"row {row % num_prompts}" for row in range(num_rows)]
    pq.write_table(pa.table({"prompt": texts}), path, row_group_size=10_000)


def add_schedule(folder: Path, home: Path, model: Path) -> None:
    """Every minute something is due, and the server finds that there is nothing new to do."""
    data, job_file = folder / "scheduled", folder / "job.toml"
    data.mkdir()
    job_file.write_text(f'input = "{data}/*.parquet"\nmodel = "{model.resolve()}"\n')
    schedules.add("* * * * *", job_file, tz="UTC", name="beside", new_only=True, home=home)


def queue(prompts: Path, home: Path, model: Path, part_interval_s: float) -> JobHandle:
    """A job that cuts parts often, so that what a part takes comes within the warm-up."""
    given = {"model": model, "device": "cpu", "max_tokens": MAX_TOKENS, "ignore_eos": True}
    submission = read_submission(prompts, given)
    spec = replace(submission.spec, part_interval_s=part_interval_s)
    place = Home.open(home)
    with JobStore(place.state_path) as store:
        return JobHandle(queue_job(store, replace(submission, spec=spec), lambda _: None).id, place)


def run(
    model: Path,
    folder: Path,
    *,
    num_rows: int,
    num_prompts: int,
    part_interval_s: float,
    sample_s: float = SAMPLE_S,
) -> list[Sample]:
    """Run the job in a new state folder below `folder`, or in the one that is there."""
    prompts, home = folder / "prompts.parquet", folder / "home"
    write_prompts(prompts, num_rows, num_prompts)
    samples: list[Sample] = []
    try:
        add_schedule(folder, home, model)
        job = queue(prompts, home, model, part_interval_s)
        job.ensure_runner()
        for snapshot in job.follow():
            pid = client.runner_status(home=home)["pid"]
            if pid is not None and ProcessId.of(pid) is not None:
                samples += take_samples(job.home, pid, snapshot.num_ok + snapshot.num_error)
            time.sleep(sample_s)
        assert snapshot.num_ok == num_rows, f"{snapshot.state}: {snapshot.reason}\n{job.logs()}"
    finally:
        client.stop_runner(home=home)
    return samples


def judge(
    samples: Sequence[Sample], num_rows: int, min_samples: int = MIN_SAMPLES
) -> dict[str, Growth | None]:
    """How each role's processes grew after the warm-up of a job of so many rows."""
    by_role: dict[str, list[Sample]] = {}
    for sample in samples:
        by_role.setdefault(sample.role, []).append(sample)
    warm_up_rows = int(num_rows * WARM_UP_SHARE)
    return {role: growth(role, some, warm_up_rows, min_samples) for role, some in by_role.items()}


def table(found: Iterable[Growth]) -> str:
    names = ("samples", "first MiB", "last MiB", "slope", "unshared")
    lines = [f"{'process':<20}" + "".join(f"{name:>10}" for name in names)]
    lines += [
        f"{g.role:<20}{g.num_samples:>10}{g.first_mib:>10.1f}{g.last_mib:>10.1f}{g.slope_mib:>10.3f}"
        f"{g.unshared_slope_mib:>10.3f}{'' if g.is_flat else '  above the bar'}"
        for g in found
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--prompts", type=int, help="different ones; default: all rows differ")
    parser.add_argument("--part-interval", type=float, default=5.0, help="s between results parts")
    parser.add_argument("--json", type=Path, help="write slopes and all samples here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ntx-long-") as name:
        samples = run(
            options.model,
            Path(name),
            num_rows=options.rows,
            num_prompts=options.prompts or options.rows,
            part_interval_s=options.part_interval,
        )
    judged = judge(samples, options.rows)
    found = [one for one in judged.values() if one is not None]
    print(
        f"{options.rows} rows, {options.prompts or options.rows} prompts; MiB per {STEP_ROWS} rows "
        f"after {WARM_UP_SHARE:.0%} of them, bar {BAR_MIB}"
    )
    print(table(found))
    for role, one in judged.items():
        if one is None:
            print(f"{role}: too few samples")
    if options.json is not None:
        facts: dict[str, Any] = {
            "machine": machine_facts(),
            "rows": options.rows,
            "prompts": options.prompts or options.rows,
            "warm_up_share": WARM_UP_SHARE,
            "growth": [asdict(one) for one in found],
            "samples": [list(asdict(sample).values()) for sample in samples],
        }
        options.json.write_text(json.dumps(facts) + "\n")
    return 0 if found and all(one.is_flat for one in found) else 1


if __name__ == "__main__":
    sys.exit(main())
