"""A job's end: memory that rows no longer need keeps layers that streamed.

While rows wait, KV pages are worth more than resident layers. When no row waits any more, pages
that fall free stay free, and each layer kept in their memory is one less to read per sweep.
"""

from __future__ import annotations

from engine.kv_cache import KvCache
from engine.weight_stream import WeightStream

DRY_SWEEPS = 2  # without a waiting row before the job counts as draining
MIN_SWEEPS_LEFT = 8  # reading a layer once more must pay


def layers_worth_keeping(
    *, num_pages: int, page_nbytes: int, layer_nbytes: int, num_layers: int, sweeps_left: int
) -> int:
    """How many layers fit into the memory of `num_pages` KV pages, if that pays at all."""
    if sweeps_left < MIN_SWEEPS_LEFT or layer_nbytes == 0:
        return 0
    return min(num_layers, num_pages * page_nbytes // layer_nbytes)


class Drain:
    """Moves memory between KV pages and layers, between two sweeps."""

    def __init__(self, cache: KvCache, stream: WeightStream, page_nbytes: int) -> None:
        self._cache = cache
        self._stream = stream
        self._page_nbytes = page_nbytes
        self._dry_sweeps = 0

    def before_sweep(self, *, rows_wait: bool, sweeps_left: int, pages_to_come: int) -> None:
        """Remake the division for what is on board.

        rows_wait: some row could use free pages
        sweeps_left: at least this many sweeps are still needed for the rows on board
        pages_to_come: that those rows may still reserve
        """
        self._dry_sweeps = 0 if rows_wait else self._dry_sweeps + 1
        if rows_wait:
            self.give_back()
        elif self._dry_sweeps > DRY_SWEEPS:
            self._keep_more(sweeps_left, pages_to_come)

    def give_back(self) -> None:
        """Put the pages back in use, and let their layers stream again."""
        if self._stream.num_kept:
            self._stream.keep(0)
            self._cache.restore()

    def _keep_more(self, sweeps_left: int, pages_to_come: int) -> None:
        stream, cache = self._stream, self._cache
        count = layers_worth_keeping(
            num_pages=max(0, cache.num_unreserved - pages_to_come) + cache.num_withdrawn,
            page_nbytes=self._page_nbytes,
            layer_nbytes=stream.layer_nbytes,
            num_layers=stream.num_layers,
            sweeps_left=sweeps_left,
        )
        if count <= stream.num_kept:
            return
        num_pages = -(-count * stream.layer_nbytes // self._page_nbytes)
        cache.withdraw(num_pages - cache.num_withdrawn)
        stream.keep(count)
