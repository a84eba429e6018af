"""Readers: bytes come back exactly, or a ReadError says what happened."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

import nvme.mmap
from nvme import READER_NAMES, Reader, ReadError, ReadRequest, open_reader

NUM_BYTES = 10_000


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    rng = np.random.default_rng(0)
    found = []
    for name in ("first.bin", "second.bin"):
        found.append(tmp_path / name)
        found[-1].write_bytes(rng.bytes(NUM_BYTES))
    return found


@pytest.fixture(params=READER_NAMES)
def reader(request: pytest.FixtureRequest, paths: list[Path]) -> Iterator[Reader]:
    opened = open_reader(request.param, paths)
    yield opened
    opened.close()


def buffer(nbytes: int) -> npt.NDArray[np.uint8]:
    return np.full(nbytes, 0xAA, np.uint8)


def read(reader: Reader, file_idx: int, offset: int, nbytes: int) -> bytes:
    out = buffer(nbytes)
    reader.wait(reader.submit([ReadRequest(file_idx=file_idx, offset=offset, out=out)]))
    return out.tobytes()


@pytest.mark.parametrize(
    ("offset", "nbytes"), [(0, NUM_BYTES), (1, 1), (4095, 2), (9_999, 1), (NUM_BYTES, 0)]
)
def test_read_returns_the_bytes_of_the_range(
    reader: Reader, paths: list[Path], offset: int, nbytes: int
) -> None:
    for file_idx, path in enumerate(paths):
        want = path.read_bytes()[offset : offset + nbytes]
        assert read(reader, file_idx, offset, nbytes) == want


def test_one_ticket_fills_many_buffers(reader: Reader, paths: list[Path]) -> None:
    outs = [buffer(7 * (number + 1)) for number in range(20)]
    requests = [
        ReadRequest(file_idx=number % 2, offset=number * 100, out=out)
        for number, out in enumerate(outs)
    ]
    reader.wait(reader.submit(requests))
    for request in requests:
        whole = paths[request.file_idx].read_bytes()
        assert request.out.tobytes() == whole[request.offset :][: request.out.nbytes]


def test_long_reads_are_cut_into_transfers(
    paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvme.mmap, "MAX_TRANSFER_NBYTES", 999)
    with_small_transfers = open_reader("mmap", paths)
    assert read(with_small_transfers, 0, 3, 9_000) == paths[0].read_bytes()[3:9_003]
    with_small_transfers.close()


def test_range_past_the_end_is_refused_with_the_numbers(reader: Reader, paths: list[Path]) -> None:
    with pytest.raises(ReadError, match=r"second\.bin: wanted 100 bytes at offset 9950, got 50"):
        read(reader, 1, 9_950, 100)


def test_file_cut_after_open_is_refused_at_submit(reader: Reader, paths: list[Path]) -> None:
    os.truncate(paths[0], 100)
    with pytest.raises(ReadError, match=r"first\.bin: changed since it was opened.*10000.*100,"):
        read(reader, 0, 0, 50)


def test_file_cut_after_submit_is_refused(reader: Reader, paths: list[Path]) -> None:
    ticket = reader.submit([ReadRequest(file_idx=0, offset=50, out=buffer(200))])
    os.truncate(paths[0], 100)
    # A reader with threads may have had the bytes already; then the change is what it notices.
    with pytest.raises(ReadError, match=r"200 bytes at offset 50, got 50|changed since it was"):
        reader.wait(ticket)


def test_file_rewritten_between_submit_and_wait_is_refused(
    reader: Reader, paths: list[Path]
) -> None:
    ticket = reader.submit([ReadRequest(file_idx=0, offset=0, out=buffer(10))])
    os.utime(paths[0], ns=(1, 1))
    with pytest.raises(ReadError, match="changed since it was opened"):
        reader.wait(ticket)


def test_file_replaced_under_its_name_is_refused(reader: Reader, paths: list[Path]) -> None:
    status = paths[0].stat()
    other = paths[0].with_name("other")
    other.write_bytes(paths[0].read_bytes())
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.rename(paths[0])
    with pytest.raises(ReadError, match="changed since it was opened"):
        read(reader, 0, 0, 10)


def test_deleted_file_is_refused(reader: Reader, paths: list[Path]) -> None:
    paths[0].unlink()
    with pytest.raises(ReadError, match=r"first\.bin: gone since it was opened"):
        read(reader, 0, 0, 10)


def test_untouched_file_stays_readable_when_another_changed(
    reader: Reader, paths: list[Path]
) -> None:
    paths[0].unlink()
    assert read(reader, 1, 0, 10) == paths[1].read_bytes()[:10]


def test_reading_after_close_is_refused_and_close_is_idempotent(reader: Reader) -> None:
    reader.close()
    reader.close()
    with pytest.raises(ReadError, match="after the reader was closed"):
        read(reader, 0, 0, 10)


@pytest.mark.parametrize("name", READER_NAMES)
def test_missing_file_is_refused_at_open_and_leaks_nothing(name: str, paths: list[Path]) -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(ReadError, match=r"absent: cannot be opened: No such file"):
        open_reader(name, [paths[0], paths[0].with_name("absent")])
    assert os.listdir("/proc/self/fd") == before


def test_unknown_reader_is_refused_by_name(paths: list[Path]) -> None:
    with pytest.raises(ValueError, match="no reader named 'tape'; there are: mmap"):
        open_reader("tape", paths)
