"""KV of 8 bits in the engine: a row's bytes still depend on that row alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine import EngineConfig, FinishedRow, Request, SamplingParams
from engine.devices import resolved
from engine.engine import Engine
from engine.requests import DeviceError
from kernels.ops import PAGE_TOKENS, KernelError, KvShape, KvType
from nvme import ReadError, open_reader
from tests import golden
from tests.gguf_factory import TinySizes, write_tiny_model
from tests.test_engine_invariance import prompts, run
from tests.test_prefix_reuse import request, some_tokens, with_common_prefix
from tests.test_prefix_reuse import run as run_rows
from tests.test_streaming import STREAMING, FailingReader, streaming_engine

NAMES = ["llama-q4_k_m", "qwen3-headdim96-q4_0"]


def engine_with(name: str, **settings: Any) -> Engine:
    config = EngineConfig(**{"kv_memory_nbytes": 64 << 20, "kv_type": "int8", **settings})
    return Engine(golden.load(name).model, config)


@pytest.fixture(scope="module", params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def alone(name: str) -> tuple[dict[int, FinishedRow], dict[tuple[int, int], bytes]]:
    with engine_with(name) as engine:
        return run(engine, prompts(), together=False)


@pytest.mark.parametrize(
    "settings",
    [{}, {"sweep_tokens": 16}, {"sweep_tokens": 37}, {"num_threads": 1}, {"expand": "never"}],
    ids=lambda settings: "-".join(f"{key}={value}" for key, value in settings.items()) or "plain",
)
def test_batch_gives_each_row_the_bytes_it_has_alone(
    name: str,
    alone: tuple[dict[int, FinishedRow], dict[tuple[int, int], bytes]],
    settings: dict[str, object],
) -> None:
    """Cases 31, 32, with rows of several pages in chunks of any size."""
    with engine_with(name, **settings) as engine:
        rows, logits = run(engine, prompts(), together=True)
        assert engine.record()["kv_type"] == "int8"
    assert rows == alone[0]
    assert logits == alone[1]


def test_it_is_not_the_text_of_halves(name: str) -> None:
    """Else the tests here would compare float16 with itself."""
    ids = golden.load(name).sequences[-1].ids
    assert len(ids) > PAGE_TOKENS
    with engine_with(name) as engine:
        halves, integers = engine.logits(ids, "f16"), engine.logits(ids, "int8")
    assert np.array_equal(integers[:PAGE_TOKENS], halves[:PAGE_TOKENS])
    assert not np.array_equal(integers[PAGE_TOKENS:], halves[PAGE_TOKENS:])


@pytest.mark.parametrize("kv_type", ["f32", "int8"])
def test_logits_from_a_later_token_on_are_the_last_of_all(kv_type: Any) -> None:
    ids = some_tokens(1, 200)
    with engine_with(NAMES[0], sweep_tokens=37) as engine:
        whole = engine.logits(ids, kv_type)
        for first in (0, 1, 31, 32, 100, 199):
            assert engine.logits(ids, kv_type, first=first).tobytes() == whole[first:].tobytes()
    with engine_with(NAMES[0], sweep_tokens=512) as engine:
        assert engine.logits(ids, kv_type).tobytes() == whole.tobytes()


def test_only_full_pages_are_reused_and_no_byte_changes() -> None:
    """Prompts that have 70 tokens in common: 64 of them can be taken over."""
    requests = with_common_prefix(12, some_tokens(1, 70))
    requests += [request(20 + i, some_tokens(1, 64)) for i in range(2)]
    requests = [replace(r, params=replace(r.params, max_tokens=40)) for r in requests]
    with engine_with("llama-q4_0", reuse_prefixes=False) as engine:
        expected = run_rows(engine, requests)
    with engine_with("llama-q4_0") as engine:
        rows = run_rows(engine, requests)
        again = run_rows(engine, requests)
    assert rows == again == expected
    assert {row.reused_tokens for row in rows.values()} == {0, 32, 64}
    assert {row.reused_tokens for row in again.values()} == {32, 64}


class NoIntegers:
    """A backend without KV of 8 bits."""

    default_kv_type = "f16"

    def kv_page_nbytes(self, shape: KvShape, kv_type: KvType) -> int:
        if kv_type == "int8":
            raise KernelError("no such KV cache here")
        return 1


def test_a_device_without_it_is_refused_by_name() -> None:
    ops: Any = NoIntegers()
    assert resolved(EngineConfig(), ops).kv_type == "f16"
    with pytest.raises(DeviceError, match="--kv-type int8: no such KV cache here"):
        resolved(EngineConfig(kv_type="int8"), ops)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "six.gguf"
    write_tiny_model(path, sizes=TinySizes(num_layers=6))
    return path


def tiny_requests() -> list[Request]:
    """For the tiny model of 32 ids: several pages, ends at, before and after a page's."""
    rng, params = np.random.default_rng(3), SamplingParams(max_tokens=40, ignore_eos=True)
    return [
        Request(row_index=i, token_ids=rng.integers(3, 30, n).astype(np.int32), params=params)
        for i, n in enumerate([20, 31, 32, 33, 64, 90] * 5)
    ]


@pytest.mark.parametrize("sweep_tokens", [24, 100])
def test_sweeps_that_fail_and_run_again_leave_the_bytes_as_they_are(
    model: Path, sweep_tokens: int
) -> None:
    """Reads fail in any layer, now once, now until the sweep is given up and begun anew."""
    with Engine(model, EngineConfig(kv_memory_nbytes=64 << 20, kv_type="int8")) as resident:
        expected = run_rows(resident, tiny_requests())
        few_pages = 24 * resident.kv_page_nbytes  # so that rows wait, and no layer is kept
    reader = FailingReader(open_reader("direct", [model]), set())
    with streaming_engine(
        model, [False] * 6, head=False, ring_parcels=3, reader_factory=lambda _: reader,
        config=replace(STREAMING, kv_type="int8", kv_memory_nbytes=few_pages,
                       sweep_tokens=sweep_tokens),
    ) as engine:  # fmt: skip
        for each in tiny_requests():
            engine.add(each)
        rows, given_up = {}, 0
        rng = np.random.default_rng(sweep_tokens)
        while engine.has_work:
            reader.calls = 0
            reader._fail_at = set(range(5, 1000)) if rng.random() < 0.2 else {rng.integers(1, 9)}
            try:
                finished = engine.sweep()
            except ReadError:
                given_up += 1
                continue
            rows |= {(row.row_index, 0): row for row in finished}
        assert engine.totals.num_failed_sweeps > 20
    assert given_up > 5
    assert rows == expected


def test_a_page_takes_about_half_and_each_row_its_open_page(model: Path) -> None:
    plans = {}
    for kv_type in ("f16", "int8"):
        config = EngineConfig(kv_memory_nbytes=1 << 20, kv_type=kv_type, sweep_tokens=8)  # type: ignore[arg-type]
        with Engine(model, config) as engine:
            plans[kv_type] = engine.plan
    halves, integers = plans["f16"], plans["int8"]
    assert integers.kv_pages > 1.7 * halves.kv_pages
    assert integers.max_rows == halves.max_rows == 8
    half_page_nbytes = halves.kv_nbytes // halves.kv_pages
    assert integers.activations_nbytes == halves.activations_nbytes + 8 * half_page_nbytes
