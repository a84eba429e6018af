"""What a model is: sizes and rules read from its metadata, and the tensors that they call for.

Every key under the architecture's name and every tensor is used, known to have no effect, or
refused by name: a model that would be run with other maths than its own must not load.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine.gguf_file import GgufFile, TensorInfo
from engine.gguf_header import listed
from engine.metadata_keys import ArchitectureKeys
from engine.requests import ModelError, UnsupportedModelError
from engine.rope import FREQ_FACTORS, RopeParams, read_rope, rope_tables
from kernels.ops import RopeStyle
from kernels.quants import QUANT_TYPES

__all__ = [
    "Hparams",
    "RopeParams",
    "check_tensors",
    "expected_tensors",
    "read_hparams",
    "rope_tables",
]

# Rows of q and k of llama files are stored so that rotary pairs lie side by side.
ROPE_STYLES: dict[str, RopeStyle] = {"llama": "adjacent", "qwen2": "halves", "qwen3": "halves"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Hparams:
    """A model's sizes and rules.

    hidden, ffn: widths of the residual stream and of the feed-forward layer
    key_length, value_length: sizes of a head
    vocab_size: rows of token_embd.weight
    num_tokens: tokens of the vocabulary; ids from here to vocab_size - 1 are padding
    context_length: most positions that the model was made for
    has_qk_norm: RMS norm over each head of q and k before the rotation
    """

    architecture: str
    num_layers: int
    hidden: int
    ffn: int
    num_heads: int
    num_kv_heads: int
    key_length: int
    value_length: int
    vocab_size: int
    num_tokens: int
    context_length: int
    norm_eps: float
    rope: RopeParams
    tied_embeddings: bool
    has_qkv_bias: bool
    has_qk_norm: bool


def read_hparams(file: GgufFile) -> Hparams:
    """Read and check the metadata.

    Raises UnsupportedModelError: an architecture, or a key that changes the maths, that this
    engine does not have. Raises ModelError: a key is missing or impossible.
    """
    architecture = _architecture(file)
    keys = ArchitectureKeys(file, architecture)
    num_heads = keys.integer("attention.head_count")
    hidden = keys.integer("embedding_length")
    key_length = keys.integer("attention.key_length", default=hidden // num_heads)
    context_length = keys.integer("context_length")
    keys.check_all_known()
    _check_attention(keys, key_length, context_length)
    vocab_size, num_tokens = _vocabulary(file)
    return Hparams(
        architecture=architecture,
        num_layers=_num_layers(keys, file),
        hidden=hidden,
        ffn=keys.integer("feed_forward_length"),
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(keys, num_heads),
        key_length=key_length,
        value_length=keys.integer("attention.value_length", default=hidden // num_heads),
        vocab_size=vocab_size,
        num_tokens=num_tokens,
        context_length=context_length,
        norm_eps=keys.positive_number("attention.layer_norm_rms_epsilon"),
        rope=read_rope(
            keys,
            style=ROPE_STYLES[architecture],
            key_length=key_length,
            context_length=context_length,
            has_freq_factors=FREQ_FACTORS in file.tensors,
        ),
        tied_embeddings="output.weight" not in file.tensors,
        has_qkv_bias=architecture == "qwen2" or "blk.0.attn_q.bias" in file.tensors,
        has_qk_norm=architecture == "qwen3",
    )


def expected_tensors(hparams: Hparams, file: GgufFile) -> dict[str, tuple[int, ...]]:
    """Names and row-major shapes of all tensors that the engine uses of this file."""
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (hparams.vocab_size, hparams.hidden),
        "output_norm.weight": (hparams.hidden,),
    }
    if not hparams.tied_embeddings:
        shapes["output.weight"] = (hparams.vocab_size, hparams.hidden)
    if FREQ_FACTORS in file.tensors:
        shapes[FREQ_FACTORS] = (hparams.rope.rotary_dim // 2,)
    layer = _layer_shapes(hparams)
    for index in range(hparams.num_layers):
        shapes |= {f"blk.{index}.{name}": shape for name, shape in layer.items()}
    return shapes


def check_tensors(file: GgufFile, hparams: Hparams) -> None:
    """Check that the file has the tensors of its architecture, whole and of known types.

    Raises ModelError: a tensor is missing or has the wrong shape. Raises UnsupportedModelError:
    a tensor that nothing uses, or of a type without a dequantiser.
    """
    expected = expected_tensors(hparams, file)
    missing = [name for name in expected if name not in file.tensors]
    if missing:
        raise ModelError(f"{file.path}: tensors are missing: {listed(missing)}")
    unused = [name for name in file.tensors if name not in expected]
    if unused:
        raise UnsupportedModelError(
            f"{file.path}: tensors that this engine has no use for in a {hparams.architecture!r} "
            f"model, so it would not be computed as it was made: {listed(unused)}"
        )
    for name, shape in expected.items():
        _check_tensor(file, file.tensors[name], shape)


def _architecture(file: GgufFile) -> str:
    kind = file.metadata.get("general.type", "model")
    architecture = file.metadata.get("general.architecture")
    if kind != "model":
        raise UnsupportedModelError(f"{file.path}: holds a {kind!r}, not a model")
    if architecture is None:
        raise ModelError(f"{file.path}: metadata key general.architecture is missing")
    if architecture not in ROPE_STYLES:
        supported = ", ".join(ROPE_STYLES)
        raise UnsupportedModelError(
            f"{file.path}: unsupported architecture {architecture!r}; supported: {supported}"
        )
    quantisation = file.metadata.get("general.quantization_version", 2)
    if quantisation != 2:
        raise UnsupportedModelError(
            f"{file.path}: general.quantization_version is {quantisation}, version 2 is supported; "
            "quantise the model again with a current llama.cpp"
        )
    return str(architecture)


def _check_attention(keys: ArchitectureKeys, key_length: int, context_length: int) -> None:
    scale = key_length**-0.5
    given = keys.number("attention.scale", default=0.0)
    if given and not math.isclose(given, scale, rel_tol=1e-6):
        raise keys.unsupported("attention.scale", f"is not supported, only key_length^-1/2 {scale}")
    window = keys.number("attention.sliding_window", default=0.0)
    if 0 < window < context_length:
        raise keys.unsupported(
            "attention.sliding_window",
            f"is below the context length {context_length}; sliding windows are not supported",
        )


def _num_layers(keys: ArchitectureKeys, file: GgufFile) -> int:
    num_layers = keys.integer("block_count")
    if num_layers > len(file.tensors):
        raise keys.error("block_count", f"layers, but the file has {len(file.tensors)} tensors")
    return num_layers


def _num_kv_heads(keys: ArchitectureKeys, num_heads: int) -> int:
    num_kv_heads = keys.integer("attention.head_count_kv", default=num_heads)
    if num_heads % num_kv_heads:
        raise keys.error("attention.head_count_kv", f"must divide the {num_heads} heads")
    return num_kv_heads


def _vocabulary(file: GgufFile) -> tuple[int, int]:
    """(rows of the embedding, tokens of the vocabulary)."""
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{file.path}: tensor 'token_embd.weight' is missing")
    num_tokens = file.metadata.array_len("tokenizer.ggml.tokens")
    if not num_tokens:
        raise ModelError(f"{file.path}: metadata key tokenizer.ggml.tokens is missing or empty")
    vocab_size = embedding.shape[0]
    if vocab_size < num_tokens:
        raise ModelError(
            f"{file.path}: the vocabulary has {num_tokens} tokens, but 'token_embd.weight' only "
            f"{vocab_size} rows: not a whole model"
        )
    return vocab_size, num_tokens


def _layer_shapes(hparams: Hparams) -> dict[str, tuple[int, ...]]:
    hidden, ffn = hparams.hidden, hparams.ffn
    rows = {
        "q": hparams.num_heads * hparams.key_length,
        "k": hparams.num_kv_heads * hparams.key_length,
        "v": hparams.num_kv_heads * hparams.value_length,
    }
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (hidden,),
        "attn_output.weight": (hidden, hparams.num_heads * hparams.value_length),
        "ffn_norm.weight": (hidden,),
        "ffn_gate.weight": (ffn, hidden),
        "ffn_up.weight": (ffn, hidden),
        "ffn_down.weight": (hidden, ffn),
    }
    shapes |= {f"attn_{part}.weight": (num_rows, hidden) for part, num_rows in rows.items()}
    if hparams.has_qkv_bias:
        shapes |= {f"attn_{part}.bias": (num_rows,) for part, num_rows in rows.items()}
    if hparams.has_qk_norm:
        shapes |= {f"attn_{part}_norm.weight": (hparams.key_length,) for part in "qk"}
    return shapes


def _check_tensor(file: GgufFile, tensor: TensorInfo, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise ModelError(
            f"{file.path}: tensor {tensor.name!r} has shape {tensor.shape}, the metadata calls "
            f"for {shape}"
        )
    if tensor.type_id not in QUANT_TYPES:
        supported = ", ".join(quant_type.name for quant_type in QUANT_TYPES.values())
        raise UnsupportedModelError(
            f"{file.path}: tensor {tensor.name!r} has {_type_phrase(tensor)}; "
            f"supported types: {supported}"
        )


def _type_phrase(tensor: TensorInfo) -> str:
    known = not tensor.type_name.startswith("unknown")
    return f"type {tensor.type_name}, which is not supported" if known else tensor.type_name
