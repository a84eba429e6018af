"""`ntx-batch doctor`: what it finds on a sound machine, and what it says of an unsound one."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from jobs.gpus import Gpu, GpuSurvey
from jobs.home import Home
from ntx_batch.doctor import Doctor, backend_advice, disk_check, gpu_text
from nvme.direct import DEFAULT_TRANSFER
from nvme.probe import DiskRates
from tests.cli_helpers import MODEL, run_here


def by_name(report: dict[str, Any]) -> dict[str, dict[str, str]]:
    return {check["name"]: check for check in report["checks"]}


def test_a_sound_machine_is_measured_and_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NTX_HOME", str(tmp_path))
    ran = run_here(capsys, "doctor", "--model", MODEL, "--json")
    report = json.loads(ran.out)
    assert (ran.code, report["ok"]) == (0, True), ran.out
    checks = by_name(report)
    for name in ("state folder", "model", "Python", "Ray", "runner", "cores", "memory", "products"):
        assert checks[name]["status"] in ("ok", "warning"), checks[name]
    assert metadata.version("ray") in checks["Ray"]["detail"]
    assert checks["reader"]["detail"].startswith("mmap")
    disk = report["rates"]["disk"]
    assert disk["buffered_nbytes_per_s"] > 0
    assert (disk["direct_nbytes_per_s"] is None) == (disk["refusal"] is not None)
    assert report["rates"]["copy"]["bytes_per_s"] > 1e8
    assert set(report["rates"]["products"]["values_per_s"]) == {"Q4_0", "expanded"}
    assert not list(tmp_path.glob("doctor-*"))


def test_people_see_one_line_for_each_check_and_the_exit_code_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NTX_HOME", str(tmp_path))
    ran = run_here(capsys, "doctor", "--model", tmp_path / "absent.gguf")
    assert ran.code == 1
    lines = ran.out.splitlines()
    assert any(line.startswith("failed") and "model" in line for line in lines)
    assert any(line.startswith("ok") and "products" in line for line in lines)


def test_without_a_model_the_disk_of_the_state_folder_is_measured(tmp_path: Path) -> None:
    doctor = Doctor(tmp_path)
    doctor.look("state folder")
    assert doctor.look("model") == []
    (check,) = doctor.look("disk")
    assert str(tmp_path) in check.name
    assert "GB/s" in check.detail
    assert not list(tmp_path.glob("doctor-*"))


def test_a_state_folder_that_cannot_be_made_fails_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    (check,) = Doctor(tmp_path / "file" / "home").look("state folder")
    assert check.status == "failed"
    assert str(tmp_path / "file") in check.detail


def test_another_environment_than_the_runners_is_told(tmp_path: Path) -> None:
    Home.open(tmp_path)
    doctor = Doctor(tmp_path, environ={"RAY_ADDRESS": "127.0.0.1:1"})
    assert [check.status for check in doctor.look("state folder")] == ["ok"]
    (runner,) = doctor.look("runner")
    assert runner.status == "failed"
    assert "127.0.0.1:1" in runner.detail


def test_a_disk_that_refuses_direct_reads_is_a_warning_that_says_why() -> None:
    rates = DiskRates(
        direct_bytes_per_s=None,
        buffered_bytes_per_s=2e9,
        refusal="tmpfs keeps files in memory",
        transfer=DEFAULT_TRANSFER,
    )
    check = disk_check("of /x", rates)
    assert check.status == "warning"
    assert "tmpfs keeps files in memory" in check.detail
    assert "local disk" in check.advice


def test_without_a_gpu_one_line_says_why_none_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (check,) = Doctor(tmp_path).look("GPU")
    assert (check.name, check.status) == ("GPU", "ok")
    assert check.detail.startswith("none will be used: CUDA_VISIBLE_DEVICES=''")


@pytest.mark.parametrize(
    ("cuda", "advice"),
    [
        ((11, 8), "update the NVIDIA driver to one that runs CUDA 12 or later"),
        ((12, 4), "pip install 'ntx-batch[cuda12]'"),
        ((13, 0), "pip install 'ntx-batch[cuda13]'"),
        ((14, 1), "pip install 'ntx-batch[cuda13]'"),
    ],
)
def test_the_extra_to_install_is_that_of_the_driver(cuda: tuple[int, int], advice: str) -> None:
    gpu = Gpu(name="NVIDIA RTX 1", capability=(8, 6), memory_nbytes=24 << 30)
    survey = GpuSurvey(gpus=(gpu,), cuda_version=cuda, driver_version="570.86")
    assert backend_advice(survey).endswith(advice)
    assert gpu_text(gpu, 8 << 30, survey) == (
        "NVIDIA RTX 1: 24.0 GiB, 8.0 GiB free, compute capability 8.6; driver 570.86, up to CUDA "
        f"{cuda[0]}.{cuda[1]}"
    )
