"""Decoding rows that share pages on the CUDA backend: the same bytes together and one by one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kernels.cuda import sharing, tasks
from kernels.ops import PAGE_TOKENS, Batch, HeadParams, KvShape
from tests.test_cuda_engine import open_engine
from tests.test_cuda_ops import KV_TYPES, open_ops
from tests.test_cuda_tasks import Spans, batch_of
from tests.test_prefix_reuse import run, with_common_prefix

cp = pytest.importorskip("cupy", reason="CuPy is not installed")
pytestmark = pytest.mark.gpu

NUM_LAYERS, NUM_KV_HEADS = 2, 2
ALWAYS, NEVER = 1, 1 << 40  # of LEAST_SAVED


@pytest.fixture(scope="module")
def ops() -> Iterator[Any]:
    made = open_ops()
    yield made
    made.close()


def head_of(group: int, length: int) -> HeadParams:
    return HeadParams(
        num_heads=group * NUM_KV_HEADS,
        num_kv_heads=NUM_KV_HEADS,
        key_length=length,
        value_length=length,
        norm_eps=1e-5,
    )


def shape_of(head: HeadParams) -> KvShape:
    return KvShape(
        num_layers=NUM_LAYERS,
        num_kv_heads=head.num_kv_heads,
        key_length=head.key_length,
        value_length=head.value_length,
    )


def random_pool(ops: Any, batch: Batch, head: HeadParams, kv_type: str) -> Any:
    pool = ops.kv_pool(
        shape_of(head),
        num_pages=int(batch.page_table.max()) + 1,
        kv_type=kv_type,
        num_rows=len(batch.page_table),
    )
    rng = np.random.default_rng(5)
    for array in (pool.keys, pool.values, pool.open_pages):
        if array.dtype == np.int8:
            array[...] = cp.asarray(rng.integers(-127, 128, array.shape, np.int8))
        else:
            numbers = rng.standard_normal(array.shape, dtype=np.float32)
            array[...] = cp.asarray(numbers.astype(array.dtype))
    scales = rng.uniform(0.002, 0.02, pool.scales.shape)
    pool.scales[...] = cp.asarray(scales.astype(np.float16))
    return pool


def queries(batch: Batch, head: HeadParams) -> Any:
    rng = np.random.default_rng(len(batch.positions))
    shape = (batch.num_tokens, head.num_heads * head.key_length)
    return cp.asarray(2 * rng.standard_normal(shape, dtype=np.float32))


def attend(ops: Any, batch: Batch, head: HeadParams, pool: Any) -> tuple[bytes, tasks.Tasks]:
    """Attention of one layer into poisoned memory: its bytes, and the tasks it was split into."""
    plan, q = ops.plan(batch, shape_of(head), head.num_heads), queries(batch, head)
    out = cp.full((batch.num_tokens, head.num_heads * head.value_length), cp.nan, cp.float32)
    for partials in ops._partial_buffers(head.value_length):
        partials[...] = cp.nan
    ops.attention(0, plan, q, head, batch, pool, 1, out)
    return cp.asnumpy(out).tobytes(), plan.host_tasks


def of_groups(*groups: tuple[int, int], alone: Spans = ()) -> Batch:  # type: ignore[assignment]
    """Rows that decode behind prefixes of so many tokens, and others with pages of their own.

    groups: rows and prefix of each; their tokens lie 0 to 290 positions behind it
    """
    spans, counts, source = [], [], []
    for num_rows, prefix in groups:
        first = len(spans)
        for row in range(num_rows):
            position = prefix + row * 29 % 291
            spans.append((position, position + 1))
            counts.append(prefix // PAGE_TOKENS)
            source.append(first)
    own = list(alone)
    return batch_of(spans + own, counts + [0] * len(own), source + [0] * len(own))


def branching() -> Batch:
    """Twelve rows behind 800 tokens, of which five and three go on alike."""
    batch = of_groups((12, 800), alone=[(64, 104), (900, 901)])
    positions = batch.positions.copy()
    positions[:12] = np.arange(12) + 1600
    table = np.concatenate([batch.page_table, np.full((14, 22), -1, np.int32)], axis=1)
    most = table.max() + 1
    table[:12, 25:] = np.arange(most, most + 12 * (table.shape[1] - 25)).reshape(12, -1)
    table[1:5, :49] = table[0, :49]
    table[7:9, :40] = table[6, :40]
    return replace(batch, positions=positions, page_table=table)


BATCHES = {
    "2 rows": of_groups((2, 300)),
    "5 rows": of_groups((5, 1000)),
    "40 rows": of_groups((40, 777)),
    "three groups": of_groups((7, 256), (1, 700), (12, 1530), (3, 530), alone=[(512, 560)]),
    "branching": branching(),
}


@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("kv_type", KV_TYPES)
@pytest.mark.parametrize("name", BATCHES)
def test_sharing_changes_no_byte(
    ops: Any, monkeypatch: pytest.MonkeyPatch, name: str, kv_type: str, group: int
) -> None:
    batch, head = BATCHES[name], head_of(group, 64)
    pool = random_pool(ops, batch, head, kv_type)
    monkeypatch.setattr(sharing, "LEAST_SAVED", NEVER)
    expected, alone = attend(ops, batch, head, pool)
    monkeypatch.setattr(sharing, "LEAST_SAVED", ALWAYS)
    out, together = attend(ops, batch, head, pool)
    assert out == expected
    assert np.isfinite(np.frombuffer(out, np.float32)).all()
    assert len(together.shared) > 0 == len(alone.shared)
    read = together.pages_read(group, NUM_KV_HEADS)
    assert read < alone.pages_read(group, NUM_KV_HEADS)


@pytest.mark.parametrize(
    ("kv_type", "group", "length"), [("f16", 3, 128), ("int8", 16, 128), ("f32", 40, 80)]
)
def test_heads_of_other_sizes_and_groups_change_no_byte(
    ops: Any, monkeypatch: pytest.MonkeyPatch, kv_type: str, group: int, length: int
) -> None:
    batch, head = BATCHES["three groups"], head_of(group, length)
    pool = random_pool(ops, batch, head, kv_type)
    monkeypatch.setattr(sharing, "LEAST_SAVED", NEVER)
    expected, _ = attend(ops, batch, head, pool)
    monkeypatch.setattr(sharing, "LEAST_SAVED", ALWAYS)
    out, together = attend(ops, batch, head, pool)
    assert out == expected
    assert len(together.shared) > 0


@pytest.mark.parametrize("kv_type", ["f16", "int8"])
def test_rounds_change_no_byte(ops: Any, monkeypatch: pytest.MonkeyPatch, kv_type: str) -> None:
    """Partials of a few rows at a time."""
    batch, head = BATCHES["40 rows"], head_of(8, 64)
    pool = random_pool(ops, batch, head, kv_type)
    monkeypatch.setattr(sharing, "LEAST_SAVED", NEVER)
    expected, _ = attend(ops, batch, head, pool)
    monkeypatch.setattr(sharing, "LEAST_SAVED", ALWAYS)
    monkeypatch.setattr(tasks, "PARTIALS_NBYTES", 200_000)
    out, together = attend(ops, batch, head, pool)
    assert out == expected
    assert len(together.rounds) > 3


def replay(ops: Any, batches: list[Batch], head: HeadParams, pool: Any) -> tuple[list[bytes], int]:
    """Sweeps of two layers, recorded where they may be: their bytes, and how many were replayed."""
    key, before = object(), ops.recordings.num_replayed
    q = cp.empty_like(queries(batches[0], head))
    out = cp.zeros((NUM_LAYERS, *q.shape), cp.float32)
    found = []
    for step, batch in enumerate(batches):
        q[...] = queries(batch, head) * (1 + step)
        out[...] = cp.nan
        plan = ops.plan(batch, shape_of(head), head.num_heads)

        def body(worker: int, plan: Any = plan, batch: Batch = batch) -> None:
            for layer in range(NUM_LAYERS):
                ops.attention(worker, plan, q, head, batch, pool, layer, out[layer])

        ops.run_sweep(plan, key, body)
        found.append(cp.asnumpy(out).tobytes())
    return found, ops.recordings.num_replayed - before


def one_by_one(
    ops: Any, batches: list[Batch], head: HeadParams, pool: Any, monkeypatch: pytest.MonkeyPatch
) -> list[bytes]:
    """The same sweeps, none recorded, and no row beside another's."""
    with monkeypatch.context() as patch:
        patch.setattr(sharing, "LEAST_SAVED", NEVER)
        patch.setattr(ops, "run_sweep", lambda plan, key, body: ops.run(body))
        return replay(ops, batches, head, pool)[0]


def steps(batch: Batch, count: int) -> list[Batch]:
    return [replace(batch, positions=batch.positions + step) for step in range(count)]


@pytest.mark.parametrize("kv_type", KV_TYPES)
def test_replayed_sweeps_share_the_pages_of_their_own_rows(
    ops: Any, monkeypatch: pytest.MonkeyPatch, kv_type: str
) -> None:
    """Two groups take turns with one whose rows go on elsewhere; rows come into new blocks."""
    monkeypatch.setattr(sharing, "LEAST_SAVED", ALWAYS)
    head, room = head_of(8, 64), 40
    spans = [(p, p + 1 + room) for p in (600, 610, 740, 1001, 760, 770, 790)]
    whole = batch_of(spans, [18, 18, 18, 18, 17, 17, 17], [0, 0, 0, 0, 4, 4, 4])
    rows = np.arange(7, dtype=np.int32)
    batch = replace(
        whole,
        token_ids=rows,
        positions=np.array([begin for begin, _ in spans], np.int32),
        rows=rows,
        segments=np.stack([rows, rows + 1], axis=1),
        logit_indices=rows,
    )
    others = replace(batch, rows=rows[[0, 4, 1, 5, 2, 6, 3]])
    others = replace(others, positions=batch.positions[others.rows])
    batches = [
        each for pair in zip(steps(batch, room), steps(others, room), strict=True) for each in pair
    ]
    pool = random_pool(ops, batch, head, kv_type)
    expected = one_by_one(ops, batches, head, pool, monkeypatch)
    out, num_replayed = replay(ops, batches, head, pool)
    assert out == expected
    assert num_replayed > room


def test_a_row_that_grows_by_blocks_is_replayed_with_its_own_partials(
    ops: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sweeps of 3 to 8 blocks have the same recording, of tables that are as long."""
    head, num_pages = head_of(8, 64), 64
    positions = [700, 701, *range(766, 770), *range(1022, 1026), *range(1279, 1282), 2047]
    row = np.zeros(1, np.int32)
    table = np.random.default_rng(1).permutation(num_pages).astype(np.int32)[None]
    batches = [
        Batch(
            token_ids=row,
            positions=np.array([position], np.int32),
            rows=row,
            page_table=table,
            segments=np.array([[0, 1]], np.int32),
            logit_indices=row,
        )
        for position in positions
    ]
    pool = random_pool(ops, batches[0], head, "f16")
    expected = one_by_one(ops, batches, head, pool, monkeypatch)
    out, num_replayed = replay(ops, batches, head, pool)
    assert out == expected
    assert num_replayed >= 8


@pytest.mark.parametrize("kv_type", ["f16", "int8"])
def test_rows_of_an_engine_end_with_the_same_bytes(
    ops: Any, monkeypatch: pytest.MonkeyPatch, kv_type: str
) -> None:
    prefix, seen, counts = list(range(3, 303)), {}, {}
    make = tasks.attention_tasks
    for least in (NEVER, ALWAYS):
        made: list[int] = []

        def count(*args: Any, made: list[int] = made) -> tasks.Tasks:
            found = make(*args)
            made.append(len(found.shared))
            return found

        monkeypatch.setattr(sharing, "LEAST_SAVED", least)
        monkeypatch.setattr(tasks, "attention_tasks", count)
        with open_engine(ops, "llama-q4_k_m", kv_type=kv_type) as engine:
            seen[least] = run(engine, with_common_prefix(24, prefix))
        counts[least] = sum(made)
    assert seen[ALWAYS] == seen[NEVER]
    assert all(row.status == "ok" for row in seen[NEVER].values())
    assert counts[ALWAYS] > 0 == counts[NEVER]
