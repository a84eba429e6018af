"""What a model file says of itself, as plain values: for `ntx-batch inspect`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import numpy as np

from engine.gguf_file import GgufFile, TensorInfo
from engine.hparams import check_tensors, read_hparams
from engine.requests import ModelError
from engine.tokenizer import Tokenizer
from ntx_batch.status import plain

LAYER_NAME = re.compile(r"blk\.(\d+)\.")
SHORT_ARRAY = 8  # longer metadata arrays are shown as their length


def describe(file: GgufFile) -> dict[str, Any]:
    """Metadata, layers, and bytes per tensor type; `problem` says why a file cannot be run."""
    return {
        "files": [str(path) for path in file.paths],
        "version": file.version,
        "architecture": file.metadata.get("general.architecture"),
        "name": file.metadata.get("general.name"),
        **_model_facts(file),
        "nbytes": sum(tensor.nbytes for tensor in file.tensors.values()),
        "types": _bytes_per_type(file.tensors.values()),
        "layers": _layers(file),
        "metadata": {key: _shown(file, key) for key in file.metadata},
        "tensors": [
            {
                "name": tensor.name,
                "shape": list(tensor.shape),
                "type": tensor.type_name,
                "nbytes": tensor.nbytes,
            }
            for tensor in file.tensors.values()
        ],
    }


def tokenize(file: GgufFile, text: str, *, pre_tokenizer: str | None = None) -> dict[str, Any]:
    """Token ids of `text` as a prompt would have them, and each token's bytes as text."""
    tokenizer = Tokenizer.from_gguf(file, pre_tokenizer=pre_tokenizer)
    ids = [int(token_id) for token_id in tokenizer.encode(text)]
    return {
        "text": text,
        "ids": ids,
        "tokens": [tokenizer.token_text(token_id) for token_id in ids],
        "bos_id": tokenizer.bos_id,
        "eos_id": tokenizer.eos_id,
        "eog_ids": sorted(tokenizer.eog_ids),
        "warnings": list(tokenizer.warnings),
    }


def _model_facts(file: GgufFile) -> dict[str, Any]:
    try:
        hparams = read_hparams(file)
        check_tensors(file, hparams)
    except ModelError as error:
        return {"problem": str(error), "hparams": None}
    return {"problem": None, "hparams": plain(asdict(hparams))}


def _bytes_per_type(tensors: Iterable[TensorInfo]) -> dict[str, int]:
    """Type name to bytes, the largest first."""
    nbytes = Counter[str]()
    for tensor in tensors:
        nbytes[tensor.type_name] += tensor.nbytes
    return dict(nbytes.most_common())


def _layers(file: GgufFile) -> list[dict[str, Any]]:
    """Each layer's tensors and bytes per type; layer None is what belongs to no layer."""
    layers: dict[int | None, list[TensorInfo]] = {}
    for tensor in file.tensors.values():
        match = LAYER_NAME.match(tensor.name)
        layers.setdefault(int(match[1]) if match else None, []).append(tensor)
    return [
        {"layer": layer, "tensors": len(tensors), "types": _bytes_per_type(tensors)}
        for layer, tensors in sorted(layers.items(), key=lambda item: (item[0] is None, item[0]))
    ]


def _shown(file: GgufFile, key: str) -> Any:
    length = file.metadata.array_len(key)
    if length is not None and length > SHORT_ARRAY:
        return f"array of {length}"
    value = file.metadata[key]
    return value.tolist() if isinstance(value, np.ndarray) else plain(value)
