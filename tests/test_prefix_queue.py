"""The order of waiting rows: depth first over shared prefixes, longest expected first."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.expected_length import NUM_RECENT, ExpectedLength
from jobs.prefix_queue import PrefixQueue
from kernels.ops import PAGE_TOKENS

Path = tuple[int, ...]


def tokens(pages: Path, rest: int = 1) -> np.ndarray:
    """A prompt of whole pages, each of one token, and `rest` tokens after them."""
    return np.array([page for page in pages for _ in range(PAGE_TOKENS)] + [9] * rest, np.int32)


def pop_all(queue: PrefixQueue[str]) -> list[str]:
    return [queue.pop() for _ in range(len(queue))]


paths = st.lists(st.integers(0, 2), max_size=4).map(tuple)
steps = st.lists(st.one_of(st.none(), st.tuples(paths, st.integers(0, 3))), max_size=60)


@given(steps)
def test_each_row_comes_out_once_and_a_branch_once_entered_to_its_end(
    steps: list[tuple[Path, int] | None],
) -> None:
    """A step puts a row in, or takes one out where it is None."""
    queue: PrefixQueue[tuple[int, Path]] = PrefixQueue()
    waiting: dict[int, Path] = {}
    last: Path = ()
    for number, step in enumerate([*steps, *[None] * len(steps)]):
        if step is not None:
            path, expected = step
            queue.push((number, path), tokens(path), expected)
            waiting[number] = path
        elif waiting:
            number, path = queue.pop()
            assert waiting.pop(number) == path
            left = [other for other in [*waiting.values(), path] if common(other, last)]
            deepest = max((common(other, last) for other in left), default=0)
            assert common(path, last) == deepest, "a row of the branch at hand was passed over"
            last = path
        assert len(queue) == len(waiting)
    with pytest.raises(IndexError):
        queue.pop()


def common(a: Path, b: Path) -> int:
    return next(
        (n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(map(len, (a, b)))
    )


def test_the_longest_expected_comes_first_then_the_longer_prompt_then_the_first() -> None:
    queue: PrefixQueue[str] = PrefixQueue()
    for name, rest, expected in [("a", 1, 5.0), ("b", 2, 5.0), ("c", 1, 9.0), ("d", 2, 5.0)]:
        queue.push(name, tokens((), rest), expected)
    assert pop_all(queue) == ["c", "b", "d", "a"]


def test_a_group_comes_with_its_longest_row() -> None:
    queue: PrefixQueue[str] = PrefixQueue()
    queue.push("alone", tokens((0, 0)), 5)
    queue.push("group, short", tokens((1, 1, 2)), 1)
    queue.push("other, alone", tokens((2,)), 2)
    queue.push("group, long", tokens((1, 1, 3)), 8)
    queue.push("group, at the fork", tokens((1, 1)), 3)
    assert pop_all(queue) == [
        "group, long",
        "group, at the fork",
        "group, short",
        "alone",
        "other, alone",
    ]


def test_the_last_token_of_a_prompt_is_no_part_of_its_prefix() -> None:
    queue: PrefixQueue[str] = PrefixQueue()
    queue.push("one page and no more", tokens((1,), 0), 2)
    queue.push("no page", tokens((), 3), 5)
    queue.push("one page", tokens((1,), 1), 9)
    assert pop_all(queue) == ["one page", "no page", "one page and no more"]


def test_expected_lengths_follow_what_rows_have_shown() -> None:
    expected = ExpectedLength()
    assert (expected.of(500), expected.of(20)) == (500.0, 20.0)
    for _ in range(NUM_RECENT):
        expected.add(400)
    expected.add(100)
    assert expected.of(500) == pytest.approx(400, abs=2)
    for _ in range(NUM_RECENT // 2):
        expected.add(30)
    assert expected.of(20) == 20.0
    assert 30 < expected.of(100) < expected.of(300) < 300
