"""Alignment of direct reads, as arithmetic: which bytes can go straight into place.

O_DIRECT wants file offset, memory address and length to be multiples of a block. A request is cut
into a head, an aligned middle and a tail; head and tail go through a bounce buffer that holds the
blocks around them. Where address and offset are not congruent, all of it goes that way.
"""

from __future__ import annotations

from dataclasses import dataclass

BLOCK_NBYTES = 4096  # enough for every file system and drive in use; 512 is not


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes [begin, end) of a request, read by one call.

    in_place: offset + begin, address + begin and end - begin are multiples of a block
    """

    begin: int
    end: int
    in_place: bool


def align_down(value: int, block: int = BLOCK_NBYTES) -> int:
    return value - value % block


def align_up(value: int, block: int = BLOCK_NBYTES) -> int:
    return value + -value % block


def align_outward(
    begin: int, end: int, *, file_nbytes: int, block: int = BLOCK_NBYTES
) -> tuple[int, int]:
    """The smallest range of whole blocks around bytes [begin, end) of a file.

    Its end is that of the file where the last block is not whole.
    """
    assert 0 <= begin <= end <= file_nbytes, (begin, end, file_nbytes)
    return align_down(begin, block), min(align_up(end, block), file_nbytes)


def split_request(
    offset: int, nbytes: int, address: int, block: int = BLOCK_NBYTES
) -> tuple[int, int, int]:
    """(head, middle, tail) in bytes; only the middle can be read in place.

    offset: of the request's first byte in the file
    address: of the same byte in memory
    """
    if (offset - address) % block:
        return nbytes, 0, 0
    head = min(-offset % block, nbytes)
    middle = align_down(nbytes - head, block)
    return head, middle, nbytes - head - middle


def cut_request(
    offset: int, nbytes: int, address: int, *, max_nbytes: int, block: int = BLOCK_NBYTES
) -> list[Piece]:
    """Cut a request into pieces of at most `max_nbytes`, in order.

    max_nbytes: a multiple of the block. The blocks around a piece that is not read in place are
        not more than this either.
    """
    assert max_nbytes > 0 and max_nbytes % block == 0, (max_nbytes, block)
    head, middle, _ = split_request(offset, nbytes, address, block)
    pieces = _cut(offset, 0, head, max_nbytes, in_place=False)
    pieces += _cut(offset, head, head + middle, max_nbytes, in_place=True)
    return pieces + _cut(offset, head + middle, nbytes, max_nbytes, in_place=False)


def _cut(offset: int, begin: int, end: int, max_nbytes: int, *, in_place: bool) -> list[Piece]:
    """Cut where the file offset is a multiple of `max_nbytes`, so that all cuts are aligned."""
    pieces = []
    while begin < end:
        stop = min(align_down(offset + begin, max_nbytes) + max_nbytes - offset, end)
        pieces.append(Piece(begin, stop, in_place))
        begin = stop
    return pieces
