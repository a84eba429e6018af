"""What a job will take: its sweeps run through in numbers, by the rules of `engine.scheduler`.

Every row has the mean prompt and the mean output, and takes over from others what rows do in the
mean; the rest of its prompt is computed. A sweep takes as long as the slowest of
computing, the link and the disk: they run side by side, and a sweep that streams waits for its
bytes however few rows are left. KV pages beyond those on the device come over the link as well, in
each sweep that reads them. Of a long job the first generations of rows are run through; the
rest go on at the pace that they have come to.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from engine.costs import Load, SweepCost
from kernels.ops import PAGE_TOKENS

GENERATIONS = 6  # of rows on board that are run through; the later half shows the pace
COMPUTE = "compute"
HALF_PAGE = 0.5  # of a row's last page is empty in the mean
OUT_SHARE = 0.83  # of a KV page's time on the link, that one on its way out holds up what comes in


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """The rows to run, copies of others not counted: their number, and means over them.

    reused_tokens: of a prompt, tokens that other rows have computed; reused_pages: whole KV pages
        of these, which rows share
    longest_tokens: of the longest row, prompt and answer; 0: nobody has looked
    """

    num_rows: int = 1000
    prompt_tokens: float = 256.0
    output_tokens: float = 128.0
    reused_tokens: float = 0.0
    reused_pages: float = 0.0
    longest_tokens: int = 0

    @property
    def whole_prompt(self) -> int:
        return max(1, round(self.prompt_tokens))

    @property
    def whole_computed(self) -> int:
        """Tokens of a prompt that are computed; the last one always is."""
        return max(1, self.whole_prompt - round(self.reused_tokens))

    def with_reuse(self, *, reuses: bool, shares_parts: bool) -> Workload:
        """The same rows where prompts are reused to the token, by whole pages, or not at all."""
        if not reuses:
            return replace(self, reused_tokens=0.0, reused_pages=0.0)
        if shares_parts:
            return self
        return replace(self, reused_tokens=PAGE_TOKENS * self.reused_pages)

    @property
    def whole_output(self) -> int:
        return max(1, round(self.output_tokens))


@dataclass(frozen=True, kw_only=True, slots=True)
class Board:
    """What limits a sweep: its most tokens, and the most rows on board.

    kv_pages: on the device, which rows take before others
    page_tokens: a piece of a prompt ends with a page of so many, where it holds one
    """

    sweep_tokens: int
    max_rows: int
    kv_pages: int = 0
    page_tokens: int = 1


@dataclass(frozen=True, slots=True)
class Travel:
    """KV pages of host memory that cross the link: those that are read, and that are written."""

    read: float = 0.0
    written: float = 0.0

    @classmethod
    def beyond(
        cls, kv_pages: float, *, held: float, rows: float, new_pages: float, closed: bool
    ) -> Travel:
        """Of a sweep in which rows hold more than `kv_pages`, those of the device.

        rows: that write one page each; new_pages: that prompts fill
        closed: pages in host memory are of 8 bits: a row's open page is not among them, and goes
            there once it is full
        """
        if held <= kv_pages:
            return STILL
        share = 1 - kv_pages / held
        read = held - rows if closed else held
        written = rows / PAGE_TOKENS if closed else rows
        return cls(share * max(0.0, read), share * (written + new_pages))


STILL = Travel()


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """What sweeps take.

    cost: their computing
    streams: seconds of a sweep by the name of what streams, "disk" or "link"
    host_page_s: more on the link for each KV page that crosses it
    kept: share of what streams that is kept in memory, by (rows on board, sweeps until the last
        of them has ended), at a job's end, when no row waits
    """

    cost: SweepCost
    streams: Mapping[str, float]
    host_page_s: float = 0.0
    kept: Callable[[int, int], float] | None = None

    def sweep_s(self, load: Load, kept: float = 0.0, travel: Travel = STILL) -> tuple[float, str]:
        """Seconds of a sweep, and what they are spent on."""
        taken = {name: seconds * (1 - kept) for name, seconds in self.streams.items()}
        if self.host_page_s:
            taken["link"] += self.travel_s(travel)
        taken[COMPUTE] = self.cost.compute_s(load)
        name = max(taken, key=lambda name: taken[name])
        return taken[name], name

    def travel_s(self, travel: Travel) -> float:
        """Seconds of the link that KV pages take."""
        return (travel.read + OUT_SHARE * travel.written) * self.host_page_s


@dataclass(frozen=True, slots=True)
class Forecast:
    """Sums over a job's sweeps.

    travel: KV pages in host memory
    limited_s: seconds by what they are spent on
    """

    num_sweeps: float
    seconds: float
    tokens: float
    outputs: float
    decode_positions: float
    prefill_positions: float
    travel: Travel
    limited_s: Mapping[str, float]

    def extended(self, earlier: Forecast, times: float) -> Forecast:
        """What has come since an earlier one, so many times more."""

        def more(now: float, before: float) -> float:
            return now + times * (now - before)

        names = self.limited_s.keys() | earlier.limited_s.keys()
        return Forecast(
            more(self.num_sweeps, earlier.num_sweeps),
            more(self.seconds, earlier.seconds),
            more(self.tokens, earlier.tokens),
            more(self.outputs, earlier.outputs),
            more(self.decode_positions, earlier.decode_positions),
            more(self.prefill_positions, earlier.prefill_positions),
            Travel(
                more(self.travel.read, earlier.travel.read),
                more(self.travel.written, earlier.travel.written),
            ),
            {n: more(self.limited_s.get(n, 0.0), earlier.limited_s.get(n, 0.0)) for n in names},
        )


def forecast(work: Workload, board: Board, pace: Pace) -> Forecast:
    """Sweeps and seconds of a whole job."""
    generation = max(1, min(board.max_rows, board.sweep_tokens))
    enough = GENERATIONS * generation
    if work.num_rows <= enough:
        return _Run(work, work.num_rows, board, pace).forecast()
    # The end of a job, when rows run out, is in both and drops out of their difference.
    half = enough // 2
    whole = _Run(work, enough, board, pace).forecast()
    earlier = _Run(work, half, board, pace).forecast()
    return whole.extended(earlier, (work.num_rows - enough) / (enough - half))


class _Run:
    """A job under way. Rows that came on board in one sweep leave in one.

    A prompt's first output comes with its last piece, so a row decodes in one sweep less than it
    has outputs. `_done` tokens of the first waiting prompt are computed.
    """

    def __init__(self, work: Workload, num_rows: int, board: Board, pace: Pace) -> None:
        self._prompt, self._output = work.whole_prompt, work.whole_output
        self._computed = work.whole_computed  # of a prompt
        self._shared_pages = work.reused_pages
        self._board, self._pace = board, pace
        self._waiting = num_rows
        self._prefilling = 0
        self._done = 0
        self._decoding = 0
        self._attended = 0  # positions that the decoding rows attend to in the next sweep
        self._leaving: deque[tuple[int, int]] = deque()  # (after so many sweeps, rows)
        self._sweeps = 0
        self._sums = [0.0] * 7
        self._limited_s: dict[str, float] = {}

    def forecast(self) -> Forecast:
        while self._waiting or self._prefilling or self._decoding:
            self._admit()
            if self._prefilling:
                self._mixed_sweep()
            else:
                self._decode_until_rows_leave()
            self._leave()
        return Forecast(
            num_sweeps=self._sweeps,
            seconds=self._sums[0],
            tokens=self._sums[1],
            outputs=self._sums[2],
            decode_positions=self._sums[3],
            prefill_positions=self._sums[4],
            travel=Travel(self._sums[5], self._sums[6]),
            limited_s=self._limited_s,
        )

    def _admit(self) -> None:
        pending = self._decoding + self._prefilling * self._computed - self._done
        budget = self._board.sweep_tokens - pending
        room = self._board.max_rows - self._decoding - self._prefilling
        if budget > 0 and room > 0:
            rows = min(self._waiting, room, -(-budget // self._computed))
            self._waiting -= rows
            self._prefilling += rows

    def _mixed_sweep(self) -> None:
        """Every decoding row's token, and prompts as far as the budget goes."""
        left = self._prefilling * self._computed - self._done
        num_tokens = min(left, self._board.sweep_tokens - self._decoding)
        end = self._piece_end(self._done + num_tokens)
        num_tokens = end - self._done
        rows = end // self._computed
        attended = self._positions(end) - self._positions(self._done)
        tokens, outputs = self._decoding + num_tokens, self._decoding + rows
        # A prompt of which one token is computed is like a row that decodes: `load_of`.
        single = attended if self._computed == 1 else 0
        travel = self._travel(self._attended, self._done, num_tokens)
        load = Load(tokens, self._attended + single, attended - single, outputs)
        self._count(1, load, travel)
        self._attended += self._decoding
        self._done = end - rows * self._computed
        self._prefilling -= rows
        if rows:
            self._decoding += rows
            self._attended += rows * (self._prompt + 1)
            self._leaving.append((self._sweeps + self._output - 1, rows))

    def _piece_end(self, end: int) -> int:
        """Where the last piece of prompts, laid end to end, ends that reaches to a token."""
        cut = end % self._computed % self._board.page_tokens
        return end - cut if end - cut > self._done else end

    def _decode_until_rows_leave(self) -> None:
        """Sweeps that are alike but for their positions: those of the middle one, so many times."""
        rows, times = self._decoding, self._leaving[0][0] - self._sweeps
        middle = self._attended + rows * (times - 1) / 2
        self._count(times, Load(rows, middle, 0.0, rows), self._travel(middle, 0, 0))
        self._attended += rows * times

    def _leave(self) -> None:
        while self._leaving and self._leaving[0][0] <= self._sweeps:
            _, rows = self._leaving.popleft()
            self._decoding -= rows
            self._attended -= rows * (self._prompt + self._output)

    def _travel(self, attended: float, done: int, num_tokens: int) -> Travel:
        """Pages beyond the device's that a sweep reads and writes.

        done: tokens of a prompt begun before it; num_tokens: of prompts in it
        """
        if not self._pace.host_page_s:
            return STILL
        rows = self._decoding + (done > 0)
        own = (attended + done) / PAGE_TOKENS + HALF_PAGE * rows
        held = own - max(0, rows - 1) * self._shared_pages
        return Travel.beyond(
            self._board.kv_pages,
            held=held,
            rows=rows,
            new_pages=num_tokens / PAGE_TOKENS,
            closed=self._board.page_tokens > 1,
        )

    def _count(self, times: int, load: Load, travel: Travel) -> None:
        seconds, name = self._pace.sweep_s(load, self._kept(), travel)
        amounts = (
            seconds,
            load.tokens,
            load.outputs,
            load.decode_positions,
            load.prefill_positions,
            travel.read,
            travel.written,
        )
        for index, amount in enumerate(amounts):
            self._sums[index] += times * amount
        self._limited_s[name] = self._limited_s.get(name, 0.0) + times * seconds
        self._sweeps += times

    def _kept(self) -> float:
        if self._pace.kept is None or self._waiting or self._prefilling or not self._leaving:
            return 0.0
        return self._pace.kept(self._decoding, self._leaving[-1][0] - self._sweeps)

    def _positions(self, num_tokens: int) -> int:
        """Positions that the first tokens computed of prompts, laid end to end, attend to."""
        reused = self._prompt - self._computed
        whole, rest = divmod(num_tokens, self._computed)

        def attended(count: int) -> int:
            return count * reused + count * (count + 1) // 2

        return whole * attended(self._computed) + attended(rest)
