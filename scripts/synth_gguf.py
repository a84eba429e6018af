"""Write a GGUF file of any Llama shape with random weights, to measure what shape alone decides.

    python -m scripts.synth_gguf OUT.gguf --layers 30 --hidden 2048 --ffn 8192 --type F16
    python -m scripts.synth_gguf OUT.gguf --layers 80 --hidden 8192 --ffn 28672 --heads 64 \
        --kv-heads 8 --vocab 128256 --mix Q4_K_M --split-nbytes 10000000000

The model computes finite nonsense: activations keep their size through the layers, and every
token is a piece of text. Written in chunks, so that memory does not grow with the file.
`--hollow` leaves the tensors out, for plans and simulations: a file of the size without its blocks.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import gguf
import numpy as np

from kernels.quants import QuantType
from scripts.synth_blocks import TYPES, Bytes, random_weights
from scripts.synth_vocab import Vocab, make_vocab

ALIGNMENT = 32
CHUNK_BLOCKS_NBYTES = 16 << 20
LOGIT_RMS = 2.0
GATED_RMS = 0.6  # of silu(gate)·up where both are normal with variance 1
MIXES = {"Q4_K_M": "Q4_K", "Q5_K_M": "Q5_K"}
FILE_TYPES = {"F32": "ALL_F32", "Q3_K": "MOSTLY_Q3_K_M", "Q4_K": "MOSTLY_Q4_K_M"}
FILE_TYPES |= {"Q5_K": "MOSTLY_Q5_K_M"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Sizes of a Llama model."""

    num_layers: int = 30
    hidden: int = 2048
    ffn: int = 8192
    num_heads: int = 16
    num_kv_heads: int = 4
    vocab_size: int = 32_000
    context_length: int = 4096

    @property
    def head_length(self) -> int:
        return self.hidden // self.num_heads


@dataclass(frozen=True, slots=True)
class Tensor:
    """shape: row-major; rms: of its values; a vector's are around 1 instead"""

    name: str
    shape: tuple[int, ...]
    type: QuantType
    rms: float

    @property
    def num_blocks(self) -> int:
        return math.prod(self.shape) // self.type.block_size

    @property
    def nbytes(self) -> int:
        return self.num_blocks * self.type.block_nbytes


def plan_tensors(shape: Shape, type_name: str, mix: str | None = None) -> list[Tensor]:
    """All tensors in file order: embedding, layers, head.

    type_name: of each matrix; mix: a recipe of `MIXES` instead
    Raises ValueError: sizes that do not go together, or rows that are not whole blocks.
    """
    _check_shape(shape)

    def matrix(name: str, num_outputs: int, num_inputs: int, rms: float = 1.0) -> Tensor:
        chosen = type_name if mix is None else mixed_type(mix, name, shape)
        quant_type = TYPES[chosen]
        if num_inputs % quant_type.block_size:
            raise ValueError(
                f"{name} has rows of {num_inputs} values, not a multiple of the "
                f"{quant_type.block_size} of a {chosen} block; change --hidden or --ffn"
            )
        return Tensor(name, (num_outputs, num_inputs), quant_type, rms * num_inputs**-0.5)

    def vector(name: str) -> Tensor:
        return Tensor(name, (shape.hidden,), TYPES["F32"], 1.0)

    # What 2·num_layers branches add to the residual stream comes to about its first size.
    branch = (2 * shape.num_layers) ** -0.5
    kv_width = shape.num_kv_heads * shape.head_length
    found = [matrix("token_embd.weight", shape.vocab_size, shape.hidden, shape.hidden**0.5)]
    for layer in range(shape.num_layers):
        found += [
            vector(f"blk.{layer}.attn_norm.weight"),
            matrix(f"blk.{layer}.attn_q.weight", shape.hidden, shape.hidden),
            matrix(f"blk.{layer}.attn_k.weight", kv_width, shape.hidden),
            matrix(f"blk.{layer}.attn_v.weight", kv_width, shape.hidden),
            matrix(f"blk.{layer}.attn_output.weight", shape.hidden, shape.hidden, branch),
            vector(f"blk.{layer}.ffn_norm.weight"),
            matrix(f"blk.{layer}.ffn_gate.weight", shape.ffn, shape.hidden),
            matrix(f"blk.{layer}.ffn_up.weight", shape.ffn, shape.hidden),
            matrix(f"blk.{layer}.ffn_down.weight", shape.hidden, shape.ffn, branch / GATED_RMS),
        ]
    head = matrix("output.weight", shape.vocab_size, shape.hidden, LOGIT_RMS)
    return [*found, vector("output_norm.weight"), head]


def mixed_type(mix: str, name: str, shape: Shape) -> str:
    """The type that llama-quantize gives a matrix.

    Source: llama.cpp, src/llama-quant.cpp, llama_tensor_get_type and use_more_bits
    """
    base = MIXES[mix]
    if name == "output.weight":
        return "Q6_K"
    parts = name.split(".")
    if parts[0] != "blk" or parts[2] not in ("attn_v", "ffn_down"):
        return base
    layer, num_layers = int(parts[1]), shape.num_layers
    eighth = num_layers // 8
    if layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2:
        return "Q6_K"
    is_70b = num_layers == 80 and shape.num_kv_heads != shape.num_heads
    return "Q5_K" if is_70b and parts[2] == "attn_v" else base


def write_model(
    path: str | Path,
    shape: Shape,
    *,
    type_name: str = "F16",
    mix: str | None = None,
    seed: int = 0,
    split_nbytes: int | None = None,
    hollow: bool = False,
) -> list[Path]:
    """Write the model; returns its files, one unless it was split.

    split_nbytes: most bytes of tensors in a file; the files are then NAME-00001-of-00003.gguf, …
    hollow: a hole in place of the tensors
    Raises ValueError: an impossible shape, or no room on the disk.
    """
    path = Path(path)
    tensors = plan_tensors(shape, type_name, mix)
    vocab = make_vocab(shape.vocab_size)
    if not hollow:
        _check_room(path, sum(tensor.nbytes for tensor in tensors))
    groups = _split(tensors, split_nbytes)
    paths = [path]
    if split_nbytes is not None:
        names = [f"{path.stem}-{n + 1:05d}-of-{len(groups):05d}.gguf" for n in range(len(groups))]
        paths = [path.with_name(name) for name in names]
    for number, (shard, group) in enumerate(zip(paths, groups, strict=True)):
        writer = gguf.GGUFWriter(None, "llama")
        if number == 0:
            _add_metadata(writer, shape, vocab, mix or type_name)
        if split_nbytes is not None:
            writer.add_uint16(gguf.Keys.Split.LLM_KV_SPLIT_NO, number)
            writer.add_uint16(gguf.Keys.Split.LLM_KV_SPLIT_COUNT, len(groups))
            writer.add_int32(gguf.Keys.Split.LLM_KV_SPLIT_TENSORS_COUNT, len(tensors))
        _write_header(writer, shard, group)
        if hollow:
            _leave_hole(shard, group)
        else:
            _write_data(shard, group, seed)
    return paths


def _check_shape(shape: Shape) -> None:
    if shape.hidden % (2 * shape.num_heads):
        raise ValueError(
            f"hidden {shape.hidden} is not an even number of values for each of "
            f"{shape.num_heads} heads; change --hidden or --heads"
        )
    if shape.num_heads % shape.num_kv_heads:
        raise ValueError(
            f"{shape.num_kv_heads} KV heads do not divide {shape.num_heads} heads; "
            "change --kv-heads"
        )


def _check_room(path: Path, nbytes: int) -> None:
    free = shutil.disk_usage(path.parent).free
    if nbytes > free:
        raise ValueError(f"{path}: the tensors take {nbytes} bytes, the disk has {free} free")


def _split(tensors: list[Tensor], split_nbytes: int | None) -> list[list[Tensor]]:
    """Neighbours together until a file is full; a tensor above the limit has one to itself."""
    groups: list[list[Tensor]] = [[]]
    filled = 0
    for tensor in tensors:
        if split_nbytes is not None and groups[-1] and filled + tensor.nbytes > split_nbytes:
            groups.append([])
            filled = 0
        groups[-1].append(tensor)
        filled += tensor.nbytes
    return groups


def _add_metadata(writer: gguf.GGUFWriter, shape: Shape, vocab: Vocab, types: str) -> None:
    file_type = FILE_TYPES.get(types, f"MOSTLY_{types}")
    writer.add_name(f"synthetic llama, {shape.num_layers} layers of {shape.hidden}, {types}")
    writer.add_file_type(gguf.LlamaFileType[file_type])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_vocab_size(shape.vocab_size)
    writer.add_context_length(shape.context_length)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.num_layers)
    writer.add_feed_forward_length(shape.ffn)
    writer.add_head_count(shape.num_heads)
    writer.add_head_count_kv(shape.num_kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(shape.head_length)
    writer.add_rope_freq_base(10_000.0)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(vocab.texts)
    writer.add_token_scores(vocab.scores)
    writer.add_token_types(vocab.kinds)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)


def _write_header(writer: gguf.GGUFWriter, path: Path, tensors: list[Tensor]) -> None:
    for tensor in tensors:
        raw_type = gguf.GGMLQuantizationType(tensor.type.type_id)
        writer.add_tensor_info(
            tensor.name, tensor.shape, np.dtype(np.float32), tensor.nbytes, raw_dtype=raw_type
        )
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()


def _write_data(path: Path, tensors: list[Tensor], seed: int) -> None:
    with open(path, "ab") as file:
        for tensor in tensors:
            _pad(file)
            for chunk in _chunks(tensor, seed):
                file.write(chunk.data)
        _pad(file)
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # measure from the disk


def _leave_hole(path: Path, tensors: list[Tensor]) -> None:
    with open(path, "ab") as file:
        _pad(file)
        nbytes = sum(-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors)
        file.truncate(file.tell() + nbytes)


def _pad(file: BinaryIO) -> None:
    file.write(bytes(-file.tell() % ALIGNMENT))


def _chunks(tensor: Tensor, seed: int) -> Iterator[Bytes]:
    """The bytes of a tensor, the same whatever else is in the file."""
    key = [seed, *tensor.name.encode()]
    if len(tensor.shape) == 1:
        gains = np.random.default_rng(key).normal(1.0, 0.05, tensor.shape)
        yield gains.astype("<f4").view(np.uint8)
        return
    step = CHUNK_BLOCKS_NBYTES // tensor.type.block_nbytes
    bits = np.random.SFC64(key)
    for begin in range(0, tensor.num_blocks, step):
        yield random_weights(bits, tensor.type, min(step, tensor.num_blocks - begin), tensor.rms)


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = Shape()
    parser.add_argument("out", type=Path, metavar="OUT.gguf")
    parser.add_argument("--layers", type=int, default=default.num_layers)
    parser.add_argument("--hidden", type=int, default=default.hidden)
    parser.add_argument("--ffn", type=int, default=default.ffn)
    parser.add_argument("--heads", type=int, default=default.num_heads)
    parser.add_argument("--kv-heads", type=int, default=default.num_kv_heads)
    parser.add_argument("--vocab", type=int, default=default.vocab_size)
    parser.add_argument("--context", type=int, default=default.context_length)
    types = parser.add_mutually_exclusive_group()
    types.add_argument("--type", choices=TYPES, default="F16", help="of every matrix")
    types.add_argument("--mix", choices=MIXES, help="types as llama-quantize mixes them")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--split-nbytes", type=int, help="most bytes of tensors in one file")
    parser.add_argument("--hollow", action="store_true", help="a hole in place of the tensors")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    options = parse_arguments(arguments)
    shape = Shape(
        num_layers=options.layers,
        hidden=options.hidden,
        ffn=options.ffn,
        num_heads=options.heads,
        num_kv_heads=options.kv_heads,
        vocab_size=options.vocab,
        context_length=options.context,
    )
    started = time.perf_counter()
    try:
        paths = write_model(
            options.out,
            shape,
            type_name=options.type,
            mix=options.mix,
            seed=options.seed,
            split_nbytes=options.split_nbytes,
            hollow=options.hollow,
        )
    except (OSError, ValueError) as error:
        print(f"synth_gguf: {error}", file=sys.stderr)
        return 1
    seconds = time.perf_counter() - started
    nbytes = sum(path.stat().st_size for path in paths)
    for path in paths:
        print(path)
    print(f"{nbytes} bytes in {seconds:.1f} s ({nbytes / seconds / 1e6:.0f} MB/s)")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
