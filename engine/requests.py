"""The engine's contract: what goes in, what comes out, and its error tree.

EngineError
├── ModelError                the model file cannot be used; says which key or tensor and why
│   ├── GgufError             not a (whole) GGUF file, or a damaged one
│   └── UnsupportedModelError a well-formed file with something this engine does not do
├── TokenizerError            the vocabulary cannot be built
├── TemplateError             a chat or prompt template fails; says the line where known
├── MemoryBudgetError         budgets that cannot work; says the smallest that does
└── RowError                  one row is bad: `code` is one of ROW_ERROR_CODES
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

ROW_ERROR_CODES = (
    "invalid_prompt",
    "empty_prompt",
    "invalid_row",
    "context_length_exceeded",
    "kv_cache_exceeded",
    "invalid_parameter",
    "template_error",
    "unsupported_content",
    "invalid_utf8",
    "out_of_memory",
    "worker_crashed",
    "internal_error",
    "timeout",
)


class EngineError(Exception):
    """Base of the engine's own errors."""


class ModelError(EngineError):
    """The model file cannot be used."""


class GgufError(ModelError):
    """Not a whole, well-formed GGUF file."""


class UnsupportedModelError(ModelError):
    """A well-formed model with something that this engine does not do."""


class TokenizerError(EngineError):
    """The vocabulary of the model file cannot be turned into a tokenizer."""


class TemplateError(EngineError):
    """A template does not compile, fails, or passes its limits."""


class DeviceError(EngineError):
    """The device that was asked for cannot be used."""


class MemoryBudgetError(EngineError):
    """The memory budgets cannot work together."""


class RowError(EngineError):
    """One row cannot run. `code` is one of ROW_ERROR_CODES."""

    def __init__(self, code: str, message: str) -> None:
        assert code in ROW_ERROR_CODES, code
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How one row's tokens are chosen.

    Order: penalties, logit_bias, temperature, top_k, top_p, min_p.

    max_tokens: most tokens to generate
    min_tokens: end-of-generation and stop tokens are masked before this many tokens
    temperature: 0 is greedy (the largest logit, lowest id first)
    top_k: keep the k most likely tokens; 0 keeps all
    top_p: keep the smallest set of most likely tokens whose probability reaches this
    min_p: drop tokens less likely than this times the most likely one
    repetition_penalty: > 0; positive logits of tokens in prompt or output are divided by it,
        negative ones multiplied (Keskar et al. 2019)
    presence_penalty, frequency_penalty: subtracted once, or per occurrence, for tokens in the
        output
    stop: texts that end a row; the output is cut before the first match
    stop_token_ids: tokens that end a row
    include_stop: keep the stop text in the output
    ignore_eos: end-of-generation tokens do not end the row
    seed: of this row; None derives it from the job's seed and the row's index
    logit_bias: (token id, value) pairs added to logits
    logprobs: report the chosen token's log-probability and this many alternatives; None is off
    """

    max_tokens: int = 256
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    seed: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None

    def to_json(self) -> str:
        """The parameters as used, as compact JSON with sorted keys."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One row to run.

    row_index, sample_index: identify the row; unique among the rows on board
    token_ids: (num_tokens,) int32 prompt, BOS included where the model wants one
    job_seed: seed of rows without their own
    """

    row_index: int
    token_ids: npt.NDArray[np.int32]
    params: SamplingParams
    sample_index: int = 0
    job_seed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLogprob:
    """Log-probability of a generated token, and of the most likely ones at its position."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedRow:
    """One row's outcome: generated, or an error with its code.

    finish_reason: "stop", "length", or None for an error
    stop_reason: the stop text, or the id of the token that ended the row, as text
    token_ids: generated ids, the ending token included
    reused_tokens: prompt tokens that earlier rows had computed; how a row came about, not what it
        is, so that equal rows may differ in it
    warnings: what was replaced or adjusted, by name
    """

    row_index: int
    sample_index: int = 0
    status: Literal["ok", "error"] = "ok"
    text: str = ""
    token_ids: tuple[int, ...] = ()
    finish_reason: Literal["stop", "length"] | None = None
    stop_reason: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    reused_tokens: int = field(default=0, compare=False)
    logprobs: tuple[TokenLogprob, ...] | None = None
    warnings: Mapping[str, Any] = field(default_factory=dict)
    error_code: str | None = None
    error_message: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """How an engine uses its machine. None means: chosen from what is free, and reported.

    device: "gpu" refuses to start without one; "auto" takes a GPU where one can be used
    kv_type: element type of the KV cache; None takes the backend's: f32 on a CPU, f16 on a GPU.
        int8 approximates: integers with scales, but for each row's last page
    kv_memory_nbytes: budget of the KV pool
    host_kv: "auto" keeps KV pages in pinned memory beside a GPU, too, where weights stream over the
        link and more rows pay for it; "never" keeps all of them on the device
    reuse_prefixes: keep the KV pages of prompts for others that begin alike
    sweep_tokens: most tokens of one sweep
    expand: "auto" keeps weights as float32 where they fit in half of the free memory, "never"
        keeps them quantised, "always" refuses to start where they do not fit
    num_threads: worker threads; None is every core this process may use
    memory_nbytes: most memory of the device for weights, KV cache and buffers together
    host_memory_nbytes: most pinned memory beside a GPU, for weights and KV pages that do not stay
        on it
    ring_nbytes: buffer through which weights stream that do not stay in memory
    reader: how model files are read; "auto" takes "direct" for weights that stream
    pre_tokenizer: use this pre-tokeniser whatever the file names
    """

    device: Literal["auto", "cpu", "gpu"] = "auto"
    kv_type: Literal["f32", "f16", "int8"] | None = None
    kv_memory_nbytes: int | None = None
    host_kv: Literal["auto", "never"] = "auto"
    reuse_prefixes: bool = True
    sweep_tokens: int | None = None
    expand: Literal["auto", "never", "always"] = "auto"
    num_threads: int | None = None
    memory_nbytes: int | None = None
    host_memory_nbytes: int | None = None
    ring_nbytes: int | None = None
    reader: Literal["auto", "direct", "mmap"] = "auto"
    pre_tokenizer: str | None = None
