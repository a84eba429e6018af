"""Hyperparameters, tensor checks and RoPE tables: used, or refused by name."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from engine.gguf_file import GgufFile
from engine.hparams import (
    Hparams,
    check_tensors,
    expected_tensors,
    read_hparams,
)
from engine.requests import ModelError, UnsupportedModelError
from tests import golden
from tests.gguf_factory import (
    ARCHITECTURES,
    TinySizes,
    header_bytes,
    patch_tensor_type,
    string_bytes,
    value_bytes,
    write_tiny_model,
)
from tests.reference_model import read_weights, reference_logits


def load(path: Path) -> Hparams:
    """Everything an engine checks before it reads weights."""
    file = GgufFile.open(path)
    hparams = read_hparams(file)
    check_tensors(file, hparams)
    return hparams


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "m.gguf"


# ---- what is read --------------------------------------------------------------------------


@pytest.mark.parametrize("name", golden.NAMES)
def test_golden_logits_follow_from_hparams_weights_and_tables(name: str) -> None:
    """Cases 52, 53: rope style, biases and norms are those of the architecture."""
    data = golden.load(name)
    file = GgufFile.open(data.model)
    check_tensors(file, read_hparams(file))
    weights = read_weights(file)
    for sequence in data.sequences[:4]:
        logits = reference_logits(file, sequence.ids, weights=weights)
        np.testing.assert_allclose(logits[sequence.positions], sequence.logits, atol=1e-4)


def test_sizes_of_a_golden_model() -> None:
    hparams = load(golden.GOLDEN / "qwen3-headdim96-q4_0.gguf")
    assert hparams == Hparams(
        architecture="qwen3",
        num_layers=2,
        hidden=256,
        ffn=512,
        num_heads=4,
        num_kv_heads=2,
        key_length=96,
        value_length=96,
        vocab_size=512,
        num_tokens=512,
        context_length=8192,
        norm_eps=float(np.float32(1e-5)),
        rope=hparams.rope,
        tied_embeddings=False,
        has_qkv_bias=False,
        has_qk_norm=True,
    )


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_expected_tensors_are_exactly_those_of_a_valid_file(path: Path, arch: str) -> None:
    sizes = TinySizes(key_length=24, value_length=8, num_kv_heads=1)
    model = write_tiny_model(path, arch=arch, sizes=sizes)
    file = GgufFile.open(path)
    hparams = read_hparams(file)
    check_tensors(file, hparams)
    assert expected_tensors(hparams, file) == {
        name: weight.shape for name, weight in model.weights.items()
    }


def test_optional_keys_have_the_formats_defaults(path: Path) -> None:
    absent = [
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "rope.freq_base",
        "rope.dimension_count",
    ]
    metadata = {f"llama.{key}": None for key in absent}
    write_tiny_model(path, sizes=TinySizes(num_kv_heads=4), metadata=metadata)
    hparams = load(path)
    assert (hparams.num_kv_heads, hparams.key_length, hparams.value_length) == (4, 16, 16)
    assert (hparams.rope.base, hparams.rope.rotary_dim) == (10000.0, 16)
    assert hparams.rope.style == "adjacent"


def test_equal_values_per_layer_are_one_value(path: Path) -> None:
    write_tiny_model(path, metadata={"llama.feed_forward_length": [96, 96]})
    assert load(path).ffn == 96
    write_tiny_model(path, metadata={"llama.feed_forward_length": [96, 64]})
    with pytest.raises(UnsupportedModelError, match=r"feed_forward_length differs.*\[96, 64\]"):
        load(path)


# ---- tied embeddings, padded vocabularies ----------------------------------------------------


@pytest.mark.parametrize("quant_type", [Type.F16, Type.Q8_0, Type.Q4_0])
def test_tied_embeddings_load_and_give_the_embedding_as_head(path: Path, quant_type: Type) -> None:
    """Case 19: without output.weight the head is token_embd, whatever its type."""
    model = write_tiny_model(path, quant_type=quant_type, tied=True)
    assert load(path).tied_embeddings
    ids = np.arange(5, 25)
    tied = reference_logits(GgufFile.open(path), ids)
    embedding = model.weights["token_embd.weight"]
    write_tiny_model(path, quant_type=quant_type, tensors={"output.weight": embedding})
    assert not load(path).tied_embeddings
    np.testing.assert_array_equal(reference_logits(GgufFile.open(path), ids), tied)


def test_padded_vocabulary_loads_and_knows_the_padding(path: Path) -> None:
    """Case 55: more embedding rows than tokens."""
    write_tiny_model(path, sizes=TinySizes(num_rows=352))
    hparams = load(path)
    assert (hparams.vocab_size, hparams.num_tokens) == (352, 320)


def test_fewer_embedding_rows_than_tokens_is_an_error(path: Path) -> None:
    """Case 55: fewer rows than tokens is a load error."""
    write_tiny_model(path, sizes=TinySizes(num_rows=319))
    with pytest.raises(ModelError, match=r"has 320 tokens, but 'token_embd\.weight' only 319 rows"):
        load(path)


def test_vocabulary_size_is_never_made_up(path: Path) -> None:
    write_tiny_model(path, metadata={"tokenizer.ggml.tokens": None, "llama.vocab_size": 320})
    with pytest.raises(ModelError, match=r"tokenizer\.ggml\.tokens is missing"):
        load(path)


# ---- tensors ---------------------------------------------------------------------------------


def test_mixed_types_in_one_file_dequantise_like_the_reference(path: Path) -> None:
    """Case 22: every type that gguf-py can write, side by side; K types: llama-q4_k_m."""
    types = [Type.F32, Type.F16, Type.BF16, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0]
    plain = write_tiny_model(path)
    names = [name for name, weight in plain.weights.items() if weight.ndim == 2]
    tensors = {
        name: (plain.weights[name], types[index % len(types)]) for index, name in enumerate(names)
    }
    model = write_tiny_model(path, tensors=tensors)
    file = GgufFile.open(path)
    check_tensors(file, read_hparams(file))
    assert {file.tensors[name].type_name for name in names} == {kind.name for kind in types}
    for name, weight in read_weights(file).items():
        np.testing.assert_array_equal(weight, model.weights[name], err_msg=name)


def test_k_types_mixed_by_a_quantiser_are_read() -> None:
    """Case 22: a K_M file holds several types."""
    file = GgufFile.open(golden.GOLDEN / "llama-q4_k_m.gguf")
    check_tensors(file, read_hparams(file))
    assert {tensor.type_name for tensor in file.tensors.values()} == {"F32", "Q4_K", "Q6_K"}


@pytest.mark.parametrize("type_id", [99, 153])
def test_unknown_type_is_refused_naming_tensor_and_id(path: Path, type_id: int) -> None:
    """Cases 22, 23: the load is refused, the metadata still reads."""
    write_tiny_model(path)
    patch_tensor_type(path, "blk.1.attn_k.weight", type_id)
    assert read_hparams(GgufFile.open(path)).num_layers == 2
    message = rf"tensor 'blk\.1\.attn_k\.weight' has unknown type {type_id}; supported types: F32,"
    with pytest.raises(UnsupportedModelError, match=message):
        load(path)


def test_known_type_without_dequantiser_is_refused_by_name(path: Path) -> None:
    write_tiny_model(path, quant_type=Type.Q4_0)
    patch_tensor_type(path, "blk.0.ffn_up.weight", 20)
    with pytest.raises(
        UnsupportedModelError, match=r"'blk\.0\.ffn_up\.weight' has type IQ4_NL, which"
    ):
        load(path)


@pytest.mark.parametrize(
    ("arch", "name"),
    [
        ("llama", "output_norm.weight"),
        ("llama", "blk.1.attn_v.weight"),
        ("qwen2", "blk.0.attn_k.bias"),
        ("qwen3", "blk.1.attn_q_norm.weight"),
    ],
)
def test_missing_tensor_is_named(path: Path, arch: str, name: str) -> None:
    """Case 53: a bias or norm that its architecture has must be there."""
    write_tiny_model(path, arch=arch, tensors={name: None})
    with pytest.raises(ModelError, match=f"tensors are missing: {name}"):
        load(path)


@pytest.mark.parametrize(
    "name", ["blk.0.attn_output.bias", "blk.1.ffn_gate_inp.weight", "rope_factors_long.weight"]
)
def test_tensor_that_nothing_uses_is_an_error(path: Path, name: str) -> None:
    """Case 53: any tensor not consumed is an error."""
    write_tiny_model(path, tensors={name: np.zeros(8)})
    with pytest.raises(UnsupportedModelError, match=f"no use for in a 'llama' model.*{name}"):
        load(path)


def test_tensor_of_another_shape_shows_both(path: Path) -> None:
    write_tiny_model(path, tensors={"blk.0.ffn_down.weight": np.zeros((96, 64))})
    message = r"'blk\.0\.ffn_down\.weight' has shape \(96, 64\), the metadata calls for \(64, 96\)"
    with pytest.raises(ModelError, match=message):
        load(path)


def test_attention_biases_of_a_llama_file_are_used(path: Path) -> None:
    biases = {
        f"blk.{layer}.attn_{part}.bias": np.full(size, 0.5)
        for layer in range(2)
        for part, size in (("q", 64), ("k", 32), ("v", 32))
    }
    write_tiny_model(path, tensors=biases)
    assert load(path).has_qkv_bias
    write_tiny_model(path, tensors=biases | {"blk.1.attn_v.bias": None})
    with pytest.raises(ModelError, match=r"missing: blk\.1\.attn_v\.bias"):
        load(path)


# ---- architectures and keys ------------------------------------------------------------------


def test_unsupported_architecture_is_refused_by_name(path: Path) -> None:
    """Case 53: no model answers for an unsupported one."""
    write_tiny_model(path, arch="foo")
    message = "unsupported architecture 'foo'; supported: llama, qwen2, qwen3"
    with pytest.raises(UnsupportedModelError, match=message):
        load(path)


def test_file_without_architecture_is_refused(path: Path) -> None:
    path.write_bytes(header_bytes())
    with pytest.raises(ModelError, match=r"general\.architecture is missing"):
        load(path)


def test_vocabulary_only_file_is_refused(path: Path) -> None:
    full = write_tiny_model(path)
    write_tiny_model(path, tensors=dict.fromkeys(full.weights))
    with pytest.raises(ModelError, match=r"'token_embd\.weight' is missing"):
        load(path)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general.type": "adapter"}, "holds a 'adapter', not a model"),
        ({"general.quantization_version": 1}, "quantization_version is 1, version 2"),
        ({"llama.expert_count": 8}, "llama.expert_count = 8 is not supported, only 0"),
        ({"llama.logit_scale": 0.25}, "llama.logit_scale = 0.25 is not supported, only 0 or 1"),
        ({"llama.attention.causal": False}, "attention.causal = False is not supported"),
        ({"llama.attention.scale": 0.5}, "scale = 0.5 is not supported, only key_length.* 0.25"),
        ({"llama.attention.sliding_window": 511}, "window = 511 is below the context length 512"),
        ({"llama.final_logit_softcapping": 30.0}, "softcapping = 30.0 is not supported, only 0"),
        ({"llama.pooling_type": 3}, "llama.pooling_type = 3 is not supported"),
        ({"llama.new_trick": "x"}, "llama.new_trick = 'x' is unknown and may change"),
    ],
)
def test_keys_that_change_the_maths_are_refused_by_name(
    path: Path, metadata: dict[str, Any], message: str
) -> None:
    write_tiny_model(path, metadata=metadata)
    with pytest.raises(UnsupportedModelError, match=message):
        load(path)


def test_keys_with_neutral_values_are_accepted(path: Path) -> None:
    neutral = {
        "general.type": "model",
        "general.quantization_version": 2,
        "llama.vocab_size": 320,
        "llama.expert_count": 0,
        "llama.logit_scale": 1.0,
        "llama.attention.causal": True,
        "llama.attention.scale": 0.25,
        "llama.attention.sliding_window": 512,
        "llama.attention.clamp_kqv": 0.0,
        "llama.tensor_data_layout": "Meta AI original pth",
        "llama.rope.scaling.finetuned": False,
    }
    plain = write_tiny_model(path)
    want = load(plain.path)
    write_tiny_model(path, metadata=neutral)
    assert load(path) == want


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("block_count", None, "llama.block_count is missing"),
        ("block_count", 10**9, "block_count = 1000000000 layers, but the file has 21 tensors"),
        ("block_count", "two", "block_count = 'two' must be a positive integer"),
        ("embedding_length", 0, "embedding_length = 0 must be a positive integer"),
        ("embedding_length", np.uint64(2**40), "must be a positive integer"),
        ("attention.head_count_kv", 3, "head_count_kv = 3 must divide the 4 heads"),
        ("attention.layer_norm_rms_epsilon", 0.0, "epsilon = 0.0 must be positive"),
        ("attention.layer_norm_rms_epsilon", math.nan, "epsilon = nan must be a finite number"),
        ("rope.freq_base", 1.0, "freq_base = 1.0 must be above 1"),
        ("rope.dimension_count", 15, "dimension_count = 15 must be even and at most 16"),
        ("rope.dimension_count", 18, "dimension_count = 18 must be even and at most 16"),
        ("rope.scaling.factor", -2.0, "factor = -2.0 must be positive"),
        ("rope.scaling.type", 1, "type = 1 must be a string"),
    ],
)
def test_impossible_values_are_refused_with_key_and_value(
    path: Path, key: str, value: Any, message: str
) -> None:
    write_tiny_model(path, metadata={f"llama.{key}": value})
    with pytest.raises(ModelError, match=message):
        load(path)


def test_empty_list_in_place_of_a_number_is_refused(path: Path) -> None:
    entry = value_bytes("general.architecture", 8, string_bytes("llama"))
    empty = value_bytes("llama.expert_count", 9, bytes(12))
    path.write_bytes(header_bytes([entry, empty]))
    with pytest.raises(ModelError, match="head_count is missing"):
        load(path)
