"""Cutting of requests for direct reads."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvme.alignment import (
    BLOCK_NBYTES,
    align_down,
    align_outward,
    align_up,
    cut_request,
    split_request,
)

offsets = st.integers(0, 1 << 40)
addresses = st.integers(1, 1 << 47)
lengths = st.one_of(st.integers(0, 3 * BLOCK_NBYTES), st.integers(0, 1 << 20))
limits = st.sampled_from([BLOCK_NBYTES, 3 * BLOCK_NBYTES, 1 << 16])


@given(offsets, lengths, addresses, limits)
def test_pieces_cover_the_request_in_order_and_once(
    offset: int, nbytes: int, address: int, limit: int
) -> None:
    at = 0
    for piece in cut_request(offset, nbytes, address, max_nbytes=limit):
        assert piece.begin == at < piece.end
        at = piece.end
    assert at == nbytes


@given(offsets, lengths, addresses, limits)
def test_pieces_in_place_are_aligned_in_file_memory_and_length(
    offset: int, nbytes: int, address: int, limit: int
) -> None:
    for piece in cut_request(offset, nbytes, address, max_nbytes=limit):
        if piece.in_place:
            assert (offset + piece.begin) % BLOCK_NBYTES == 0
            assert (address + piece.begin) % BLOCK_NBYTES == 0
            assert (piece.end - piece.begin) % BLOCK_NBYTES == 0


@given(offsets, lengths, addresses, limits)
def test_no_piece_needs_more_blocks_than_the_limit(
    offset: int, nbytes: int, address: int, limit: int
) -> None:
    for piece in cut_request(offset, nbytes, address, max_nbytes=limit):
        window = align_up(offset + piece.end) - align_down(offset + piece.begin)
        assert 0 < window <= limit


@given(offsets, lengths, addresses, limits)
def test_less_than_two_blocks_are_copied_where_address_and_offset_agree(
    offset: int, nbytes: int, address: int, limit: int
) -> None:
    address += (offset - address) % BLOCK_NBYTES
    pieces = cut_request(offset, nbytes, address, max_nbytes=limit)
    copied = sum(piece.end - piece.begin for piece in pieces if not piece.in_place)
    assert copied < 2 * BLOCK_NBYTES
    assert nbytes < 2 * BLOCK_NBYTES or any(piece.in_place for piece in pieces)


@pytest.mark.parametrize(
    ("offset", "nbytes", "address", "want"),
    [
        (0, 8192, 4096, (0, 8192, 0)),
        (0, 8193, 4096, (0, 8192, 1)),
        (4095, 8193, 4095, (1, 8192, 0)),
        (100, 50, 4196, (50, 0, 0)),
        (4000, 200, 4000, (96, 0, 104)),
        (32, 1 << 20, 0, (1 << 20, 0, 0)),
        (4096, 0, 4096, (0, 0, 0)),
    ],
)
def test_head_middle_and_tail(
    offset: int, nbytes: int, address: int, want: tuple[int, int, int]
) -> None:
    assert split_request(offset, nbytes, address) == want


@given(offsets, lengths, st.integers(0, 3 * BLOCK_NBYTES))
def test_outward_range_holds_the_bytes_and_ends_with_the_file(
    begin: int, nbytes: int, rest: int
) -> None:
    end, file_nbytes = begin + nbytes, begin + nbytes + rest
    first, last = align_outward(begin, end, file_nbytes=file_nbytes)
    assert first <= begin and end <= last <= file_nbytes
    assert begin - first < BLOCK_NBYTES and last - end < BLOCK_NBYTES
    assert first % BLOCK_NBYTES == 0
    assert last % BLOCK_NBYTES == 0 or last == file_nbytes
