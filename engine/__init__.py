"""Tokens in, tokens out: an engine that runs many rows through a model, one sweep at a time."""

from typing import TYPE_CHECKING, Any

from engine.requests import (
    ROW_ERROR_CODES,
    DeviceError,
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

if TYPE_CHECKING:
    from engine.engine import Engine

__all__ = [
    "ROW_ERROR_CODES",
    "DeviceError",
    "Engine",
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


def __getattr__(name: str) -> Any:
    # Engine brings Numba with it; a command that only reads a header should not wait for that.
    if name == "Engine":
        from engine.engine import Engine

        return Engine
    raise AttributeError(f"module 'engine' has no attribute {name!r}")
