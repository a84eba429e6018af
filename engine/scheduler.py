"""What a sweep carries: admission and composition, as pure functions of the rows' progress.

Rows join and leave at sweep boundaries. A sweep holds the next token of every decoding row, then
prefill chunks in order of admission, up to its token budget; nothing is padded.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kernels.ops import PAGE_TOKENS

LOOK_AHEAD = 128  # rows that may be passed over while what they begin with is being computed
SPARE_SWEEPS = 8  # of growth of the rows on board, for which pages stay free when others come
KEEP_AHEAD = 32  # waiting rows whose beginnings stay in the cache while anything else can go


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a row on board stands: `computed` of its `known` tokens are in the KV cache."""

    slot: int
    known: int
    computed: int

    @property
    def pending(self) -> int:
        return self.known - self.computed


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [begin, end) of the row in `slot`; logits are wanted where they reach its end."""

    slot: int
    begin: int
    end: int
    wants_logits: bool


def chunk_end(begin: int, end: int, page_tokens: int) -> int:
    """Where a chunk of tokens [begin, end) ends that leaves no page but those it begins."""
    inside = begin % page_tokens
    return min(end, begin - inside + page_tokens) if inside else end


def compose_sweep(rows: Iterable[Progress], token_budget: int, page_tokens: int = 1) -> list[Chunk]:
    """Choose the tokens of one sweep.

    rows: in order of admission; at most `token_budget` of them have one token pending
    page_tokens: a chunk that begins inside a page of so many ends in it
    Returns chunks that hold `token_budget` tokens at most, decoding rows first.
    """
    rows = list(rows)
    decoding = [row for row in rows if row.pending == 1]
    prefilling = [row for row in rows if row.pending > 1]
    chunks: list[Chunk] = []
    budget = token_budget
    for row in decoding + prefilling:
        if budget == 0:
            break
        end = chunk_end(row.computed, row.computed + min(row.pending, budget), page_tokens)
        whole = end // page_tokens * page_tokens
        if row.computed < whole and end < row.known:
            end = whole  # else the next chunk would have little room
        chunks.append(Chunk(row.slot, row.computed, end, wants_logits=end == row.known))
        budget -= end - row.computed
    return chunks


def spare_pages(num_growing: int) -> int:
    """KV pages to be left unreserved when a row comes on board beside `num_growing` that grow."""
    return -(-num_growing * SPARE_SWEEPS // PAGE_TOKENS)


def admission_budget(rows: Iterable[Progress], token_budget: int) -> int:
    """Tokens that a sweep has left for rows not yet on board."""
    return max(0, token_budget - sum(row.pending for row in rows))
