"""`ntx-batch schedule` and `runner install`, and the same words in Python."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from jobs.home import Home
from jobs.records import RunnerError, ScheduleNotFoundError, SpecError
from jobs.schedule_store import ScheduleStore
from jobs.store import JobStore
from ntx_batch import schedules, systemd
from ntx_batch.doctor import Doctor
from tests.cli_helpers import MODEL, ROOT, Ran, run_here, write_prompts

Command = Callable[..., Ran]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state folder for which no runner is started."""
    monkeypatch.setenv("NTX_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TZ", "Europe/Berlin")
    monkeypatch.setattr("jobs.control.ensure_runner", lambda home: None)
    return tmp_path / "home"


@pytest.fixture
def ntx(home: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    return lambda *arguments: run_here(capsys, *arguments)


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    write_prompts(tmp_path / "prompts.parquet", ["one", "two"], id=[1, 2])
    file = tmp_path / "nightly.toml"
    file.write_text(f'input = "prompts.parquet"\nmodel = "{MODEL}"\n')
    return file


def test_add_prints_the_name_and_says_when_it_runs(ntx: Command, job_file: Path) -> None:
    ran = ntx("schedule", "add", "30 2 * * *", job_file, "--tz", "America/Santiago")
    assert (ran.code, ran.out) == (0, "nightly\n")
    assert "30 2 * * * America/Santiago; next runs: 20" in ran.err
    (listed,) = json.loads(ntx("schedule", "list", "--json").out)
    assert (listed["schedule"], listed["state"], listed["tz"]) == (
        "nightly",
        "active",
        "America/Santiago",
    )
    assert [text[10:16] for text in listed["next"]] == ["T02:30"] * 3
    assert (listed["runs"], listed["last"], listed["overlap"]) == (0, None, "skip")


def test_the_zone_is_this_machines_where_none_is_named(ntx: Command, job_file: Path) -> None:
    added = json.loads(ntx("schedule", "add", "@daily", job_file, "--json").out)
    assert (added["tz"], added["cron"]) == ("Europe/Berlin", "@daily")


def test_the_local_zone_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 95: no TZ, a link, no link."""
    monkeypatch.delenv("TZ", raising=False)
    zones = tmp_path / "zoneinfo" / "Asia"
    zones.mkdir(parents=True)
    (zones / "Tokyo").touch()
    link = tmp_path / "localtime"
    monkeypatch.setattr(schedules, "LOCAL_ZONE_LINK", link)
    assert schedules.local_zone_name() == "UTC"
    link.symlink_to(zones / "Tokyo")
    assert schedules.local_zone_name() == "Asia/Tokyo"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["0 2 * *"], "has 4 fields, not 5"),
        (["0 2 * * *", "--tz", "Mars/X"], "no time zone 'Mars/X'"),
        (["0 2 * * *", "--overlap", "kill"], "skip, queue, allow, not 'kill'"),
        (["0 2 * * *", "--window", "22-7"], "like 22:00-07:00"),
        (["0 2 * * *", "--max-runtime", "soon"], "like 6h"),
        (["0 2 * * *", "--id-column", "id"], "give new_only with it"),
        (["0 2 * * *", "--new-only", "--id-column", "key"], "it has prompt, id"),
        (["0 2 * * *", "--name", "a b"], "'a b'"),
    ],
)
def test_what_cannot_run_is_refused_before_it_is_kept(
    ntx: Command, job_file: Path, arguments: list[str], said: str
) -> None:
    ran = ntx("schedule", "add", arguments[0], job_file, *arguments[1:])
    assert (ran.code, ran.out) == (2, "")
    assert said in ran.err
    assert json.loads(ntx("schedule", "list", "--json").out) == []


def test_a_job_file_that_could_not_be_submitted_is_refused(
    ntx: Command, job_file: Path, tmp_path: Path
) -> None:
    text = job_file.read_text()
    for more, said in (
        ('output = "out"', "put {date} or {run} into it"),
        ('key = "k"', "take it out"),
        ("max_token = 3", "did you mean max_tokens"),
        ('prompt_column = "text"', "text"),
    ):
        job_file.write_text(f"{text}{more}\n")
        ran = ntx("schedule", "add", "@daily", job_file)
        assert (ran.code, said in ran.err) == (2, True), ran.err
    assert ntx("schedule", "add", "@daily", tmp_path / "gone.toml").code == 2
    job_file.write_text(f'{text}output = "out/{{run}}"\n')
    assert ntx("schedule", "add", "@daily", job_file).code == 0
    assert not (tmp_path / "out").exists(), "no folder is taken before a run"


def test_input_may_come_later(ntx: Command, job_file: Path) -> None:
    job_file.write_text(job_file.read_text().replace("prompts.parquet", "in/{date}/*.parquet"))
    ran = ntx("schedule", "add", "@daily", job_file)
    assert ran.code == 0
    assert "runs that find no input have nothing to do" in ran.err
    ran = ntx("schedule", "run", "nightly")
    assert (ran.code, ran.out) == (0, "")
    assert "nothing to do: pattern" in ran.err


def test_run_makes_a_job_that_list_and_status_know_as_a_run(ntx: Command, job_file: Path) -> None:
    ntx("schedule", "add", "@daily", job_file, "--new-only")
    ran = ntx("schedule", "run", "nightly")
    job_id = ran.out.strip()
    assert "queued; follow it with" in ran.err
    status = json.loads(ntx("status", job_id, "--json").out)
    assert (status["schedule"], status["run"], status["total"]) == ("nightly", 1, 2)
    assert "nightly, run 1" in ntx("status", job_id).out
    assert "prompts.parquet (nightly 1)" in ntx("list").out
    assert "are done" in ntx("schedule", "run", "nightly").err
    second, first = json.loads(ntx("schedule", "history", "nightly", "--json").out)
    assert (first["run"], first["job"], first["state"]) == (1, job_id, "queued")
    assert (second["run"], second["job"], second["state"]) == (None, None, "nothing")
    table = ntx("schedule", "history", "nightly").out
    assert job_id in table and "all 1 files of" in table
    assert "nothing" in ntx("schedule", "list").out


def test_a_run_that_cannot_be_made_says_why(ntx: Command, job_file: Path) -> None:
    ntx("schedule", "add", "@daily", job_file)
    job_file.unlink()
    ran = ntx("schedule", "run", "nightly")
    assert ran.code == 2
    assert "schedule nightly: job file" in ran.err
    assert schedules.history("nightly")[0]["state"] == "refused"


def test_a_run_outside_its_window_says_when_it_goes_on(ntx: Command, job_file: Path) -> None:
    hour = datetime.now(UTC).hour
    window = f"{(hour + 2) % 24:02}:00-{(hour + 3) % 24:02}:00"
    assert ntx("schedule", "add", "@daily", job_file, "--window", window, "--tz", "UTC").code == 0
    ran = ntx("schedule", "run", "nightly")
    assert f"paused: outside its window {window} UTC; goes on at {window[:5]}" in ran.err
    assert json.loads(ntx("status", ran.out.strip(), "--json").out)["state"] == "paused"


def test_pause_resume_and_rm_say_what_they_did(ntx: Command, job_file: Path) -> None:
    ntx("schedule", "add", "@daily", job_file, "--name", "n.1")
    assert "schedule n.1 paused; go on with" in ntx("schedule", "pause", "n.1").err
    assert "already paused" in ntx("schedule", "pause", "n.1").err
    assert "paused" in ntx("schedule", "list").out
    assert "goes on; next: 20" in ntx("schedule", "resume", "n.1").err
    assert "was not paused" in ntx("schedule", "resume", "n.1").err
    assert "its jobs and their results stay" in ntx("schedule", "rm", "n.1").err
    for command in ("run", "history", "pause", "resume", "rm"):
        ran = ntx("schedule", command, "n.1")
        assert (ran.code, ran.out) == (2, "")
        assert "there is no schedule 'n.1'" in ran.err


def test_list_and_doctor_say_that_no_runner_is_there(
    ntx: Command, job_file: Path, home: Path
) -> None:
    ntx("schedule", "add", "@daily", job_file)
    assert "1 schedule waits for a runner, and none is there" in ntx("schedule", "list").err
    doctor = Doctor(home)
    doctor.look("state folder")
    (check,) = doctor.look("schedules")
    assert (check.status, "no runner is there" in check.detail) == ("warning", True)
    ntx("schedule", "pause", "nightly")
    assert ntx("schedule", "list").err == ""
    assert [check.status for check in doctor.look("schedules")] == ["ok"]


def test_python_says_the_same_words(home: Path, job_file: Path) -> None:
    added = schedules.add("0 */6 * * *", job_file, max_runtime=3600, keep_runs=3)
    assert (added["max_runtime_s"], added["keep_runs"]) == (3600.0, 3)
    made = schedules.run("nightly")
    job = schedules.job_of(made)
    assert job is not None and job.snapshot().run == 1
    with pytest.raises(SpecError, match="at least 1, not 0"):
        schedules.add("@daily", job_file, name="other", keep_runs=0)
    with pytest.raises(ScheduleNotFoundError):
        schedules.pause("other")
    with JobStore(Home.open(home).state_path) as jobs:
        assert [found.name for found in ScheduleStore(jobs).list_schedules()] == ["nightly"]


def test_commands_start_without_what_only_runs_need() -> None:
    code = "import sys, ntx_batch.cli; print({'pyarrow', 'jinja2'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "set()\n"


# ---- systemd -----------------------------------------------------------------------------


def test_install_prints_a_unit_that_keeps_this_runner(ntx: Command, home: Path) -> None:
    ran = ntx("runner", "install", "--print")
    assert ran.code == 0
    assert f'-m jobs.runner --home "{home}"' in ran.out
    assert "Restart=on-failure" in ran.out and "KillMode=mixed" in ran.out


def test_install_writes_the_unit_and_says_how_to_switch_it_on(
    ntx: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    unit = tmp_path / "config" / "systemd" / "user" / "ntx-batch.service"
    for _ in range(2):
        ran = ntx("runner", "install")
        assert f"wrote {unit}" in ran.err
        assert "systemctl --user enable --now ntx-batch.service" in ran.out
    assert 'Environment="CUDA_VISIBLE_DEVICES=1"\n' in unit.read_text()
    monkeypatch.setenv("NTX_HOME", str(tmp_path / "another"))
    ran = ntx("runner", "install")
    assert (ran.code, "remove it first" in ran.err) == (1, True)
    assert str(tmp_path / "home") in unit.read_text()


def test_odd_paths_are_quoted_for_systemd(tmp_path: Path, home: Path) -> None:
    odd = tmp_path / 'a "b" 100% $HOME'
    text = systemd.unit_text({}, odd)
    assert 'a \\"b\\" 100%% $$HOME"' in text
    with pytest.raises(RunnerError, match="another's"):
        config = {"XDG_CONFIG_HOME": str(tmp_path / "config")}
        systemd.install(config, odd)
        systemd.install(config, home)


@pytest.mark.skipif(
    subprocess.run(["which", "systemd-analyze"], capture_output=True).returncode != 0,
    reason="systemd-analyze is not here",
)
def test_systemd_takes_the_unit(tmp_path: Path, home: Path) -> None:
    path = tmp_path / "ntx-batch.service"
    path.write_text(systemd.unit_text({"RAY_ADDRESS": "a:1"}, tmp_path / "a b%c"))
    ran = subprocess.run(
        ["systemd-analyze", "verify", "--user", str(path)], capture_output=True, text=True
    )
    assert "ntx-batch" not in ran.stderr, ran.stderr
