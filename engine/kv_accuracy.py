"""What a smaller type of KV cache changes, measured on rows: no text is generated for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kernels.ops import Float32, KvType

Int32 = npt.NDArray[np.int32]
Float64 = npt.NDArray[np.float64]

MOST_COMPARED = 64  # tokens of a row


class HasLogits(Protocol):
    """An engine: see `Engine.logits`."""

    def logits(
        self, token_ids: Sequence[int], kv_type: KvType = "f32", *, first: int = 0
    ) -> Float32: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class KvAccuracy:
    """Next-token distributions with one type of KV cache against those with another.

    num_tokens: places compared
    greedy_agreement: share of them with the same most likely token
    mean_logprob_difference: mean magnitude, of the token that follows in the row, in nats
    mean_kl: mean divergence of the distributions from the reference's, in nats
    """

    num_tokens: int
    greedy_agreement: float
    mean_logprob_difference: float
    mean_kl: float

    def record(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {
            "num_tokens": self.num_tokens,
            "greedy_agreement": round(self.greedy_agreement, 6),
            "mean_logprob_difference": round(self.mean_logprob_difference, 6),
            "mean_kl": round(self.mean_kl, 8),
        }


def log_softmax(logits: Float32) -> Float64:
    """Log-probabilities of each line."""
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    result: Float64 = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return result


def compare_logits(logits: Float32, reference: Float32, following: Int32) -> KvAccuracy:
    """Compare line by line.

    logits, reference: (num_tokens, vocab_size); following: (num_tokens,) ids that come after
    """
    found, expected = log_softmax(logits), log_softmax(reference)
    place = np.arange(len(following))
    difference = np.abs(found[place, following] - expected[place, following])
    divergence = (np.exp(expected) * (expected - found)).sum(axis=1)
    return KvAccuracy(
        num_tokens=len(following),
        greedy_agreement=float((logits.argmax(axis=1) == reference.argmax(axis=1)).mean()),
        mean_logprob_difference=float(difference.mean()),
        mean_kl=float(divergence.mean()),
    )


def mean_of(parts: Sequence[KvAccuracy]) -> KvAccuracy:
    """Over the tokens of all parts. Raises ValueError: there are none."""
    total = sum(part.num_tokens for part in parts)
    if total == 0:
        raise ValueError("no row has two tokens, so no next token can be compared")

    def mean(values: Sequence[float]) -> float:
        weights = [part.num_tokens / total for part in parts]
        return float(sum(value * weight for value, weight in zip(values, weights, strict=True)))

    return KvAccuracy(
        num_tokens=total,
        greedy_agreement=mean([part.greedy_agreement for part in parts]),
        mean_logprob_difference=mean([part.mean_logprob_difference for part in parts]),
        mean_kl=mean([part.mean_kl for part in parts]),
    )


def measure_kv_accuracy(
    engine: HasLogits,
    rows: Sequence[Int32],
    kv_type: KvType,
    *,
    reference: KvType = "f16",
    most_compared: int = MOST_COMPARED,
) -> KvAccuracy:
    """Run rows with both types of KV cache and compare what follows their last tokens.

    rows: token ids of each, prompt and answer; rows of one token are passed over. A row's last
        `most_compared` places are compared, where most of the cache lies before them
    Raises ValueError: nothing to compare; ReadError: the weights cannot be read.
    """
    parts = []
    for ids in rows:
        if len(ids) < 2:
            continue
        read, following = ids[:-1].tolist(), ids[1:]
        first = max(0, len(read) - most_compared)
        logits = engine.logits(read, kv_type, first=first)
        expected = engine.logits(read, reference, first=first)
        parts.append(compare_logits(logits, expected, following[first:]))
    return mean_of(parts)
