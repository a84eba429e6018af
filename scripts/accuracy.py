"""Largest logit error of each reference file, with float32 and float16 KV.

python -m scripts.accuracy tests/data/golden
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from engine import EngineConfig
from engine.engine import Engine
from kernels.ops import KvType

KV_TYPES: tuple[KvType, ...] = ("f32", "f16")
KV_NBYTES = 64 << 20


def max_errors(model: Path) -> list[float]:
    """By KV type, over all sequences of `model`'s .npz, against its float64 reference."""
    data = np.load(model.with_suffix(".npz"))
    count = sum(key.startswith("ids_") for key in data)
    worst = []
    with Engine(model, EngineConfig(kv_memory_nbytes=KV_NBYTES)) as engine:
        for kv_type in KV_TYPES:
            errors = [
                engine.logits(data[f"ids_{i}"], kv_type)[data[f"positions_{i}"]]
                - data[f"logits_{i}"]
                for i in range(count)
            ]
            worst.append(max(float(np.abs(error).max()) for error in errors))
    return worst


def main() -> None:
    folder = Path(sys.argv[1])
    print("| file | float32 KV | float16 KV |\n|---|---|---|")
    for reference in sorted(folder.glob("*.npz")):
        numbers = " | ".join(f"{error:.1e}" for error in max_errors(reference.with_suffix(".gguf")))
        print(f"| {reference.stem} | {numbers} |")


if __name__ == "__main__":
    main()
