"""Energy counters: what is counted, and what is said where nothing can be."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.energy import EnergyMeter, GpuCounter, PackageCounter, open_meter, open_packages


def add_domain(powercap: Path, domain: str, label: str, count_uj: int, range_uj: int = 999) -> Path:
    folder = powercap / domain
    folder.mkdir(parents=True)
    (folder / "name").write_text(label + "\n")
    (folder / "max_energy_range_uj").write_text(f"{range_uj}\n")
    (folder / "energy_uj").write_text(f"{count_uj}\n")
    return folder / "energy_uj"


class FakeCounter:
    def __init__(self, name: str, joules: list[float]) -> None:
        self.name, self._joules = name, iter(joules)

    def joules(self) -> float:
        try:
            return next(self._joules)
        except StopIteration:
            raise OSError("gone") from None


class FakeDriver:
    """Answers as libcuda and libnvidia-ml do; the board's bus id ties them."""

    def __init__(self, *, status: int = 0) -> None:
        self.status = status
        self.asked: bytes = b""

    def cuInit(self, flags: int) -> int:
        return 0

    def cuDeviceGet(self, device: Any, ordinal: int) -> int:
        return 0

    def cuDeviceGetPCIBusId(self, text: Any, nbytes: int, device: Any) -> int:
        text.value = b"0000:3B:00.0"
        return 0

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetHandleByPciBusId_v2(self, pci_id: Any, handle: Any) -> int:
        self.asked = pci_id.value
        return 0

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: Any, count: Any) -> int:
        ctypes.cast(count, ctypes.POINTER(ctypes.c_ulonglong))[0] = 12_345_678_901_234
        return self.status


def test_packages_and_their_memory_count_and_parts_of_a_package_do_not(tmp_path: Path) -> None:
    add_domain(tmp_path, "intel-rapl:0", "package-0", 5)
    add_domain(tmp_path, "intel-rapl:0:0", "core", 5)
    add_domain(tmp_path, "intel-rapl:0:1", "dram", 5)
    add_domain(tmp_path, "intel-rapl:1", "psys", 5)
    counters, left_out = open_packages(tmp_path)
    assert [counter.name.split(" (")[0] for counter in counters] == [
        "processor of package 0",
        "memory of package 0",
    ]
    assert left_out == []


def test_a_machine_without_counters_says_so(tmp_path: Path) -> None:
    counters, left_out = open_packages(tmp_path)
    assert counters == []
    assert left_out == [f"processor: there is no energy counter in {tmp_path}"]
    meter = EnergyMeter(counters, left_out)
    assert meter.joules() is None
    assert meter.facts() == {"counted": [], "left_out": left_out}


def test_a_counter_that_only_root_may_read_is_named(tmp_path: Path) -> None:
    path = add_domain(tmp_path, "intel-rapl:0", "package-0", 5)
    path.unlink()
    path.symlink_to(path)  # refuses to be opened, to root as well
    counters, left_out = open_packages(tmp_path)
    assert counters == [] and str(path) in left_out[0]


@given(st.lists(st.integers(0, 999), max_size=20))
def test_a_count_that_begins_anew_goes_on(steps: list[int]) -> None:
    counts = iter([sum(steps[: n + 1]) % 1000 for n in range(len(steps))])
    counter = PackageCounter("p", FakePath(counts), range_uj=999)  # type: ignore[arg-type]
    last = [counter.joules() for _ in steps][-1:]
    assert last == ([pytest.approx(sum(steps) / 1e6)] if steps else [])


class FakePath:
    def __init__(self, counts: Any) -> None:
        self._counts = counts

    def read_text(self) -> str:
        return f"{next(self._counts)}\n"


def test_a_meter_adds_its_counters_and_gives_up_where_one_fails() -> None:
    meter = EnergyMeter([FakeCounter("a", [1.0, 2.0]), FakeCounter("b", [10.0])], ["c: none"])
    assert meter.joules() == 11.0
    assert meter.facts() == {"counted": ["a", "b"], "left_out": ["c: none"]}
    assert meter.joules() is None and meter.joules() is None
    assert meter.facts() == {"counted": [], "left_out": ["c: none", "a: gone", "b: gone"]}


def test_the_board_is_found_by_its_bus_id_and_counts_in_joules() -> None:
    driver = FakeDriver()
    counter = GpuCounter.open(driver, driver)
    assert driver.asked == b"0000:3B:00.0"
    assert counter.joules() == 12_345_678_901.234


def test_a_board_without_a_counter_says_which_call_fails() -> None:
    driver = FakeDriver(status=3)
    with pytest.raises(OSError, match="nvmlDeviceGetTotalEnergyConsumption fails with 3"):
        GpuCounter.open(driver, driver)


def test_this_machine_has_a_meter_or_a_reason() -> None:
    facts = open_meter("cpu").facts()
    assert facts["counted"] or facts["left_out"]
