"""Writes small GGUF files for tests: valid models with overrides, and headers byte by byte."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import gguf.quants
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFValueType

Float32 = npt.NDArray[np.float32]
Token = tuple[str, float, int]  # text, score, type (1 normal, 2 unknown, 3 control, 6 byte)

ARCHITECTURES = ("llama", "qwen2", "qwen3")
F32 = GGMLQuantizationType.F32


@dataclass(frozen=True, kw_only=True, slots=True)
class TinySizes:
    num_layers: int = 2
    hidden: int = 64
    ffn: int = 96
    num_heads: int = 4
    num_kv_heads: int = 2
    key_length: int = 16
    value_length: int = 16
    context_length: int = 512
    num_rows: int | None = None  # embedding rows; None is one per token


@dataclass(frozen=True, kw_only=True, slots=True)
class TinyModel:
    """weights: what the file's tensors dequantise to, by name, row-major float32"""

    path: Path
    sizes: TinySizes
    weights: dict[str, Float32]


def tiny_vocab() -> list[Token]:
    """A SentencePiece vocabulary of 320: <unk>, <s>, </s>, 256 bytes, then pieces and letters."""
    special: list[Token] = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3)]
    byte_tokens: list[Token] = [(f"<0x{value:02X}>", 0.0, 6) for value in range(256)]
    pieces = ["▁", "▁the", "the", "he", "in", "▁a", "er", "on", "▁in"]
    letters = [chr(code) for code in (*range(97, 123), *range(65, 91))]
    normal: list[Token] = [(text, -float(rank), 1) for rank, text in enumerate(pieces + letters)]
    return special + byte_tokens + normal


def write_tiny_model(
    path: str | Path,
    *,
    arch: str = "llama",
    sizes: TinySizes | None = None,
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Any] | None = None,
    vocab: Sequence[Token] | None = None,
    quant_type: GGMLQuantizationType = F32,
    tied: bool = False,
    seed: int = 0,
) -> TinyModel:
    """Write a random model that loads.

    metadata: keys to set, or to leave out where the value is None; int is written as uint32,
        float as float32, a NumPy scalar as its own type
    tensors: tensors to set: a float array, or (array, GGMLQuantizationType) to quantise it;
        None leaves a tensor out
    quant_type: of the matrices that are not given
    tied: leave out output.weight
    """
    path, sizes = Path(path), sizes or TinySizes()
    vocab = tiny_vocab() if vocab is None else vocab
    writer = gguf.GGUFWriter(None, arch)
    for key, value in (_metadata(arch, sizes, vocab) | dict(metadata or {})).items():
        _add_value(writer, key, value)
    random = _tensors(arch, sizes, sizes.num_rows or len(vocab), quant_type, tied, seed)
    weights = {}
    for name, given in (random | dict(tensors or {})).items():
        if given is not None:
            array, tensor_type = given if isinstance(given, tuple) else (given, F32)
            weights[name] = _add_tensor(writer, name, np.asarray(array, np.float32), tensor_type)
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return TinyModel(path=path, sizes=sizes, weights=weights)


def _metadata(arch: str, sizes: TinySizes, vocab: Sequence[Token]) -> dict[str, Any]:
    texts, scores, types = zip(*vocab, strict=True)
    return {
        "general.name": f"tiny-{arch}",
        f"{arch}.context_length": sizes.context_length,
        f"{arch}.embedding_length": sizes.hidden,
        f"{arch}.block_count": sizes.num_layers,
        f"{arch}.feed_forward_length": sizes.ffn,
        f"{arch}.attention.head_count": sizes.num_heads,
        f"{arch}.attention.head_count_kv": sizes.num_kv_heads,
        f"{arch}.attention.key_length": sizes.key_length,
        f"{arch}.attention.value_length": sizes.value_length,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{arch}.rope.freq_base": 10000.0,
        f"{arch}.rope.dimension_count": sizes.key_length,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": list(texts),
        "tokenizer.ggml.scores": [float(score) for score in scores],
        "tokenizer.ggml.token_type": [int(kind) for kind in types],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": False,
    }


def _tensors(
    arch: str,
    sizes: TinySizes,
    num_rows: int,
    quant_type: GGMLQuantizationType,
    tied: bool,
    seed: int,
) -> dict[str, Any]:
    rng = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> tuple[Float32, GGMLQuantizationType]:
        scale = np.float32(columns**-0.5)
        return rng.standard_normal((rows, columns), np.float32) * scale, quant_type

    def vector(length: int, mean: float) -> Float32:
        return np.float32(mean) + rng.standard_normal(length, np.float32) * np.float32(0.1)

    q_rows = sizes.num_heads * sizes.key_length
    k_rows = sizes.num_kv_heads * sizes.key_length
    v_rows = sizes.num_kv_heads * sizes.value_length
    found: dict[str, Any] = {"token_embd.weight": matrix(num_rows, sizes.hidden)}
    for layer in range(sizes.num_layers):
        block = {
            "attn_norm.weight": vector(sizes.hidden, 1),
            "attn_q.weight": matrix(q_rows, sizes.hidden),
            "attn_k.weight": matrix(k_rows, sizes.hidden),
            "attn_v.weight": matrix(v_rows, sizes.hidden),
            "attn_output.weight": matrix(sizes.hidden, sizes.num_heads * sizes.value_length),
            "ffn_norm.weight": vector(sizes.hidden, 1),
            "ffn_gate.weight": matrix(sizes.ffn, sizes.hidden),
            "ffn_up.weight": matrix(sizes.ffn, sizes.hidden),
            "ffn_down.weight": matrix(sizes.hidden, sizes.ffn),
        }
        if arch == "qwen2":
            rows = {"q": q_rows, "k": k_rows, "v": v_rows}
            block |= {f"attn_{part}.bias": vector(size, 0) for part, size in rows.items()}
        if arch == "qwen3":
            block |= {f"attn_{part}_norm.weight": vector(sizes.key_length, 1) for part in "qk"}
        found |= {f"blk.{layer}.{name}": tensor for name, tensor in block.items()}
    found["output_norm.weight"] = vector(sizes.hidden, 1)
    if not tied:
        found["output.weight"] = matrix(num_rows, sizes.hidden)
    return found


VALUE_KINDS = {
    np.uint8: GGUFValueType.UINT8,
    np.int8: GGUFValueType.INT8,
    np.uint16: GGUFValueType.UINT16,
    np.int16: GGUFValueType.INT16,
    np.int32: GGUFValueType.INT32,
    np.uint64: GGUFValueType.UINT64,
    np.int64: GGUFValueType.INT64,
    np.float64: GGUFValueType.FLOAT64,
    bool: GGUFValueType.BOOL,
    int: GGUFValueType.UINT32,
    float: GGUFValueType.FLOAT32,
    str: GGUFValueType.STRING,
    bytes: GGUFValueType.STRING,
}


def _add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, list):
        writer.add_array(key, value)
        return
    kind = VALUE_KINDS[type(value)]
    writer.add_key_value(key, value.item() if isinstance(value, np.generic) else value, kind)


def _add_tensor(
    writer: gguf.GGUFWriter, name: str, array: Float32, tensor_type: GGMLQuantizationType
) -> Float32:
    """Add a tensor; returns what it dequantises to."""
    if tensor_type == F32:
        writer.add_tensor(name, array)
        return array
    stored = gguf.quants.quantize(array, tensor_type)
    writer.add_tensor(name, stored, raw_dtype=tensor_type)
    decoded: Float32 = gguf.quants.dequantize(stored, tensor_type)
    return decoded


# ---- bytes ---------------------------------------------------------------------------------


def patch_tensor_type(path: Path, name: str, type_id: int) -> None:
    """Overwrite the type id of one tensor in a file's header."""
    data = bytearray(path.read_bytes())
    at = data.index(struct.pack("<Q", len(name)) + name.encode()) + 8 + len(name)
    (num_dims,) = struct.unpack_from("<I", data, at)
    struct.pack_into("<I", data, at + 4 + 8 * num_dims, type_id)
    path.write_bytes(data)


def string_bytes(text: str | bytes, order: str = "<") -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack(f"{order}Q", len(data)) + data


def value_bytes(key: str, kind: int, value: bytes, order: str = "<") -> bytes:
    """A metadata entry whose value is given as bytes."""
    return string_bytes(key, order) + struct.pack(f"{order}I", kind) + value


def tensor_bytes(
    name: str, dims: Sequence[int], type_id: int, offset: int, order: str = "<"
) -> bytes:
    layout = f"{order}I{len(dims)}QIQ"
    return string_bytes(name, order) + struct.pack(layout, len(dims), *dims, type_id, offset)


def header_bytes(
    values: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    *,
    version: int = 3,
    num_values: int | None = None,
    num_tensors: int | None = None,
    order: str = "<",
) -> bytes:
    """A GGUF header; counts are those of the lists unless given. Version 1 has 32-bit counts."""
    num_values = len(values) if num_values is None else num_values
    num_tensors = len(tensors) if num_tensors is None else num_tensors
    layout = f"{order}I2I" if version == 1 else f"{order}I2Q"
    counts = struct.pack(layout, version, num_tensors, num_values)
    return b"GGUF" + counts + b"".join(values) + b"".join(tensors)


def with_data(header: bytes, nbytes: int, alignment: int = 32) -> bytes:
    """A header, padding, and so many bytes of tensor data."""
    return header + bytes(-len(header) % alignment + nbytes)
