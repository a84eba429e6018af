"""What a KV page of the CPU backend takes; known without Numba."""

from __future__ import annotations

from kernels.ops import PAGE_TOKENS, KvShape, KvType

DEFAULT_KV_TYPE: KvType = "f32"
VALUE_STEP = 32  # values of a head are padded to a multiple of this, a panel's width
_ITEMSIZES: dict[KvType, int] = {"f32": 4, "f16": 2}


def page_nbytes(shape: KvShape, kv_type: KvType) -> int:
    """Bytes of one page over all layers."""
    per_token = shape.key_length + -(-shape.value_length // VALUE_STEP) * VALUE_STEP
    values = shape.num_layers * shape.num_kv_heads * PAGE_TOKENS * per_token
    return values * _ITEMSIZES[kv_type]
