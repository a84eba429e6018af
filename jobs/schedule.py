"""When a schedule runs, and what becomes of each occurrence: policy without clock, store or jobs.

Instants are Unix seconds. A *wall* time is what a clock in the schedule's zone shows, a datetime
without a zone. An *occurrence* is an instant at which a schedule runs.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Container, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, time, timedelta
from itertools import islice, takewhile
from typing import Any, Literal, TypeAlias
from zoneinfo import ZoneInfo

from croniter import CroniterBadDateError, CroniterError, croniter

from jobs.records import SpecError

Overlap = Literal["skip", "queue", "allow"]
Action = Literal["run", "wait", "skip", "miss"]
Walls: TypeAlias = Iterator[datetime]

# A runner looks every few seconds, unless it is held up by a slow disk.
LATE_S = 300.0
MAX_COUNTED = 1000
_FIELDS = ("minute", "hour", "day of month", "month", "weekday")
_ALIASES = ("@yearly", "@annually", "@monthly", "@weekly", "@daily", "@midnight", "@hourly")
_ITEM = re.compile(r"(\*|\w+(-\w+)?)(/\d+)?")
_NAMES = {
    "month": ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"),
    "weekday": ("sun", "mon", "tue", "wed", "thu", "fri", "sat"),
}
_DURATION = re.compile(r"(?=\d)(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s?)?")
_WINDOW = re.compile(r"(\d\d?):(\d\d)\s*-\s*(\d\d?):(\d\d)")
_PLACEHOLDER = re.compile(r"(?<!\{)\{(date|run)\}(?!\})")


@dataclass(frozen=True, slots=True)
class Cron:
    """A cron expression of five fields in a time zone; `parse_cron` makes one.

    One that names its hours runs once at each wall time that matches: where the clock jumps past
    it, at that moment, and where the clock shows it twice, the first time. One of every hour goes
    by elapsed time: it runs whenever the clock shows a time that matches, and at no other.
    """

    expression: str
    zone: ZoneInfo
    every_hour: bool

    def after(self, instant: float) -> Iterator[float]:
        """The occurrences after an instant, ascending."""
        wall = self.wall(instant)
        offset, later = self._offset(instant), self._offset(instant + 90_000)
        # Where the clock is about to go back, wall times that have passed come again.
        start = wall - max(timedelta(0), offset - later)
        pending: list[float] = []
        last = instant
        for candidate in self._walls(start):
            first, instants = self._instants(candidate)
            for occurrence in instants:
                heapq.heappush(pending, occurrence)
            # Later candidates begin no earlier, so what is pending up to here is complete.
            while pending and pending[0] <= first:
                if (occurrence := heapq.heappop(pending)) > last:
                    last = occurrence
                    yield occurrence

    def latest(self, instant: float) -> float | None:
        """The last occurrence that is not after an instant."""
        for candidate in self._walls(self.wall(instant) + timedelta(seconds=1), backwards=True):
            _, instants = self._instants(candidate)
            if instants:
                later = takewhile(lambda found: found <= instant, self.after(instants[0]))
                return max(later, default=instants[0])
        return None

    def wall(self, instant: float) -> datetime:
        """What the clock shows, to the second."""
        return datetime.fromtimestamp(instant // 1, self.zone).replace(tzinfo=None)

    def date(self, instant: float) -> str:
        """The date at an instant in the zone, like 2026-03-29."""
        return self.wall(instant).date().isoformat()

    def _walls(self, start: datetime, *, backwards: bool = False) -> Walls:
        matches = croniter(self.expression, start, ret_type=datetime)
        step = matches.get_prev if backwards else matches.get_next
        while True:
            try:
                yield step()
            except CroniterBadDateError:
                return

    def _instants(self, wall: datetime) -> tuple[float, list[float]]:
        """Where a wall time comes on the line of instants, and the occurrences that it makes."""
        first, second = (
            wall.replace(tzinfo=self.zone, fold=fold).timestamp() for fold in (False, True)
        )
        if first > second:  # the clock never shows it
            jump = self._jump_between(second, first)
            return jump, [] if self.every_hour else [jump]
        if first < second and self.every_hour:
            return first, [first, second]
        return first, [first]

    def _jump_between(self, before: float, after: float) -> float:
        """The instant in (before, after] at which the clock jumps, both whole seconds."""
        old = self._offset(before)
        while after - before > 1:
            middle = (before + after) // 2
            if self._offset(middle) == old:
                before = middle
            else:
                after = middle
        return after

    def _offset(self, instant: float) -> timedelta:
        offset = datetime.fromtimestamp(instant, self.zone).utcoffset()
        assert offset is not None
        return offset


def parse_cron(expression: str, zone_name: str) -> Cron:
    """A cron expression of five fields, or @daily and its like, in a zone of the tz database.

    Days match as in POSIX: where day of month and weekday are both restricted, either will do.

    Raises SpecError: it is no such expression, never matches, or there is no such zone.
    """
    text = expression.strip().lower()
    zone = parse_zone(zone_name)
    if text.startswith("@"):
        if text not in _ALIASES:
            raise SpecError(f"cron {expression!r} is none of {', '.join(_ALIASES)}")
    else:
        _refuse_odd_fields(expression, text)
    try:
        (_, hours, *_), _ = croniter.expand(text)
        croniter(text, datetime(2026, 1, 1), ret_type=datetime).get_next()
    except CroniterBadDateError:
        raise SpecError(f"cron {expression!r} never matches: no month has such a day") from None
    except CroniterError as error:
        raise SpecError(f"cron {expression!r}: {error}") from None
    return Cron(text, zone, every_hour=hours == ["*"])


def _refuse_odd_fields(expression: str, text: str) -> None:
    fields = text.split()
    if len(fields) != len(_FIELDS):
        raise SpecError(
            f"cron {expression!r} has {len(fields)} fields, not 5: {', '.join(_FIELDS)}; "
            "'0 2 * * *' is every day at 02:00"
        )
    for name, field in zip(_FIELDS, fields, strict=True):
        for item in field.split(","):
            if not _ITEM.fullmatch(item) or not _known_words(name, item):
                raise SpecError(
                    f"cron {expression!r}: {item!r} is no {name}; write numbers, *, 1-5, */15 or "
                    "lists of these"
                )


def _known_words(field_name: str, item: str) -> bool:
    words = re.findall(r"[a-z_]\w*", item)
    return all(word in _NAMES.get(field_name, ()) for word in words)


def parse_zone(name: str) -> ZoneInfo:
    """A zone of the tz database. Raises SpecError: there is none of that name."""
    try:
        return ZoneInfo(name)
    except (ValueError, OSError) as error:  # ZoneInfoNotFoundError is a KeyError
        raise SpecError(f"time zone {name!r} cannot be used: {error}") from None
    except KeyError:
        raise SpecError(
            f"there is no time zone {name!r}; name one like Europe/Madrid or UTC with --tz"
        ) from None


# ---- what is due -------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Due:
    """An occurrence that has come. num_missed: those before it that nobody looked at in time"""

    at: float
    num_missed: int
    is_late: bool


def find_due(
    cron: Cron, looked_at: float, now: float, settled: Container[float] = ()
) -> Due | None:
    """The latest occurrence in (looked_at, now] that is not settled; it stands for all before it.

    looked_at: until when occurrences were decided on; where the clock was set back it is after
        `now`, and nothing is due
    settled: occurrences that were decided on before the clock was set back
    """
    at = cron.latest(now)
    while at is not None and at > looked_at and at in settled:
        at = cron.latest(at - 1)
    if at is None or at <= looked_at:
        return None
    latest = at
    earlier = takewhile(lambda found: found < latest, cron.after(looked_at))
    num_missed = sum(found not in settled for found in islice(earlier, MAX_COUNTED))
    return Due(at=at, num_missed=num_missed, is_late=now - at > LATE_S)


def choose_action(
    due: Due, *, overlap: Overlap, catch_up: bool, is_busy: bool, is_waiting: bool
) -> Action:
    """What becomes of an occurrence that is due.

    is_busy: the job of a run before it is not over
    is_waiting: another occurrence waits for that already
    """
    if due.is_late and not catch_up:
        return "miss"
    if overlap == "allow" or not (is_busy or is_waiting):
        return "run"
    return "wait" if overlap == "queue" and not is_waiting else "skip"


# ---- when its jobs run -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Window:
    """The part of each day from `start` up to `end`, by the wall clock; over midnight too."""

    start: time
    end: time

    def is_open(self, wall: datetime) -> bool:
        now = wall.time()
        if self.start < self.end:
            return self.start <= now < self.end
        return now >= self.start or now < self.end

    def __str__(self) -> str:
        return f"{self.start:%H:%M}-{self.end:%H:%M}"


def parse_window(text: str) -> Window:
    """A window like "22:00-07:00". Raises SpecError: it is none, or empty."""
    match = _WINDOW.fullmatch(text.strip())
    try:
        hour, minute, end_hour, end_minute = map(int, match.groups() if match else ())
        start, end = time(hour, minute), time(end_hour, end_minute)
    except ValueError:
        start = end = time()
    if start == end:
        raise SpecError(f"window {text!r} is no part of a day; write it like 22:00-07:00")
    return Window(start, end)


def parse_duration(text: str | float) -> float:
    """Seconds of "6h", "1h30m", "90s" or a number. Raises SpecError: it is none, or 0."""
    match = _DURATION.fullmatch(str(text).strip())
    if match:
        hours, minutes, seconds = (int(group or 0) for group in match.groups())
        if total := hours * 3600 + minutes * 60 + seconds:
            return float(total)
    raise SpecError(f"{text!r} is no length of time; write it like 6h, 1h30m or 90s")


def duration_text(seconds: float) -> str:
    """The shortest way to write it: 6h, 1h30m, 90s."""
    hours, rest = divmod(int(seconds), 3600)
    minutes, s = divmod(rest, 60)
    parts = ((hours, "h"), (minutes, "m"), (s, "s"))
    return "".join(f"{number}{unit}" for number, unit in parts if number)


# ---- {date} and {run} --------------------------------------------------------------------


def fill_in(text: str, *, date: str, run: int) -> str:
    """Put the run's date and number in place of {date} and {run}; {{date}} is Jinja's and stays."""
    values: dict[str, Any] = {"date": date, "run": run}
    return _PLACEHOLDER.sub(lambda match: str(values[match[1]]), text)


def has_placeholder(text: str) -> bool:
    return _PLACEHOLDER.search(text) is not None


def iso_wall(cron: Cron, instant: float) -> str:
    """An instant as people of the zone write it, with its offset: 2026-03-29T03:00:00+02:00."""
    return datetime.fromtimestamp(instant, UTC).astimezone(cron.zone).isoformat(timespec="seconds")
