"""Memory decisions, as pure functions: weight layout, KV pages, sweep budget."""

from __future__ import annotations

from dataclasses import dataclass

from engine.hparams import Hparams
from engine.kv_cache import pages_for
from engine.requests import EngineConfig, MemoryBudgetError

DEFAULT_SWEEP_TOKENS = 512
DEFAULT_KV_NBYTES = 8 << 30  # more rows than this holds fill no core any further


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """How an engine divides its memory.

    expand: weights kept as float32 in the product's layout
    weights_nbytes, activations_nbytes: what those take
    kv_pages: pages of the pool
    sweep_tokens: most tokens of a sweep, and most rows on board
    """

    expand: bool
    weights_nbytes: int
    activations_nbytes: int
    kv_pages: int
    sweep_tokens: int


def activations_nbytes(hparams: Hparams, sweep_tokens: int) -> int:
    """Bytes of the work buffers of a sweep, logits of one token per row included."""
    q = hparams.num_heads * hparams.key_length
    kv = hparams.num_kv_heads * (hparams.key_length + hparams.value_length)
    attention = hparams.num_heads * hparams.value_length
    width = 3 * hparams.hidden + 2 * q + kv + attention + 3 * hparams.ffn + hparams.vocab_size
    return 4 * sweep_tokens * width


def choose_expand(config: EngineConfig, expanded_nbytes: int, free_nbytes: int) -> bool:
    """Whether weights are kept as float32. Raises MemoryBudgetError for `always` without room."""
    if config.expand == "never":
        return False
    if config.expand == "auto":
        return expanded_nbytes <= free_nbytes // 2
    if expanded_nbytes > free_nbytes:
        raise MemoryBudgetError(
            f"--expand always: the weights take {expanded_nbytes:,} bytes as float32, "
            f"{free_nbytes:,} are free; use --expand auto or never"
        )
    return True


def plan_memory(
    hparams: Hparams,
    config: EngineConfig,
    *,
    stored_nbytes: int,
    expanded_nbytes: int,
    page_nbytes: int,
    free_nbytes: int,
) -> MemoryPlan:
    """Divide `free_nbytes` between weights, work buffers and KV pages.

    stored_nbytes, expanded_nbytes: all weights as the file has them, and as float32
    page_nbytes: one KV page over all layers
    Raises MemoryBudgetError: when not even one page of KV fits, or a budget is below one page.
    """
    expand = choose_expand(config, expanded_nbytes, free_nbytes)
    weights_nbytes = expanded_nbytes if expand else stored_nbytes
    sweep_tokens = config.sweep_tokens or DEFAULT_SWEEP_TOKENS
    if sweep_tokens < 1:
        raise MemoryBudgetError(f"--sweep-tokens {sweep_tokens}: at least 1 is needed")
    work_nbytes = activations_nbytes(hparams, sweep_tokens)
    left_nbytes = free_nbytes - weights_nbytes - work_nbytes
    kv_nbytes = config.kv_memory_nbytes
    if kv_nbytes is None:
        kv_nbytes = min(left_nbytes // 2, DEFAULT_KV_NBYTES)
    elif kv_nbytes > left_nbytes:
        raise MemoryBudgetError(
            f"--kv-memory {kv_nbytes:,} bytes: {max(0, left_nbytes):,} are left beside "
            f"{weights_nbytes:,} of weights and {work_nbytes:,} of work buffers"
        )
    if kv_nbytes < page_nbytes:
        raise MemoryBudgetError(
            f"KV cache of {max(0, kv_nbytes):,} bytes: one page takes {page_nbytes:,}; "
            f"free memory is {free_nbytes:,}, weights take {weights_nbytes:,} and work buffers "
            f"{work_nbytes:,}; try fewer --sweep-tokens"
        )
    most_pages = sweep_tokens * pages_for(hparams.context_length)
    return MemoryPlan(
        expand=expand,
        weights_nbytes=weights_nbytes,
        activations_nbytes=work_nbytes,
        kv_pages=min(kv_nbytes // page_nbytes, most_pages),
        sweep_tokens=sweep_tokens,
    )
