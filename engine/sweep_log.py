"""What each sweep took and moved, and the sums of it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Self

from engine.costs import Load
from engine.links import LinkStats
from engine.scheduler import Chunk
from engine.sweep_fit import Moments
from engine.weight_stream import WeightStream
from kernels.ops import KvTravel

RECENT_SWEEPS = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepRecord:
    """One sweep.

    num_tokens, num_rows: that rode along; load: the same, as what it costs
    seconds: from its first chunk to its last sampled token
    streamed_nbytes: of weights that came through the ring
    wait_s: the computing stood still for them, or for KV pages
    copied_nbytes, copy_busy_s: from host memory to the device, and the time of the copies alone
    kv_in_nbytes: of those, KV pages; kv_out_nbytes: of KV pages back to host memory
    direct_nbytes, buffered_nbytes: read past and through the page cache since the sweep before, in
        part for the next one
    read_busy_s: there was something to read
    reader: how the bytes travelled, and what kept them from a faster way
    probed_nbytes_per_s: the rate of the disk that the plan counted on; None where not probed
    """

    num_tokens: int
    num_rows: int
    load: Load
    seconds: float
    streamed_nbytes: int
    wait_s: float
    copied_nbytes: int
    copy_busy_s: float
    kv_in_nbytes: int
    kv_out_nbytes: int
    direct_nbytes: int
    buffered_nbytes: int
    read_busy_s: float
    reader: str
    probed_nbytes_per_s: float | None

    @property
    def moments(self) -> Moments:
        """For an estimate of what computing costs."""
        return Moments.of(self.load, self.seconds - self.wait_s)

    @property
    def disk_nbytes_per_s(self) -> float:
        """Bytes streamed per second of the sweep."""
        return self.streamed_nbytes / self.seconds

    @property
    def probe_share(self) -> float | None:
        """That rate over the probed one."""
        probed = self.probed_nbytes_per_s
        return self.disk_nbytes_per_s / probed if probed and self.streamed_nbytes else None


@dataclass(slots=True)
class SweepTotals:
    """Sums over sweeps; fields as in SweepRecord."""

    num_sweeps: int = 0
    num_tokens: int = 0
    num_rows: int = 0
    seconds: float = 0.0
    streamed_nbytes: int = 0
    wait_s: float = 0.0
    copied_nbytes: int = 0
    copy_busy_s: float = 0.0
    kv_in_nbytes: int = 0
    kv_out_nbytes: int = 0
    direct_nbytes: int = 0
    buffered_nbytes: int = 0
    read_busy_s: float = 0.0
    moments: Moments = field(default_factory=Moments)

    def add(self, record: SweepRecord) -> None:
        self.num_sweeps += 1
        for name in _SUMMED:
            setattr(self, name, getattr(self, name) + getattr(record, name))

    def __sub__(self, earlier: SweepTotals) -> SweepTotals:
        names = ("num_sweeps", *_SUMMED)
        return SweepTotals(*(getattr(self, name) - getattr(earlier, name) for name in names))

    def copy(self) -> SweepTotals:
        return self - SweepTotals()


_SUMMED = tuple(each.name for each in fields(SweepTotals) if each.name != "num_sweeps")


def load_of(chunks: Sequence[Chunk]) -> Load:
    """What a sweep of these chunks costs for: each token attends to itself and all before it."""
    tokens = outputs = 0
    positions = [0, 0]  # of single tokens that wait for the next, of pieces of prompts
    for chunk in chunks:
        num_tokens = chunk.end - chunk.begin
        tokens += num_tokens
        outputs += chunk.wants_logits
        positions[num_tokens > 1] += num_tokens * (chunk.begin + chunk.end + 1) // 2
    decode_positions, prefill_positions = positions
    return Load(tokens, decode_positions, prefill_positions, outputs)


@dataclass(frozen=True, slots=True)
class _Mark:
    at: float
    nbytes: int
    link: LinkStats
    kv: KvTravel

    @classmethod
    def now(cls, stream: WeightStream | None, kv: KvTravel) -> Self:
        if stream is None:
            return cls(time.perf_counter(), 0, LinkStats(), kv)
        return cls(time.perf_counter(), stream.totals.nbytes, stream.link_stats(), kv)


class SweepLog:
    """Sweeps as they are run.

    recent: the last `RECENT_SWEEPS`
    totals: of all that ended well
    stream: what weights come through; None where all are resident
    reader, probed_nbytes_per_s: as in SweepRecord
    kv_travel: what KV pages in host memory have cost so far
    """

    def __init__(
        self,
        stream: WeightStream | None,
        reader: str,
        probed_nbytes_per_s: float | None,
        *,
        kv_travel: Callable[[], KvTravel] = KvTravel,
    ) -> None:
        self.recent: deque[SweepRecord] = deque(maxlen=RECENT_SWEEPS)
        self.totals = SweepTotals()
        self._stream, self._kv_travel = stream, kv_travel
        self._reader = reader
        self._probed_nbytes_per_s = probed_nbytes_per_s
        self._mark = self._ended = self._now()

    def _now(self) -> _Mark:
        return _Mark.now(self._stream, self._kv_travel())

    def begin(self) -> None:
        """A sweep begins. What has come ahead since the last one ended is its own.

        Not where a pass that is none of these has streamed meanwhile.
        """
        now, ended = self._now(), self._ended
        self._mark = replace(now, link=ended.link) if now.nbytes == ended.nbytes else now

    def end(self, chunks: Sequence[Chunk]) -> None:
        """It is over. chunks: that it carried"""
        before, now = self._mark, self._now()
        self._ended = now
        link, kv = now.link - before.link, now.kv - before.kv
        record = SweepRecord(
            num_tokens=sum(chunk.end - chunk.begin for chunk in chunks),
            num_rows=len(chunks),
            load=load_of(chunks),
            seconds=now.at - before.at,
            streamed_nbytes=now.nbytes - before.nbytes,
            wait_s=link.wait_s + kv.wait_s,
            copied_nbytes=link.copied_nbytes + kv.in_nbytes,
            copy_busy_s=link.copy_busy_s + kv.copy_s,
            kv_in_nbytes=kv.in_nbytes,
            kv_out_nbytes=kv.out_nbytes,
            direct_nbytes=link.read.nbytes_direct,
            buffered_nbytes=link.read.nbytes_buffered,
            read_busy_s=link.read.busy_s,
            reader=self._reader,
            probed_nbytes_per_s=self._probed_nbytes_per_s,
        )
        self.recent.append(record)
        self.totals.add(record)
