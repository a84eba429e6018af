"""A model's weights, read from its file and packed by the backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from engine.gguf_file import GgufFile, TensorInfo
from engine.hparams import Hparams
from kernels.ops import Float32, Ops, PackedMatrix
from kernels.quants import QUANT_TYPES, BlockTensor, dequantize
from nvme import Reader, ReadRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerWeights:
    """One transformer layer. Matrices are (num_outputs, num_inputs), vectors float32.

    qkv: q, k and v stacked; gate_up: gate, then up
    """

    attn_norm: Float32
    qkv: PackedMatrix
    qkv_bias: Float32 | None
    q_norm: Float32 | None
    k_norm: Float32 | None
    attn_output: PackedMatrix
    ffn_norm: Float32
    gate_up: PackedMatrix
    ffn_down: PackedMatrix


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """All of a model. `head` is `embedding` itself where the file ties them."""

    embedding: PackedMatrix
    layers: tuple[LayerWeights, ...]
    output_norm: Float32
    head: PackedMatrix

    @property
    def nbytes(self) -> int:
        matrices = {id(m): m for m in (self.embedding, self.head)}
        for layer in self.layers:
            for m in (layer.qkv, layer.attn_output, layer.gate_up, layer.ffn_down):
                matrices[id(m)] = m
        return sum(m.nbytes for m in matrices.values())


def stored_nbytes(file: GgufFile) -> int:
    """Bytes of all tensors as the file has them."""
    return sum(tensor.nbytes for tensor in file.tensors.values())


def expanded_nbytes(file: GgufFile) -> int:
    """Bytes of all tensors as float32."""
    return sum(4 * int(np.prod(tensor.shape)) for tensor in file.tensors.values())


class WeightLoader:
    """Reads tensors through a reader and hands them to the backend."""

    def __init__(self, file: GgufFile, reader: Reader, ops: Ops, *, expand: bool) -> None:
        self._file = file
        self._reader = reader
        self._ops = ops
        self._expand = expand

    def load(self, hparams: Hparams, progress: Callable[[int, int], None] | None = None) -> Weights:
        """Load everything; `progress(layers done, layers)` is called after each layer.

        Raises ReadError when the file comes short, UnsupportedTypeError for a type without
        a dequantiser.
        """
        layers = []
        for layer in range(hparams.num_layers):
            layers.append(self._layer(f"blk.{layer}", hparams))
            if progress is not None:
                progress(layer + 1, hparams.num_layers)
        # A separate embedding is only gathered from, a few rows a sweep: it stays quantised.
        tied = hparams.tied_embeddings
        embedding = self._matrix("token_embd.weight", expand=self._expand and tied)
        return Weights(
            embedding=embedding,
            layers=tuple(layers),
            output_norm=self._vector("output_norm.weight"),
            head=embedding if tied else self._matrix("output.weight"),
        )

    def vector_or_none(self, name: str) -> Float32 | None:
        return self._vector(name) if name in self._file.tensors else None

    def _layer(self, prefix: str, hparams: Hparams) -> LayerWeights:
        return LayerWeights(
            attn_norm=self._vector(f"{prefix}.attn_norm.weight"),
            qkv=self._matrix(*(f"{prefix}.attn_{part}.weight" for part in "qkv")),
            qkv_bias=self._qkv_bias(prefix) if hparams.has_qkv_bias else None,
            q_norm=self.vector_or_none(f"{prefix}.attn_q_norm.weight"),
            k_norm=self.vector_or_none(f"{prefix}.attn_k_norm.weight"),
            attn_output=self._matrix(f"{prefix}.attn_output.weight"),
            ffn_norm=self._vector(f"{prefix}.ffn_norm.weight"),
            gate_up=self._matrix(f"{prefix}.ffn_gate.weight", f"{prefix}.ffn_up.weight"),
            ffn_down=self._matrix(f"{prefix}.ffn_down.weight"),
        )

    def _qkv_bias(self, prefix: str) -> Float32:
        return np.concatenate([self._vector(f"{prefix}.attn_{part}.bias") for part in "qkv"])

    def _matrix(self, *names: str, expand: bool | None = None) -> PackedMatrix:
        expand = self._expand if expand is None else expand
        return self._ops.pack(self._read(names), expand=expand)

    def _vector(self, name: str) -> Float32:
        (tensor,) = self._read((name,))
        return dequantize(tensor.data, tensor.type).reshape(-1)

    def _read(self, names: tuple[str, ...]) -> list[BlockTensor]:
        infos = [self._file.tensors[name] for name in names]
        buffers = [np.empty(info.nbytes, np.uint8) for info in infos]
        self._reader.wait(
            self._reader.submit(
                [
                    ReadRequest(file_idx=info.file_idx, offset=info.offset, out=buffer)
                    for info, buffer in zip(infos, buffers, strict=True)
                ]
            )
        )
        return [_as_tensor(info, buffer) for info, buffer in zip(infos, buffers, strict=True)]


def _as_tensor(info: TensorInfo, buffer: np.ndarray) -> BlockTensor:
    num_outputs = info.shape[0] if len(info.shape) == 2 else 1
    return BlockTensor(
        name=info.name,
        type=QUANT_TYPES[info.type_id],
        num_outputs=num_outputs,
        num_inputs=info.shape[-1],
        data=buffer.reshape(num_outputs, -1),
    )
