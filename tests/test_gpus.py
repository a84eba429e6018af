"""Which GPUs are seen: CUDA_VISIBLE_DEVICES, and what the driver says of them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from engine import DeviceError, EngineConfig
from engine.devices import DeviceChoice
from jobs import job_device
from jobs.gpus import (
    DRIVER_LIBRARY,
    Gpu,
    GpuSurvey,
    driver_version,
    each_gpu_once,
    hidden_reason,
    survey_gpus,
    visible_devices,
)
from jobs.job_device import choose_job_device, device_notes

VISIBLE = "CUDA_VISIBLE_DEVICES"
UUID = "GPU-6f1c2e3a-0000-0000-0000-000000000000"


class Library:
    """The driver's calls, answering for GPUs of these names; notes what was visible at its start.

    status: of cuInit
    """

    def __init__(self, *names: str, status: int = 0) -> None:
        self._names, self._status = names, status
        self.visible: str | None = None

    def cuInit(self, flags: int) -> int:
        self.visible = os.environ.get(VISIBLE)
        return self._status

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = len(self._names)
        return 0

    def cuDriverGetVersion(self, version: Any) -> int:
        version._obj.value = 12040
        return 0

    def cuDeviceGet(self, device: Any, ordinal: int) -> int:
        device._obj.value = ordinal
        return 0

    def cuDeviceGetName(self, name: Any, nbytes: int, device: Any) -> int:
        name.value = self._names[device.value].encode()
        return 0

    def cuDeviceTotalMem_v2(self, nbytes: Any, device: Any) -> int:
        nbytes._obj.value = 24 << 30
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: Any) -> int:
        value._obj.value = {75: 8, 76: 6}[attribute]
        return 0


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (None, None),
        ("", ()),
        ("1", ("1",)),
        ("0,0", ("0",)),
        ("1, 0 ,1", ("1", "0")),
        ("-1", ()),
        ("0,-1,1", ("0",)),
        (f"{UUID},{UUID}", (UUID,)),
    ],
)
def test_visible_devices_are_named_once(text: str | None, names: tuple[str, ...] | None) -> None:
    """Case 67."""
    environ = {} if text is None else {VISIBLE: text}
    assert visible_devices(environ) == names
    assert (hidden_reason(environ) is not None) == (names == ())
    with each_gpu_once(environ):
        assert environ.get(VISIBLE) == (None if names is None else ",".join(names))
    assert environ.get(VISIBLE) == text


def test_the_driver_tells_of_its_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VISIBLE, "1,1,0")
    note = tmp_path / "version"
    note.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.10  Release\n")
    library = Library("NVIDIA RTX 1", "NVIDIA RTX 2")
    survey = survey_gpus(library, note)
    assert library.visible == "1,0"
    assert os.environ[VISIBLE] == "1,1,0"
    assert survey.gpus[1] == Gpu(name="NVIDIA RTX 2", capability=(8, 6), memory_nbytes=24 << 30)
    assert (len(survey.gpus), survey.problem) == (2, "")
    assert (survey.cuda_version, survey.driver_version) == ((12, 4), "570.86.10")
    assert driver_version(tmp_path / "absent") is None


def test_a_driver_that_shows_no_gpu_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VISIBLE, "7")
    survey = survey_gpus(Library(status=100))
    assert survey.gpus == ()
    assert survey.problem == (
        "the NVIDIA driver shows no GPU: it finds no device; CUDA_VISIBLE_DEVICES is '7'"
    )
    assert "cuInit fails with 999" in survey_gpus(Library(status=999)).problem
    assert "shows no GPU" in survey_gpus(Library()).problem


@pytest.mark.parametrize("text", ["", "-1"])
def test_hidden_gpus_are_none_and_the_variable_is_named(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 67: refused where a GPU is asked for, told where the choice is free."""
    monkeypatch.setenv(VISIBLE, text)
    with pytest.raises(DeviceError, match=f"--device gpu: {VISIBLE}='{text}' hides every GPU"):
        choose_job_device(EngineConfig(device="gpu"))
    choice = choose_job_device(EngineConfig())
    assert choice.device == "cpu"
    assert f"no GPU can be used: {VISIBLE}='{text}' hides every GPU" in choice.reason
    assert choose_job_device(EngineConfig(device="cpu")).reason == "asked for"


def test_without_a_driver_a_job_computes_on_the_cpu_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Case 67: on a machine without a GPU, whatever else is installed."""
    monkeypatch.delenv(VISIBLE, raising=False)
    problem = survey_gpus().problem
    if not problem:
        pytest.skip("there is a GPU here")
    assert DRIVER_LIBRARY in problem or "NVIDIA driver" in problem
    assert choose_job_device(EngineConfig()).reason == f"no GPU can be used: {problem}"
    with pytest.raises(DeviceError, match="--device gpu: "):
        choose_job_device(EngineConfig(device="gpu"))


def test_a_choice_is_told_at_submit_and_what_was_asked_for_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Case 67."""
    gpu = Gpu(name="NVIDIA RTX 1", capability=(8, 6), memory_nbytes=24 << 30)
    monkeypatch.setattr(job_device, "survey_gpus", lambda: GpuSurvey(gpus=(gpu,)))
    taken, left = DeviceChoice("gpu", "one is there"), DeviceChoice("cpu", "CuPy is missing")
    auto = EngineConfig()
    assert list(device_notes(auto, taken)) == ["computes on the GPU NVIDIA RTX 1"]
    assert list(device_notes(auto, left)) == ["computes on the CPU; CuPy is missing"]
    assert list(device_notes(EngineConfig(device="gpu"), taken)) == []
    assert list(device_notes(EngineConfig(device="cpu"), left)) == []
