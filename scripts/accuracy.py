"""What each type of KV cache changes.

python -m scripts.accuracy tests/data/golden           largest logit error of each reference file
python -m scripts.accuracy MODEL.gguf TEXT [TEXT ...]   next-token distributions over text files
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from engine import EngineConfig
from engine.engine import Engine
from engine.kv_accuracy import measure_kv_accuracy
from kernels.ops import KvType

KV_TYPES: tuple[KvType, ...] = ("f32", "f16", "int8")
KV_NBYTES = 64 << 20
MOST_TOKENS = 2048  # of one text


def max_errors(model: Path) -> list[float]:
    """By KV type, over all sequences of `model`'s .npz, against its float64 reference."""
    data = np.load(model.with_suffix(".npz"))
    count = sum(key.startswith("ids_") for key in data)
    worst = []
    with Engine(model, EngineConfig(device="cpu", kv_memory_nbytes=KV_NBYTES)) as engine:
        for kv_type in KV_TYPES:
            errors = [
                engine.logits(data[f"ids_{i}"], kv_type)[data[f"positions_{i}"]]
                - data[f"logits_{i}"]
                for i in range(count)
            ]
            worst.append(max(float(np.abs(error).max()) for error in errors))
    return worst


def print_errors(folder: Path) -> None:
    print("| file | float32 KV | float16 KV | 8-bit KV |\n|---|---|---|---|")
    for reference in sorted(folder.glob("*.npz")):
        numbers = " | ".join(f"{error:.1e}" for error in max_errors(reference.with_suffix(".gguf")))
        print(f"| {reference.stem} | {numbers} |")


def print_distributions(model: Path, texts: list[Path]) -> None:
    """Against float32 KV, over all places of each text's first tokens."""
    with Engine(model, EngineConfig(device="cpu", kv_memory_nbytes=KV_NBYTES)) as engine:
        most = min(MOST_TOKENS, engine.context_length)
        rows = [
            np.asarray(engine.tokenizer.encode(text.read_text())[:most], np.int32) for text in texts
        ]
        print("| KV | tokens | mean KL | same greedy token | mean log-probability difference |")
        print("|---|---|---|---|---|")
        for kv_type in KV_TYPES[1:]:
            found = measure_kv_accuracy(
                engine, rows, kv_type, reference="f32", most_compared=MOST_TOKENS
            )
            print(
                f"| {kv_type} | {found.num_tokens:,} | {found.mean_kl:.1e} | "
                f"{found.greedy_agreement:.2%} | {found.mean_logprob_difference:.1e} |"
            )


def main() -> None:
    first, *texts = [Path(argument) for argument in sys.argv[1:]]
    if texts:
        print_distributions(first, texts)
    else:
        print_errors(first)


if __name__ == "__main__":
    main()
