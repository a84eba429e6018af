"""The tensors of a hollow model (scripts.synth_gguf --hollow), made as they are read.

Random blocks, of the size that the file's would have; a tensor repeats a stretch of them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from engine.gguf_file import GgufFile
from engine.hparams import read_hparams
from nvme import ReadRequest
from scripts.simulated_ops import BlankReader
from scripts.synth_blocks import Bytes, random_weights
from scripts.synth_gguf import MIXES, Shape, Tensor, plan_tensors

_STRETCH_NBYTES = 16 << 20


class FilledReader(BlankReader):
    """Fills what is asked for. model: one file, hollow, of types mixed as `mix` says"""

    name = "filled"
    path_taken = "blocks are made as they are read"

    def __init__(self, model: Path, mix: str = "Q4_K_M") -> None:
        super().__init__([model])
        file = GgufFile.open(model)
        h = read_hparams(file)
        shape = Shape(
            num_layers=h.num_layers,
            hidden=h.hidden,
            ffn=h.ffn,
            num_heads=h.num_heads,
            num_kv_heads=h.num_kv_heads,
            vocab_size=h.vocab_size,
        )
        tensors = {tensor.name: tensor for tensor in plan_tensors(shape, MIXES[mix], mix)}
        placed = sorted((info.offset, name) for name, info in file.tensors.items())
        self._offsets = [offset for offset, _ in placed]
        self._tensors = [tensors[name] for _, name in placed]
        self._stretches: dict[tuple[str, float], Bytes] = {}

    def submit(self, requests: Sequence[ReadRequest]) -> None:
        for request in requests:
            self._fill(request.offset, request.out)

    def _fill(self, offset: int, out: Bytes) -> None:
        end, at = offset + len(out), max(0, bisect_right(self._offsets, offset) - 1)
        while at < len(self._tensors) and self._offsets[at] < end:
            first, tensor = self._offsets[at], self._tensors[at]
            begin, stop = max(first, offset), min(first + tensor.nbytes, end)
            if begin < stop:
                _repeat(self._stretch(tensor), begin - first, out[begin - offset : stop - offset])
            at += 1

    def _stretch(self, tensor: Tensor) -> Bytes:
        key = (tensor.type.name, tensor.rms if len(tensor.shape) > 1 else 0.0)
        if key not in self._stretches:
            self._stretches[key] = _random(tensor, len(self._stretches))
        return self._stretches[key]


def _random(tensor: Tensor, seed: int) -> Bytes:
    if len(tensor.shape) == 1:
        gains = np.random.default_rng(seed).normal(1.0, 0.05, tensor.shape)
        return gains.astype("<f4").view(np.uint8)
    num_blocks = min(tensor.num_blocks, _STRETCH_NBYTES // tensor.type.block_nbytes)
    return random_weights(np.random.SFC64(seed), tensor.type, num_blocks, tensor.rms)


def _repeat(stretch: Bytes, phase: int, out: Bytes) -> None:
    """out: of a tensor that repeats `stretch`, the bytes from byte `phase` on."""
    begin = 0
    while begin < len(out):
        at = (phase + begin) % len(stretch)
        count = min(len(stretch) - at, len(out) - begin)
        out[begin : begin + count] = stretch[at : at + count]
        begin += count
