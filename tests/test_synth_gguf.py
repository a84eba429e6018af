"""Synthetic models: valid files of every type whose activations keep their size."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf
import gguf.quants
import numpy as np
import pytest

from engine.engine import Engine
from engine.gguf_file import GgufFile
from engine.requests import EngineConfig
from engine.tokenizer import Tokenizer
from kernels.quants import QUANT_TYPES
from nvme import ReadRequest
from scripts.filled_reader import FilledReader
from scripts.synth_blocks import TYPES, random_weights
from scripts.synth_gguf import MIXES, Shape, main, mixed_type, plan_tensors, write_model
from scripts.synth_vocab import make_vocab
from tests.reference_model import read_weights, reference_logits

TINY = Shape(
    num_layers=4,
    hidden=256,
    ffn=512,
    num_heads=4,
    num_kv_heads=2,
    vocab_size=600,
    context_length=128,
)
TEXT = "hello, baced fofo wörld"


def logits_of(path: Path) -> np.ndarray:
    with Engine(path, EngineConfig(num_threads=1)) as engine:
        return engine.logits(engine.tokenizer.encode(TEXT))


def check_sane(logits: np.ndarray) -> None:
    assert np.isfinite(logits).all()
    assert 0.7 < logits.std() < 6
    spread_over_tokens, spread_over_positions = logits.std(axis=1), logits.std(axis=0)
    assert (spread_over_tokens > 0.5).all()
    assert np.median(spread_over_positions) > 0.2


@pytest.mark.parametrize("type_name", TYPES)
def test_every_type_runs_through_the_engine(type_name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_model(path, TINY, type_name=type_name)
    file = GgufFile.open(path)
    types = {tensor.type_name for tensor in file.tensors.values() if len(tensor.shape) == 2}
    assert types == {type_name}
    check_sane(logits_of(path))


@pytest.mark.parametrize("mix", MIXES)
def test_mixes_run_through_the_engine(mix: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_model(path, TINY, mix=mix)
    types = {name: tensor.type_name for name, tensor in GgufFile.open(path).tensors.items()}
    assert types["output.weight"] == types["blk.2.ffn_down.weight"] == "Q6_K"
    assert types["token_embd.weight"] == types["blk.0.ffn_down.weight"] == MIXES[mix]
    assert types["blk.3.attn_norm.weight"] == "F32"
    check_sane(logits_of(path))


@pytest.mark.parametrize("type_name", ["F16", "Q4_K", "Q8_0"])
def test_activations_neither_vanish_nor_explode_over_many_layers(
    type_name: str, tmp_path: Path
) -> None:
    """What 24 layers add to the residual stream is about as large as what they found there."""
    path = tmp_path / "deep.gguf"
    write_model(path, replace(TINY, num_layers=24), type_name=type_name)
    file = GgufFile.open(path)
    weights = read_weights(file)
    ids = np.arange(300, 332)
    first = weights["token_embd.weight"][ids]
    assert 0.5 < first.std() < 2
    weights["output.weight"] = np.eye(TINY.hidden)
    weights["output_norm.weight"][:] = 1
    last = reference_logits(file, ids, weights=weights)  # residual stream over its size
    cosines = np.mean(last * first, axis=1) / first.std(axis=1)
    assert 0.3 < cosines.mean() < 0.9  # 0.71 where both parts are equal; 1 or 0 where one is nil


@pytest.mark.parametrize("type_name", TYPES)
def test_weights_have_the_size_asked_for_and_no_mean(type_name: str) -> None:
    quant_type = TYPES[type_name]
    num_blocks = 1_000_000 // quant_type.block_size
    for rms in (0.5, 0.005):
        data = random_weights(np.random.SFC64(3), quant_type, num_blocks, rms)
        blocks = data.reshape(num_blocks, quant_type.block_nbytes)
        raw_type = gguf.GGMLQuantizationType(quant_type.type_id)
        values = gguf.quants.dequantize(blocks, raw_type).astype(np.float64)
        found = float(np.sqrt(np.mean(values**2)))
        slack = 1.5 if quant_type.block_size == 1 else 1.05
        assert rms / slack < found < rms * slack
        assert abs(values.mean()) < 0.03 * found


def test_llama_cpp_gives_more_bits_to_the_same_layers() -> None:
    """Layers of Llama-2-7B in a Q4_K_M file by llama-quantize."""
    shape = Shape(num_layers=32)
    for part in ("attn_v", "ffn_down"):
        names = [f"blk.{layer}.{part}.weight" for layer in range(32)]
        more = [n for n, name in enumerate(names) if mixed_type("Q4_K_M", name, shape) == "Q6_K"]
        assert more == [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31]
    assert mixed_type("Q4_K_M", "blk.0.attn_q.weight", shape) == "Q4_K"
    assert mixed_type("Q5_K_M", "blk.4.attn_v.weight", shape) == "Q5_K"
    large = Shape(num_layers=80, num_heads=64, num_kv_heads=8)
    assert mixed_type("Q4_K_M", "blk.10.attn_v.weight", large) == "Q5_K"
    assert mixed_type("Q4_K_M", "blk.10.ffn_down.weight", large) == "Q4_K"


def test_a_split_model_is_the_same_model(tmp_path: Path) -> None:
    whole, split = tmp_path / "whole.gguf", tmp_path / "split.gguf"
    assert write_model(whole, TINY, type_name="Q8_0") == [whole]
    paths = write_model(split, TINY, type_name="Q8_0", split_nbytes=600_000)
    assert len(paths) > 2
    assert paths[0].name == f"split-00001-of-{len(paths):05d}.gguf"
    assert all(path.stat().st_size < 650_000 for path in paths)
    np.testing.assert_array_equal(logits_of(paths[0]), logits_of(whole))


def test_bytes_depend_on_the_seed_alone(tmp_path: Path) -> None:
    one, same, other = (tmp_path / name for name in ("one", "same", "other"))
    write_model(one, TINY, seed=1)
    write_model(same, TINY, seed=1)
    write_model(other, TINY, seed=2)
    assert one.read_bytes() == same.read_bytes()
    assert one.stat().st_size == other.stat().st_size
    assert one.read_bytes() != other.read_bytes()


def test_gguf_py_reads_the_file_and_its_values(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_model(path, TINY, mix="Q4_K_M")
    reader = gguf.GGUFReader(path)
    assert reader.fields["general.architecture"].contents() == "llama"
    assert reader.fields["general.file_type"].contents() == gguf.LlamaFileType.MOSTLY_Q4_K_M
    planned = {tensor.name: tensor for tensor in plan_tensors(TINY, "F16", "Q4_K_M")}
    assert [tensor.name for tensor in reader.tensors] == list(planned)
    for tensor in reader.tensors:
        want = planned[tensor.name]
        assert tuple(reversed(tensor.shape.tolist())) == want.shape
        assert (tensor.tensor_type, tensor.n_bytes) == (want.type.type_id, want.nbytes)
        assert np.isfinite(gguf.quants.dequantize(tensor.data, tensor.tensor_type)).all()


def test_tokens_are_words_and_text_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_model(path, TINY)
    tokenizer = Tokenizer.from_gguf(GgufFile.open(path))
    assert tokenizer.num_tokens == TINY.vocab_size
    ids = tokenizer.encode(TEXT)
    assert ids[0] == tokenizer.bos_id
    decoded = b"".join(tokenizer.token_bytes(token_id) for token_id in ids[1:])
    assert decoded.decode().strip() == TEXT
    assert len(tokenizer.encode(" ba ce", add_bos=False)) < len(" ba ce")
    texts = {tokenizer.token_bytes(token_id) for token_id in range(259, TINY.vocab_size)}
    assert len(texts) == TINY.vocab_size - 259


def test_vocabulary_of_a_large_model_has_no_text_twice() -> None:
    vocab = make_vocab(128_256)
    assert len(set(vocab.texts)) == len(vocab.scores) == len(vocab.kinds) == 128_256


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 3}, "hidden 256 is not an even number of values for each of 3 heads"),
        ({"num_kv_heads": 3}, "3 KV heads do not divide 4 heads; change --kv-heads"),
        ({"ffn": 500}, "rows of 500 values, not a multiple of the 32 of a Q8_0 block"),
        ({"vocab_size": 100}, "a vocabulary of 100 is too small; 354 is the least"),
        ({"vocab_size": 10**8}, "a vocabulary of 100000000 is too large"),
    ],
)
def test_impossible_shapes_are_refused_and_nothing_is_written(
    change: dict[str, int], message: str, tmp_path: Path
) -> None:
    sizes = {name: getattr(TINY, name) for name in Shape.__dataclass_fields__} | change
    with pytest.raises(ValueError, match=message):
        write_model(tmp_path / "model.gguf", Shape(**sizes), type_name="Q8_0")
    assert list(tmp_path.iterdir()) == []


def test_a_model_larger_than_the_disk_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"the tensors take \d+ bytes, the disk has \d+ free"):
        write_model(tmp_path / "model.gguf", Shape(num_layers=1000, hidden=1 << 16, ffn=1 << 20))


def test_command_writes_and_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.gguf"
    sizes = ["--layers=1", "--hidden=64", "--ffn=128", "--heads=4", "--kv-heads=2", "--vocab=400"]
    assert main([str(path), *sizes, "--type=Q4_0"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == str(path)
    assert second.startswith(f"{path.stat().st_size} bytes in ")
    assert main([str(path), *sizes, "--type=Q4_K"]) == 1
    assert "not a multiple of the 256 of a Q4_K block" in capsys.readouterr().err


def test_there_is_a_recipe_for_every_type_that_the_engine_reads() -> None:
    assert set(TYPES) == {quant_type.name for quant_type in QUANT_TYPES.values()}
    for quant_type in TYPES.values():
        assert len(random_weights(np.random.SFC64(0), quant_type, 7, 0.1)) == (
            7 * quant_type.block_nbytes
        )


def test_a_hollow_model_is_filled_the_same_however_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_model(path, replace(TINY, num_layers=8), type_name="Q4_K", mix="Q4_K_M", hollow=True)
    reader, end = FilledReader(path), path.stat().st_size
    whole = np.zeros(end, np.uint8)
    reader.submit([ReadRequest(file_idx=0, offset=0, out=whole)])
    for begin, nbytes in ((0, 5000), (12_345, 1), (end - 70_001, 70_001)):
        out = np.zeros(nbytes, np.uint8)
        reader.submit([ReadRequest(file_idx=0, offset=begin, out=out)])
        assert out.tobytes() == whole[begin : begin + nbytes].tobytes()
    config = EngineConfig(kv_memory_nbytes=64 << 20, expand="never")
    with Engine(path, config, reader_factory=lambda paths: FilledReader(paths[0])) as engine:
        logits = engine.logits([5, 6, 7])
    check_sane(logits)
