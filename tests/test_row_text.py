"""A row's text: stop texts over token and byte edges, and bytes that are no whole character."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engine.requests import SamplingParams
from engine.text import RowText


def run(
    tokens: Sequence[bytes | str], *stops: str, **changes: Any
) -> tuple[str, str | None, int, dict[str, Any]]:
    """Push tokens until a stop: (text, stop, number of tokens pushed, warnings)."""
    pieces = [token.encode() if isinstance(token, str) else token for token in tokens]
    row = RowText(pieces.__getitem__, SamplingParams(stop=stops, **changes))
    stop, num_pushed = None, 0
    while stop is None and num_pushed < len(pieces):
        stop = row.push(num_pushed)
        num_pushed += 1
    text, warnings = row.finish()
    return text, stop, num_pushed, warnings


@pytest.mark.parametrize(
    ("tokens", "stops", "wanted"),
    [
        (["alpha", " beta", " gam", "ma", " delta"], ["beta gamma"], ("alpha ", "beta gamma", 4)),
        (["alpha", " beta gamma delta"], ["beta gamma"], ("alpha ", "beta gamma", 2)),
        (["so", "...", "x"], [".."], ("so", "..", 2)),
        (["a", ".", ".", "x"], [".."], ("a", "..", 3)),
        (["x", "END", "y"], ["END"], ("x", "END", 2)),
        (["END"], ["END"], ("", "END", 1)),
        (["aab", "aab", "c"], ["aabaabc"], ("", "aabaabc", 3)),
        (["aa", "ab"], ["aab"], ("a", "aab", 2)),
        (["no", "thing"], ["here"], ("nothing", None, 2)),
    ],
)
def test_stop_texts_over_tokens(
    tokens: list[str], stops: list[str], wanted: tuple[str, str | None, int]
) -> None:
    """Case 29: "beta gamma" over tokens; ".." when the token is "..."."""
    assert run(tokens, *stops)[:3] == wanted


@pytest.mark.parametrize(
    ("stops", "wanted"),
    [
        (["bc", "abcd"], ("xa", "bc")),
        (["abcd", "bc"], ("xa", "bc")),
        (["bcd", "abcd"], ("x", "abcd")),
        (["d", "bcd"], ("xa", "bcd")),
        (["cde", "abcd"], ("x", "abcd")),
        (["zz", "e"], ("xabcd", "e")),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_the_stop_complete_first_wins_and_of_equal_ends_the_longer(
    stops: list[str], wanted: tuple[str, str], size: int
) -> None:
    """Case 29: two stops where one begins inside the other, however the text is split."""
    text = "xabcde"
    tokens = [text[begin : begin + size] for begin in range(0, len(text), size)]
    assert run(tokens, *stops)[:2] == wanted


def test_a_non_ascii_stop_is_found_over_byte_tokens() -> None:
    """Case 29: non-ASCII stop."""
    data = "grün 終わり. rest".encode()
    tokens = [data[i : i + 1] for i in range(len(data))]
    assert run(tokens, "終わり") == ("grün ", "終わり", len("grün 終わり".encode()), {})


def test_half_a_stop_at_the_end_is_ordinary_text() -> None:
    """Case 29: stop cut by max_tokens half way."""
    assert run(["alpha", " beta", " gam"], "beta gamma") == ("alpha beta gam", None, 3, {})
    assert run(["a", "終".encode(), "わ".encode()], "終わり") == ("a終わ", None, 3, {})


def test_include_stop_keeps_the_stop_and_nothing_after_it() -> None:
    """Case 29: option to keep it."""
    assert run(["so", "...", "x"], "..", include_stop=True)[:2] == ("so..", "..")


def test_no_stop_texts() -> None:
    """Case 62: [] means none."""
    assert run(["a", "", "b"]) == ("ab", None, 3, {})


def test_a_stop_before_min_tokens_does_not_end_the_row() -> None:
    assert run(["a", "END", "b", "END", "c"], "END", min_tokens=3)[:3] == ("aENDb", "END", 4)
    assert run(["a", "END", "b"], "END", min_tokens=3)[:2] == ("aENDb", None)
    assert run(["a", "EN", "D", "b"], "END", min_tokens=3)[:3] == ("a", "END", 3)


EMOJI = "🙂".encode()  # four bytes


@pytest.mark.parametrize("num_bytes", [1, 2, 3])
def test_a_cut_character_is_dropped_with_a_warning(num_bytes: int) -> None:
    """Case 34: max_tokens=1, 2, 3 with forced emoji bytes."""
    tokens = [EMOJI[i : i + 1] for i in range(num_bytes)]
    assert run(tokens)[::3] == ("", {"incomplete_utf8_bytes": num_bytes})
    assert run(["hi ", *tokens])[::3] == ("hi ", {"incomplete_utf8_bytes": num_bytes})


def test_a_whole_character_over_byte_tokens_is_kept() -> None:
    """Case 34: the fourth byte completes it."""
    assert run([EMOJI[i : i + 1] for i in range(4)])[::3] == ("🙂", {})


@pytest.mark.parametrize(
    ("data", "text", "warnings"),
    [
        (b"a\xffb", "a�b", {"invalid_utf8_bytes": 1}),
        (b"a\xf0\x9f\x99b", "a�b", {"invalid_utf8_bytes": 3}),
        (b"\x80\x80", "��", {"invalid_utf8_bytes": 2}),
        (b"\xed\xa0\x80!", "���!", {"invalid_utf8_bytes": 3}),
        (b"\xff\xe2\x82", "�", {"invalid_utf8_bytes": 1, "incomplete_utf8_bytes": 2}),
        ("real �".encode() + b"\xc3(", "real ��(", {"invalid_utf8_bytes": 1}),
        (b"nul \x00 stays", "nul \x00 stays", {}),
    ],
)
def test_bytes_that_are_no_utf8(data: bytes, text: str, warnings: dict[str, int]) -> None:
    assert run([data])[::3] == (text, warnings)


def test_a_leading_space_stays() -> None:
    assert run([" Hello"])[0] == " Hello"


def search_whole(data: bytes, stops: Sequence[str]) -> tuple[bytes, str | None]:
    for end in range(len(data) + 1):
        ending = [stop for stop in stops if data[:end].endswith(stop.encode())]
        if ending:
            longest = max(ending, key=lambda stop: len(stop.encode()))
            return data[: end - len(longest.encode())], longest
    return data, None


@given(
    data=st.lists(st.sampled_from([*"ab.", "é", "終", "🙂"]), max_size=30).map(
        lambda characters: "".join(characters).encode()
    ),
    stops=st.lists(st.text("ab.é終🙂", min_size=1, max_size=4), max_size=3, unique=True),
    cuts=st.lists(st.integers(0, 120), max_size=40),
)
@example(data=b"aab", stops=["ab", "aab"], cuts=[1, 2])
def test_any_split_gives_the_text_and_stop_of_searching_the_whole(
    data: bytes, stops: list[str], cuts: list[int]
) -> None:
    edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    tokens = [data[begin:end] for begin, end in pairwise(edges)]
    wanted, wanted_stop = search_whole(data, stops)
    text, stop, _, warnings = run(tokens, *stops)
    assert (text, stop, warnings) == (wanted.decode(), wanted_stop, {})


@given(st.binary(max_size=40))
def test_any_bytes_give_text_and_account_for_every_byte(data: bytes) -> None:
    text, _, _, warnings = run([data[i : i + 1] for i in range(len(data))])
    lost = sum(warnings.values())
    assert text.replace("�", "") == data.decode(errors="ignore").replace("�", "")
    assert len(data) - lost == len(data.decode(errors="ignore").encode())


def test_cost_is_linear_in_the_output() -> None:
    searched = 0

    class Counting(bytearray):
        def find(self, sub: Any, start: Any = 0, *_: Any) -> int:
            nonlocal searched
            searched += len(self) - start
            return super().find(sub, start)

    row = RowText(lambda _: b"abcd", SamplingParams(stop=("x" * 50,)))
    row._bytes = Counting()
    for _ in range(10_000):
        assert row.push(0) is None
    assert searched <= 10_000 * (4 + 50)
