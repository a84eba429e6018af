"""Rotary position embeddings: their parameters in a GGUF file, and the tables made of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from engine.metadata_keys import ArchitectureKeys
from engine.requests import ModelError, UnsupportedModelError
from kernels.ops import Float32, RopeStyle

RopeScaling = Literal["none", "linear", "llama3", "yarn"]
Float64 = npt.NDArray[np.float64]

FREQ_FACTORS = "rope_freqs.weight"  # the tensor that divides the frequencies (Llama 3.1 and later)


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeParams:
    """How positions turn queries and keys.

    rotary_dim: leading dimensions of a head that are turned
    base: of the geometric series of wavelengths
    style: "adjacent" turns pairs (2i, 2i+1), "halves" pairs (i, i + rotary_dim/2)
    scaling: "llama3" is carried by the tensor `rope_freqs.weight`, its factor is not applied again
    factor: by which positions are compressed (linear), or long wavelengths (yarn)
    original_context_length: context that the model was trained with before YaRN
    attention_factor: scale of cos and sin, YaRN's mscale
    beta_fast, beta_slow: turns over the original context above which a wavelength is kept, and
        below which it is stretched in full; a ramp lies between (Peng et al. 2023)
    """

    rotary_dim: int
    base: float
    style: RopeStyle
    scaling: RopeScaling = "none"
    factor: float = 1.0
    original_context_length: int = 0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0


def read_rope(
    keys: ArchitectureKeys,
    *,
    style: RopeStyle,
    key_length: int,
    context_length: int,
    has_freq_factors: bool,
) -> RopeParams:
    """Raises UnsupportedModelError for another scaling, ModelError for impossible values."""
    rotary_dim = keys.integer("rope.dimension_count", default=key_length)
    if rotary_dim % 2 or rotary_dim > key_length:
        raise keys.error("rope.dimension_count", f"must be even and at most {key_length}")
    base = keys.number("rope.freq_base", default=10000.0)
    if base <= 1:
        raise keys.error("rope.freq_base", "must be above 1")
    scaling = _scaling(keys, has_freq_factors)
    factor = _factor(keys)
    return RopeParams(
        rotary_dim=rotary_dim,
        base=base,
        style=style,
        scaling=scaling,
        factor=factor,
        original_context_length=keys.integer(
            "rope.scaling.original_context_length", default=context_length
        ),
        attention_factor=_attention_factor(keys, scaling, factor),
        beta_fast=keys.positive_number("rope.scaling.yarn_beta_fast", default=32.0),
        beta_slow=keys.positive_number("rope.scaling.yarn_beta_slow", default=1.0),
    )


def rope_tables(
    rope: RopeParams, num_positions: int, freq_factors: Float32 | None = None
) -> tuple[Float32, Float32]:
    """Cosines and sines of positions 0 to num_positions - 1, computed in float64.

    freq_factors: (rotary_dim // 2,), the tensor `rope_freqs.weight`; divides the frequencies
    Returns cos, sin: (num_positions, rotary_dim // 2) float32, attention_factor included.
    Raises ModelError: freq_factors of another length, or not positive.
    Source: Su et al. 2021; ggml_compute_forward_rope of llama.cpp.
    """
    frequencies = _frequencies(rope)
    if freq_factors is not None:
        frequencies = frequencies / _checked_factors(freq_factors, len(frequencies))
    if rope.scaling == "linear":
        frequencies = frequencies / rope.factor
    elif rope.scaling == "yarn":
        kept = _yarn_kept_share(rope)
        frequencies = frequencies * kept + frequencies / rope.factor * (1 - kept)
    angles = np.arange(num_positions, dtype=np.float64)[:, None] * frequencies
    cos = np.cos(angles) * rope.attention_factor
    sin = np.sin(angles) * rope.attention_factor
    return cos.astype(np.float32), sin.astype(np.float32)


def _scaling(keys: ArchitectureKeys, has_freq_factors: bool) -> RopeScaling:
    # Files with a factor and no type are older than the type key and mean linear, as in llama.cpp.
    scaling = keys.text("rope.scaling.type", default="linear" if _factor(keys) != 1 else "none")
    match scaling:
        case "none" | "linear" | "yarn":
            return scaling
        case "llama3" if has_freq_factors:
            return scaling
        case "llama3":
            raise UnsupportedModelError(
                f"{keys.path}: rope scaling 'llama3' needs the tensor {FREQ_FACTORS!r}, which the "
                "file lacks; convert the model with a current llama.cpp"
            )
    raise UnsupportedModelError(
        f"{keys.path}: unsupported rope scaling {scaling!r}; supported: none, linear, llama3, yarn"
    )


def _factor(keys: ArchitectureKeys) -> float:
    """Of linear and yarn; `rope.scale_linear` is the old name. 0 stands for no scaling."""
    old = keys.number("rope.scale_linear", default=0.0)
    factor = keys.number("rope.scaling.factor", default=old) or 1.0
    if not 0 < factor < math.inf:
        raise keys.error("rope.scaling.factor", "must be positive")
    return factor


def _attention_factor(keys: ArchitectureKeys, scaling: RopeScaling, factor: float) -> float:
    """YaRN's mscale.

    Converters store transformers' `attention_factor`, the whole scale, as yarn_attn_factor; the
    older attn_factor multiplies.
    """
    whole, multiplier = "rope.scaling.yarn_attn_factor", "rope.scaling.attn_factor"
    if scaling == "yarn":
        mscale = 0.1 * math.log(factor) + 1 if factor > 1 else 1.0
        given = keys.positive_number(whole, default=mscale)
        return given * keys.positive_number(multiplier, default=1.0)
    for name in (whole, multiplier):
        if keys.positive_number(name, default=1.0) != 1:
            raise keys.unsupported(name, f"is only known for yarn, the scaling is {scaling!r}")
    return 1.0


def _frequencies(rope: RopeParams) -> Float64:
    """(rotary_dim // 2,) radians per position, before any scaling."""
    exponents = np.arange(0, rope.rotary_dim, 2, dtype=np.float64) / rope.rotary_dim
    return np.power(rope.base, -exponents)


def _checked_factors(freq_factors: Float32, length: int) -> Float64:
    if freq_factors.shape != (length,):
        raise ModelError(
            f"tensor {FREQ_FACTORS!r} has shape {freq_factors.shape}, the rotary dimensions of "
            f"the model need ({length},)"
        )
    if not (np.isfinite(freq_factors) & (freq_factors > 0)).all():
        raise ModelError(f"tensor {FREQ_FACTORS!r} has values that are not positive: damaged")
    return freq_factors.astype(np.float64)


def _yarn_kept_share(rope: RopeParams) -> Float64:
    """(rotary_dim // 2,) share of each frequency that is kept: 1 for short wavelengths, 0 for long.

    Source: Peng et al. 2023, section 3.2; `ggml_rope_yarn_corr_dims` of llama.cpp.
    """
    low = max(math.floor(_dim_of_turns(rope, rope.beta_fast)), 0)
    high = min(math.ceil(_dim_of_turns(rope, rope.beta_slow)), rope.rotary_dim - 1)
    pairs = np.arange(rope.rotary_dim // 2, dtype=np.float64)
    ramp = (pairs - low) / max(high - low, 0.001)
    return 1 - np.clip(ramp, 0, 1)


def _dim_of_turns(rope: RopeParams, turns: float) -> float:
    """The pair whose wavelength makes so many turns over the original context."""
    wavelength = rope.original_context_length / (turns * 2 * math.pi)
    return rope.rotary_dim * math.log(wavelength) / (2 * math.log(rope.base))
