"""RAY_ADDRESS: engines on the nodes of a cluster, here two nodes of one machine."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import ray.util

from jobs.control import stop_runner
from jobs.home import Home
from jobs.processes import INSTANCE_VARIABLE, ProcessId, find_instance, kill_instance
from jobs.records import Job
from jobs.results import read_results
from jobs.store import JobStore
from tests.cli_helpers import MODEL, run_process, write_prompts
from tests.runner_helpers import make_home, wait_until
from tests.test_ray_address import free_port

RAY = Path(sys.executable).with_name("ray")
NUM_ROWS = 3000  # enough that a slow start of one engine does not leave all to the other
pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Node:
    leader: ProcessId
    marker: str

    def actors(self) -> list[int]:
        """Pids of the engine actors that this node's raylet has started."""
        own = {process.pid for process in find_instance(self.marker, [self.leader])}
        found = psutil.process_iter(["name", "ppid"])
        return [p.pid for p in found if "EngineActor" in p.name() and p.ppid() in own]


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, list[Node]]]:
    """The address of a cluster of two nodes of one core each, and the nodes."""
    own_ip = ray.util.get_node_ip_address()
    if own_ip.startswith("127."):
        pytest.skip("Ray has no second node on loopback, and this machine no other address")
    folder = tmp_path_factory.mktemp("cluster")
    token, port = folder / "token", free_port()
    token.write_text(secrets.token_hex(32))
    temp_dir = Path("/tmp") / f"ntx-test-{secrets.token_hex(4)}"
    started: list[tuple[subprocess.Popen[bytes], Node]] = []
    own = ["--port", str(port), "--temp-dir", str(temp_dir), "--include-dashboard", "false"]
    try:
        for number, how in enumerate((["--head", *own], ["--address", f"{own_ip}:{port}"])):
            marker = f"test-{secrets.token_hex(6)}"
            with (folder / f"log-{number}").open("wb") as log:
                child = subprocess.Popen(
                    [
                        *(RAY, "start", "--block", "--node-ip-address", own_ip, *how),
                        *("--num-cpus", "1", "--object-store-memory", "80000000"),
                    ],
                    env=os.environ | environment(token, marker),
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            leader = ProcessId.of(child.pid)
            assert leader is not None
            node = Node(leader, marker)
            started.append((child, node))
            wait_until(
                lambda node=node: (
                    answers(own_ip, port) and len(find_instance(node.marker, [node.leader])) > 3
                ),
                90,
            )
        os.environ.update(RAY_ADDRESS=f"{own_ip}:{port}", RAY_AUTH_MODE="token")
        os.environ["RAY_AUTH_TOKEN_PATH"] = str(token)
        yield f"{own_ip}:{port}", [node for _, node in started]
    finally:
        for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH"):
            os.environ.pop(name, None)
        for child, node in started:
            kill_instance(node.marker, [node.leader])
            child.wait()
        subprocess.run(["rm", "-rf", temp_dir], check=True)


def answers(host: str, port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((host, port)) == 0


def environment(token: Path, marker: str) -> dict[str, str]:
    return {
        INSTANCE_VARIABLE: marker,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_USAGE_STATS_ENABLED": "0",
    }


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    home = make_home(tmp_path / "home")
    yield home
    stop_runner(home)


def only_job(home: Home) -> tuple[Job, list[int], list[str]]:
    with JobStore(home.state_path) as store:
        (job,) = store.list_jobs()
        table = read_results(store.finished(job.id))
    return job, table["row_index"].to_pylist(), table["generated_text"].to_pylist()


def test_a_job_has_an_engine_on_each_node_and_both_do_some_of_it(
    nodes: tuple[str, list[Node]], home: Home, tmp_path: Path
) -> None:
    prompts = write_prompts(
        tmp_path / "in.parquet", [f"row {row % 100}" for row in range(NUM_ROWS)]
    )
    arguments = ("run", prompts, "--model", MODEL, "--max-tokens", "32", "--no-dedupe")
    ran = run_process(home.path, *arguments)
    assert ran.code == 0, ran.err
    address = nodes[0]
    job, rows, texts = only_job(home)
    assert rows == list(range(NUM_ROWS))
    assert all(texts[row] == texts[row % 100] for row in rows)
    engines = job.record["engines"]
    assert len(engines) == 2
    assert all(address.rpartition(":")[0] in engine["node"] for engine in engines)
    assert [engine["num_threads"] for engine in engines] == [1, 1]
    assert all(engine["tokens_per_s"] for engine in engines)
    assert [len(node.actors()) for node in nodes[1]] == [1, 1], "each node has one"
    assert stop_runner(home)
    assert not any(node.actors() for node in nodes[1]), "and nothing is left on either"


def test_more_engines_than_cores_of_all_nodes_are_refused_with_what_there_is(
    nodes: tuple[str, list[Node]], home: Home, tmp_path: Path
) -> None:
    prompts = write_prompts(tmp_path / "in.parquet", ["a", "b", "c"])
    ran = run_process(home.path, "run", prompts, "--model", MODEL, "--engines", "3")
    assert ran.code == 1
    assert "--engines 3 asks for as many cores, and there are 2 (1 on" in ran.err.replace("\n", " ")
