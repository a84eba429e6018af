"""A byte ring: contiguous pieces of one buffer, taken at the front, given back in order."""

from __future__ import annotations

from collections import deque


class ByteRing:
    """Places of [0, capacity) for pieces that are freed in the order in which they were taken."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._head = 0  # where the next piece may begin
        self._pieces: deque[tuple[int, int]] = deque()  # (begin, end), oldest first

    @property
    def num_pieces(self) -> int:
        return len(self._pieces)

    def take(self, nbytes: int) -> int | None:
        """Offset of a contiguous piece, or None while older pieces are in the way.

        A piece that does not fit between the front and the buffer's end begins at 0.
        """
        assert 0 < nbytes <= self.capacity, (nbytes, self.capacity)
        begin = self._place(nbytes)
        if begin is not None:
            self._pieces.append((begin, begin + nbytes))
            self._head = begin + nbytes
        return begin

    def free_oldest(self) -> None:
        self._pieces.popleft()

    def clear(self) -> None:
        self._pieces.clear()
        self._head = 0

    def _place(self, nbytes: int) -> int | None:
        if not self._pieces:
            return 0 if self._head + nbytes > self.capacity else self._head
        tail = self._pieces[0][0]
        if self._head > tail:  # free: [head, capacity) and [0, tail)
            if self._head + nbytes <= self.capacity:
                return self._head
            return 0 if nbytes <= tail else None
        return self._head if self._head + nbytes <= tail else None  # free: [head, tail)
