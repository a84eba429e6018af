"""What is measured of disks and memory, and what is kept of it."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nvme import ReadError, ReadRequest, open_reader, page_aligned
from nvme.direct import DEFAULT_TRANSFER, DirectReader, Transfer, open_direct
from nvme.probe import (
    CACHE_NAME,
    CANDIDATES,
    MIN_PROBE_NBYTES,
    choose_transfer,
    device_key,
    measure_copy,
    measure_disk,
    pick_transfer,
    probe_transfer,
    read_for,
)

MIB = 1 << 20


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file just long enough to be probed; all of it is a hole, so that it takes no space."""
    path = tmp_path_factory.mktemp("probe") / "large.bin"
    with open(path, "wb") as file:
        file.truncate(MIN_PROBE_NBYTES + 5)
    source = open_direct(path)
    os.close(source.file.fd)
    if source.refusal:
        pytest.skip(f"temporary files lie where direct reads do not work: {source.refusal}")
    return path


@pytest.fixture
def in_memory() -> Iterator[Path]:
    if not Path("/dev/shm").is_dir():
        pytest.skip("no tmpfs at /dev/shm")
    path = Path(f"/dev/shm/ntx-test-probe-{os.getpid()}.bin")
    with open(path, "wb") as file:
        file.truncate(MIN_PROBE_NBYTES)
    yield path
    path.unlink()


def test_fewest_threads_then_longest_chunks_among_those_near_the_best() -> None:
    few, long, many = Transfer(MIB, 1), Transfer(4 * MIB, 1), Transfer(MIB, 4)
    assert pick_transfer({few: 98.0, long: 98.0, many: 100.0}) == long
    assert pick_transfer({few: 98.0, long: 90.0, many: 100.0}) == few
    assert pick_transfer({few: 90.0, long: 90.0, many: 100.0}) == many


def test_probe_finds_that_a_slow_disk_wants_long_chunks_and_many_threads(large: Path) -> None:
    """A disk that takes 2 ms for a call of any size."""

    def preadv(fd: int, buffers: Sequence[Any], offset: int) -> int:
        time.sleep(0.002)
        return len(buffers[0])

    candidates = [Transfer(MIB, 1), Transfer(4 * MIB, 1), Transfer(MIB, 3), Transfer(4 * MIB, 3)]
    assert probe_transfer(large, candidates, preadv=preadv) == Transfer(4 * MIB, 3)


def test_probe_finds_that_a_disk_with_one_head_wants_no_threads(large: Path) -> None:
    """A disk that serves one call after the other, at a rate."""
    head = threading.Lock()

    def preadv(fd: int, buffers: Sequence[Any], offset: int) -> int:
        with head:
            time.sleep(len(buffers[0]) / MIB / 500)
        return len(buffers[0])

    candidates = [Transfer(4 * MIB, 1), Transfer(4 * MIB, 2)]
    rates = [probe_transfer(large, candidates, preadv=preadv).num_threads for _ in range(3)]
    assert sorted(rates)[1] == 1


def test_choice_is_kept_for_the_disk_and_not_measured_again(large: Path, tmp_path: Path) -> None:
    cache_dir = tmp_path / "cache"
    cache_dir.mkdir(parents=True)
    (cache_dir / CACHE_NAME).write_text(json.dumps({"another disk": "kept as it is"}))
    chosen = choose_transfer([large], cache_dir)
    assert chosen in CANDIDATES
    assert json.loads((cache_dir / CACHE_NAME).read_text()).keys() == {
        "another disk",
        device_key(large),
    }
    assert list(cache_dir.iterdir()) == [cache_dir / CACHE_NAME]
    other = next(transfer for transfer in CANDIDATES if transfer != chosen)
    entry = {"chunk_nbytes": other.chunk_nbytes, "num_threads": other.num_threads}
    known = {device_key(large): entry, "another disk": "kept as it is"}
    (cache_dir / CACHE_NAME).write_text(json.dumps(known))
    assert choose_transfer([large], cache_dir) == other
    assert json.loads((cache_dir / CACHE_NAME).read_text()) == known


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"KEY": 5}', '{"KEY": {"chunk_nbytes": 7, "num_threads": 1}}']
)
def test_damaged_cache_is_measured_anew_and_mended(large: Path, tmp_path: Path, text: str) -> None:
    (tmp_path / CACHE_NAME).write_text(text.replace("KEY", device_key(large)))
    chosen = choose_transfer([large], tmp_path)
    assert os.listdir(tmp_path) == [CACHE_NAME]
    kept = json.loads((tmp_path / CACHE_NAME).read_text())[device_key(large)]
    assert Transfer(**kept) == chosen


def test_cache_that_cannot_be_written_does_not_matter(large: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert choose_transfer([large], tmp_path / "file" / "below a file") in CANDIDATES


def test_short_files_and_those_in_memory_are_not_probed(in_memory: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.bin"
    short.write_bytes(b"x" * 5000)
    assert choose_transfer([short], tmp_path) == DEFAULT_TRANSFER
    assert choose_transfer([in_memory], tmp_path) == DEFAULT_TRANSFER


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ReadError, match="absent: cannot be opened"):
        open_reader("direct", [tmp_path / "absent"], cache_dir=tmp_path)


def test_reader_with_a_cache_takes_the_choice_for_the_largest_file(
    large: Path, tmp_path: Path
) -> None:
    small = tmp_path / "small.bin"
    small.write_bytes(b"small")
    chosen = Transfer(MIB, 2)
    entry = {"chunk_nbytes": MIB, "num_threads": 2}
    (tmp_path / CACHE_NAME).write_text(json.dumps({device_key(large): entry}))
    reader = open_reader("direct", [small, large], cache_dir=tmp_path)
    assert isinstance(reader, DirectReader) and reader.transfer == chosen
    out = page_aligned(5)
    reader.wait(reader.submit([ReadRequest(file_idx=0, offset=0, out=out)]))
    assert out.tobytes() == b"small"
    reader.close()


def test_a_trial_reads_its_range_once_and_stops_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "bytes.bin"
    path.write_bytes(np.random.default_rng(0).bytes(100_000))
    seen: list[tuple[int, int]] = []

    def preadv(fd: int, buffers: Sequence[Any], offset: int) -> int:
        seen.append((offset, len(buffers[0])))
        return os.preadv(fd, buffers, offset)

    ring = page_aligned(5 * 4096).data
    with open(path, "rb") as file:
        trial = read_for(
            file.fileno(),
            ring,
            Transfer(4096, 2),
            begin=8192,
            end=99_000,
            seconds=60,
            preadv=preadv,
        )
    assert trial.nbytes == 99_000 - 8192
    ends = [offset + nbytes for offset, nbytes in sorted(seen)]
    assert sorted(offset for offset, _ in seen) == [8192, *ends[:-1]]
    assert ends[-1] == 99_000


def test_a_trial_ends_with_its_time(large: Path) -> None:
    def preadv(fd: int, buffers: Sequence[Any], offset: int) -> int:
        time.sleep(0.005)
        return len(buffers[0])

    with open(large, "rb") as file:
        started = time.monotonic()
        trial = read_for(
            file.fileno(),
            page_aligned(8 * 4096).data,
            Transfer(4096, 2),
            begin=0,
            end=large.stat().st_size,
            seconds=0.05,
            preadv=preadv,
        )
    assert time.monotonic() - started < 5
    assert 0 < trial.nbytes <= 2 * 4096 * 11
    assert trial.seconds >= 0.05


def test_errors_of_a_disk_come_out_of_the_threads_of_a_trial(large: Path) -> None:
    def preadv(fd: int, buffers: Sequence[Any], offset: int) -> int:
        raise OSError(5, "Input/output error")

    with open(large, "rb") as file, pytest.raises(OSError, match="Input/output error"):
        read_for(
            file.fileno(),
            page_aligned(8 * 4096).data,
            Transfer(4096, 2),
            begin=0,
            end=1 << 20,
            seconds=60,
            preadv=preadv,
        )


def test_disk_rates_of_a_file(large: Path) -> None:
    before = os.listdir("/proc/self/fd")
    rates = measure_disk(large, Transfer(MIB, 2), seconds=0.02)
    assert os.listdir("/proc/self/fd") == before
    assert rates.direct_bytes_per_s is not None and rates.direct_bytes_per_s > 0
    assert rates.buffered_bytes_per_s > 0
    assert rates.refusal is None
    assert rates.transfer == Transfer(MIB, 2)


def test_disk_rates_say_why_there_is_no_direct_one(in_memory: Path) -> None:
    rates = measure_disk(in_memory, seconds=0.02)
    assert rates.direct_bytes_per_s is None
    assert rates.refusal == "tmpfs keeps files in memory"
    assert rates.buffered_bytes_per_s > 0


def test_copy_rate_is_that_of_memory() -> None:
    rate = measure_copy(2, num_repeats=1)
    assert rate.num_threads == 2
    assert 1e8 < rate.bytes_per_s < 1e13


def test_cache_folder_is_made_when_needed(large: Path, tmp_path: Path) -> None:
    choose_transfer([large], tmp_path / "made" / "here")
    assert (tmp_path / "made" / "here" / CACHE_NAME).is_file()
