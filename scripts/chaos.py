"""kill -9 of processes of ours, at random, in the middle of a job, and what comes of it.

    python -m scripts.chaos --model FILE [--rows 3000] [--kills 20] [--seed 0] [--json FILE]

Runs one job and kills, each time after some more rows, one of the runner, the driver, the engine
actor, the raylet and the GCS, all as often; where the runner was hit it starts another. Sometimes
it kills again before rows are back on board, which is not counted. In the end it compares rows
with those of a job that nobody disturbed, and counts what the engines computed again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq

import ntx_batch
from jobs.control import runner_status, stop_runner
from jobs.home import Home
from jobs.processes import ProcessId, find_instance, read_leader
from jobs.store import JobStore
from jobs.temp_folder import PREFIX, temp_roots
from ntx_batch import client
from scripts.bench_report import machine_facts
from scripts.chaos_driver import Computed, read_notes
from scripts.chaos_runner import start_chaos_runner

ROLES = ("runner", "driver", "EngineActor", "raylet", "gcs_server")
NEW_ROWS = 10  # at least, between the way back and the next kill
HURRIED_SHARE, HURRIED_WITHIN_S = 0.2, 3.0
GO_ON_S = 30.0  # within which a job should go on, on a machine that does nothing else
LOG_CHARS = 20_000
GONE_S, BACK_S, COMPILE_S = 60.0, 600.0, 600.0


@dataclass(frozen=True, slots=True)
class Kill:
    """One kill -9 and what it cost.

    num_on_board: rows that the engine was at work on; 0 where none had come so far
    num_lost: rows that it had admitted and that were not kept: those, and finished ones on the way;
        at most, since some may have been kept in the moment before the kill
    go_on_s: until the next row was committed; None where the next kill came before
    num_left: processes of the dead instance when the job went on
    """

    role: str
    num_on_board: int
    num_lost: int
    go_on_s: float | None
    num_left: int


@dataclass(frozen=True, slots=True)
class Recomputed:
    """num_begun: times that a row was admitted after its first; num_finished: ended after that"""

    num_begun: int
    num_finished: int


def instance(home: Home) -> set[ProcessId]:
    """The driver of a state folder and all below it."""
    leader = read_leader(home.driver_path)
    return find_instance(f"{home.key}-", [leader] if leader else [])


def process_of(home: Home, role: str) -> ProcessId | None:
    """The process of this role, once there is one."""
    if role == "runner":
        pid = runner_status(home).pid
        return None if pid is None else ProcessId.of(pid)
    if role == "driver":
        leader = read_leader(home.driver_path)
        return leader if leader and leader.is_running() else None
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


def recomputed(engines: Iterable[Computed]) -> Recomputed:
    """How much more was computed than each row once."""
    engines = list(engines)
    begun = Counter(row for engine in engines for row in engine.begun)
    finished = Counter(row for engine in engines for row in engine.finished)
    return Recomputed(begun.total() - len(begun), finished.total() - len(finished))


class Chaos:
    """One job, and the killing of what runs it."""

    def __init__(self, job: ntx_batch.JobHandle, num_rows: int, seed: int) -> None:
        self.job = job
        self.kills: list[Kill] = []
        self._num_rows = num_rows
        self._random = random.Random(seed)
        self._kept: set[int] = set()
        self._kept_before: dict[str, set[int]] = {}  # by the engine that was there
        self._dead: str | None = None  # the engine that was killed last
        self._runners: list[subprocess.Popen[bytes]] = []

    @property
    def num_counted(self) -> int:
        return sum(kill.num_on_board > 0 for kill in self.kills)

    def run(self, num_kills: int) -> None:
        """Kill until so many kills met rows on board, then let the job end."""
        self._start_runner()
        self._wait_rows(NEW_ROWS, COMPILE_S)
        roles = list[str]()
        while self.num_counted < num_kills:
            roles = roles or self._random.sample(ROLES, len(ROLES))
            left = self._num_rows - self.job.snapshot().num_ok
            spread = max(NEW_ROWS, left // (2 * (num_kills - self.num_counted + 1)))
            self._wait_rows(self._random.randint(NEW_ROWS, spread), BACK_S)
            self._kill(roles.pop(), hurried=self._random.random() < HURRIED_SHARE)
        code = self.job.wait()
        assert code == 0, f"the job ended with {code}: {self.job.snapshot().reason}"

    def _start_runner(self) -> None:
        self._runners.append(start_chaos_runner(self.job.home))
        pid = self._runners[-1].pid
        wait_until(lambda: runner_status(self.job.home).pid == pid, GO_ON_S)

    def close(self) -> None:
        """End the runner that is left, in good order."""
        stop_runner(self.job.home)
        for runner in self._runners:
            runner.wait()

    def _wait_rows(self, num_more: int, timeout_s: float) -> None:
        wanted = self.job.snapshot().num_ok + num_more
        wait_until(lambda: self.job.snapshot().num_ok >= wanted, timeout_s)

    def _kill(self, role: str, *, hurried: bool) -> None:
        """Kill a process and wait until the job goes on; in a hurry, kill again before that."""
        killed_at = time.monotonic()
        before = self._kill_now(role)
        if hurried:
            time.sleep(self._random.uniform(0.0, HURRIED_WITHIN_S))
            again = self._random.choice(ROLES)
            if process_of(self.job.home, again) is not None:
                self._kill_now(again)
        wait_until(lambda: self._newest()[0] != self._dead, BACK_S)
        self._wait_rows(1, BACK_S)
        if not hurried:
            go_on_s = time.monotonic() - killed_at
            num_left = sum(process.is_running() for process in before)
            last = self.kills.pop()
            self.kills.append(Kill(role, last.num_on_board, last.num_lost, go_on_s, num_left))

    def _kill_now(self, role: str) -> set[ProcessId]:
        """Kill a process, wait until all that must go with it is gone, and see what was lost.

        Returns that. An engine actor goes alone.
        """
        home = self.job.home
        doomed = wait_until(lambda: process_of(home, role), GO_ON_S)
        before = {doomed} if role == "EngineActor" else instance(home)
        self._keep_track()
        assert self.job.snapshot().exit_code is None, "the job is too short for so many kills"
        os.kill(doomed.pid, signal.SIGKILL)
        wait_until(lambda: not doomed.is_running(), GO_ON_S)
        wait_until(lambda: not any(process.is_running() for process in before), GONE_S)
        name, engine = self._newest()
        if name == self._dead:
            engine = Computed()  # there was no other since
        self._dead = name
        num_on_board = len(engine.on_board - self._kept)
        self.kills.append(Kill(role, num_on_board, len(engine.begun - self._kept), None, 0))
        if role == "runner":
            self._start_runner()
        return before

    def _newest(self) -> tuple[str | None, Computed]:
        """The engine that began last, by its name."""
        return next(reversed(read_notes(self.job.home).items()), (None, Computed()))

    def _keep_track(self) -> None:
        """See what the store has kept; engines that begin after this must not begin it again."""
        with JobStore(self.job.home.state_path) as store:
            kept = set(store.done_keys(self.job.id)[:, 0].tolist())
        assert self._kept <= kept, "rows that were kept are gone"
        self._kept = kept
        self._kept_before |= {name: kept for name in [self._newest()[0]] if name}

    def check_nothing_kept_began_again(self) -> None:
        engines = read_notes(self.job.home)
        names = list(engines)
        for dead, kept in self._kept_before.items():
            for later in names[names.index(dead) + 1 :]:
                assert not engines[later].begun & kept, "a row that was kept was begun again"


def queue(prompts: Path, home: Path, model: Path, max_tokens: int) -> ntx_batch.JobHandle:
    return client.queue(
        prompts,
        model=model,
        home=home,
        device="cpu",
        max_tokens=max_tokens,
        ignore_eos=True,
        sweep_tokens=64,
        kv_memory="64MiB",
    )


def run_undisturbed(job: ntx_batch.JobHandle) -> pa.Table:
    job.ensure_runner()
    code = job.wait()
    assert code == 0, f"the job ended with {code}: {job.snapshot().reason}"
    return job.results()


def check_rows(table: pa.Table, undisturbed: pa.Table) -> None:
    """Each row once, and with the same text."""
    rows = table["row_index"].to_pylist()
    assert rows == undisturbed["row_index"].to_pylist(), "a row is missing or there twice"
    assert table["generated_text"].equals(undisturbed["generated_text"]), "a text has changed"


def temp_folders(home: Home) -> list[Path]:
    """Folders of Ray sessions of a state folder."""
    return [
        folder for root in temp_roots(os.environ) for folder in root.glob(f"{PREFIX}{home.key}-*")
    ]


def run_chaos(
    model: Path, folder: Path, *, num_rows: int, num_kills: int, max_tokens: int, seed: int
) -> tuple[list[Kill], Recomputed]:
    """A disturbed job beside an undisturbed one. Raises AssertionError: what must hold does not."""
    prompts, home = folder / "prompts.parquet", Home.open(folder / "home")
    texts = [f"prompt number {row}" for row in range(num_rows)]
    pq.write_table(pa.table({"prompt": texts}), prompts)
    try:
        undisturbed = run_undisturbed(queue(prompts, home.path, model, max_tokens))
        stop_runner(home)
        chaos = Chaos(queue(prompts, home.path, model, max_tokens), num_rows, seed)
        try:
            chaos.run(num_kills)
        except Exception:
            snapshot = chaos.job.snapshot()
            print(chaos.kills, snapshot.state, snapshot.reason, snapshot.num_ok, file=sys.stderr)
            print(home.log_path.read_text()[-LOG_CHARS:], file=sys.stderr)
            raise
        finally:
            chaos.close()
    finally:
        stop_runner(home)
    check_rows(chaos.job.results(), undisturbed)
    chaos.check_nothing_kept_began_again()
    again = recomputed(read_notes(home).values())
    num_lost = sum(kill.num_lost for kill in chaos.kills)
    assert again.num_finished <= again.num_begun <= num_lost, f"{again}, {num_lost} were lost"
    assert not instance(home), "processes are left"
    assert not temp_folders(home), "temporary folders are left"
    return chaos.kills, again


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=3000)
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--kills", type=int, default=20, help="with rows on board")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write each kill here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ntx-chaos-") as folder:
        kills, again = run_chaos(
            options.model.resolve(),
            Path(folder),
            num_rows=options.rows,
            num_kills=options.kills,
            max_tokens=options.max_tokens,
            seed=options.seed,
        )
    print("killed,rows_on_board,rows_lost,goes_on_after_s,processes_left")
    for kill in kills:
        go_on = "" if kill.go_on_s is None else f"{kill.go_on_s:.1f}"
        print(f"{kill.role},{kill.num_on_board},{kill.num_lost},{go_on},{kill.num_left}")
    num_counted = sum(kill.num_on_board > 0 for kill in kills)
    num_lost = sum(kill.num_lost for kill in kills)
    worst = max(kill.go_on_s for kill in kills if kill.go_on_s is not None)
    print(
        f"{options.rows} rows once each, texts as undisturbed; {len(kills)} kills, {num_counted} "
        f"with rows on board; {num_lost} rows admitted and not kept then, {again.num_begun} of "
        f"them begun again, {again.num_finished} finished twice; slowest return {worst:.1f} s"
    )
    if options.json is not None:
        facts = {
            "machine": machine_facts(),
            "rows": options.rows,
            "seed": options.seed,
            "kills": [asdict(kill) for kill in kills],
            "recomputed": asdict(again),
        }
        options.json.write_text(json.dumps(facts, indent=1) + "\n")
    return 0 if worst <= GO_ON_S else 1


if __name__ == "__main__":
    sys.exit(main())
