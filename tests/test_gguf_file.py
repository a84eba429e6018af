"""The GGUF reader: what it returns, and that no bytes make it slow, large or wrong."""

from __future__ import annotations

import lzma
import os
import shutil
import struct
import time
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.gguf_file import GgufFile
from engine.gguf_header import HeaderCursor
from engine.requests import GgufError
from tests.gguf_factory import (
    F32,
    header_bytes,
    patch_tensor_type,
    string_bytes,
    tensor_bytes,
    value_bytes,
    with_data,
    write_tiny_model,
)

GOLDEN = Path(__file__).parent / "data" / "golden"
SHARDS = sorted((GOLDEN / "split").glob("*.gguf"))
U32, STRING, ARRAY, U64 = 4, 8, 9, 10


def open_bytes(folder: Path, data: bytes, name: str = "model.gguf") -> GgufFile:
    path = folder / name
    path.write_bytes(data)
    return GgufFile.open(path)


# ---- what it returns -----------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.gguf")), ids=lambda path: path.stem)
def test_tensors_and_metadata_equal_those_of_gguf_py(path: Path) -> None:
    file, reader = GgufFile.open(path), gguf.GGUFReader(path)
    want = {
        tensor.name: (
            tuple(int(size) for size in reversed(tensor.shape)),
            tensor.tensor_type.name,
            tensor.data_offset,
            tensor.n_bytes,
        )
        for tensor in reader.tensors
    }
    found = {t.name: (t.shape, t.type_name, t.offset, t.nbytes) for t in file.tensors.values()}
    assert found == want
    fields = {key: field for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert list(file.metadata) == list(fields)
    for key, field in fields.items():
        value = file.metadata[key]
        assert (value.tolist() if isinstance(value, np.ndarray) else value) == field.contents()


def test_values_of_every_scalar_type_are_read(tmp_path: Path) -> None:
    values = {
        "a.u8": np.uint8(255),
        "a.i8": np.int8(-128),
        "a.u16": np.uint16(65535),
        "a.i16": np.int16(-2),
        "a.u32": 4294967295,
        "a.i32": np.int32(-3),
        "a.f32": 0.5,
        "a.bool": True,
        "a.u64": np.uint64(2**64 - 1),
        "a.i64": np.int64(-(2**63)),
        "a.f64": np.float64(0.1),
        "a.text": "héllo\0there",
    }
    model = write_tiny_model(tmp_path / "m.gguf", metadata=values)
    metadata = GgufFile.open(model.path).metadata
    for key, value in values.items():
        assert metadata[key] == value, key
        assert isinstance(metadata[key], (bool, int, float, str)), key


def test_128k_vocabulary_opens_in_less_than_300_ms(tmp_path: Path) -> None:
    packed = GOLDEN / "tokenizers" / "ggml-vocab-llama-bpe.gguf.xz"
    path = tmp_path / "vocab.gguf"
    path.write_bytes(lzma.decompress(packed.read_bytes()))
    seconds = []
    for _ in range(3):
        begin = time.perf_counter()
        file = GgufFile.open(path)
        seconds.append(time.perf_counter() - begin)
    assert file.metadata.array_len("tokenizer.ggml.tokens") == 128_256
    assert file.metadata["tokenizer.ggml.tokens"][-1] == "<|reserved_special_token_250|>"
    assert len(file.metadata["tokenizer.ggml.merges"]) == 280_147
    assert min(seconds) < 0.3


def test_arrays_are_read_on_access_and_a_changed_file_is_noticed(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "m.gguf")
    file = GgufFile.open(model.path)
    assert len(file.metadata["tokenizer.ggml.scores"]) == 320
    os.utime(model.path, ns=(1, 1))
    assert len(file.metadata["tokenizer.ggml.scores"]) == 320
    with pytest.raises(GgufError, match=r"m\.gguf: changed since it was opened"):
        file.metadata["tokenizer.ggml.tokens"]
    model.path.unlink()
    with pytest.raises(GgufError, match=r"m\.gguf: No such file"):
        file.metadata["tokenizer.ggml.tokens"]


def test_token_bytes_that_are_not_utf8_are_kept(tmp_path: Path) -> None:
    texts = [b"ok", b"\xff\xfe", b"", b"nul\0"]
    array = struct.pack("<IQ", STRING, len(texts)) + b"".join(map(string_bytes, texts))
    file = open_bytes(tmp_path, header_bytes([value_bytes("tokens", ARRAY, array)]))
    assert file.get_bytes_array("tokens") == texts
    assert file.metadata["tokens"] == ["ok", "��", "", "nul\0"]
    assert file.metadata.array_len("tokens") == 4
    assert file.metadata.array_len("absent") is None


def test_bytes_of_numbers_are_refused(tmp_path: Path) -> None:
    file = GgufFile.open(write_tiny_model(tmp_path / "m.gguf").path)
    with pytest.raises(GgufError, match=r"'tokenizer.ggml.scores' is not an array of strings"):
        file.get_bytes_array("tokenizer.ggml.scores")


def test_file_without_tensors_opens(tmp_path: Path) -> None:
    file = open_bytes(tmp_path, header_bytes([value_bytes("a", U32, struct.pack("<I", 7))]))
    assert file.tensors == {}
    assert dict(file.metadata) == {"a": 7}


def test_alignment_of_the_file_is_used(tmp_path: Path) -> None:
    values = [value_bytes("general.alignment", U32, struct.pack("<I", 128))]
    header = header_bytes(values, [tensor_bytes("t", [4], 0, 128)])
    file = open_bytes(tmp_path, with_data(header, 128 + 16, alignment=128))
    assert (file.tensors["t"].offset, file.tensors["t"].nbytes) == (256, 16)


@pytest.mark.parametrize("type_id", [41, 42, 99, 153])
def test_unknown_tensor_types_are_listed(tmp_path: Path, type_id: int) -> None:
    """Case 23: metadata and tensors list although a type is newer than the table."""
    model = write_tiny_model(tmp_path / "m.gguf")
    before = GgufFile.open(model.path)
    patch_tensor_type(model.path, "blk.0.ffn_up.weight", type_id)
    file = GgufFile.open(model.path)
    tensor = file.tensors["blk.0.ffn_up.weight"]
    assert tensor.type_name == f"unknown type {type_id}"
    assert tensor.nbytes == before.tensors[tensor.name].nbytes
    assert dict.fromkeys(file.tensors) == dict.fromkeys(before.tensors)
    assert file.metadata["general.name"] == "tiny-llama"


def test_types_without_dequantiser_are_listed_by_name(tmp_path: Path) -> None:
    header = header_bytes(tensors=[tensor_bytes("t", [256, 2], 16, 0)])
    tensor = open_bytes(tmp_path, with_data(header, 132)).tensors["t"]
    assert (tensor.type_name, tensor.shape, tensor.nbytes) == ("IQ2_XXS", (2, 256), 132)


# ---- versions ------------------------------------------------------------------------------


def tiny_header(version: int, order: str = "<") -> bytes:
    values = [value_bytes("a", U32, struct.pack(f"{order}I", 7), order)]
    tensors = [tensor_bytes("t", [4], 0, 0, order)]
    return with_data(header_bytes(values, tensors, version=version, order=order), 16)


@pytest.mark.parametrize("version", [2, 3])
def test_supported_versions_open(tmp_path: Path, version: int) -> None:
    """Case 100: versions 2 and 3 load."""
    file = open_bytes(tmp_path, tiny_header(version))
    assert (file.version, file.metadata["a"], list(file.tensors)) == (version, 7, ["t"])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (tiny_header(1), "GGUF version 1; versions 2 and 3 are read"),
        (tiny_header(4), "GGUF version 4; versions 2 and 3 are read"),
        (tiny_header(0), "GGUF version 0; versions 2 and 3 are read"),
        (tiny_header(3, ">"), "a big-endian GGUF file"),
        (tiny_header(2, ">"), "a big-endian GGUF file"),
    ],
    ids=["v1", "v4", "v0", "v3-big-endian", "v2-big-endian"],
)
def test_other_versions_are_refused_by_name(tmp_path: Path, data: bytes, message: str) -> None:
    """Case 100: version 1, version 4 and big-endian files are refused by name."""
    with pytest.raises(GgufError, match=message):
        open_bytes(tmp_path, data)


# ---- not a model, or not all of it ---------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "0 bytes; download the file again"),
        (b"GG", "the version at byte 4 needs 4 bytes, but the file ends at 2"),
        (b"\n<!DOCTYPE html><html>", "an HTML or XML page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:4\n", "a git-lfs pointer"),
        (b'{"error":"Repository not found"}', "JSON text"),
        (b"Entry not found", "not a GGUF file; it starts with b'Entr'"),
        (b"PK\x03\x04" + bytes(60), "a zip archive"),
        (b"\xfd7zXZ\0", "xz-compressed: unpack it first"),
        (b"tjgg\3\0\0\0", "a GGJT file, older than GGUF"),
        (bytes(4096), "zeros at its start: an incomplete download"),
    ],
)
def test_other_files_are_named_for_what_they_are(tmp_path: Path, data: bytes, message: str) -> None:
    with pytest.raises(GgufError, match=rf"model\.gguf: {message}"):
        open_bytes(tmp_path, data)


def test_paths_that_are_no_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(GgufError, match="absent: No such file or directory; give the path"):
        GgufFile.open(tmp_path / "absent")
    with pytest.raises(GgufError, match=r"not a regular file; give the path of a \.gguf file"):
        GgufFile.open(tmp_path)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(GgufError, match="fifo: not a regular file"):
        GgufFile.open(tmp_path / "fifo")


def test_half_a_download_says_what_is_there_and_what_should_be(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "m.gguf")
    whole = GgufFile.open(model.path).tensors.values()
    expected = max(tensor.offset + tensor.nbytes for tensor in whole)
    os.truncate(model.path, 100_000)
    message = rf"100000 bytes present, {expected} expected .*incomplete download"
    with pytest.raises(GgufError, match=message):
        GgufFile.open(model.path)


def test_every_cut_of_a_header_is_refused(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "m.gguf")
    header_nbytes = min(t.offset for t in GgufFile.open(model.path).tensors.values())
    data = model.path.read_bytes()
    for nbytes in [*range(1, 400), *range(400, header_nbytes, 97)]:
        with pytest.raises(GgufError):
            open_bytes(tmp_path, data[:nbytes], "cut.gguf")


def test_file_that_shrinks_while_it_is_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(header_bytes())
    with path.open("rb") as opened:
        cursor = HeaderCursor(path, opened.fileno(), nbytes=100)
        with pytest.raises(GgufError, match="read 24 of 100 bytes at 0; the file became shorter"):
            cursor.take(40, "the head")


# ---- crafted headers -----------------------------------------------------------------------


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def aligned_to(alignment: int) -> bytes:
    values = [value_bytes("general.alignment", U32, u32(alignment))]
    return with_data(header_bytes(values, [tensor_bytes("t", [4], 0, 0)]), 1 << 12)


def with_tensors(*tensors: bytes, nbytes: int = 1 << 12) -> bytes:
    return with_data(header_bytes(tensors=tensors), nbytes)


NESTED = b"".join(u32(ARRAY) + u64(1) for _ in range(10_000)) + u32(U32) + u64(1) + u32(1)
CRAFTED = {
    "keys-2^63": (header_bytes(num_values=1 << 63) + bytes(4096), "metadata keys"),
    "keys-of-a-large-file": (header_bytes(num_values=70_000) + bytes(1 << 20), "metadata keys"),
    "tensors-2^63": (header_bytes(num_tensors=1 << 63) + bytes(4096), "tensors in the"),
    "key-length-2^63": (header_bytes([u64(1 << 63)], num_values=1) + bytes(99), "a metadata key"),
    "key-length-0": (header_bytes([u64(0)], num_values=1) + bytes(99), "has 0 bytes: damaged"),
    "key-not-utf8": (header_bytes([value_bytes("a", U32, u32(1)).replace(b"a", b"\xff")]), "UTF-8"),
    "key-twice": (header_bytes([value_bytes("a", U32, u32(1))] * 2), "'a' occurs twice"),
    "string-2^63": (
        header_bytes([value_bytes("a", STRING, u64(1 << 63))]) + bytes(99),
        "value of 'a' at byte 45 needs 9223372036854775808 bytes, but the file ends at 144",
    ),
    "value-type-13": (header_bytes([value_bytes("a", 13, u32(1))]), "unknown value type 13"),
    "array-2^63": (
        header_bytes([value_bytes("a", ARRAY, u32(U64) + u64(1 << 63))]) + bytes(99),
        "items of the array 'a'",
    ),
    "array-of-string-2^63": (
        header_bytes([value_bytes("a", ARRAY, u32(STRING) + u64(2) + u64(1 << 63))]) + bytes(99),
        "the array 'a' at byte",
    ),
    "array-type-13": (
        header_bytes([value_bytes("a", ARRAY, u32(13) + u64(1))]) + bytes(99),
        "unknown value type 13",
    ),
    "array-nested": (header_bytes([value_bytes("a", ARRAY, NESTED)]), "'a' holds arrays"),
    "alignment-0": (aligned_to(0), "general.alignment is 0; it must be a power of two"),
    "alignment-3": (aligned_to(3), "general.alignment is 3"),
    "alignment-2^30": (aligned_to(1 << 30), "general.alignment is 1073741824"),
    "alignment-text": (
        header_bytes([value_bytes("general.alignment", STRING, string_bytes("32"))]),
        "'general.alignment' must be an integer",
    ),
    "dims-10^6": (
        with_data(header_bytes(tensors=[string_bytes("t") + u32(10**6)]), 1 << 12),
        "'t' has 1000000 dimensions",
    ),
    "dims-0": (with_tensors(string_bytes("t") + u32(0)), "'t' has 0 dimensions"),
    "dims-overflow": (with_tensors(tensor_bytes("t", [1 << 32, 1 << 32], 0, 0)), "damaged"),
    "dims-overflow-unknown-type": (
        with_tensors(tensor_bytes("t", [1 << 62, 1 << 62], 153, 0)),
        "damaged",
    ),
    "dims-2^61": (with_tensors(tensor_bytes("t", [1 << 61], 0, 0)), "9223372036854775872 expected"),
    "dim-zero": (with_tensors(tensor_bytes("t", [4, 0], 0, 0)), r"dimensions \(4, 0\)"),
    "row-of-half-a-block": (with_tensors(tensor_bytes("t", [48], 2, 0)), "rows of 48 values"),
    "offset-unaligned": (with_tensors(tensor_bytes("t", [4], 0, 8)), "offset 8 is not aligned"),
    "offset-outside": (with_tensors(tensor_bytes("t", [4], 0, 1 << 20)), "1048656 expected"),
    "offset-outside-unknown-type": (
        with_tensors(tensor_bytes("t", [4], 153, 1 << 20)),
        "bytes present, .* expected",
    ),
    "offset-2^64": (with_tensors(tensor_bytes("t", [4], 0, (1 << 64) - 32)), "expected"),
    "offsets-overlap": (
        with_tensors(tensor_bytes("t", [64], 0, 0), tensor_bytes("u", [4], 0, 224)),
        "'t' .* and 'u' .* overlap",
    ),
    "tensor-twice": (
        with_tensors(tensor_bytes("t", [4], 0, 0), tensor_bytes("t", [4], 0, 32)),
        "'t' occurs twice",
    ),
}


@pytest.mark.parametrize("name", CRAFTED)
def test_crafted_headers_are_refused_fast_and_in_small_memory(tmp_path: Path, name: str) -> None:
    """Case 103: refused in under 1 s and with small memory."""
    data, message = CRAFTED[name]
    (tmp_path / "model.gguf").write_bytes(data)
    tracemalloc.start()
    begin = time.perf_counter()
    with pytest.raises(GgufError, match=message):
        GgufFile.open(tmp_path / "model.gguf")
    seconds, (_, peak) = time.perf_counter() - begin, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert seconds < 1
    assert peak < 8 << 20


@pytest.mark.parametrize(("item_kind", "count"), [(STRING, 1 << 33), (0, 1 << 35)])
def test_huge_arrays_in_a_sparse_file_are_refused(
    tmp_path: Path, item_kind: int, count: int
) -> None:
    """Case 103: a count that the file's size allows is still bounded."""
    path = tmp_path / "sparse.gguf"
    path.write_bytes(header_bytes([value_bytes("a", ARRAY, u32(item_kind) + u64(count))]))
    os.truncate(path, 1 << 37)
    begin = time.perf_counter()
    with pytest.raises(GgufError, match="items of the array 'a'"):
        GgufFile.open(path)
    assert time.perf_counter() - begin < 1


def test_huge_string_in_a_sparse_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "sparse.gguf"
    path.write_bytes(header_bytes([value_bytes("a", STRING, u64(1 << 36))]))
    os.truncate(path, 1 << 37)
    with pytest.raises(GgufError, match="'a' has 68719476736 bytes, more than"):
        GgufFile.open(path)


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    places=st.lists(st.tuples(st.integers(0, 9_000), st.integers(0, 255)), min_size=1, max_size=4)
)
def test_no_damage_raises_anything_else(tmp_path: Path, places: list[tuple[int, int]]) -> None:
    """Case 103: whatever bytes a header has, it opens or is refused with a GgufError."""
    path = tmp_path / "m.gguf"
    if not path.exists():
        write_tiny_model(path)
    data = bytearray(path.read_bytes())
    for at, value in places:
        data[at] = value
    try:
        file = open_bytes(tmp_path, bytes(data), "damaged.gguf")
    except GgufError as error:
        assert "damaged.gguf" in str(error)
        return
    assert all(t.offset + t.nbytes <= len(data) for t in file.tensors.values())
    assert len(dict(file.metadata)) == len(file.metadata)


# ---- shards --------------------------------------------------------------------------------


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    return [Path(shutil.copy(path, tmp_path)) for path in SHARDS]


@pytest.mark.parametrize("number", range(3))
def test_any_shard_opens_the_whole_model(number: int) -> None:
    file = GgufFile.open(SHARDS[number])
    whole = GgufFile.open(GOLDEN / "llama-q4_k_m.gguf")
    assert file.path == SHARDS[number]
    assert file.paths == tuple(SHARDS)
    assert file.metadata["llama.block_count"] == 2
    assert file.tensors.keys() == whole.tensors.keys()
    for name, tensor in whole.tensors.items():
        shard = file.tensors[name]
        with whole.path.open("rb") as one, file.paths[shard.file_idx].open("rb") as other:
            one.seek(tensor.offset)
            other.seek(shard.offset)
            assert one.read(tensor.nbytes) == other.read(shard.nbytes)


def test_missing_shards_are_named(shards: list[Path]) -> None:
    shards[1].unlink()
    shards[2].unlink()
    message = "2 of 3 shards are missing .*-00002-of-00003.gguf, .*-00003-of-00003.gguf"
    with pytest.raises(GgufError, match=message):
        GgufFile.open(shards[0])


def test_renamed_shard_says_the_name_it_needs(shards: list[Path]) -> None:
    other = shards[1].rename(shards[1].with_name("part-two.gguf"))
    message = r"shard 2 of 3, so its name must end in -00002-of-00003\.gguf"
    with pytest.raises(GgufError, match=message):
        GgufFile.open(other)


def test_swapped_shards_are_refused(shards: list[Path]) -> None:
    shutil.copy(shards[2], shards[1])
    with pytest.raises(GgufError, match="says it is shard 3 of 3, not 2 of 3"):
        GgufFile.open(shards[0])


def test_damaged_shard_is_named(shards: list[Path]) -> None:
    os.truncate(shards[2], 5_000)
    with pytest.raises(GgufError, match=r"00003-of-00003\.gguf: 5000 bytes present"):
        GgufFile.open(shards[0])


def write_shard(path: Path, number: int, total: int, tensors: list[bytes]) -> None:
    values = [
        value_bytes("split.no", 2, struct.pack("<H", number)),
        value_bytes("split.count", 2, struct.pack("<H", 2)),
        value_bytes("split.tensors.count", 5, struct.pack("<i", total)),
    ]
    path.write_bytes(with_data(header_bytes(values, tensors), 64))


@pytest.mark.parametrize(
    ("totals", "names", "message"),
    [
        ((2, 3), "ab", "a model of 3 tensors, but m-00001-of-00002.gguf to one of 2"),
        ((3, 3), "ab", "its 2 shards hold 2 tensors, 3 were split"),
        ((2, 2), "aa", "00001-of-00002.gguf and .*00002-of-00002.gguf: tensor 'a' occurs twice"),
    ],
)
def test_shards_of_different_models_are_refused(
    tmp_path: Path, totals: tuple[int, int], names: str, message: str
) -> None:
    for number, (total, name) in enumerate(zip(totals, names, strict=True)):
        path = tmp_path / f"m-{number + 1:05d}-of-00002.gguf"
        write_shard(path, number, total, [tensor_bytes(name, [4], F32.value, 0)])
    with pytest.raises(GgufError, match=message):
        GgufFile.open(tmp_path / "m-00001-of-00002.gguf")
