"""A model's weights, read from its file and packed by the backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from engine.gguf_file import GgufFile, TensorInfo
from engine.hparams import Hparams
from kernels.ops import Float32, Ops, PackedMatrix
from kernels.quants import QUANT_TYPES, BlockTensor, dequantize
from nvme import Reader, ReadRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerVectors:
    """A layer's norms and biases, float32; always resident."""

    attn_norm: Float32
    qkv_bias: Float32 | None
    q_norm: Float32 | None
    k_norm: Float32 | None
    ffn_norm: Float32


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerMatrices:
    """A layer's matrices, (num_outputs, num_inputs). qkv: q, k, v stacked; gate_up: gate, up."""

    qkv: PackedMatrix
    attn_output: PackedMatrix
    gate_up: PackedMatrix
    ffn_down: PackedMatrix


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """What is resident of a model.

    layers: matrices of each layer, None for one that streams
    head: `embedding` itself where the file ties them; None where it streams
    """

    embedding: PackedMatrix
    vectors: tuple[LayerVectors, ...]
    layers: tuple[LayerMatrices | None, ...]
    output_norm: Float32
    head: PackedMatrix | None


# The tensors of a layer's matrices, by field of LayerMatrices.
LAYER_PARTS = {
    "qkv": ("attn_q", "attn_k", "attn_v"),
    "attn_output": ("attn_output",),
    "gate_up": ("ffn_gate", "ffn_up"),
    "ffn_down": ("ffn_down",),
}
HEAD_TENSOR = "output.weight"


def layer_tensor_names(layer: int) -> list[str]:
    """Names of the matrices of a layer."""
    return [f"blk.{layer}.{part}.weight" for parts in LAYER_PARTS.values() for part in parts]


@dataclass(frozen=True, slots=True)
class Residence:
    """What stays in memory: layers, one flag each, and the output head."""

    layers: tuple[bool, ...]
    head: bool

    @property
    def streams(self) -> bool:
        return not (all(self.layers) and self.head)


class WeightLoader:
    """Reads tensors through a reader and hands them to the backend."""

    def __init__(self, file: GgufFile, reader: Reader, ops: Ops, *, expand: bool) -> None:
        self._file = file
        self._reader = reader
        self._ops = ops
        self._expand = expand

    def load(
        self,
        hparams: Hparams,
        residence: Residence,
        progress: Callable[[int, int], None] | None = None,
    ) -> Weights:
        """Load what is resident; `progress(layers done, layers)` is called after each layer.

        Raises ReadError when the file comes short, UnsupportedTypeError for a type without
        a dequantiser.
        """
        vectors, layers = [], []
        for layer in range(hparams.num_layers):
            vectors.append(self._layer_vectors(f"blk.{layer}", hparams))
            layers.append(self._layer_matrices(layer) if residence.layers[layer] else None)
            if progress is not None:
                progress(layer + 1, hparams.num_layers)
        # A separate embedding is only gathered from, a few rows a sweep: it stays quantised.
        tied = hparams.tied_embeddings
        embedding = self._matrix("token_embd.weight") if tied else self._gathered()
        head = self._matrix(HEAD_TENSOR) if residence.head and not tied else None
        return Weights(
            embedding=embedding,
            vectors=tuple(vectors),
            layers=tuple(layers),
            output_norm=self._vector("output_norm.weight"),
            head=embedding if tied else head,
        )

    def host_vector_or_none(self, name: str) -> Float32 | None:
        """A vector for the host's own use, or None where the file has none."""
        return self._host_vector(name) if name in self._file.tensors else None

    def _vector_or_none(self, name: str) -> Float32 | None:
        return self._vector(name) if name in self._file.tensors else None

    def _layer_vectors(self, prefix: str, hparams: Hparams) -> LayerVectors:
        return LayerVectors(
            attn_norm=self._vector(f"{prefix}.attn_norm.weight"),
            qkv_bias=self._qkv_bias(prefix) if hparams.has_qkv_bias else None,
            q_norm=self._vector_or_none(f"{prefix}.attn_q_norm.weight"),
            k_norm=self._vector_or_none(f"{prefix}.attn_k_norm.weight"),
            ffn_norm=self._vector(f"{prefix}.ffn_norm.weight"),
        )

    def _layer_matrices(self, layer: int) -> LayerMatrices:
        matrices = {
            field: self._matrix(*(f"blk.{layer}.{part}.weight" for part in parts))
            for field, parts in LAYER_PARTS.items()
        }
        return LayerMatrices(**matrices)

    def _gathered(self) -> PackedMatrix:
        """The embedding where the host keeps it."""
        info = self._file.tensors["token_embd.weight"]
        data, in_place = self._ops.shared(info.nbytes)
        self._fill([info], [data])
        return self._ops.pack([as_tensor(info, in_place)], expand=False)

    def _qkv_bias(self, prefix: str) -> Float32:
        biases = [self._host_vector(f"{prefix}.attn_{part}.bias") for part in "qkv"]
        return self._ops.put(np.concatenate(biases))

    def _matrix(self, *names: str, expand: bool | None = None) -> PackedMatrix:
        expand = self._expand if expand is None else expand
        return self._ops.pack(self._read(names), expand=expand)

    def _vector(self, name: str) -> Float32:
        return self._ops.put(self._host_vector(name))

    def _host_vector(self, name: str) -> Float32:
        (tensor,) = self._read((name,))
        return dequantize(tensor.data, tensor.type).reshape(-1)

    def _read(self, names: tuple[str, ...]) -> list[BlockTensor]:
        infos = [self._file.tensors[name] for name in names]
        buffers = [np.empty(info.nbytes, np.uint8) for info in infos]
        self._fill(infos, buffers)
        return [as_tensor(info, buffer) for info, buffer in zip(infos, buffers, strict=True)]

    def _fill(self, infos: Sequence[TensorInfo], buffers: Sequence[np.ndarray]) -> None:
        requests = [
            ReadRequest(file_idx=info.file_idx, offset=info.offset, out=buffer)
            for info, buffer in zip(infos, buffers, strict=True)
        ]
        self._reader.wait(self._reader.submit(requests))


def as_tensor(info: TensorInfo, buffer: np.ndarray) -> BlockTensor:
    """A tensor as the bytes of its file, (nbytes,) uint8."""
    num_outputs = info.shape[0] if len(info.shape) == 2 else 1
    return BlockTensor(
        name=info.name,
        type=QUANT_TYPES[info.type_id],
        num_outputs=num_outputs,
        num_inputs=info.shape[-1],
        data=buffer.reshape(num_outputs, -1),
    )
