"""The engine on the CUDA backend: golden logits, greedy tokens, and rows that depend on nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine import EngineConfig, Request, SamplingParams
from engine.engine import Engine
from engine.extents import ALIGNMENT
from engine.gguf_file import GgufFile
from engine.planner import Plan
from engine.weight_stream import parcel_layouts
from kernels.ops import PAGE_TOKENS
from nvme import Reader, ReadError, open_reader
from scripts.synth_gguf import Shape, write_model
from tests import golden
from tests.test_cuda_ops import KV_TYPES, open_ops

cp = pytest.importorskip("cupy", reason="CuPy is not installed")
pytestmark = pytest.mark.gpu

MAX_ERROR = 3e-2  # half operands
MAX_INT8_CHANGE = 0.15  # of logits
POOL = 64 << 20


@pytest.fixture(scope="module")
def ops() -> Iterator[Any]:
    made = open_ops()
    yield made
    made.close()


class OwnOps:
    """The backend of a whole module, which an engine must not close."""

    def __init__(self, ops: Any) -> None:
        self._ops = ops

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def close(self) -> None:
        pass


def open_engine(ops: Any, name: str, **settings: Any) -> Engine:
    settings = {"kv_type": "f16", "kv_memory_nbytes": POOL, "expand": "never", **settings}
    return Engine(golden.load(name).model, EngineConfig(**settings), ops=OwnOps(ops))


def logit_error(engine: Engine, reference: golden.Golden, kv_type: Any) -> float:
    errors = []
    for sequence in reference.sequences:
        logits = engine.logits(sequence.ids, kv_type=kv_type)
        errors.append(np.abs(logits[sequence.positions] - sequence.logits).max())
    return float(max(errors))


def run_rows(engine: Engine, requests: list[Request]) -> dict[int, tuple[int, ...]]:
    for request in requests:
        engine.add(request)
    finished = {}
    while engine.has_work:
        finished.update({row.row_index: row for row in engine.sweep()})
    assert all(row.status == "ok" for row in finished.values())
    return {index: (row.token_ids, row.logprobs) for index, row in finished.items()}


@pytest.mark.parametrize("name", golden.NAMES)
def test_logits_and_greedy_tokens_match_the_reference(
    ops: Any, name: str, record_property: pytest.RecordProperty
) -> None:
    reference = golden.load(name)
    with open_engine(ops, name) as engine:
        error = logit_error(engine, reference, "f16")
        error_f32 = logit_error(engine, reference, "f32")
        print(f"max abs error {name}: {error:.2e} with f16 KV, {error_f32:.2e} with f32 KV")
        ids = reference.sequences[1].ids.astype(np.int32)
        params = SamplingParams(max_tokens=len(reference.greedy_ids), ignore_eos=True)
        rows = run_rows(engine, [Request(row_index=0, token_ids=ids, params=params)])
    assert error <= MAX_ERROR and error_f32 <= MAX_ERROR
    close = np.flatnonzero(reference.greedy_margin < 2 * error)
    comparable = int(close[0]) if len(close) else len(reference.greedy_ids)
    assert list(rows[0][0][:comparable]) == list(reference.greedy_ids[:comparable])


def prompts() -> list[Request]:
    rng = np.random.default_rng(5)
    rows = []
    for index in range(40):
        temperature = float(index % 2)
        params = SamplingParams(
            max_tokens=int(rng.integers(3, 12)),
            logprobs=3,
            ignore_eos=True,
            temperature=temperature,
        )
        ids = rng.integers(3, 500, int(rng.integers(1, 90))).astype(np.int32)
        rows.append(Request(row_index=index, token_ids=ids, params=params, job_seed=7))
    return rows


@pytest.mark.parametrize("kv_type", ["f16", "int8"])
@pytest.mark.parametrize("name", ["llama-q4_k_m", "qwen3-headdim96-q4_0"])
def test_rows_alone_in_a_batch_shuffled_and_in_chunks_are_the_same(
    ops: Any, name: str, kv_type: str
) -> None:
    """Case 21: tokens and log-probabilities to the last bit, in both weight layouts."""
    requests = prompts()
    with open_engine(ops, name, kv_type=kv_type) as engine:
        alone: dict[int, Any] = {}
        for request in requests:
            alone |= run_rows(engine, [request])
        assert run_rows(engine, requests) == alone
        shuffled = [requests[i] for i in np.random.default_rng(1).permutation(len(requests))]
        assert run_rows(engine, shuffled) == alone
    for settings in ({"sweep_tokens": 7}, {"sweep_tokens": 300}, {"expand": "always"}):
        with open_engine(ops, name, **{"kv_type": kv_type, **settings}) as engine:
            assert run_rows(engine, requests) == alone, settings


@pytest.mark.parametrize("name", ["llama-q4_k_m", "qwen3-headdim96-q4_0"])
def test_kv_of_8_bits_is_that_of_halves_for_a_page_and_near_it_from_then_on(
    ops: Any, name: str
) -> None:
    ids = golden.load(name).sequences[-1].ids
    with open_engine(ops, name, kv_type="int8") as engine:
        halves, integers = engine.logits(ids, "f16"), engine.logits(ids, "int8")
    assert integers[:PAGE_TOKENS].tobytes() == halves[:PAGE_TOKENS].tobytes()
    assert (integers[PAGE_TOKENS:] != halves[PAGE_TOKENS:]).any(axis=1).all()
    assert np.abs(integers - halves).max() <= MAX_INT8_CHANGE


PLACES = {
    "host": ("hhhhhh", "h"),
    "disk": ("dddddd", "d"),
    "one disk layer": ("hhhdhh", "h"),
    "all tiers": ("rhdrhd", "d"),
    "resident head": ("hdhdhd", "r"),
}


def tiered_plan(engine: Engine, path: Path, letters: tuple[str, str], ring_parcels: float) -> Plan:
    """The engine's plan with its layers and head in these tiers."""
    layers, head = letters
    layouts, head_layout = parcel_layouts(GgufFile.open(path), engine.hparams)
    assert head_layout is not None and len(layouts) == len(layers)
    sizes = [(layout.nbytes, letter) for layout, letter in zip(layouts, layers, strict=True)]
    sizes.append((head_layout.nbytes, head))
    largest = max(nbytes for nbytes, _ in sizes)
    return replace(
        engine.plan,
        resident=tuple(letter == "r" for letter in layers),
        head_resident=head == "r",
        host=tuple(letter == "h" for letter in layers),
        head_in_host=head == "h",
        ring_nbytes=int(ring_parcels * largest) // ALIGNMENT * ALIGNMENT,
        streamed_nbytes=sum(nbytes for nbytes, letter in sizes if letter != "r"),
        disk_nbytes=sum(nbytes for nbytes, letter in sizes if letter == "d"),
    )


@pytest.fixture(scope="module")
def six_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a head of its own, so that some can stream and some stay."""
    path = tmp_path_factory.mktemp("model") / "six.gguf"
    shape = Shape(num_layers=6, hidden=256, ffn=512, num_heads=4, num_kv_heads=2)
    write_model(path, shape, type_name="Q4_K")
    return path


@pytest.mark.parametrize("ring_parcels", [1, 2, 3.5])
@pytest.mark.parametrize("places", PLACES)
def test_streamed_weights_give_the_bytes_of_resident_ones(
    ops: Any, six_layers: Path, places: str, ring_parcels: float
) -> None:
    """From pinned memory, off the disk through it, and both, in rings of one parcel and more."""
    requests = prompts()
    config = EngineConfig(kv_memory_nbytes=POOL, expand="never", sweep_tokens=50, reader="direct")
    with Engine(six_layers, config, ops=OwnOps(ops)) as engine:
        plan = tiered_plan(engine, six_layers, PLACES[places], ring_parcels)
        expected = run_rows(engine, requests)
    with Engine(six_layers, config, ops=OwnOps(ops), plan=plan) as engine:
        for _ in range(2):
            assert run_rows(engine, requests) == expected
        assert engine.record()["placement"] == " ".join(PLACES[places])
        sweeps = engine.sweeps.totals
        assert sweeps.streamed_nbytes == sweeps.num_sweeps * plan.streamed_nbytes
        stream = engine._model.stream
        assert stream is not None
        link = stream.link_stats()  # what is there ahead of its sweep included
        assert link.copied_nbytes >= sweeps.streamed_nbytes and sweeps.copy_busy_s > 0
        read_in_sweeps = sweeps.direct_nbytes + sweeps.buffered_nbytes
        assert (read_in_sweeps > 0) == (plan.disk_nbytes > 0)


def test_a_read_that_fails_once_is_tried_again_and_one_that_stays_ends_the_sweep(
    ops: Any, six_layers: Path
) -> None:
    requests = prompts()
    config = EngineConfig(kv_memory_nbytes=POOL, expand="never", reader="direct")
    with Engine(six_layers, config, ops=OwnOps(ops)) as engine:
        plan = tiered_plan(engine, six_layers, PLACES["all tiers"], 2)
        expected = run_rows(engine, requests)
    failing: list[FailingReader] = []

    def open_failing(paths: Any) -> FailingReader:
        failing.append(FailingReader(open_reader("direct", paths)))
        return failing[0]

    with Engine(
        six_layers, config, ops=OwnOps(ops), plan=plan, reader_factory=open_failing
    ) as engine:
        failing[0].failures_left = 1
        assert run_rows(engine, requests) == expected
        assert engine.totals.num_failed_sweeps == 1
        failing[0].failures_left = 1000
        engine.add(requests[0])
        with pytest.raises(ReadError, match="planted"):
            engine.sweep()


class FailingReader:
    """Fails as often as told, when a read is waited for."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self.failures_left = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)

    def wait(self, ticket: Any) -> None:
        self._reader.wait(ticket)
        if self.failures_left:
            self.failures_left -= 1
            raise ReadError("planted")


@pytest.mark.parametrize("kv_type", ["f16", "int8"])
def test_small_sweeps_are_replayed_and_give_the_same_bytes(ops: Any, kv_type: str) -> None:
    """A row alone, whose sweeps are recorded; the same among others, too many to be recorded."""
    from kernels.cuda import launch

    rng = np.random.default_rng(8)
    params = SamplingParams(max_tokens=40, ignore_eos=True, logprobs=2)
    requests = [
        Request(row_index=i, token_ids=rng.integers(3, 500, 240).astype(np.int32), params=params)
        for i in range(24)
    ]
    with open_engine(ops, "llama-q4_k_m", kv_type=kv_type) as engine:
        together = run_rows(engine, requests)
        before, early_before = ops.recordings.num_replayed, launch.num_early
        for request in requests[:3]:
            alone = run_rows(engine, [request])
            assert alone[request.row_index] == together[request.row_index]
        assert ops.recordings.num_replayed - before > 90
        assert (launch.num_early > early_before) == launch.can_overlap(0)


def test_short_prompts_in_pools_of_all_types_are_computed_anew(ops: Any) -> None:
    """Logits come from a pool that lives for one call: nothing recorded may outlive it."""
    ids = np.arange(5, 13, dtype=np.int32)
    with open_engine(ops, "llama-q4_k_m") as engine:
        first = {kv_type: engine.logits(ids, kv_type).tobytes() for kv_type in KV_TYPES}
        before = ops.recordings.num_replayed
        for kv_type in ("f32", "f16", "int8", "f16", "int8", "int8", "f32", "f32"):
            assert engine.logits(ids, kv_type).tobytes() == first[kv_type]
        assert ops.recordings.num_replayed == before
    assert first["int8"] == first["f16"] != first["f32"]


def test_device_memory_does_not_grow_with_rows_of_changing_length(ops: Any) -> None:
    """Case 107: rows of 10 and of 300 tokens, in turn, after one of each."""
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    rng = np.random.default_rng(3)
    lengths = [10, 300] * 40
    requests = [
        Request(row_index=i, token_ids=rng.integers(3, 500, n).astype(np.int32), params=params)
        for i, n in enumerate(lengths)
    ]
    with open_engine(ops, "llama-q4_k_m") as engine:
        run_rows(engine, requests[:2])
        run_rows(engine, requests)
        before = cp.get_default_memory_pool().total_bytes()
        for request in requests:
            run_rows(engine, [request])
        assert cp.get_default_memory_pool().total_bytes() == before
