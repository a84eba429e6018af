"""A little model of random weights with another model's shapes, for what only shapes decide."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from engine.hparams import Hparams, RopeParams
from engine.weights import LayerMatrices, LayerVectors, Weights
from kernels.ops import Float32, Ops, PackedMatrix
from kernels.quants import QUANT_TYPES, BlockTensor, QuantType

TYPES = {qtype.name: qtype for qtype in QUANT_TYPES.values()}
_FLOATS = ("F32", "BF16")
_STEP = 256  # sizes of a smaller model are multiples of it, as those of large ones are

# A model of about two billion weights: what is measured where none is named.
USUAL_SHAPE = Hparams(
    architecture="llama",
    num_layers=24,
    hidden=2048,
    ffn=8192,
    num_heads=16,
    num_kv_heads=4,
    key_length=128,
    value_length=128,
    vocab_size=32_000,
    num_tokens=32_000,
    context_length=4096,
    norm_eps=1e-5,
    rope=RopeParams(rotary_dim=128, base=10_000.0, style="adjacent"),
    tied_embeddings=False,
    has_qkv_bias=False,
    has_qk_norm=False,
)


def little_hparams(hparams: Hparams, num_values: int, block_size: int = 1) -> Hparams:
    """A model of the same shapes with about `num_values` weights at most, or of smaller ones.

    block_size: rows of its matrices are whole blocks of so many
    The feed-forward layer shrinks first: what a product gives depends on the other sizes more.
    """
    small = _whole_blocks(hparams, block_size)
    while layer_values(small) > num_values and small.ffn >= 2 * small.hidden:
        small = replace(small, ffn=round_up(small.ffn // 2, _STEP))
    while layer_values(small) > num_values and small.num_kv_heads % 2 == 0:
        halved = replace(
            small,
            hidden=round_up(small.hidden // 2, _STEP),
            ffn=round_up(small.ffn // 2, _STEP),
            num_heads=small.num_heads // 2,
            num_kv_heads=small.num_kv_heads // 2,
        )
        small = _whole_blocks(halved, block_size)
    return replace(
        small,
        num_layers=max(1, min(hparams.num_layers, num_values // layer_values(small))),
        vocab_size=max(1, min(hparams.vocab_size, num_values // small.hidden)),
    )


def _whole_blocks(hparams: Hparams, block_size: int) -> Hparams:
    num_heads = hparams.num_heads
    while num_heads * hparams.value_length % block_size:
        num_heads += hparams.num_kv_heads
    return replace(
        hparams,
        hidden=round_up(hparams.hidden, block_size),
        ffn=round_up(hparams.ffn, block_size),
        num_heads=num_heads,
    )


def layer_values(hparams: Hparams) -> int:
    return sum(outputs * inputs for outputs, inputs in _matrix_shapes(hparams).values())


def _matrix_shapes(hparams: Hparams) -> Mapping[str, tuple[int, int]]:
    h = hparams
    qkv = h.num_heads * h.key_length + h.num_kv_heads * (h.key_length + h.value_length)
    return {
        "qkv": (qkv, h.hidden),
        "attn_output": (h.hidden, h.num_heads * h.value_length),
        "gate_up": (2 * h.ffn, h.hidden),
        "ffn_down": (h.hidden, h.ffn),
    }


def random_weights(
    ops: Ops, hparams: Hparams, type_name: str, head_type: str, expand: bool
) -> Weights:
    """Weights of one type, the head of another; expand: both are kept expanded."""

    def matrix(name: str, shape: tuple[int, int], expand: bool = expand) -> PackedMatrix:
        return ops.pack([_random_tensor(TYPES[name], *shape)], expand=expand)

    def vector(length: int) -> Float32:
        return ops.put(np.ones(length, np.float32))

    h = hparams
    qkv = h.num_heads * h.key_length + h.num_kv_heads * (h.key_length + h.value_length)
    vectors = LayerVectors(
        attn_norm=vector(h.hidden),
        qkv_bias=vector(qkv) if h.has_qkv_bias else None,
        q_norm=vector(h.key_length) if h.has_qk_norm else None,
        k_norm=vector(h.key_length) if h.has_qk_norm else None,
        ffn_norm=vector(h.hidden),
    )
    layers = [
        LayerMatrices(**{n: matrix(type_name, shape) for n, shape in _matrix_shapes(h).items()})
        for _ in range(h.num_layers)
    ]
    head = "F16" if expand else head_type
    return Weights(
        embedding=matrix("F16", (1, h.hidden), expand=False),
        vectors=(vectors,) * h.num_layers,
        layers=tuple(layers),
        output_norm=vector(h.hidden),
        head=matrix(head, (h.vocab_size, h.hidden)),
    )


def round_up(value: int, step: int) -> int:
    return -(-value // step) * step


def _random_tensor(qtype: QuantType, num_outputs: int, num_inputs: int) -> BlockTensor:
    row_nbytes = qtype.row_nbytes(num_inputs)
    if qtype.name in _FLOATS:
        values = random_floats((1 << 16,)).view(np.uint8)
    else:
        # Small bytes make small finite scales in every block format.
        values = np.random.default_rng(0).integers(1, 40, 1 << 16, dtype=np.uint8)
    data = np.resize(values, (num_outputs, row_nbytes))
    return BlockTensor(qtype.name, qtype, num_outputs, num_inputs, data)


def random_floats(shape: tuple[int, ...]) -> Float32:
    return 0.02 * np.random.default_rng(1).standard_normal(shape, dtype=np.float32)
