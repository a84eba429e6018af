"""Numba set-up in one place: options, signatures, and where compiled code is kept.

Numba's cache notices a change of the function's own file only, while our kernels inline functions
of other files. So the cache folder's name carries a hash of every kernel source.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numba
import platformdirs
from numba import types

from kernels.ops import KvType

_OPTIONS: dict[str, Any] = {"nogil": True, "boundscheck": False, "error_model": "numpy"}

F32 = types.float32
I64 = types.int64
U8_MATRIX = types.Array(types.uint8, 2, "C", readonly=True)
I64_MATRIX = types.Array(types.int64, 2, "C")
I64_VECTOR = types.Array(types.int64, 1, "C")
I32_VECTOR = types.Array(types.int32, 1, "C", readonly=True)
I32_MATRIX = types.Array(types.int32, 2, "C", readonly=True)
F32_INPUT_VECTOR = types.Array(types.float32, 1, "C", readonly=True)
F32_INPUT_MATRIX = types.Array(types.float32, 2, "C", readonly=True)
F32_VECTOR = types.Array(types.float32, 1, "C")
F32_MATRIX = types.Array(types.float32, 2, "C")
F32_PANELS = types.Array(types.float32, 3, "C")

_kernels: list[tuple[Any, list[Any]]] = []
_kernels_for_kv: dict[KvType, list[tuple[Any, Any]]] = {}


def _source_hash() -> str:
    folder = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted([*folder.glob("*.py"), *folder.parent.glob("*.py")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def cache_folder() -> Path:
    """Where compiled kernels are kept: under $NTX_HOME, or the user's cache folder."""
    home = os.environ.get("NTX_HOME")
    base = Path(home) if home else Path(platformdirs.user_cache_dir("ntx-batch"))
    return base / "numba" / _source_hash()


_CACHE_FOLDER = str(cache_folder())


@contextmanager
def _our_cache_folder() -> Iterator[None]:
    """Numba reads the folder while decorating; other users of Numba keep their own setting."""
    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = _CACHE_FOLDER
    try:
        yield
    finally:
        numba.config.CACHE_DIR = before


def inlined(function: Callable[..., Any]) -> Any:
    """A function called by kernels only; compiled into each of them."""
    with _our_cache_folder():
        return numba.njit(**_OPTIONS)(function)


def kernel(*signatures: Any) -> Callable[[Callable[..., Any]], Any]:
    """A function called from Python, for these signatures alone; see `compile_all`."""

    def decorate(function: Callable[..., Any]) -> Any:
        with _our_cache_folder():
            dispatcher = numba.njit(cache=True, **_OPTIONS)(function)
        _kernels.append((dispatcher, list(signatures)))
        return dispatcher

    return decorate


def kernel_for_kv(signatures: Mapping[KvType, Any]) -> Callable[[Callable[..., Any]], Any]:
    """A kernel on a KV cache, with a signature for each type; see `compile_for_kv`."""

    def decorate(function: Callable[..., Any]) -> Any:
        with _our_cache_folder():
            dispatcher = numba.njit(cache=True, **_OPTIONS)(function)
        for kv_type, signature in signatures.items():
            _kernels_for_kv.setdefault(kv_type, []).append((dispatcher, signature))
        return dispatcher

    return decorate


def compile_for_kv(kv_type: KvType) -> None:
    """Load or compile the kernels of one type of KV cache; most jobs need no other."""
    waiting = _kernels_for_kv.get(kv_type, [])
    while waiting:
        dispatcher, signature = waiting[-1]
        dispatcher.disable_compile(False)
        dispatcher.compile(signature)
        dispatcher.disable_compile()
        waiting.pop()


def compile_all() -> None:
    """Load or compile every kernel without a KV cache; a call with other types is an error."""
    while _kernels:
        dispatcher, signatures = _kernels[-1]
        for signature in signatures:
            dispatcher.compile(signature)
        dispatcher.disable_compile()
        _kernels.pop()
