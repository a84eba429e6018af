"""Tokens in, tokens out: an engine that runs many rows through a model, one sweep at a time."""

from engine.requests import (
    ROW_ERROR_CODES,
    EngineConfig,
    EngineError,
    FinishedRow,
    GgufError,
    MemoryBudgetError,
    ModelError,
    Request,
    RowError,
    SamplingParams,
    TemplateError,
    TokenizerError,
    TokenLogprob,
    UnsupportedModelError,
)

__all__ = [
    "ROW_ERROR_CODES",
    "EngineConfig",
    "EngineError",
    "FinishedRow",
    "GgufError",
    "MemoryBudgetError",
    "ModelError",
    "Request",
    "RowError",
    "SamplingParams",
    "TemplateError",
    "TokenLogprob",
    "TokenizerError",
    "UnsupportedModelError",
]
