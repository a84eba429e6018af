"""The GPUs that CUDA shows to this process, asked of the driver alone: without CuPy or a context.

CUDA reads CUDA_VISIBLE_DEVICES once, when a process first asks for its GPUs.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
from collections.abc import Iterator, Mapping, MutableMapping
from ctypes import byref, c_int, c_size_t, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"
DRIVER_LIBRARY = "libcuda.so.1"
_DRIVER_NOTE = Path("/proc/driver/nvidia/version")
_NO_DEVICE = 100
_NAME_NBYTES = 256
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76  # CUdevice_attribute


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """name; capability: compute capability, major and minor; memory_nbytes: all that it has"""

    name: str
    capability: tuple[int, int]
    memory_nbytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuSurvey:
    """gpus: those that this process sees, in CUDA's order

    cuda_version: the newest CUDA that the driver runs, (12, 4); None without a driver
    driver_version: the driver's own, "550.54.15"; None where it is not told
    problem: why there is no GPU; empty where there is one
    """

    gpus: tuple[Gpu, ...] = ()
    cuda_version: tuple[int, int] | None = None
    driver_version: str | None = None
    problem: str = ""


# ---- which are to be seen --------------------------------------------------------------------


def visible_devices(environ: Mapping[str, str]) -> tuple[str, ...] | None:
    """What CUDA_VISIBLE_DEVICES names, each once; None where it is not set.

    As for CUDA, an empty or negative entry ends the list.
    """
    text = environ.get(VISIBLE_VARIABLE)
    if text is None:
        return None
    names: list[str] = []
    for name in map(str.strip, text.split(",")):
        if not name or name.startswith("-"):
            break
        if name not in names:
            names.append(name)
    return tuple(names)


def hidden_reason(environ: Mapping[str, str]) -> str | None:
    """Why no GPU is to be seen, where CUDA_VISIBLE_DEVICES names none."""
    if visible_devices(environ) != ():
        return None
    return (
        f"{VISIBLE_VARIABLE}={environ[VISIBLE_VARIABLE]!r} hides every GPU; unset it, or let it "
        "name one"
    )


def name_each_gpu_once(environ: MutableMapping[str, str]) -> None:
    """Take repetitions out of CUDA_VISIBLE_DEVICES: Ray would give one GPU to two actors."""
    names = visible_devices(environ)
    if names is not None:
        environ[VISIBLE_VARIABLE] = ",".join(names)


@contextlib.contextmanager
def each_gpu_once(environ: MutableMapping[str, str]) -> Iterator[None]:
    """The same for a while."""
    before = environ.get(VISIBLE_VARIABLE)
    name_each_gpu_once(environ)
    try:
        yield
    finally:
        if before is not None:
            environ[VISIBLE_VARIABLE] = before


# ---- what the driver says --------------------------------------------------------------------


def survey_gpus(library: Any = None, driver_note: Path = _DRIVER_NOTE) -> GpuSurvey:
    """What there is to be seen here.

    library: the driver's; None loads it
    driver_note: the file in which the kernel tells the driver's version
    """
    if (hidden := hidden_reason(os.environ)) is not None:
        return GpuSurvey(problem=hidden)
    if library is None:
        try:
            library = ctypes.CDLL(DRIVER_LIBRARY)
        except OSError:
            return GpuSurvey(problem=f"there is no NVIDIA driver ({DRIVER_LIBRARY} is not found)")
    version = driver_version(driver_note)
    with each_gpu_once(os.environ):
        status = library.cuInit(0)
    if status != 0:
        why = "it finds no device" if status == _NO_DEVICE else f"cuInit fails with {status}"
        if (named := os.environ.get(VISIBLE_VARIABLE)) is not None:
            why += f"; {VISIBLE_VARIABLE} is {named!r}"
        return GpuSurvey(driver_version=version, problem=f"the NVIDIA driver shows no GPU: {why}")
    count, cuda = c_int(), c_int()
    library.cuDeviceGetCount(byref(count))
    library.cuDriverGetVersion(byref(cuda))
    return GpuSurvey(
        gpus=tuple(_gpu(library, ordinal) for ordinal in range(count.value)),
        cuda_version=(cuda.value // 1000, cuda.value % 1000 // 10),
        driver_version=version,
        problem="" if count.value else "the NVIDIA driver shows no GPU",
    )


def _gpu(library: Any, ordinal: int) -> Gpu:
    device, nbytes = c_int(), c_size_t()
    name = ctypes.create_string_buffer(_NAME_NBYTES)
    library.cuDeviceGet(byref(device), ordinal)
    library.cuDeviceGetName(name, _NAME_NBYTES, device)
    library.cuDeviceTotalMem_v2(byref(nbytes), device)
    return Gpu(
        name=name.value.decode(errors="replace"),
        capability=(
            _attribute(library, _CAPABILITY_MAJOR, device),
            _attribute(library, _CAPABILITY_MINOR, device),
        ),
        memory_nbytes=nbytes.value,
    )


def _attribute(library: Any, attribute: int, device: c_int) -> int:
    value = c_int()
    library.cuDeviceGetAttribute(byref(value), attribute, device)
    return value.value


def driver_version(note: Path = _DRIVER_NOTE) -> str | None:
    """The driver's own version, "550.54.15"; None where the kernel does not tell."""
    try:
        found = re.search(r"\s(\d+\.\d[\d.]*)\s", note.read_text())
    except OSError:
        return None
    return found[1] if found else None


def free_gpu_nbytes(ordinal: int = 0) -> int | None:
    """Memory of a GPU that is free beside a context of ours; None where it cannot be asked.

    Makes that context for a moment, in a part of a second.
    """
    library = ctypes.CDLL(DRIVER_LIBRARY)
    device, context, ignored = c_int(), c_void_p(), c_void_p()
    free, total = c_size_t(), c_size_t()
    library.cuDeviceGet(byref(device), ordinal)
    if library.cuDevicePrimaryCtxRetain(byref(context), device) != 0:
        return None
    try:
        library.cuCtxPushCurrent_v2(context)
        failed = library.cuMemGetInfo_v2(byref(free), byref(total))
        library.cuCtxPopCurrent_v2(byref(ignored))
    finally:
        library.cuDevicePrimaryCtxRelease_v2(device)
    return None if failed else free.value
