"""The metadata keys under an architecture's name: typed access, and which are understood."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from engine.gguf_file import GgufFile
from engine.requests import ModelError, UnsupportedModelError

MAX_INTEGER = (1 << 31) - 1

USED_KEYS = {
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "attention.scale",
    "attention.sliding_window",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scale_linear",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.attn_factor",
    "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
}
KEYS_WITHOUT_EFFECT = {
    "vocab_size",  # the rows of token_embd.weight and the token list say it
    "tensor_data_layout",
    "attention.layer_norm_epsilon",  # of a norm that these architectures do not have
    "rope.scaling.finetuned",
}
# Keys that change the maths, with the values at which they do not.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "expert_count": (0,),
    "expert_used_count": (0,),
    "expert_shared_count": (0,),
    "pooling_type": (0,),
    "use_parallel_residual": (False,),
    "logit_scale": (0, 1),
    "residual_scale": (0, 1),
    "embedding_scale": (0, 1),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.output_scale": (0, 1),
    "rope.scaling.yarn_ext_factor": (1,),
    "rope.scaling.yarn_log_multiplier": (0,),
}


class ArchitectureKeys:
    """Keys `<architecture>.*` of a file, by their names without the prefix."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self.path = file.path
        self._metadata = file.metadata
        self._prefix = f"{architecture}."

    def __iter__(self) -> Iterator[str]:
        prefix = self._prefix
        return (key.removeprefix(prefix) for key in self._metadata if key.startswith(prefix))

    def value(self, name: str, default: Any = None) -> Any:
        """The value; one number where a list gives it per layer and all layers agree."""
        key = self._prefix + name
        value = self._metadata.get(key, default)
        if isinstance(value, np.ndarray):
            if not len(value):
                return None
            if (value != value[0]).any():
                raise UnsupportedModelError(
                    f"{self.path}: {key} differs between layers ({_shown(value)}); "
                    "models whose layers differ are not supported"
                )
            return value[0].item()
        return value

    def integer(self, name: str, *, default: int | None = None) -> int:
        """A positive count."""
        value = self._required(name, default)
        if type(value) is not int or not 0 < value <= MAX_INTEGER:
            raise self.error(name, "must be a positive integer")
        return value

    def number(self, name: str, *, default: float | None = None) -> float:
        value = self._required(name, default)
        if type(value) not in (int, float) or not math.isfinite(value):
            raise self.error(name, "must be a finite number")
        return float(value)

    def positive_number(self, name: str, *, default: float | None = None) -> float:
        value = self.number(name, default=default)
        if value <= 0:
            raise self.error(name, "must be positive")
        return value

    def text(self, name: str, *, default: str) -> str:
        value = self.value(name, default)
        if not isinstance(value, str):
            raise self.error(name, "must be a string")
        return value

    def check_all_known(self) -> None:
        """Raises UnsupportedModelError for a key that may change the maths in an unknown way."""
        for name in self:
            if name in USED_KEYS or name in KEYS_WITHOUT_EFFECT:
                continue
            if name not in NEUTRAL_VALUES:
                raise self.unsupported(name, "is unknown and may change the model's results")
            neutral = NEUTRAL_VALUES[name]
            if self.value(name) not in neutral:
                values = " or ".join(map(repr, neutral))
                raise self.unsupported(name, f"is not supported, only {values}")

    def error(self, name: str, rule: str) -> ModelError:
        return ModelError(f"{self.path}: {self._described(name)} {rule}")

    def unsupported(self, name: str, why: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"{self.path}: {self._described(name)} {why}")

    def _required(self, name: str, default: float | None) -> Any:
        value = self.value(name, default)
        if value is None:
            raise ModelError(f"{self.path}: metadata key {self._prefix}{name} is missing")
        return value

    def _described(self, name: str) -> str:
        return (
            f"metadata key {self._prefix}{name} = {_shown(self._metadata.get(self._prefix + name))}"
        )


def _shown(value: Any) -> str:
    text = repr(value.tolist() if isinstance(value, np.ndarray) else value)
    return text if len(text) <= 60 else f"{text[:57]}..."
