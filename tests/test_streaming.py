"""Weights that stream give the bytes of resident ones, whatever streams, and through any ring."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import EngineConfig, Request, SamplingParams
from engine.engine import Engine
from engine.extents import ALIGNMENT, lay_out
from engine.gguf_file import GgufFile, TensorInfo
from engine.hparams import read_hparams
from engine.placement import spread
from engine.ring import ByteRing
from engine.weight_stream import parcel_layouts
from engine.weights import layer_tensor_names
from nvme import Reader, ReadError, open_reader
from tests import golden
from tests.gguf_factory import TinySizes, write_tiny_model

POOL = 64 << 20
STREAMING = EngineConfig(kv_memory_nbytes=POOL, expand="never", reader="direct")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six layers with a head of its own, so that some can stream and some stay."""
    path = tmp_path_factory.mktemp("model") / "six.gguf"
    write_tiny_model(path, sizes=TinySizes(num_layers=6))
    return path


def streaming_engine(
    model: Path,
    resident: Sequence[bool],
    *,
    head: bool,
    ring_parcels: float,
    config: EngineConfig = STREAMING,
    **options: Any,
) -> Engine:
    with Engine(model, config) as probe:
        plan, file = probe.plan, GgufFile.open(model)
    sizes = [path.stat().st_size for path in file.paths]
    names = [layer_tensor_names(layer) for layer in range(len(resident))]
    layouts = [lay_out([file.tensors[name] for name in layer], sizes) for layer in names]
    layouts.append(lay_out([file.tensors["output.weight"]], sizes))
    streamed = [
        layout.nbytes for layout, stays in zip(layouts, [*resident, head], strict=True) if not stays
    ]
    largest = max(layout.nbytes for layout in layouts)
    ring = int(ring_parcels * largest) // ALIGNMENT * ALIGNMENT
    plan = replace(
        plan,
        resident=tuple(resident),
        head_resident=head,
        ring_nbytes=ring,
        streamed_nbytes=sum(streamed),
        disk_nbytes=sum(streamed),
    )
    return Engine(model, config, plan=plan, **options)


def token_ids(count: int) -> np.ndarray:
    return np.random.default_rng(4).integers(3, 30, count).astype(np.int32)


@pytest.mark.parametrize("ring_parcels", [1, 1.5, 2, 3, 20])
@pytest.mark.parametrize("reader", ["direct", "mmap"])
def test_streamed_logits_are_the_bytes_of_resident_ones(
    model: Path, ring_parcels: float, reader: str
) -> None:
    ids = token_ids(40)
    with Engine(model, EngineConfig(kv_memory_nbytes=POOL)) as resident:
        expected = [resident.logits(ids).tobytes() for _ in range(2)]
    engine = streaming_engine(
        model,
        [False] * 6,
        head=False,
        ring_parcels=ring_parcels,
        reader_factory=lambda paths: open_reader(reader, paths),
    )
    with engine:
        assert engine.record()["reader"] == reader
        assert [engine.logits(ids).tobytes() for _ in range(2)] == expected
        assert engine._model.stream is not None
        assert engine._model.stream.totals.num_parcels == 2 * 7


@pytest.mark.parametrize("num_resident", [0, 1, 3, 5, 6])
@pytest.mark.parametrize("head", [True, False])
def test_any_share_of_resident_layers_gives_the_same_bytes(
    model: Path, num_resident: int, head: bool
) -> None:
    if num_resident == 6 and head:
        pytest.skip("nothing streams")
    ids = token_ids(33)
    with Engine(model, EngineConfig(kv_memory_nbytes=POOL)) as resident:
        expected = resident.logits(ids).tobytes()
    with streaming_engine(model, spread(num_resident, 6), head=head, ring_parcels=2) as engine:
        assert [engine.logits(ids).tobytes() for _ in range(3)] == [expected] * 3
        stream = engine._model.stream
        assert stream is not None
        assert stream.totals.num_parcels == 3 * (6 - num_resident + (not head))


class FailingReader:
    """A reader whose `wait` fails at chosen calls, as a disk would."""

    def __init__(self, inner: Reader, fail_at: set[int]) -> None:
        self._inner = inner
        self._fail_at = fail_at
        self.calls = 0

    def wait(self, ticket: Any) -> None:
        self.calls += 1
        self._inner.wait(ticket)
        if self.calls in self._fail_at:
            raise ReadError(5, "Input/output error (injected)")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def run_rows(engine: Engine) -> dict[int, tuple[int, ...]]:
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    for index in range(4):
        ids = token_ids(10 + index)
        engine.add(Request(row_index=index, token_ids=ids, params=params))
    rows = {}
    while engine.has_work:
        for row in engine.sweep():
            assert row.status == "ok"
            rows[row.row_index] = row.token_ids
    return rows


def engine_with_failures(model: Path, fail_at: set[int]) -> Engine:
    reader = FailingReader(open_reader("direct", [model]), set())
    engine = streaming_engine(
        model, [False] * 6, head=False, ring_parcels=3, reader_factory=lambda _: reader
    )
    reader.calls, reader._fail_at = 0, fail_at
    return engine


def test_failed_read_is_retried_and_the_text_stays_the_same(model: Path) -> None:
    with Engine(model, EngineConfig(kv_memory_nbytes=POOL)) as resident:
        expected = run_rows(resident)
    with engine_with_failures(model, {4, 30}) as engine:
        assert run_rows(engine) == expected
        assert engine.totals.num_failed_sweeps == 2


def test_read_that_keeps_failing_ends_the_sweep_with_the_error(model: Path) -> None:
    with (
        engine_with_failures(model, set(range(1, 1000))) as engine,
        pytest.raises(ReadError, match="injected"),
    ):
        run_rows(engine)


def test_file_cut_short_while_streaming_is_an_error_and_never_wrong_weights(
    model: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(model.read_bytes())
    with streaming_engine(copy, [False] * 6, head=False, ring_parcels=1) as engine:
        with copy.open("r+b") as file:
            file.truncate(copy.stat().st_size // 2)
        with pytest.raises(ReadError):
            for _ in range(2):
                engine.logits(token_ids(5))


@given(st.integers(0, 200), st.integers(1, 200))
def test_resident_layers_are_spread_evenly(num_resident: int, num_layers: int) -> None:
    num_resident = min(num_resident, num_layers)
    flags = spread(num_resident, num_layers)
    assert sum(flags) == num_resident
    for window in range(1, num_layers + 1):
        counts = [sum(flags[i : i + window]) for i in range(num_layers - window + 1)]
        assert max(counts) - min(counts) <= 1


@given(st.integers(1, 64), st.lists(st.tuples(st.booleans(), st.integers(1, 64)), max_size=60))
def test_ring_pieces_never_overlap_and_an_empty_ring_takes_anything(
    capacity: int, steps: list[tuple[bool, int]]
) -> None:
    ring = ByteRing(capacity)
    live: list[tuple[int, int]] = []
    for take, size in steps:
        if take:
            size = min(size, capacity)
            offset = ring.take(size)
            if offset is None:
                assert live, "an empty ring refused a piece that fits"
                continue
            assert offset >= 0 and offset + size <= capacity
            assert all(offset + size <= begin or end <= offset for begin, end in live)
            live.append((offset, offset + size))
        elif live:
            ring.free_oldest()
            live.pop(0)


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 200_000), st.integers(1, 300_000)),
        min_size=1,
        max_size=12,
    )
)
def test_extents_cover_every_tensor_at_offsets_that_agree_with_the_file(
    shapes: list[tuple[int, int, int]],
) -> None:
    ends = [0, 0, 0]
    tensors = []
    for number, (file_idx, gap, nbytes) in enumerate(shapes):
        offset = ends[file_idx] + gap
        ends[file_idx] = offset + nbytes
        tensors.append(
            TensorInfo(
                name=f"t{number}",
                shape=(nbytes,),
                type_id=0,
                type_name="F32",
                file_idx=file_idx,
                offset=offset,
                nbytes=nbytes,
            )
        )
    layout = lay_out(tensors, ends)
    for tensor in tensors:
        at = layout.tensor_offsets[tensor.name]
        (extent,) = [
            e
            for e in layout.extents
            if e.file_idx == tensor.file_idx and e.begin <= tensor.offset < e.end
        ]
        assert tensor.offset + tensor.nbytes <= extent.end
        assert at - extent.slot_offset == tensor.offset - extent.begin
    for extent in layout.extents:
        assert extent.begin % ALIGNMENT == extent.slot_offset % ALIGNMENT == 0
        assert extent.end % ALIGNMENT == 0 or extent.end == ends[extent.file_idx]
    slots = sorted((e.slot_offset, e.slot_offset + e.nbytes) for e in layout.extents)
    assert all(first[1] <= second[0] for first, second in itertools.pairwise(slots))
    assert slots[-1][1] <= layout.nbytes


def test_a_file_cut_short_while_it_is_loaded_is_named_with_both_sizes(
    model: Path, tmp_path: Path
) -> None:
    path = tmp_path / "short.gguf"
    path.write_bytes(model.read_bytes())
    file = GgufFile.open(path)
    hparams, nbytes = read_hparams(file), path.stat().st_size
    assert file.tensors
    os.truncate(path, nbytes // 2)
    with pytest.raises(ReadError, match=f"short.gguf has {nbytes // 2:,} bytes.*cut short"):
        parcel_layouts(file, hparams)


def test_golden_model_streams_with_tied_embeddings() -> None:
    reference = golden.load("llama-tied-q4_0")
    config = EngineConfig(kv_memory_nbytes=POOL, expand="never", reader="direct")
    with Engine(reference.model, config) as engine:
        expected = engine.logits(reference.sequences[2].ids).tobytes()
        plan = replace(engine.plan, resident=(False, True), ring_nbytes=1 << 20)
    with Engine(reference.model, config, plan=plan) as engine:
        assert engine.logits(reference.sequences[2].ids).tobytes() == expected


def test_draining_job_keeps_layers_in_the_memory_of_free_pages(model: Path) -> None:
    """More rows later take the pages back; the text never changes."""
    params = SamplingParams(max_tokens=30, ignore_eos=True)

    def run(engine: Engine, indices: Sequence[int]) -> tuple[dict[int, tuple[int, ...]], int]:
        for index in indices:
            ids = token_ids(40 + index)
            engine.add(Request(row_index=index, token_ids=ids, params=params))
        rows, most_kept = {}, 0
        while engine.has_work:
            rows.update({row.row_index: row.token_ids for row in engine.sweep()})
            stream = engine._model.stream
            most_kept = max(most_kept, stream.num_kept if stream else 0)
        return rows, most_kept

    with Engine(model, EngineConfig(kv_memory_nbytes=POOL)) as resident:
        expected, _ = run(resident, range(6))
    with streaming_engine(model, [False] * 6, head=False, ring_parcels=2) as engine:
        stream = engine._model.stream
        assert stream is not None
        whole = stream.sweep_nbytes
        first_rows, kept = run(engine, range(3))
        assert kept == 6
        assert stream.sweep_nbytes < whole
        read_in_sweeps = stream.totals.num_parcels
        for index in range(3, 6):
            engine.add(Request(row_index=index, token_ids=token_ids(40 + index), params=params))
        engine.sweep()
        assert stream.num_kept == 0
        assert engine._cache.num_withdrawn == 0
        assert stream.totals.num_parcels == read_in_sweeps + 7
        last_rows, kept = run(engine, [])
        assert kept == 6
    assert first_rows | last_rows == expected
