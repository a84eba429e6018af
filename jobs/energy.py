"""Energy that this machine took while a job ran, from the counters that its hardware keeps.

They count for the whole part, whatever else ran on it: a processor package, a graphics board.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref, c_int, c_uint, c_ulonglong, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from jobs.gpus import DRIVER_LIBRARY

POWERCAP = Path("/sys/class/powercap")
NVML_LIBRARY = "libnvidia-ml.so.1"
_PCI_ID_NBYTES = 32


class Counter(Protocol):
    """Counts joules from some moment on. name: of what it counts for, and of who counts"""

    name: str

    def joules(self) -> float:
        """Raises OSError: it cannot be read."""
        ...


class EnergyMeter:
    """Counters of the parts that compute, read together.

    counters: of parts that do not hold each other
    left_out: parts without a counter that can be read, each with the reason
    others_count: what is neither here nor there is counted by another meter
    """

    def __init__(
        self,
        counters: Sequence[Counter],
        left_out: Sequence[str] = (),
        *,
        others_count: bool = False,
    ) -> None:
        self._counters = counters
        self._left_out = list(left_out)
        self._others_count = others_count

    def joules(self) -> float | None:
        """Their sum; only differences mean something. None where there is nothing to read."""
        if not self._counters:
            return 0.0 if self._others_count and not self._left_out else None
        try:
            return sum(counter.joules() for counter in self._counters)
        except OSError as error:
            self._left_out += [f"{counter.name}: {error}" for counter in self._counters]
            self._counters = ()
            return None

    def facts(self) -> dict[str, list[str]]:
        """counted: names of the counters; left_out: what none could be read of, and why."""
        return {
            "counted": [counter.name for counter in self._counters],
            "left_out": list(self._left_out),
        }


def open_meter(device: str, *, counts_machine: bool = True) -> EnergyMeter:
    """The meter of an engine that computes on `device`, "cpu" or "cuda".

    counts_machine: also what engines on one machine have in common, its processors and memory
    """
    packages, left_out = open_packages() if counts_machine else ([], [])
    counters: list[Counter] = list(packages)
    if device == "cuda":
        try:
            counters.insert(0, GpuCounter.open())
        except OSError as error:
            left_out = [str(error), *left_out]
    return EnergyMeter(counters, left_out, others_count=not counts_machine)


# ---- processors ------------------------------------------------------------------------------


@dataclass(slots=True)
class PackageCounter:
    """A domain of the kernel's powercap: a processor package or its memory.

    name: as in Counter
    path: of its count in microjoules
    range_uj: where the count begins anew; it must be read more often than that, minutes to hours
    """

    name: str
    path: Path
    range_uj: int
    _last_uj: int = 0
    _sum_uj: int = 0

    def joules(self) -> float:
        now_uj = _read_count(self.path)
        self._sum_uj += (now_uj - self._last_uj) % (self.range_uj + 1)
        self._last_uj = now_uj
        return self._sum_uj / 1e6


def open_packages(powercap: Path = POWERCAP) -> tuple[list[PackageCounter], list[str]]:
    """Counters of all processor packages and of their memory, and why there are none of others."""
    found, left_out = [], []
    for domain in sorted(powercap.glob("intel-rapl:*")):
        try:
            if name := _counted_part(domain):
                found.append(_open_package(name, domain))
        except OSError as error:
            left_out.append(f"processor: {error.filename} cannot be read ({error.strerror})")
    if not found and not left_out:
        left_out.append(f"processor: there is no energy counter in {powercap}")
    return found, left_out


def _counted_part(domain: Path) -> str | None:
    """What a domain counts for; None for one that lies within a package, or holds it."""
    label = (domain / "name").read_text().strip()
    what = "processor" if label.startswith("package") else {"dram": "memory"}.get(label)
    number = domain.name.split(":")[1]
    return what and f"{what} of package {number} (its own counter, by Linux powercap)"


def _open_package(name: str, domain: Path) -> PackageCounter:
    path = domain / "energy_uj"
    range_uj = _read_count(domain / "max_energy_range_uj")
    return PackageCounter(name, path, range_uj, _last_uj=_read_count(path))


def _read_count(path: Path) -> int:
    return int(path.read_text())


# ---- graphics boards -------------------------------------------------------------------------


class GpuCounter:
    """The count that a board keeps since its driver was loaded.

    nvml: NVIDIA's management library, initialised
    handle: its name for the board
    """

    def __init__(self, nvml: Any, handle: c_void_p) -> None:
        self.name = "graphics board (its own counter, by NVML)"
        self._nvml = nvml
        self._handle = handle

    @classmethod
    def open(cls, cuda: Any = None, nvml: Any = None) -> GpuCounter:
        """That of the first GPU that this process sees.

        cuda, nvml: the driver's libraries; None loads them

        Raises OSError: there is none that can be read, with the reason.
        """
        cuda = _load(DRIVER_LIBRARY) if cuda is None else cuda
        nvml = _load(NVML_LIBRARY) if nvml is None else nvml
        device, handle = c_int(), c_void_p()
        pci_id = ctypes.create_string_buffer(_PCI_ID_NBYTES)
        _check(cuda.cuInit(0), "cuInit")
        _check(cuda.cuDeviceGet(byref(device), 0), "cuDeviceGet")
        status = cuda.cuDeviceGetPCIBusId(pci_id, _PCI_ID_NBYTES, device)
        _check(status, "cuDeviceGetPCIBusId")
        _check(nvml.nvmlInit_v2(), "nvmlInit")
        # The two libraries do not number the boards alike.
        status = nvml.nvmlDeviceGetHandleByPciBusId_v2(pci_id, byref(handle))
        _check(status, "nvmlDeviceGetHandleByPciBusId")
        counter = cls(nvml, handle)
        counter.joules()
        return counter

    def joules(self) -> float:
        millijoules = c_ulonglong()
        status = self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle, byref(millijoules))
        _check(status, "nvmlDeviceGetTotalEnergyConsumption")
        return millijoules.value / 1e3


def _load(name: str) -> Any:
    try:
        return ctypes.CDLL(name)
    except OSError as error:
        raise OSError(f"graphics board: {name} is not found") from error


def _check(status: int, call: str) -> None:
    if status != 0:
        raise OSError(f"graphics board: {call} fails with {c_uint(status).value}")
