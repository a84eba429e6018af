"""RAY_ADDRESS: at a cluster that lets us in, at one that does not, and at none."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from jobs.control import RunnerStatus, check_environment, stop_runner
from jobs.home import Home
from jobs.processes import INSTANCE_VARIABLE, ProcessId, find_instance, kill_instance
from jobs.ray_cluster import cluster_address, is_on_loopback
from jobs.records import RunnerError
from jobs.store import JobStore
from tests.cli_helpers import MODEL, run_process, write_prompts
from tests.runner_helpers import make_home, wait_until


@dataclass(frozen=True)
class Cluster:
    address: str
    marker: str
    leader: ProcessId
    token: Path

    def processes(self) -> set[ProcessId]:
        return find_instance(self.marker, [self.leader])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A Ray of somebody else on this machine, protected by a token."""
    folder = tmp_path_factory.mktemp("cluster")
    token, marker, port = folder / "token", f"test-{secrets.token_hex(6)}", free_port()
    token.write_text(secrets.token_hex(32))
    # Ray's sockets want a short path.
    temp_dir = Path("/tmp") / f"ntx-{marker}"
    with (folder / "log").open("wb") as log:
        head = subprocess.Popen(
            [
                *(Path(sys.executable).with_name("ray"), "start", "--head", "--block"),
                *("--port", str(port), "--node-ip-address", "127.0.0.1", "--num-cpus", "2"),
                *("--object-store-memory", "80000000", "--include-dashboard", "false"),
                *("--temp-dir", temp_dir),
            ],
            env=os.environ
            | {
                INSTANCE_VARIABLE: marker,
                "RAY_AUTH_MODE": "token",
                "RAY_AUTH_TOKEN_PATH": str(token),
                "RAY_USAGE_STATS_ENABLED": "0",
                "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            },
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    leader = ProcessId.of(head.pid)
    assert leader is not None
    try:
        wait_until(lambda: answers(port) and len(find_instance(marker, [leader])) > 4, 60)
        yield Cluster(f"127.0.0.1:{port}", marker, leader, token)
    finally:
        kill_instance(marker, [leader])
        head.wait()
        subprocess.run(["rm", "-rf", temp_dir], check=True)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    home = make_home(tmp_path / "home")
    yield home
    stop_runner(home)


@pytest.mark.slow
def test_a_job_runs_in_a_cluster_that_is_there_and_leaves_it_as_it_was(
    cluster: Cluster, home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(cluster.token))
    before = cluster.processes()
    prompts = write_prompts(tmp_path / "in.parquet", ["a", "b", "c"])
    ran = run_process(home.path, "run", prompts, "--model", MODEL, "--max-tokens", "4")
    assert ran.code == 0, ran.err
    with JobStore(home.state_path) as store:
        assert store.list_jobs()[0].num_ok == 3
    assert stop_runner(home)
    names = [Path(f"/proc/{p.pid}/comm").read_text() for p in cluster.processes()]
    assert not any("EngineActo" in name for name in names), "of which the kernel keeps 15 bytes"
    assert all(process.is_running() for process in before if process == cluster.leader)
    assert answers(int(cluster.address.rpartition(":")[2]))


def test_a_wrong_token_is_told_within_seconds(
    cluster: Cluster, home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_text(secrets.token_hex(32))
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(wrong))
    prompts = write_prompts(tmp_path / "in.parquet", ["a"])
    ran = run_process(home.path, "run", prompts, "--model", MODEL)
    assert ran.code == 1
    assert f"RAY_ADDRESS={cluster.address} cannot be joined" in ran.err
    assert f"RAY_AUTH_TOKEN_PATH to the file with that token (it is {wrong})" in ran.err


def test_a_dead_address_is_told_within_seconds(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 65: before anything of Ray is loaded, and nothing is queued."""
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{free_port()}")
    prompts = write_prompts(tmp_path / "in.parquet", ["a"])
    started = time.monotonic()
    ran = run_process(home.path, "run", prompts, "--model", MODEL)
    assert time.monotonic() - started < 10
    assert (ran.code, ran.out) == (1, "")
    assert "Connection refused" in ran.err
    assert "unset RAY_ADDRESS" in ran.err


@pytest.mark.parametrize("address", ["ray://10.0.0.1:10001", "auto", "10.0.0.1", "10.0.0.1:x"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(RunnerError, match=r"host and port"):
        check_environment(RunnerStatus("absent"), {"RAY_ADDRESS": address})


def test_where_jobs_run_in_a_ray_of_their_own() -> None:
    assert cluster_address({}) is None
    assert cluster_address({"RAY_ADDRESS": "local"}) is None
    assert cluster_address({"RAY_ADDRESS": "[::1]:6379"}) == "[::1]:6379"
    assert is_on_loopback("127.0.0.1:6379")
    assert not is_on_loopback("10.0.0.1:6379")
