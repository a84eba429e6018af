"""What a machine's disk and memory give, measured by short loops without a reader."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nvme.alignment import BLOCK_NBYTES, align_down
from nvme.direct import DEFAULT_TRANSFER, Preadv, Source, Transfer, open_direct
from nvme.files import mount_of, open_file
from nvme.memory import page_aligned

CANDIDATES = tuple(
    Transfer(chunk_nbytes, num_threads)
    for num_threads in (1, 2, 4)
    for chunk_nbytes in (1 << 20, 2 << 20, 4 << 20)
)
TRIAL_S = 0.03
NUM_ROUNDS = 2  # so that a short disturbance does not decide
GOOD_ENOUGH = 0.97  # of the best rate; among those the fewest threads win
MIN_PROBE_NBYTES = 256 << 20  # a shorter file is read before a probe could pay
CACHE_NAME = "disks.json"
COPY_NBYTES = 128 << 20  # more than the caches of a core hold
# A drive (and a virtual one more so) writes faster into memory that is in the caches. Weights
# never are, so a probe that reads into one small buffer promises a quarter too much.
RING_NBYTES = 128 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class DiskRates:
    """Rates of reading one file from its disk, in bytes per second.

    direct: past the page cache; None where that is refused, `refusal` says by what
    buffered: through the page cache, of pages that were not in it
    transfer: size and number of reads at once, in both
    """

    direct_bytes_per_s: float | None
    buffered_bytes_per_s: float
    refusal: str | None
    transfer: Transfer


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyRate:
    """Bytes copied per second from memory to memory (each is read once and written once)."""

    bytes_per_s: float
    num_threads: int


@dataclass(frozen=True, slots=True)
class Trial:
    nbytes: int
    seconds: float

    @property
    def bytes_per_s(self) -> float:
        return self.nbytes / self.seconds


def measure_disk(
    path: str | Path, transfer: Transfer = DEFAULT_TRANSFER, *, seconds: float = 0.5
) -> DiskRates:
    """Measure the reading of a file, from its start, for `seconds` each way.

    The file's pages leave the page cache. Of a file of some MiB the rates are noise.
    Raises ReadError: it cannot be opened. Raises OSError: it cannot be read.
    """
    path, ring = Path(path), make_ring()
    with _opened(open_file(path).fd) as fd:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        end = os.fstat(fd).st_size
        buffered = read_for(fd, ring, transfer, begin=0, end=end, seconds=seconds)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    source = open_direct(path)
    with _opened(source.file.fd) as fd:
        end = _direct_end(source)
        direct = read_for(fd, ring, transfer, begin=0, end=end, seconds=seconds)
    return DiskRates(
        direct_bytes_per_s=None if source.refusal else direct.bytes_per_s,
        buffered_bytes_per_s=buffered.bytes_per_s,
        refusal=source.refusal,
        transfer=transfer,
    )


def measure_copy(num_threads: int = 1, *, num_repeats: int = 5) -> CopyRate:
    """Measure copies between buffers of 128 MiB in each thread; the median of the repeats."""
    pairs = [(page_aligned(COPY_NBYTES), page_aligned(COPY_NBYTES)) for _ in range(num_threads)]
    for source, target in pairs:
        source.fill(1)
        target.fill(1)

    def copy(number: int) -> None:
        source, target = pairs[number]
        np.copyto(target, source)

    times = [_run_threads(num_threads, copy) for _ in range(num_repeats)]
    rate = num_threads * COPY_NBYTES / statistics.median(times)
    return CopyRate(bytes_per_s=rate, num_threads=num_threads)


def choose_transfer(paths: Sequence[str | Path], cache_dir: str | Path) -> Transfer:
    """The transfer that suits the disk of the largest of some files.

    From the cache where that disk is known; else from a probe of less than a second, which is
    kept. The default where the files are short or their file system refuses direct reads.
    Raises ReadError: the file cannot be opened. Raises OSError: it cannot be read.
    """
    largest = max((Path(path) for path in paths), key=_nbytes)
    if _nbytes(largest) < MIN_PROBE_NBYTES:
        return DEFAULT_TRANSFER
    cache, key = Path(cache_dir) / CACHE_NAME, device_key(largest)
    known = _load_cache(cache)
    transfer = _as_transfer(known.get(key))
    if transfer is None:
        transfer = probe_transfer(largest)
        # A folder that cannot be written costs the next reader a probe, nothing more.
        with contextlib.suppress(OSError):
            _save_cache(cache, {**known, key: asdict(transfer)})
    return transfer


def probe_transfer(
    path: str | Path,
    candidates: Sequence[Transfer] = CANDIDATES,
    *,
    trial_s: float = TRIAL_S,
    preadv: Preadv = os.preadv,
) -> Transfer:
    """Read with each candidate in turn; the default where direct reads are refused."""
    source = open_direct(Path(path), preadv)
    with _opened(source.file.fd) as fd:
        if source.refusal:
            return DEFAULT_TRANSFER
        best = dict.fromkeys(candidates, 0.0)
        ring, at, end = make_ring(), 0, _direct_end(source)
        for transfer in [*candidates] * NUM_ROUNDS:
            at = at if end - at > MIN_PROBE_NBYTES else 0
            trial = read_for(fd, ring, transfer, begin=at, end=end, seconds=trial_s, preadv=preadv)
            at += trial.nbytes
            best[transfer] = max(best[transfer], trial.bytes_per_s)
    return pick_transfer(best)


def pick_transfer(rates: dict[Transfer, float]) -> Transfer:
    """Among those near the best rate: fewest threads, then the longest chunk."""
    enough = GOOD_ENOUGH * max(rates.values())
    near = [transfer for transfer, rate in rates.items() if rate >= enough]
    return min(near, key=lambda transfer: (transfer.num_threads, -transfer.chunk_nbytes))


def make_ring() -> memoryview:
    """Memory to read into, its pages there already so that a trial does not pay for them."""
    ring = page_aligned(RING_NBYTES)
    ring.fill(0)
    return ring.data


def read_for(
    fd: int,
    ring: memoryview,
    transfer: Transfer,
    *,
    begin: int,
    end: int,
    seconds: float,
    preadv: Preadv = os.preadv,
) -> Trial:
    """Read [begin, end) of a file in order, round and round a ring, until the time is over."""
    step = transfer.chunk_nbytes
    num_slots = len(ring) // step
    turns = itertools.count()  # `next` is atomic under the interpreter's lock
    got = [0] * transfer.num_threads
    deadline = time.perf_counter() + seconds

    def read(number: int) -> None:
        while time.perf_counter() < deadline:
            turn = next(turns)
            offset, slot = begin + turn * step, turn % num_slots * step
            if offset >= end:
                return
            got[number] += preadv(fd, [ring[slot : slot + min(step, end - offset)]], offset)

    elapsed = _run_threads(transfer.num_threads, read)
    return Trial(sum(got), elapsed)


def device_key(path: Path) -> str:
    """What tells the disk under a path from others of this machine."""
    file_system, source = mount_of(path)
    device = path.stat().st_dev
    return f"{os.major(device)}:{os.minor(device)} {file_system} {source}"


def _run_threads(num_threads: int, work: Callable[[int], None]) -> float:
    """Seconds that `work(0)`, `work(1)`, … took side by side. Raises what one of them raised."""
    errors: list[Exception] = []

    def run(number: int) -> None:
        try:
            work(number)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(1, num_threads)]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    run(0)
    for thread in threads:
        thread.join()
    elapsed = time.perf_counter() - started
    if errors:
        raise errors[0]
    return elapsed


def _direct_end(source: Source) -> int:
    """The end of what can be read in whole blocks."""
    nbytes = source.file.nbytes
    return nbytes if nbytes < BLOCK_NBYTES or source.refusal else align_down(nbytes)


@contextlib.contextmanager
def _opened(fd: int) -> Iterator[int]:
    try:
        yield fd
    finally:
        os.close(fd)


def _nbytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0  # opening it will say what is wrong


def _load_cache(cache: Path) -> dict[str, Any]:
    try:
        known = json.loads(cache.read_text())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _as_transfer(entry: Any) -> Transfer | None:
    """An entry of the cache, None where there is none or it is not one of ours."""
    return next((transfer for transfer in CANDIDATES if asdict(transfer) == entry), None)


def _save_cache(cache: Path, known: dict[str, Any]) -> None:
    cache.parent.mkdir(parents=True, exist_ok=True)
    fd, name = tempfile.mkstemp(dir=cache.parent, prefix=cache.name)
    try:
        with os.fdopen(fd, "w") as file:
            json.dump(known, file, indent=1)
        os.replace(name, cache)
    except OSError:
        os.unlink(name)
        raise
