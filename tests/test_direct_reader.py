"""The direct reader: which way bytes go, in which order, and what happens when reads fail."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nvme import ReadError, ReadRequest, page_aligned
from nvme.alignment import BLOCK_NBYTES
from nvme.direct import DirectReader, Preadv, Transfer, open_direct

CHUNK = 4 * BLOCK_NBYTES
NUM_BYTES = 20 * CHUNK + 123
SMALL = Transfer(chunk_nbytes=CHUNK, num_threads=2)
ONE_THREAD = Transfer(chunk_nbytes=CHUNK, num_threads=1)
TIMEOUT_S = 20


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("direct") / "model.bin"
    path.write_bytes(np.random.default_rng(0).bytes(NUM_BYTES))
    source = open_direct(path)
    os.fsync(source.file.fd)
    os.close(source.file.fd)
    if source.refusal:
        pytest.skip(f"temporary files lie where direct reads do not work: {source.refusal}")
    return path


@pytest.fixture
def open_on(path: Path) -> Iterator[Callable[..., DirectReader]]:
    readers: list[DirectReader] = []

    def open_reader(transfer: Transfer = SMALL, preadv: Preadv = os.preadv) -> DirectReader:
        readers.append(DirectReader([path], transfer, preadv=preadv))
        return readers[-1]

    yield open_reader
    for reader in readers:
        reader.close()


class Calls:
    """A preadv that notes its calls, and does something else in those that a test names.

    Calls count from 0 after the one with which the reader tries the file.
    """

    def __init__(self, act: Callable[[int, int, Sequence[Any], int], int] | None = None) -> None:
        self.seen: list[tuple[int, int, int]] = []  # offset, bytes, address
        self._act = act or (lambda number, *call: os.preadv(*call))
        self._lock = threading.Lock()
        self._trials = 1

    def __call__(self, fd: int, buffers: Sequence[Any], offset: int) -> int:
        with self._lock:
            if self._trials:
                self._trials -= 1
                return os.preadv(fd, buffers, offset)
            number = len(self.seen)
            address = np.frombuffer(buffers[0], np.uint8).ctypes.data
            self.seen.append((offset, len(buffers[0]), address))
        return self._act(number, fd, buffers, offset)


def request(offset: int, out: npt.NDArray[np.uint8]) -> ReadRequest:
    return ReadRequest(file_idx=0, offset=offset, out=out)


def content(path: Path, offset: int, nbytes: int) -> bytes:
    return path.read_bytes()[offset : offset + nbytes]


def threads_of_readers() -> list[str]:
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith("nvme-direct")]


def resident_nbytes(path: Path) -> int:
    """Bytes of a file in the page cache."""
    libc = ctypes.CDLL(None, use_errno=True)
    size = path.stat().st_size
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), size) as mapped:
        pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        start = ctypes.c_char.from_buffer(mapped)
        assert libc.mincore(ctypes.byref(start), ctypes.c_size_t(size), pages) == 0
        del start
    return sum(page & 1 for page in pages) * mmap.PAGESIZE


def drop_from_cache(path: Path) -> None:
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@given(
    st.integers(0, NUM_BYTES),
    st.integers(0, NUM_BYTES),
    st.integers(0, BLOCK_NBYTES),
    st.booleans(),
)
@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_bytes_are_exact_for_any_offset_length_and_address(
    open_on: Callable[..., DirectReader],
    path: Path,
    offset: int,
    nbytes: int,
    shift: int,
    congruent: bool,
) -> None:
    nbytes = min(nbytes, NUM_BYTES - offset)
    shift = offset % BLOCK_NBYTES if congruent else shift
    room = page_aligned(NUM_BYTES + 2 * BLOCK_NBYTES)
    room.fill(0xAA)
    reader = open_on()
    reader.wait(reader.submit([request(offset, room[shift : shift + nbytes])]))
    assert room[shift : shift + nbytes].tobytes() == content(path, offset, nbytes)
    assert (room[:shift] == 0xAA).all() and (room[shift + nbytes :] == 0xAA).all()
    assert reader.stats().nbytes_direct == nbytes
    reader.close()


def test_aligned_requests_are_read_into_place_and_only_the_last_block_is_copied(
    open_on: Callable[..., DirectReader], path: Path
) -> None:
    calls = Calls()
    reader = open_on(ONE_THREAD, calls)
    out = page_aligned(NUM_BYTES)
    reader.wait(reader.submit([request(0, out)]))
    start = out.ctypes.data
    in_place = [call for call in calls.seen if call[2] == start + call[0]]
    assert [offset for offset, _, _ in in_place] == list(range(0, NUM_BYTES - 123, CHUNK))
    assert {nbytes for _, nbytes, _ in in_place} == {CHUNK}
    assert [call[:2] for call in calls.seen if call not in in_place] == [(20 * CHUNK, BLOCK_NBYTES)]


def test_every_call_is_aligned_even_where_the_request_is_not(
    open_on: Callable[..., DirectReader],
) -> None:
    calls = Calls()
    reader = open_on(SMALL, calls)
    reader.wait(reader.submit([request(5, page_aligned(9 * CHUNK)[1:-7])]))
    assert len(calls.seen) >= 9
    assert all(number % BLOCK_NBYTES == 0 for call in calls.seen for number in call)


def test_direct_reads_leave_nothing_in_the_page_cache(
    open_on: Callable[..., DirectReader], path: Path
) -> None:
    drop_from_cache(path)
    before = resident_nbytes(path)
    reader = open_on()
    reader.wait(reader.submit([request(3, page_aligned(NUM_BYTES - 3))]))
    assert resident_nbytes(path) <= before
    assert reader.path_taken == "direct"


def test_tickets_are_served_in_the_order_of_submission(
    open_on: Callable[..., DirectReader],
) -> None:
    calls = Calls()
    reader = open_on(ONE_THREAD, calls)
    offsets = [7, 0, 12, 3, 18]
    tickets = [
        reader.submit([request(offset * CHUNK, page_aligned(2 * CHUNK))]) for offset in offsets
    ]
    for ticket in reversed(tickets):
        reader.wait(ticket)
    assert [offset // CHUNK for offset, _, _ in calls.seen] == [
        number for offset in offsets for number in (offset, offset + 1)
    ]


def test_a_slow_read_of_one_ticket_does_not_hold_up_the_next(
    open_on: Callable[..., DirectReader], path: Path
) -> None:
    gate = threading.Event()

    def act(number: int, fd: int, buffers: Sequence[Any], offset: int) -> int:
        if offset == 0:
            assert gate.wait(TIMEOUT_S)
        return os.preadv(fd, buffers, offset)

    reader = open_on(SMALL, Calls(act))
    slow, quick = page_aligned(CHUNK), page_aligned(3 * CHUNK)
    first, second = reader.submit([request(0, slow)]), reader.submit([request(CHUNK, quick)])
    reader.wait(second)
    assert reader.done(second) and not reader.done(first)
    assert quick.tobytes() == content(path, CHUNK, 3 * CHUNK)
    gate.set()
    reader.wait(first)
    assert reader.done(first)
    assert slow.tobytes() == content(path, 0, CHUNK)


def test_close_ends_calls_in_flight_and_abandons_the_rest(
    open_on: Callable[..., DirectReader],
) -> None:
    entered = threading.Semaphore(0)

    def act(number: int, fd: int, buffers: Sequence[Any], offset: int) -> int:
        entered.release()
        time.sleep(0.1)
        return os.preadv(fd, buffers, offset)

    calls = Calls(act)
    reader = open_on(SMALL, calls)
    outs = [page_aligned(20 * CHUNK) for _ in range(6)]
    tickets = [reader.submit([request(0, out)]) for out in outs]
    assert entered.acquire(timeout=TIMEOUT_S)
    started = time.monotonic()
    reader.close()
    assert time.monotonic() - started < 5  # all 120 calls would take 6 s
    assert len(calls.seen) < 20
    assert threads_of_readers() == []
    for ticket in tickets:
        assert reader.done(ticket)
        with pytest.raises(ReadError, match=r"model\.bin after the reader was closed"):
            reader.wait(ticket)


def test_a_failed_call_names_file_offset_and_bytes_and_spares_other_tickets(
    open_on: Callable[..., DirectReader], path: Path
) -> None:
    """A ticket whose read fails with EIO raises; tickets around it have their bytes."""

    def act(number: int, fd: int, buffers: Sequence[Any], offset: int) -> int:
        if offset == 6 * CHUNK:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return os.preadv(fd, buffers, offset)

    reader = open_on(ONE_THREAD, Calls(act))
    outs = [page_aligned(4 * CHUNK) for _ in range(3)]
    tickets = [reader.submit([request(4 * CHUNK * n, out)]) for n, out in enumerate(outs)]
    match = (
        rf"model\.bin: wanted {4 * CHUNK} bytes at offset {4 * CHUNK}, got {2 * CHUNK}: Input/outp"
    )
    with pytest.raises(ReadError, match=match) as caught:
        reader.wait(tickets[1])
    assert isinstance(caught.value.__cause__, OSError)
    for n in (0, 2):
        reader.wait(tickets[n])
        assert outs[n].tobytes() == content(path, 4 * CHUNK * n, 4 * CHUNK)
    reader.wait(reader.submit([request(0, outs[1])]))
    assert outs[1].tobytes() == content(path, 0, 4 * CHUNK)


def test_calls_that_return_less_are_continued(
    open_on: Callable[..., DirectReader], path: Path
) -> None:
    def act(number: int, fd: int, buffers: Sequence[Any], offset: int) -> int:
        return os.preadv(fd, [buffers[0][:BLOCK_NBYTES]], offset)

    reader = open_on(SMALL, Calls(act))
    out = page_aligned(5 * CHUNK)
    reader.wait(reader.submit([request(CHUNK, out)]))
    assert out.tobytes() == content(path, CHUNK, 5 * CHUNK)


@pytest.mark.parametrize("nbytes", [0, 512, BLOCK_NBYTES + 512])
def test_a_read_that_ends_early_is_an_error(
    open_on: Callable[..., DirectReader], nbytes: int
) -> None:
    def act(number: int, fd: int, buffers: Sequence[Any], offset: int) -> int:
        return min(os.preadv(fd, buffers, offset), nbytes if offset == CHUNK else CHUNK)

    reader = open_on(SMALL, Calls(act))
    ticket = reader.submit([request(0, page_aligned(3 * CHUNK))])
    match = rf"wanted {3 * CHUNK} bytes at offset 0, got {CHUNK + nbytes}: the file ends"
    with pytest.raises(ReadError, match=match):
        reader.wait(ticket)


def test_a_file_cut_while_it_is_read_is_an_error(tmp_path: Path, path: Path) -> None:
    copy = tmp_path / "cut.bin"
    copy.write_bytes(path.read_bytes())
    gate = threading.Event()

    def act(number: int, fd: int, buffers: Sequence[Any], offset: int) -> int:
        assert gate.wait(TIMEOUT_S)
        return os.preadv(fd, buffers, offset)

    reader = DirectReader([copy], SMALL, preadv=Calls(act))
    ticket = reader.submit([request(0, page_aligned(NUM_BYTES))])
    os.truncate(copy, 2 * CHUNK + 100)
    gate.set()
    with pytest.raises(
        ReadError, match=rf"wanted {NUM_BYTES} bytes at offset 0, got \d+: the file"
    ):
        reader.wait(ticket)
    reader.close()


def test_wait_raises_only_when_nothing_writes_into_the_buffers_any_more(
    open_on: Callable[..., DirectReader],
) -> None:
    gate, failed = threading.Event(), threading.Event()

    def act(number: int, fd: int, buffers: Sequence[Any], offset: int) -> int:
        if offset == 0:
            assert gate.wait(TIMEOUT_S)
            return os.preadv(fd, buffers, offset)
        failed.set()
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    reader = open_on(SMALL, Calls(act))
    ticket = reader.submit([request(0, page_aligned(2 * CHUNK))])
    assert failed.wait(TIMEOUT_S)
    assert not reader.done(ticket)
    gate.set()
    with pytest.raises(ReadError, match="Input/output error"):
        reader.wait(ticket)


def test_an_unforeseen_error_reaches_the_thread_that_waits(
    open_on: Callable[..., DirectReader],
) -> None:
    def act(number: int, fd: int, buffers: Sequence[Any], offset: int) -> int:
        raise MemoryError("no bytes left")

    reader = open_on(SMALL, Calls(act))
    with pytest.raises(MemoryError, match="no bytes left"):
        reader.wait(reader.submit([request(0, page_aligned(CHUNK))]))


def refuse_direct(fd: int, buffers: Sequence[Any], offset: int) -> int:
    if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    return os.preadv(fd, buffers, offset)


def test_without_direct_reads_bytes_come_through_the_page_cache_and_leave_it(
    open_on: Callable[..., DirectReader], path: Path
) -> None:
    drop_from_cache(path)
    reader = open_on(SMALL, refuse_direct)
    out = page_aligned(NUM_BYTES)[1:]
    reader.wait(reader.submit([request(1, out)]))
    assert out.tobytes() == content(path, 1, NUM_BYTES - 1)
    stats = reader.stats()
    assert (stats.nbytes_direct, stats.nbytes_buffered) == (0, NUM_BYTES - 1)
    assert reader.path_taken.startswith("buffered (")
    assert "refuses O_DIRECT" in reader.path_taken


def test_pages_read_for_want_of_direct_reads_are_dropped(
    open_on: Callable[..., DirectReader], path: Path
) -> None:
    drop_from_cache(path)
    reader = open_on(ONE_THREAD, refuse_direct)
    reader.wait(reader.submit([request(0, page_aligned(NUM_BYTES))]))
    assert resident_nbytes(path) < NUM_BYTES // 4  # readahead may leave some


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no tmpfs at /dev/shm")
def test_each_file_goes_its_own_way_and_both_are_counted(path: Path) -> None:
    in_memory = Path(f"/dev/shm/ntx-test-{os.getpid()}.bin")
    in_memory.write_bytes(path.read_bytes()[:CHUNK])
    try:
        reader = DirectReader([path, in_memory], SMALL)
        outs = [page_aligned(2 * CHUNK), page_aligned(CHUNK)]
        requests = [ReadRequest(file_idx=n, offset=0, out=out) for n, out in enumerate(outs)]
        reader.wait(reader.submit(requests))
        assert outs[1].tobytes() == outs[0][:CHUNK].tobytes() == content(path, 0, CHUNK)
        assert reader.stats().nbytes_direct == 2 * CHUNK
        assert reader.stats().nbytes_buffered == CHUNK
        assert reader.path_taken == ("direct, 1 of 2 files buffered (tmpfs keeps files in memory)")
        reader.close()
    finally:
        in_memory.unlink()


def test_busy_time_grows_while_reads_are_under_way_and_stands_still_without(
    open_on: Callable[..., DirectReader],
) -> None:
    gate = threading.Event()

    def act(number: int, fd: int, buffers: Sequence[Any], offset: int) -> int:
        assert gate.wait(TIMEOUT_S)
        return os.preadv(fd, buffers, offset)

    reader = open_on(SMALL, Calls(act))
    assert reader.stats().busy_s == 0
    ticket = reader.submit([request(0, page_aligned(CHUNK))])
    time.sleep(0.02)
    under_way = reader.stats()
    assert under_way.nbytes == 0 and under_way.busy_s >= 0.02
    gate.set()
    reader.wait(ticket)
    after = reader.stats()
    assert (after - under_way).nbytes == CHUNK
    time.sleep(0.01)
    assert reader.stats() == after


def test_an_empty_ticket_is_done_at_once(open_on: Callable[..., DirectReader]) -> None:
    reader = open_on()
    ticket = reader.submit([])
    assert reader.done(ticket)
    reader.wait(ticket)


def test_a_reader_that_cannot_open_leaves_neither_threads_nor_files(path: Path) -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(ReadError, match=r"absent: cannot be opened: No such file"):
        DirectReader([path, path.with_name("absent")], SMALL)
    assert os.listdir("/proc/self/fd") == before
    assert threads_of_readers() == []


def test_page_aligned_memory_begins_at_a_page_and_is_zero() -> None:
    for nbytes in (1, 4095, 3 << 20):
        array = page_aligned(nbytes)
        assert array.nbytes == nbytes and array.ctypes.data % mmap.PAGESIZE == 0
        assert not array.any()
        array[-1] = 1  # writable to the last byte
