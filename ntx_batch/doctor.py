"""What this machine gives a job, and what stands in its way: for `ntx-batch doctor`."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from engine.gguf_file import GgufFile
from engine.hparams import check_tensors, read_hparams
from engine.machine import free_memory_nbytes, usable_cores
from engine.requests import EngineConfig, EngineError
from jobs import control
from jobs.gpus import Gpu, GpuSurvey, free_gpu_nbytes, survey_gpus
from jobs.home import Home
from jobs.job_device import choose_job_device
from jobs.records import JobError
from jobs.schedule_store import ScheduleStore
from jobs.store import JobStore
from jobs.temp_folder import make_temp_folder, space_warnings
from ntx_batch.render import nbytes_text
from nvme.probe import DiskRates, choose_transfer, measure_copy, measure_disk

Status = Literal["ok", "warning", "failed"]
LEAST_HOME_NBYTES = 1 << 30
LEAST_MEMORY_NBYTES = 2 << 30
SCRATCH_NBYTES = 256 << 20
COPY_THREADS = 4  # each takes 256 MiB
USUAL_TYPES = ("F16", "Q8_0", "Q4_K")
RAY_TIMEOUT_S = 60.0
PACKAGES = (
    *("gguf", "jinja2", "numba", "numpy", "platformdirs", "psutil", "pyarrow"),
    *("rich", "sentencepiece", "tokenizers", "typer"),
)
CUPY_PACKAGES = ("cupy-cuda12x", "cupy-cuda13x", "cupy")
OLDEST_CUDA, NEWEST_CUDA = 12, 13  # there is an extra for each


@dataclass(frozen=True, slots=True)
class Check:
    """name; status; detail: what was found; advice: what to do, empty where nothing is"""

    name: str
    status: Status
    detail: str
    advice: str = ""


class Doctor:
    """Looks at this machine, and at a model where one is named.

    environ: of the commands that submit jobs
    """

    def __init__(
        self,
        home_path: str | Path | None = None,
        model: str | Path | None = None,
        *,
        environ: dict[str, str] | None = None,
    ) -> None:
        self._home_path = home_path
        self._home: Home | None = None
        self._model = None if model is None else Path(model)
        self._file: GgufFile | None = None
        self._environ = dict(os.environ if environ is None else environ)
        self._checks: list[Check] = []
        self._rates: dict[str, Any] = {}

    def examine(self) -> dict[str, Any]:
        """All checks and measurements, as plain JSON values; ok: none has failed."""
        checks = [check for name in LOOKS for check in self.look(name)]
        ok = all(check.status != "failed" for check in checks)
        return {"ok": ok, "checks": [asdict(check) for check in checks], "rates": self._rates}

    def look(self, name: str) -> list[Check]:
        """What one of `LOOKS` finds; "state folder" and "model" come before the others."""
        self._checks = []
        try:
            LOOKS[name](self)
        except (EngineError, JobError, OSError) as error:
            self._add(name, "failed", str(error))
        except ImportError as error:
            self._add(name, "failed", str(error), "install ntx-batch and what it needs again")
        return self._checks

    def _add(self, name: str, status: Status, detail: str, advice: str = "") -> None:
        self._checks.append(Check(name, status, detail, advice))

    # ---- what must be there --------------------------------------------------------------

    def _look_at_home(self) -> None:
        self._home = home = Home.open(self._home_path)
        with tempfile.TemporaryFile(dir=home.path) as file:
            file.write(b"x")
            file.flush()
        free = _free_nbytes(home.path)
        status: Status = "ok" if free >= LEAST_HOME_NBYTES else "warning"
        advice = "" if status == "ok" else "make room, or move it with $NTX_HOME"
        detail = f"{home.path}: {nbytes_text(free)} free for spool, results and logs"
        self._add("state folder", status, detail, advice)

    def _look_at_model(self) -> None:
        if self._model is None:
            return
        self._file = file = GgufFile.open(self._model)
        check_tensors(file, read_hparams(file))
        nbytes = sum(tensor.nbytes for tensor in file.tensors.values())
        self._add("model", "ok", f"{self._model}: {nbytes_text(nbytes)}; this version can run it")

    def _look_at_packages(self) -> None:
        versions = installed(PACKAGES)
        missing = [name for name in PACKAGES if name not in versions]
        found = ", ".join(f"{name} {version}" for name, version in versions.items())
        self._add("Python", "ok", f"{sys.version.split()[0]}; {found}")
        if missing:
            advice = f"{sys.executable} -m pip install {' '.join(missing)}"
            self._add("packages", "failed", f"missing: {', '.join(missing)}", advice)

    def _look_at_ray(self) -> None:
        advice = f"{sys.executable} -m pip install ray"
        command = [sys.executable, "-c", "import ray; print(ray.__version__)"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=RAY_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._add("Ray", "failed", f"not imported within {RAY_TIMEOUT_S:.0f} s", advice)
            return
        if done.returncode:
            words = done.stderr.strip().splitlines() or ["no message"]
            self._add("Ray", "failed", f"cannot be imported: {words[-1]}", advice)
        else:
            self._add("Ray", "ok", f"version {done.stdout.split()[-1]}")

    def _look_at_runner(self) -> None:
        if self._home is None:
            return
        status = control.runner_status(self._home)
        control.check_environment(status, self._environ)
        if status.state == "absent":
            self._add("runner", "ok", "none runs; the first submit starts it")
        else:
            self._add("runner", "ok", f"{status.state}, pid {status.pid}")

    def _look_at_schedules(self) -> None:
        if self._home is None:
            return
        with JobStore(self._home.state_path) as jobs:
            found = ScheduleStore(jobs).list_schedules()
        active = [schedule.name for schedule in found if schedule.paused_at is None]
        if not found:
            return
        detail = f"{len(active)} active ({', '.join(active)}), {len(found) - len(active)} paused"
        if active and control.runner_status(self._home).state == "absent":
            advice = "`ntx-batch runner start`; `ntx-batch runner install` for each start"
            self._add("schedules", "warning", f"{detail}; no runner is there for them", advice)
        else:
            self._add("schedules", "ok", detail)

    def _look_at_temp_folder(self) -> None:
        folder = make_temp_folder("ntx-doctor-", self._environ)
        free = _free_nbytes(folder)
        folder.rmdir()
        warnings = list(space_warnings(self._environ))
        for warning in warnings:
            self._add("temp folder", "warning", warning)
        if not warnings:
            shared = nbytes_text(_free_nbytes(Path("/dev/shm"))) if _has_shm() else "no"
            detail = f"{folder.parent}: {nbytes_text(free)} free; {shared} shared memory free"
            self._add("temp folder", "ok", detail)

    def _look_at_cores(self) -> None:
        cores, free = usable_cores(), free_memory_nbytes()
        self._add("cores", "ok", f"{cores} usable by this process, of {os.cpu_count()}")
        status: Status = "ok" if free >= LEAST_MEMORY_NBYTES else "warning"
        advice = "" if status == "ok" else "end other programs, or lower --memory"
        self._add("memory", status, f"{nbytes_text(free)} for an engine", advice)

    def _look_at_gpus(self) -> None:
        survey = survey_gpus()
        if not survey.gpus:
            self._add("GPU", "ok", f"none will be used: {survey.problem}")
            return
        for ordinal, gpu in enumerate(survey.gpus):
            self._add(f"GPU {ordinal}", "ok", gpu_text(gpu, free_gpu_nbytes(ordinal), survey))
        self._add_backend(survey)

    def _add_backend(self, survey: GpuSurvey) -> None:
        """Whether the engine can compute on the first GPU, and how fast weights get there."""
        choice = choose_job_device(EngineConfig())
        if choice.device == "cpu":
            self._add("GPU backend", "warning", choice.reason, backend_advice(survey))
            return
        from engine.cuda_link import measure_link  # CuPy comes with it

        rate = measure_link()
        self._rates["link"] = {"host_to_device_nbytes_per_s": rate}
        cupy = ", ".join(f"{name} {found}" for name, found in installed(CUPY_PACKAGES).items())
        self._add("GPU backend", "ok", f"{cupy}; {rate / 1e9:.1f} GB/s from pinned memory to it")

    # ---- what is measured ----------------------------------------------------------------

    def _measure_disk(self) -> None:
        with self._probed_file() as path:
            if path is None:
                return
            assert self._home is not None
            transfer = choose_transfer([path], self._home.probes_dir)
            rates = measure_disk(path, transfer)
        what = "of the model" if self._file else f"of {self._home.path}"
        self._rates["disk"] = {
            "direct_nbytes_per_s": rates.direct_bytes_per_s,
            "buffered_nbytes_per_s": rates.buffered_bytes_per_s,
            "refusal": rates.refusal,
            **asdict(transfer),
        }
        self._checks.append(disk_check(what, rates))

    @contextlib.contextmanager
    def _probed_file(self) -> Iterator[Path | None]:
        """The largest file of the model, or one written for this on the state folder's disk."""
        if self._file is not None and self._home is not None:
            yield max(self._file.paths, key=lambda path: path.stat().st_size)
        elif self._home is not None and _free_nbytes(self._home.path) > 2 * SCRATCH_NBYTES:
            with tempfile.NamedTemporaryFile(dir=self._home.path, prefix="doctor-") as file:
                block = os.urandom(1 << 20)
                for _ in range(SCRATCH_NBYTES >> 20):
                    file.write(block)
                file.flush()
                os.fsync(file.fileno())
                yield Path(file.name)
        else:
            yield None

    def _measure_copy(self) -> None:
        rate = measure_copy(min(usable_cores(), COPY_THREADS))
        self._rates["copy"] = asdict(rate)
        detail = f"{rate.bytes_per_s / 1e9:.1f} GB/s with {rate.num_threads} threads"
        self._add("memory copy", "ok", detail)

    def _measure_products(self) -> None:
        # Numba comes with these; `plan` and `doctor` alone need it.
        from engine.devices import open_ops
        from engine.loading import make_planner, reader_name
        from engine.rates import probe_rates
        from jobs.job_plan import product_types

        ops = open_ops(EngineConfig(device="cpu"))
        try:
            file, types, config = self._file, set(USUAL_TYPES), EngineConfig()
            if file is not None:
                hparams = read_hparams(file)
                types = product_types(file, hparams)
            rates = probe_rates(ops, types, (), "")
            self._rates["products"] = {
                "num_threads": ops.num_workers,
                "flops_per_s": rates.flops_per_s,
                "values_per_s": dict(rates.values_per_s),
            }
            passes = ", ".join(f"{n} {v / 1e9:.1f}" for n, v in rates.values_per_s.items())
            self._add(
                "products",
                "ok",
                f"{rates.flops_per_s / 1e9:.0f} GFLOP/s with {ops.num_workers} threads; a pass "
                f"over weights, in 1e9/s: {passes}",
            )
            if file is not None:
                plan = make_planner(file, hparams, config, ops).best()
                where = "does not fit in memory, and streams" if plan.streams else "fits in memory"
                name = reader_name(config, plan)
                self._add("reader", "ok", f"{name}: the model {where}")
        finally:
            ops.close()


LOOKS: dict[str, Callable[[Doctor], None]] = {
    "state folder": Doctor._look_at_home,
    "model": Doctor._look_at_model,
    "packages": Doctor._look_at_packages,
    "Ray": Doctor._look_at_ray,
    "runner": Doctor._look_at_runner,
    "schedules": Doctor._look_at_schedules,
    "temp folder": Doctor._look_at_temp_folder,
    "cores": Doctor._look_at_cores,
    "GPU": Doctor._look_at_gpus,
    "disk": Doctor._measure_disk,
    "memory copy": Doctor._measure_copy,
    "products": Doctor._measure_products,
}


def disk_check(what: str, rates: DiskRates) -> Check:
    """The check of a disk. what: whose it is"""
    name, buffered = f"disk {what}", f"{rates.buffered_bytes_per_s / 1e9:.2f} GB/s buffered"
    if rates.direct_bytes_per_s is None:
        advice = "put models that stream on a local disk that takes direct reads"
        return Check(name, "warning", f"{buffered}; no direct reads: {rates.refusal}", advice)
    reads = f"{rates.transfer.num_threads} reads of {nbytes_text(rates.transfer.chunk_nbytes)}"
    detail = (
        f"{rates.direct_bytes_per_s / 1e9:.2f} GB/s direct, {buffered}, {reads} at a time; weights "
        "that stream are read directly"
    )
    return Check(name, "ok", detail)


def gpu_text(gpu: Gpu, free_nbytes: int | None, survey: GpuSurvey) -> str:
    """A GPU in one line."""
    free = "" if free_nbytes is None else f", {nbytes_text(free_nbytes)} free"
    major, minor = gpu.capability
    cuda = ".".join(map(str, survey.cuda_version or ()))
    return (
        f"{gpu.name}: {nbytes_text(gpu.memory_nbytes)}{free}, compute capability {major}.{minor}; "
        f"driver {survey.driver_version or 'of unknown version'}, up to CUDA {cuda}"
    )


def backend_advice(survey: GpuSurvey) -> str:
    """How to get a backend that this machine's driver runs."""
    major = (survey.cuda_version or (0, 0))[0]
    if major < OLDEST_CUDA:
        return f"update the NVIDIA driver to one that runs CUDA {OLDEST_CUDA} or later"
    return f"{sys.executable} -m pip install 'ntx-batch[cuda{min(major, NEWEST_CUDA)}]'"


def installed(packages: Iterable[str]) -> dict[str, str]:
    """Versions of those packages that are there."""
    versions = {}
    for name in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def _free_nbytes(path: Path) -> int:
    stat = os.statvfs(path)
    return stat.f_bavail * stat.f_frsize


def _has_shm() -> bool:
    return os.path.isdir("/dev/shm")
