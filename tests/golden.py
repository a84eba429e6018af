"""The reference data of tests/data/golden (see its README)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

GOLDEN = Path(__file__).parent / "data" / "golden"
NAMES = sorted(path.stem for path in GOLDEN.glob("*.npz"))


@dataclass(frozen=True)
class Sequence:
    """Logits (float64 reference, stored as float32) at `positions` of one token sequence."""

    ids: np.ndarray
    positions: np.ndarray
    logits: np.ndarray


@dataclass(frozen=True)
class Golden:
    name: str
    model: Path
    sequences: list[Sequence]
    greedy_ids: np.ndarray
    greedy_margin: np.ndarray


def load(name: str) -> Golden:
    data = np.load(GOLDEN / f"{name}.npz")
    count = sum(key.startswith("ids_") for key in data)
    return Golden(
        name=name,
        model=GOLDEN / f"{name}.gguf",
        sequences=[
            Sequence(data[f"ids_{i}"], data[f"positions_{i}"], data[f"logits_{i}"])
            for i in range(count)
        ],
        greedy_ids=data["greedy_ids"],
        greedy_margin=data["greedy_margin"],
    )


def split_model() -> Path:
    return GOLDEN / "split" / "llama-q4_k_m-00001-of-00003.gguf"
