"""Dequantisation, against gguf-py on random and on real bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import gguf.quants
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from kernels import quants
from kernels.quants import LISTED_TYPES, QUANT_TYPES, BlockTensor, QuantType, dequantize

GOLDEN = Path(__file__).parent / "data" / "golden"
HALF_FIELDS = ("d", "dmin", "m")


def random_blocks(quant_type: QuantType, num_blocks: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Random bytes whose scales (and float values) are finite."""
    rng = np.random.default_rng(quant_type.type_id)
    layout = quants._LAYOUTS[quant_type.name]
    data = rng.integers(0, 256, num_blocks * quant_type.block_nbytes, dtype=np.uint8)
    blocks = data.view(layout)
    values = rng.standard_normal(num_blocks)
    if layout.names is None:
        blocks[:] = values if layout.kind == "f" else rng.integers(0, 0x7F00, num_blocks)
    for name in set(HALF_FIELDS) & set(layout.names or ()):
        blocks[name] = rng.standard_normal(num_blocks)
    return data


@pytest.mark.parametrize("quant_type", QUANT_TYPES.values(), ids=lambda t: t.name)
def test_dequantize_equals_gguf_py_on_random_blocks(quant_type: QuantType) -> None:
    """Case 22: every listed type dequantises exactly like the reference."""
    data = random_blocks(quant_type, 6 * 35).reshape(6, -1)
    want = gguf.quants.dequantize(data, GGMLQuantizationType(quant_type.type_id))
    got = dequantize(data, quant_type)
    assert got.dtype == np.float32
    assert got.shape == want.shape == (6, 35 * quant_type.block_size)
    np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))


@pytest.mark.parametrize("name", ["Q4_0", "Q6_K", "F16"])
def test_chunked_decoding_leaves_no_seam(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    quant_type = next(t for t in QUANT_TYPES.values() if t.name == name)
    data = random_blocks(quant_type, 37)
    whole = dequantize(data, quant_type)
    monkeypatch.setattr(quants, "CHUNK_VALUES", 4 * quant_type.block_size)
    np.testing.assert_array_equal(dequantize(data, quant_type), whole)


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.gguf")), ids=lambda path: path.stem)
def test_dequantize_equals_gguf_py_on_golden_files(path: Path) -> None:
    for tensor in gguf.GGUFReader(path).tensors:
        data = np.ascontiguousarray(tensor.data).view(np.uint8)
        want = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(-1)
        got = dequantize(data, QUANT_TYPES[tensor.tensor_type]).reshape(-1)
        np.testing.assert_array_equal(got, want, err_msg=tensor.name)


def test_dequantize_tensor_has_the_matrix_shape() -> None:
    quant_type = QUANT_TYPES[12]
    data = random_blocks(quant_type, 6).reshape(3, -1)
    matrix = quants.dequantize_tensor(BlockTensor("w", quant_type, 3, 512, data))
    assert matrix.shape == (3, 512)
    np.testing.assert_array_equal(matrix, dequantize(data, quant_type))


def test_type_tables_agree_with_gguf_py() -> None:
    for type_id, quant_type in (QUANT_TYPES | LISTED_TYPES).items():
        reference = GGMLQuantizationType(type_id)
        sizes = (quant_type.block_size, quant_type.block_nbytes)
        assert (type_id, quant_type.name) == (quant_type.type_id, reference.name)
        assert sizes == GGML_QUANT_SIZES[reference]
        assert quant_type.row_nbytes(512) == 512 // sizes[0] * sizes[1]


def test_the_two_tables_share_no_type() -> None:
    assert not QUANT_TYPES.keys() & LISTED_TYPES.keys()
