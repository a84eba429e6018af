"""Composition of sweeps: decode first, prefill in chunks, budgets kept, nothing lost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.scheduler import Chunk, Progress, admission_budget, compose_sweep


def test_decoding_rows_come_before_prefill_chunks() -> None:
    rows = [Progress(0, known=100, computed=0), Progress(1, known=51, computed=50)]
    assert compose_sweep(rows, 37) == [
        Chunk(1, 50, 51, wants_logits=True),
        Chunk(0, 0, 36, wants_logits=False),
    ]


def test_last_prefill_chunk_wants_logits() -> None:
    assert compose_sweep([Progress(3, known=40, computed=30)], 16) == [
        Chunk(3, 30, 40, wants_logits=True)
    ]


def test_chunks_that_mind_pages_end_with_one_and_leave_the_rest_to_others() -> None:
    rows = [Progress(0, known=100, computed=40), Progress(1, known=90, computed=0)]
    chunks = compose_sweep(rows, 80, page_tokens=32)
    assert [(c.slot, c.begin, c.end) for c in chunks] == [(0, 40, 64), (1, 0, 32)]
    chunks = compose_sweep([Progress(0, known=100, computed=64)], 20, page_tokens=32)
    assert [(c.begin, c.end) for c in chunks] == [(64, 84)]


def test_rows_beyond_the_budget_wait_for_the_next_sweep() -> None:
    rows = [Progress(slot, known=10, computed=0) for slot in range(3)]
    assert [(c.slot, c.begin, c.end) for c in compose_sweep(rows, 15)] == [(0, 0, 10), (1, 0, 5)]


def test_admission_budget_is_what_pending_tokens_leave() -> None:
    rows = [Progress(0, known=10, computed=9), Progress(1, known=30, computed=10)]
    assert admission_budget(rows, 32) == 11
    assert admission_budget(rows, 16) == 0


@given(
    st.lists(st.tuples(st.integers(1, 200), st.integers(1, 20)), min_size=1, max_size=20),
    st.integers(1, 64),
    st.sampled_from([1, 32]),
)
def test_every_token_is_computed_once_and_in_order(
    shapes: list[tuple[int, int]], budget: int, page_tokens: int
) -> None:
    """Runs rows of (prompt, output) lengths to their end under any budget."""
    budget = max(budget, len(shapes))  # an engine never boards more rows than tokens of a sweep
    known = {slot: prompt for slot, (prompt, _) in enumerate(shapes)}
    computed = dict.fromkeys(known, 0)
    left = {slot: output for slot, (_, output) in enumerate(shapes)}
    while known:
        rows = [Progress(slot, known[slot], computed[slot]) for slot in known]
        chunks = compose_sweep(rows, budget, page_tokens)
        assert 0 < sum(chunk.end - chunk.begin for chunk in chunks) <= budget
        assert len({chunk.slot for chunk in chunks}) == len(chunks)
        decoding = {row.slot for row in rows if row.pending == 1}
        assert decoding <= {chunk.slot for chunk in chunks}
        for chunk in chunks:
            assert chunk.begin == computed[chunk.slot]
            inside = chunk.begin % page_tokens
            assert not inside or chunk.end <= chunk.begin - inside + page_tokens
            computed[chunk.slot] = chunk.end
            assert chunk.wants_logits == (chunk.end == known[chunk.slot])
            if chunk.wants_logits:
                left[chunk.slot] -= 1
                known[chunk.slot] += 1
                if left[chunk.slot] == 0:
                    del known[chunk.slot]
    assert set(left.values()) == {0}
