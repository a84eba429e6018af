"""A plain float64 transformer on the weights of a file, for tests; no kernels, no cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from engine.gguf_file import GgufFile
from engine.hparams import Hparams, read_hparams, rope_tables
from kernels.quants import QUANT_TYPES, dequantize
from nvme import ReadRequest, open_reader

Float64 = npt.NDArray[np.float64]
Weights = dict[str, Float64]


def read_weights(file: GgufFile) -> Weights:
    """All tensors of a file, dequantised, as float64."""
    reader = open_reader("mmap", file.paths)
    weights = {}
    for name, info in file.tensors.items():
        data = np.empty(info.nbytes, np.uint8)
        request = ReadRequest(file_idx=info.file_idx, offset=info.offset, out=data)
        reader.wait(reader.submit([request]))
        values = dequantize(data, QUANT_TYPES[info.type_id])
        weights[name] = values.reshape(info.shape).astype(np.float64)
    reader.close()
    return weights


def reference_logits(
    file: GgufFile, ids: npt.NDArray[Any], *, weights: Weights | None = None
) -> Float64:
    """Logits of one sequence: (num_tokens, vocab_size)."""
    hparams = read_hparams(file)
    weights = read_weights(file) if weights is None else weights
    factors = weights.get("rope_freqs.weight")
    cos, sin = rope_tables(
        hparams.rope, len(ids), None if factors is None else factors.astype(np.float32)
    )
    tables = cos.astype(np.float64), sin.astype(np.float64)
    x = weights["token_embd.weight"][ids]
    for layer in range(hparams.num_layers):
        prefix = f"blk.{layer}."
        block = {
            name.removeprefix(prefix): tensor
            for name, tensor in weights.items()
            if name.startswith(prefix)
        }
        x = x + _attention(hparams, block, tables, _norm(hparams, x, block["attn_norm.weight"]))
        x = x + _feed_forward(block, _norm(hparams, x, block["ffn_norm.weight"]))
    head = weights.get("output.weight", weights["token_embd.weight"])
    logits: Float64 = _norm(hparams, x, weights["output_norm.weight"]) @ head.T
    return logits


def _norm(hparams: Hparams, x: Float64, weight: Float64) -> Float64:
    scale = np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + hparams.norm_eps)
    out: Float64 = x / scale * weight
    return out


def _feed_forward(block: Weights, x: Float64) -> Float64:
    gate = x @ block["ffn_gate.weight"].T
    activated = gate / (1 + np.exp(-gate)) * (x @ block["ffn_up.weight"].T)
    out: Float64 = activated @ block["ffn_down.weight"].T
    return out


def _attention(
    hparams: Hparams, block: Weights, tables: tuple[Float64, Float64], x: Float64
) -> Float64:
    q, k, v = (_heads(hparams, block, part, x) for part in "qkv")
    q, k = (_rotate(hparams, part, tables) for part in (q, k))
    group = hparams.num_heads // hparams.num_kv_heads
    mask = np.tri(len(x), dtype=bool)
    outputs = []
    for head in range(hparams.num_heads):
        scores = q[:, head] @ k[:, head // group].T * hparams.key_length**-0.5
        scores = np.where(mask, scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        outputs.append(weights / weights.sum(axis=-1, keepdims=True) @ v[:, head // group])
    out: Float64 = np.concatenate(outputs, axis=-1) @ block["attn_output.weight"].T
    return out


def _heads(hparams: Hparams, block: Weights, part: str, x: Float64) -> Float64:
    """(num_tokens, heads, head size) of q, k or v; biased and normalised where the file says so."""
    length = hparams.value_length if part == "v" else hparams.key_length
    out = x @ block[f"attn_{part}.weight"].T + block.get(f"attn_{part}.bias", 0.0)
    heads = out.reshape(len(x), -1, length)
    norm = block.get(f"attn_{part}_norm.weight")
    return heads if norm is None else _norm(hparams, heads, norm)


def _rotate(hparams: Hparams, x: Float64, tables: tuple[Float64, Float64]) -> Float64:
    cos, sin = (table[:, None, :] for table in tables)
    half = hparams.rope.rotary_dim // 2
    adjacent = hparams.rope.style == "adjacent"
    first = slice(0, 2 * half, 2) if adjacent else slice(0, half)
    second = slice(1, 2 * half, 2) if adjacent else slice(half, 2 * half)
    out = x.copy()
    out[..., first] = x[..., first] * cos - x[..., second] * sin
    out[..., second] = x[..., first] * sin + x[..., second] * cos
    return out
