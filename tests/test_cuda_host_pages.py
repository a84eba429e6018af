"""KV pages in host memory on the CUDA backend: the same bytes, and every copy counted."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine import EngineConfig
from engine.engine import Engine
from kernels.host_pages import pages_read, pages_written, runs_of
from tests.cpu_helpers import AttentionCase, attention_case, segments_batch
from tests.cuda_helpers import HostOps
from tests.test_cuda_engine import (
    PLACES,
    POOL,
    FailingReader,
    OwnOps,
    open_reader,
    ops,
    prompts,
    run_rows,
    six_layers,
    tiered_plan,
)
from tests.test_cuda_ops import KV_TYPES
from tests.test_host_pages import check_rows_do_not_see_where_their_pages_are, with_host_pages
from tests.test_prefix_reuse import run, some_tokens, with_common_prefix

cp = pytest.importorskip("cupy", reason="CuPy is not installed")
pytestmark = pytest.mark.gpu

__all__ = ["ops", "six_layers"]  # the fixtures of the module

NUM_LAYERS = 5
# Of sweeps; with 8 bits, one that begins inside a page ends in it.
EDGES = [0, 37, 64, 65, 66, 96, 200, 201, 224, 256]


def sweep(
    ops: Any, case: AttentionCase, pool: Any, step: list[tuple[int, int]]
) -> tuple[Any, bytes]:
    """Segments [begin, end) of rows 0, 1, ... through all layers, each with keys of its own."""
    segments = [(row, *span) for row, span in enumerate(step)]
    lengths = [len(rows) for rows in case.qkv]
    batch = segments_batch(segments, lengths, np.random.default_rng(7))
    plan, head = ops.plan(batch, case.shape, case.head.num_heads), case.head
    qkv = np.concatenate([case.qkv[row][begin:end] for row, begin, end in segments])
    outs = []

    def body(worker: int) -> None:
        for layer in range(NUM_LAYERS):
            q = np.zeros((len(qkv), head.num_heads * head.key_length), np.float32)
            out = np.zeros((len(qkv), head.num_heads * head.value_length), np.float32)
            own = np.roll(qkv, layer, axis=1)
            ops.rope_store(worker, plan, own, head, case.rope, batch, pool, layer, q)
            ops.attention(worker, plan, q, head, batch, pool, layer, out)
            outs.append(out.tobytes())

    ops.run(body)
    return batch, b"".join(outs)


@pytest.mark.parametrize("kv_type", KV_TYPES)
def test_attention_reads_and_writes_pages_wherever_they_are(ops: Any, kv_type: Any) -> None:
    case = attention_case(np.random.default_rng(3), [256] * 3, num_heads=4, num_kv_heads=2)
    shape = replace(case.shape, num_layers=NUM_LAYERS)
    host = HostOps(ops)
    expected = None
    for num_pages in (24, 23, 7, 1):
        pool = ops.kv_pool(
            shape, num_pages=num_pages, num_host_pages=24 - num_pages, kv_type=kv_type, num_rows=3
        )
        read = written = 0
        seen = []
        for span in itertools.pairwise(EDGES):
            batch, got = sweep(host, case, pool, [span, span, span])
            seen.append(got)
            runs = runs_of(pages_read(batch, num_pages, kv_type))
            read += int((runs[:, 1] - runs[:, 0]).sum())
            written += len(pages_written(batch, num_pages, kv_type))
        expected = expected or seen
        assert seen == expected, num_pages
        ops.synchronize()
        travel = ops.kv_travel(pool)
        assert travel.in_nbytes == read * pool.page_nbytes
        assert travel.out_nbytes == written * pool.page_nbytes
        assert (travel.copy_s > 0) == (read > 0)


@pytest.mark.parametrize("kv_type", KV_TYPES)
def test_copied_pages_read_as_those_they_came_from_across_tiers(ops: Any, kv_type: Any) -> None:
    case = attention_case(np.random.default_rng(3), [64], num_heads=4, num_kv_heads=2)
    shape = replace(case.shape, num_layers=NUM_LAYERS)
    host = HostOps(ops)
    pool = ops.kv_pool(shape, num_pages=3, num_host_pages=3, kv_type=kv_type, num_rows=1)
    sweep(host, case, pool, [(0, 64)])
    for source, target in ((0, 3), (3, 4), (4, 2)):
        ops.kv_copy(pool, source, target)
    ops.synchronize()
    for part, array in zip(pool.host.parts, (pool.keys, pool.values, pool.scales), strict=False):
        assert array[:, 0].any()
        for copy in (part.in_host[:, 0], part.in_host[:, 1], array[:, 2]):
            assert (copy == array[:, 0]).all()


@pytest.mark.parametrize("kv_type", KV_TYPES)
@pytest.mark.parametrize("settings", [{}, {"sweep_tokens": 37}], ids=["whole", "chunked"])
def test_rows_do_not_see_where_their_pages_are(
    ops: Any, kv_type: str, settings: dict[str, Any]
) -> None:
    engine = check_rows_do_not_see_where_their_pages_are(OwnOps(ops), kv_type, **settings)
    totals = engine.sweeps.totals
    assert totals.kv_in_nbytes > 0 and totals.kv_out_nbytes > 0


@pytest.mark.parametrize("kv_type", ["f16", "int8"])
@pytest.mark.parametrize("places", ["host", "all tiers"])
def test_pages_travel_beside_weights_and_through_reads_that_fail(
    ops: Any, six_layers: Path, places: str, kv_type: Any
) -> None:
    requests = prompts()
    config = EngineConfig(
        kv_memory_nbytes=POOL, expand="never", sweep_tokens=50, reader="direct", kv_type=kv_type
    )
    with Engine(six_layers, config, ops=OwnOps(ops)) as engine:
        plan = tiered_plan(engine, six_layers, PLACES[places], 2)
        expected = run_rows(engine, requests)
    plan = replace(plan, kv_pages=5, host_kv_pages=200)
    failing: list[FailingReader] = []

    def open_failing(paths: Any) -> FailingReader:
        failing.append(FailingReader(open_reader("direct", paths)))
        return failing[0]

    with Engine(
        six_layers, config, ops=OwnOps(ops), plan=plan, reader_factory=open_failing
    ) as engine:
        for _ in range(2):
            assert run_rows(engine, requests) == expected
            failing[0].failures_left = plan.disk_nbytes > 0
        totals = engine.sweeps.totals
        assert engine.totals.num_failed_sweeps == (plan.disk_nbytes > 0)
        assert totals.kv_in_nbytes > 0 and totals.kv_out_nbytes > 0
        assert totals.copied_nbytes > totals.kv_in_nbytes


@pytest.mark.parametrize("kv_type", ["f16", "int8"])
def test_rows_share_a_prefix_whose_pages_are_in_host_memory(ops: Any, kv_type: str) -> None:
    requests, seen = with_common_prefix(40, some_tokens(1, 700)), []
    for pages in ((400, 0), (9, 391)):
        with with_host_pages(OwnOps(ops), *pages, kv_type=kv_type) as engine:
            seen.append(run(engine, requests))
            assert engine.totals.reused_tokens > 39 * 600
            assert (engine.sweeps.totals.kv_in_nbytes > 0) == (pages[1] > 0)
    assert seen[0] == seen[1]
