"""A model that streams: against the bare disk, against its own computing, and by placement."""

from __future__ import annotations

import argparse
import os
import statistics
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from engine import EngineConfig, Request, SamplingParams
from engine.engine import Engine
from engine.placement import spread
from engine.planner import Plan
from ntx_batch.spec import parse_size
from nvme import ReadStats
from nvme.alignment import align_down
from nvme.direct import DEFAULT_TRANSFER, open_direct
from nvme.probe import make_ring, measure_disk, read_for
from scripts.bench_report import Report

MEMORY = "1.5GiB"  # where `--memory` says nothing
ROWS = (1, 8, 32, 64, 96, 128)
ROW_TOKENS = 64
SWEEPS = 4


def streaming_config(options: argparse.Namespace) -> EngineConfig:
    return EngineConfig(
        kv_type="f16",
        num_threads=options.threads,
        memory_nbytes=memory_nbytes(options),
        reader=options.reader,
        sweep_tokens=max(ROWS),
    )


def memory_nbytes(options: argparse.Namespace) -> int:
    return parse_size(options.memory or MEMORY)


def board(engine: Engine, rows: int) -> None:
    """Put `rows` rows on board, all decoding from a few tokens on."""
    engine.cancel_all()
    params = SamplingParams(max_tokens=ROW_TOKENS, ignore_eos=True)
    ids = np.arange(10, 14, dtype=np.int32)
    for index in range(rows):
        engine.add(Request(row_index=index, token_ids=ids, params=params))
    while engine.num_waiting or engine.num_prefilling:
        engine.sweep()


def sweep_s(engine: Engine, sweeps: int = SWEEPS) -> float:
    """Seconds of one sweep, over `sweeps` of them."""
    rows = engine.num_running
    started = time.perf_counter()
    for _ in range(sweeps):
        engine.sweep()
    assert engine.num_running == rows, "a row ended inside the timed part"
    return (time.perf_counter() - started) / sweeps


def reader_stats(engine: Engine) -> ReadStats:
    stream = engine._model.stream
    assert stream is not None, "the model is resident: nothing streams"
    return stream.link_stats().read


def probe_bytes_per_s(options: argparse.Namespace) -> float:
    rates = measure_disk(options.model)
    return rates.direct_bytes_per_s or rates.buffered_bytes_per_s


def side_by_side_s(options: argparse.Namespace, resident: Engine, nbytes: int) -> float:
    """Seconds in which a loop of bare reads brings a sweep's bytes while another sweep computes.

    Where reading takes time of the cores, in this system or in the one around it, nothing that
    streams can be faster.
    """
    source = open_direct(Path(options.model))
    fd, ring = source.file.fd, make_ring()
    times: list[float] = []

    def read() -> None:
        end, left, started = align_down(source.file.nbytes), nbytes * SWEEPS, time.perf_counter()
        while left > 0:
            trial = read_for(
                fd,
                ring,
                DEFAULT_TRANSFER,
                begin=0,
                end=min(end, align_down(left) or left),
                seconds=60,
            )
            left -= trial.nbytes
        times.append(time.perf_counter() - started)

    reading = threading.Thread(target=read)
    reading.start()
    times.append(sweep_s(resident) * SWEEPS)
    reading.join()
    os.close(fd)
    return max(times) / SWEEPS


def resident_plan(engine: Engine) -> Plan:
    """The same buffers, with every byte of the weights in memory."""
    layers = len(engine.plan.resident)
    return replace(
        engine.plan, resident=(True,) * layers, head_resident=True, streamed_nbytes=0, ring_nbytes=0
    )


def first(num_resident: int, num_layers: int) -> tuple[bool, ...]:
    """The first layers resident, the rest streamed: what `spread` is measured against."""
    return tuple(layer < num_resident for layer in range(num_layers))


def bench_stream(options: argparse.Namespace) -> Report:
    """Read rate against the probe, sweep time against the larger of disk and compute, by rows."""
    report = Report(f"streamed sweeps, {options.memory or MEMORY}, f16 KV")
    config = streaming_config(options)
    with Engine(options.model, config) as engine:
        in_memory = EngineConfig(kv_type="f16", expand="never", num_threads=options.threads)
        with Engine(options.model, in_memory, plan=resident_plan(engine)) as resident:
            report.facts["streamed bytes per sweep"] = engine.plan.streamed_nbytes
            report.facts["rows the KV cache holds"] = engine.plan.kv_pages // 3
            for _ in range(options.repeats):
                for rows in ROWS:
                    _measure_rows(report, options, engine, resident, rows)
    return report


def _measure_rows(
    report: Report, options: argparse.Namespace, engine: Engine, resident: Engine, rows: int
) -> None:
    board(engine, rows)
    board(resident, rows)
    probe = probe_bytes_per_s(options)
    before = reader_stats(engine)
    streamed_s = sweep_s(engine)
    read = reader_stats(engine) - before
    probe = statistics.mean([probe, probe_bytes_per_s(options)])
    compute_s = sweep_s(resident)
    bare_s = side_by_side_s(options, resident, engine.plan.streamed_nbytes)
    disk_s = engine.plan.streamed_nbytes / probe
    report.add(f"{rows} rows: tokens/s", rows / streamed_s)
    report.add(f"{rows} rows: sweep s", streamed_s)
    report.add(f"{rows} rows: disk s at the probed rate", disk_s)
    report.add(f"{rows} rows: compute s", compute_s)
    report.add(f"{rows} rows: sweep / max(disk, compute)", streamed_s / max(disk_s, compute_s))
    report.add(f"{rows} rows: bare reads beside computing s", bare_s)
    report.add(f"{rows} rows: sweep / bare", streamed_s / bare_s)
    report.add(f"{rows} rows: smaller / larger", min(disk_s, compute_s) / max(disk_s, compute_s))
    report.add(f"{rows} rows: read rate / probe", read.nbytes / (streamed_s * SWEEPS) / probe)


def bench_placement(options: argparse.Namespace) -> Report:
    """Interleaved against contiguous placement, half of the layers resident."""
    report = Report("placement, half of the layers resident, f16 KV")
    config = EngineConfig(
        kv_type="f16",
        num_threads=options.threads,
        expand="never",
        reader=options.reader,
        sweep_tokens=options.rows,
        kv_memory_nbytes=1 << 29,
    )
    with Engine(options.model, replace(config, memory_nbytes=memory_nbytes(options))) as probe:
        plan = probe.plan
    layers = len(plan.resident)
    engines = {
        name: Engine(options.model, config, plan=replace(plan, resident=place(layers // 2, layers)))
        for name, place in (("interleaved", spread), ("contiguous", first))
    }
    for _ in range(options.repeats):
        for name, engine in engines.items():
            board(engine, options.rows)
            report.add(f"{name}: sweep s", sweep_s(engine))
        values = {name: report.samples[f"{name}: sweep s"][-1] for name in engines}
        report.add("contiguous / interleaved", values["contiguous"] / values["interleaved"])
    for engine in engines.values():
        engine.close()
    return report
