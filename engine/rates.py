"""What this machine's sweeps and disk give, measured by short runs of a little model.

It has the shapes of the model to run, its tensor types and random weights; as many layers as the
caches do not hold, and where one layer is more than a probe should wait for, a smaller one.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engine.costs import DEFAULT_RATES, EXPANDED, Curve, Rates
from engine.hparams import Hparams
from engine.little_model import (
    TYPES,
    USUAL_SHAPE,
    layer_values,
    little_hparams,
    random_floats,
    random_weights,
)
from engine.model import Model, kv_shape
from engine.requests import Request, SamplingParams
from engine.sampler import RowSampler, choose
from kernels.ops import PAGE_TOKENS, Batch, HeadParams, KvType, Ops
from nvme.probe import choose_transfer, measure_disk

_REPEATS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Effort:
    """How much is run.

    num_values: most weights of the little model's layers, and of its head
    tokens: of the sweeps that are timed; outputs: rows that the head is timed for
    rows, context: that attend, and to how many positions
    """

    num_values: int
    tokens: tuple[int, ...]
    outputs: tuple[int, ...]
    rows: int
    context: int


EFFORTS = {
    "cpu": Effort(
        num_values=32 << 20,
        tokens=(1, 8, 32, 64, 128, 256),
        outputs=(1, 8, 32, 128),
        rows=8,
        context=512,
    ),
    "cuda": Effort(
        num_values=1 << 29,
        tokens=(1, 8, 64, 256, 512, 1024, 2048, 4096),
        outputs=(1, 8, 64, 256),
        rows=32,
        context=1024,
    ),
}
TILE_TOKENS = 256  # of a device whose products are computed in whole tiles


def probe_rates(
    ops: Ops,
    type_names: Iterable[str],
    files: Sequence[Path],
    cache_dir: str | Path,
    *,
    hparams: Hparams = USUAL_SHAPE,
    head_type: str | None = None,
    kv_type: KvType | None = None,
    expand: bool | None = None,
) -> Rates:
    """Measure layers of each type by tokens, the head, attention, the choice of tokens, and links.

    type_names: of the model's matrices
    files: read for about a second; their pages leave the page cache; none of them, no disk probe
    hparams: the model's shapes; head_type: of its output head, F16 if not said
    expand: whether weights are kept expanded; None measures both
    Raises ReadError, OSError: the files cannot be read.
    """
    effort, kinds = EFFORTS[ops.name], [] if expand else sorted(set(type_names))
    if expand is not False:
        kinds.append(EXPANDED)
    kv_type, head_type = kv_type or ops.default_kv_type, head_type or "F16"
    models = {kind: _LittleModel(ops, hparams, kind, head_type, kv_type, effort) for kind in kinds}
    little = models[kinds[0]]
    layer_s = {kind: model.layer_s() for kind, model in models.items()}
    decode_position_s, prefill_position_s = little.position_s()
    head_s, choice_s = little.head_s(), _choice_s(ops, hparams.vocab_size)
    del models, little  # a device's memory is free again before its link is measured
    return Rates(
        disk_nbytes_per_s=disk_rate(files, cache_dir) if files else DEFAULT_RATES.disk_nbytes_per_s,
        link_nbytes_per_s=_link_rate(ops),
        values_per_s={kind: 1 / max(curve.points[0][1], 1e-15) for kind, curve in layer_s.items()},
        flops_per_s=float(np.median([_flops_per_s(curve) for curve in layer_s.values()])),
        layer_s=layer_s,
        head_s=head_s,
        decode_position_s=decode_position_s,
        prefill_position_s=prefill_position_s,
        choice_s=choice_s,
        tile_tokens=_tile_tokens(layer_s[kinds[0]]) if ops.name == "cuda" else 1,
    )


def disk_rate(files: Sequence[Path], cache_dir: str | Path) -> float:
    """Bytes per second of direct reads of the largest file, buffered where those are refused."""
    largest = max(files, key=lambda path: path.stat().st_size)
    disk = measure_disk(largest, choose_transfer(files, cache_dir))
    return disk.direct_bytes_per_s or disk.buffered_bytes_per_s


def _link_rate(ops: Ops) -> float | None:
    if ops.name != "cuda":
        return None
    from engine.cuda_link import measure_link

    return measure_link()


class _LittleModel:
    """Layers and head of random weights of one type, and a cache for what attends.

    kind: a type name, or EXPANDED
    """

    def __init__(
        self, ops: Ops, hparams: Hparams, kind: str, head_type: str, kv_type: KvType, effort: Effort
    ) -> None:
        self._ops, self._effort, self._of = ops, effort, hparams
        expand, block_size = kind == EXPANDED, TYPES[head_type].block_size
        if not expand:
            block_size = max(block_size, TYPES[kind].block_size)
        self._hparams = little = little_hparams(hparams, effort.num_values, block_size)
        self._model = Model(
            little,
            random_weights(ops, little, "F16" if expand else kind, head_type, expand),
            ops,
            max_tokens=max(*effort.tokens, effort.rows, effort.context // 2),
            max_logits=max(effort.outputs),
        )
        self._pages_per_row = effort.context // PAGE_TOKENS + 1
        self._num_pages = effort.rows * self._pages_per_row
        shape = kv_shape(little)
        most_rows = max(*effort.tokens, effort.rows)
        self._pool = ops.kv_pool(
            shape, num_pages=self._num_pages, kv_type=kv_type, num_rows=most_rows
        )

    def layer_s(self) -> Curve:
        """Seconds per weight, by tokens that attend to nothing but themselves."""
        values = self._hparams.num_layers * layer_values(self._hparams)
        points = ((n, self._sweep_s(self._decoding(n, 0)) / values) for n in self._effort.tokens)
        return _rising(points)

    def position_s(self) -> tuple[float, float]:
        """Seconds per layer and position, of single tokens and of a piece of a prompt."""
        effort = self._effort
        single, piece = self._decoding(effort.rows, effort.context - 1), self._piece()
        return self._attention_s(single), self._attention_s(piece)

    def head_s(self) -> Curve:
        """Seconds per weight of the head, by rows."""
        ops, hparams, model = self._ops, self._hparams, self._model
        weights, buffers = model.weights, model.buffers
        x = ops.put(random_floats((max(self._effort.outputs), hparams.hidden)))

        def seconds(rows: int) -> float:
            batch = self._decoding(rows, 0)
            plan = ops.plan(batch, kv_shape(hparams), hparams.num_heads)
            ids = np.arange(rows, dtype=np.int32)
            normed, logits = buffers.head_normed[:rows], buffers.logits[:rows]
            head, norm, eps = weights.head, weights.output_norm, hparams.norm_eps

            def body(worker: int) -> None:
                ops.head(worker, plan, x[:rows], norm, eps, head, ids, normed, logits)

            return _median_s(ops, lambda: ops.run(body))

        values = hparams.vocab_size * hparams.hidden
        return _rising((n, seconds(n) / values) for n in self._effort.outputs)

    def _attention_s(self, batch: Batch) -> float:
        ops, h = self._ops, self._hparams
        head = HeadParams(
            num_heads=h.num_heads,
            num_kv_heads=h.num_kv_heads,
            key_length=h.key_length,
            value_length=h.value_length,
            norm_eps=h.norm_eps,
        )
        q = ops.put(random_floats((batch.num_tokens, h.num_heads * h.key_length)))
        out = ops.empty(batch.num_tokens, h.num_heads * h.value_length)
        plan = ops.plan(batch, kv_shape(h), h.num_heads)

        def body(worker: int) -> None:
            for layer in range(h.num_layers):
                ops.attention(worker, plan, q, head, batch, self._pool, layer, out)

        positions = int(batch.positions.sum()) + batch.num_tokens
        layer_s = _median_s(ops, lambda: ops.run(body)) / h.num_layers
        return layer_s / positions * self._of.num_heads / h.num_heads

    def _sweep_s(self, batch: Batch) -> float:
        return _median_s(self._ops, lambda: self._model.forward(batch, self._pool))

    def _decoding(self, num_rows: int, position: int) -> Batch:
        """One token at `position` of each row. Short rows may share pages: nobody reads them."""
        ids = np.arange(num_rows, dtype=np.int32)
        pages = position // PAGE_TOKENS + 1
        table = (np.arange(num_rows * pages, dtype=np.int32) % self._num_pages).reshape(-1, pages)
        return _batch(np.full(num_rows, position), ids, table, np.stack([ids, ids + 1], axis=1))

    def _piece(self) -> Batch:
        """The later half of one row's prompt."""
        end = self._effort.context
        positions = np.arange(end // 2, end)
        table = np.arange(self._pages_per_row, dtype=np.int32)[None]
        rows = np.zeros(len(positions), np.int32)
        return _batch(positions, rows, table, np.array([[0, len(positions)]], np.int32))


def _batch(
    positions: np.ndarray, rows: np.ndarray, table: np.ndarray, segments: np.ndarray
) -> Batch:
    return Batch(
        token_ids=np.zeros(len(positions), np.int32),
        positions=positions.astype(np.int32),
        rows=rows,
        page_table=table,
        segments=segments,
        logit_indices=np.empty(0, np.int32),
    )


def _choice_s(ops: Ops, vocab_size: int, num_rows: int = 16) -> float:
    """Seconds per row of choosing its next token, greedily."""
    logits = ops.put(random_floats((num_rows, vocab_size)))
    ids, params = np.zeros(1, np.int32), SamplingParams()
    rows = [
        RowSampler(Request(row_index=i, token_ids=ids, params=params), frozenset())
        for i in range(num_rows)
    ]

    def work() -> None:
        choose(logits, rows, num_tokens=vocab_size, ops=ops)

    return _median_s(ops, work) / num_rows


def _rising(points: Iterable[tuple[int, float]]) -> Curve:
    """Less work never takes more time: a disturbance only makes a measurement longer."""
    amounts, seconds = zip(*points, strict=True)
    shortest = [*itertools.accumulate(reversed(seconds), min)]
    return Curve(tuple(zip(amounts, reversed(shortest), strict=True)))


def _tile_tokens(layer_s: Curve) -> int:
    """A tile, where one token takes as long as a tile of them; else no tiles."""
    return TILE_TOKENS if layer_s.at(1) > 0.8 * layer_s.at(TILE_TOKENS) else 1


def _flops_per_s(layer_s: Curve) -> float:
    """Of all tokens that were added: one disturbed time counts little."""
    (few, few_s), (many, many_s) = layer_s.points[0], layer_s.points[-1]
    return 2 * (many - few) / max(many_s - few_s, 1e-15)


def _median_s(ops: Ops, work: Callable[[], object]) -> float:
    def timed() -> float:
        started = time.perf_counter()
        work()
        ops.synchronize()
        return time.perf_counter() - started

    timed()
    return float(np.median([timed() for _ in range(_REPEATS)]))
