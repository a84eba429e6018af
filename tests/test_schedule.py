"""Which occurrences of a schedule are due: cron, zones, clocks that change or are set wrong."""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime, timedelta
from itertools import islice, takewhile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.records import SpecError
from jobs.schedule import (
    LATE_S,
    Action,
    Cron,
    Due,
    Overlap,
    choose_action,
    duration_text,
    fill_in,
    find_due,
    has_placeholder,
    iso_wall,
    parse_cron,
    parse_duration,
    parse_window,
)

MINUTE, HOUR, DAY = 60.0, 3600.0, 86400.0


def at(text: str) -> float:
    """The instant of a UTC time."""
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


def runs(expression: str, zone: str, start: str, end: str) -> list[str]:
    """Occurrences in (start, end], both in UTC, as the zone's clock shows them."""
    cron = parse_cron(expression, zone)
    found = takewhile(lambda instant: instant <= at(end), cron.after(at(start)))
    return [iso_wall(cron, instant) for instant in found]


# ---- nights on which the clock changes ---------------------------------------------------


def test_a_time_that_the_clock_jumps_over_runs_once_at_that_moment() -> None:
    """Case 94: Berlin, 2026-03-29: 02:00 to 03:00 does not exist."""
    found = runs("30 2 * * *", "Europe/Berlin", "2026-03-27T12:00", "2026-03-31T12:00")
    assert found == [
        "2026-03-28T02:30:00+01:00",
        "2026-03-29T03:00:00+02:00",
        "2026-03-30T02:30:00+02:00",
        "2026-03-31T02:30:00+02:00",
    ]
    assert runs("0,20,40 2 * * *", "Europe/Berlin", "2026-03-29T00:00", "2026-03-29T12:00") == [
        "2026-03-29T03:00:00+02:00"
    ]


def test_a_time_that_the_clock_shows_twice_runs_once_the_first_time() -> None:
    """Case 94: Berlin, 2026-10-25: 02:00 to 03:00 comes twice."""
    found = runs("30 2 * * *", "Europe/Berlin", "2026-10-24T12:00", "2026-10-26T12:00")
    assert found == ["2026-10-25T02:30:00+02:00", "2026-10-26T02:30:00+01:00"]


def test_every_half_hour_goes_by_elapsed_time_through_both_nights() -> None:
    """Case 94: neither a pause nor a double run where the clock changes."""
    for night in ("2026-03-28T22:00", "2026-10-24T22:00"):
        cron = parse_cron("*/30 * * * *", "Europe/Berlin")
        found = list(islice(cron.after(at(night)), 20))
        assert found == [at(night) + 30 * MINUTE * n for n in range(1, 21)]


def test_midnight_that_does_not_exist_and_the_hour_before_it_that_comes_twice() -> None:
    """Case 94: Santiago changes at midnight, on 2026-09-06 forward and on 2026-04-05 back."""
    found = runs("0 0 * * *", "America/Santiago", "2026-09-05T01:00", "2026-09-07T12:00")
    assert found == [
        "2026-09-05T00:00:00-04:00",
        "2026-09-06T01:00:00-03:00",
        "2026-09-07T00:00:00-03:00",
    ]
    found = runs("30 23 * * *", "America/Santiago", "2026-04-04T12:00", "2026-04-06T12:00")
    assert found == ["2026-04-04T23:30:00-03:00", "2026-04-05T23:30:00-04:00"]
    found = runs("0 0 * * *", "America/Santiago", "2026-04-04T12:00", "2026-04-06T12:00")
    assert found == ["2026-04-05T00:00:00-04:00", "2026-04-06T00:00:00-04:00"]


def test_a_change_by_half_an_hour_and_one_by_a_whole_day() -> None:
    found = runs("15 2 * * *", "Australia/Lord_Howe", "2026-10-02T00:00", "2026-10-05T00:00")
    assert found == [
        "2026-10-03T02:15:00+10:30",
        "2026-10-04T02:30:00+11:00",
        "2026-10-05T02:15:00+11:00",
    ]
    # Samoa had no 30th of December in 2011.
    found = runs("0 9 * * *", "Pacific/Apia", "2011-12-29T00:00", "2012-01-01T00:00")
    assert found == [
        "2011-12-29T09:00:00-10:00",
        "2011-12-31T00:00:00+14:00",
        "2011-12-31T09:00:00+14:00",
        "2012-01-01T09:00:00+14:00",
    ]


ZONES = (
    "Europe/Berlin",
    "America/Santiago",
    "Australia/Lord_Howe",
    "America/St_Johns",
    "Africa/Casablanca",
    "UTC",
)
CRONS = st.builds(
    "{} {} * * *".format,
    st.sampled_from(["0", "30", "*/7", "0,59", "1-3"]),
    st.sampled_from(["*", "0", "1", "2", "0-3", "*/2", "23", "*/6"]),
)


def by_minutes(cron: Cron, start: float, end: float) -> list[float]:
    """Occurrences in (start, end], by looking at the clock every minute."""
    minutes, hours = (
        {n for n in range(top) if _matches(field, n)}
        for field, top in zip(cron.expression.split()[:2], (60, 24), strict=True)
    )
    seen: set[datetime] = set()
    found = []
    before = cron.wall(start - DAY)
    instant = start - DAY
    while instant < end:
        instant += MINUTE
        wall = cron.wall(instant)
        passed = [wall]
        if wall - before > timedelta(minutes=1) and not cron.every_hour:
            jumped = int((wall - before).total_seconds()) // 60
            passed = [before + timedelta(minutes=n) for n in range(1, jumped + 1)]
        matching = [w for w in passed if w.minute in minutes and w.hour in hours]
        if any(cron.every_hour or w not in seen for w in matching) and instant > start:
            found.append(instant)
        seen.update(matching)
        before = wall
    return found


def _matches(field: str, number: int) -> bool:
    for item in field.split(","):
        span, _, step = item.partition("/")
        low, _, high = span.partition("-")
        if span == "*":
            inside, low = True, "0"
        else:
            inside = int(low) <= number <= int(high or low)
        if inside and (number - int(low)) % int(step or 1) == 0:
            return True
    return False


@settings(max_examples=40)
@given(expression=CRONS, zone=st.sampled_from(ZONES), data=st.data())
def test_occurrences_are_those_that_a_watched_clock_shows(
    expression: str, zone: str, data: st.DataObject
) -> None:
    nights = ["2026-03-29T00:00", "2026-10-24T22:00", "2026-09-06T00:00", "2026-04-05T00:00"]
    nights += ["2026-10-03T12:00", "2026-04-04T12:00", "2026-03-08T03:00", "2026-11-01T02:00"]
    night = at(data.draw(st.sampled_from(nights)))
    start = night + data.draw(st.integers(-6 * 60, 6 * 60)) * MINUTE
    cron = parse_cron(expression, zone)
    end = start + 1.2 * DAY
    expected = by_minutes(cron, start, end)
    assert list(takewhile(lambda found: found <= end, cron.after(start))) == expected
    if expected:
        assert cron.latest(end) == expected[-1]
        assert cron.latest(expected[0] + 0.5) == expected[0]


# ---- expressions and zones ---------------------------------------------------------------


def test_day_of_month_and_weekday_match_as_in_posix() -> None:
    """Case 97: either will do where both are restricted; 7 is Sunday; names."""

    def days(expression: str) -> list[str]:
        found = runs(expression, "UTC", "2026-11-30T00:00", "2026-12-14T00:00")
        return [day[8:10] for day in found]

    assert days("0 0 13 * 5") == ["04", "11", "13"]
    assert days("0 9 * * 7") == days("0 9 * * 0") == ["06", "13"]
    assert len(days("0 0 1-31 * 5")) == 14
    assert days("0 9 * DEC MON") == ["07"]
    assert len(days("@daily")) == 14


def test_minutes_that_do_not_divide_the_hour_begin_anew_in_each() -> None:
    assert runs("*/45 * * * *", "UTC", "2026-11-30T00:00", "2026-11-30T02:00") == [
        "2026-11-30T00:45:00+00:00",
        "2026-11-30T01:00:00+00:00",
        "2026-11-30T01:45:00+00:00",
        "2026-11-30T02:00:00+00:00",
    ]


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("0 0 30 2 *", "never matches"),
        ("0 0 31 4,6 *", "never matches"),
        ("0 0 0 * * *", "has 6 fields, not 5: minute, hour"),
        ("", "has 0 fields"),
        ("@reboot", "none of @yearly"),
        ("61 * * * *", "61"),
        ("*/0 * * * *", "step"),
        ("H 2 * * *", "'h' is no minute"),
        ("R 2 * * *", "'r' is no minute"),
        ("0 jan * * *", "'jan' is no hour"),
        ("0 2 ? * *", "'?' is no day of month"),
        ("0 2 L * *", "'l' is no day of month"),
        ("0 2 * * 5#2", "'5#2' is no weekday"),
        ("0 2 * * mo", "'mo' is no weekday"),
    ],
)
def test_what_is_no_cron_expression_is_refused_with_the_reason(expression: str, said: str) -> None:
    """Case 97."""
    with pytest.raises(SpecError) as refused:
        parse_cron(expression, "UTC")
    assert said in str(refused.value) and repr(expression) in str(refused.value)


@pytest.mark.parametrize("zone", ["Mars/X", "", "../etc/passwd", "europe", "Europe"])
def test_an_unknown_zone_is_refused(zone: str) -> None:
    """Case 95."""
    with pytest.raises(SpecError, match="zone"):
        parse_cron("0 2 * * *", zone)


def test_zones_are_known_where_the_system_has_none() -> None:
    """Case 95: a container without /usr/share/zoneinfo."""
    program = (
        "from jobs.schedule import parse_cron, iso_wall\n"
        "cron = parse_cron('0 2 * * *', 'Europe/Madrid')\n"
        "print(iso_wall(cron, next(cron.after(0))))"
    )
    environment = {"PYTHONTZPATH": "", "PATH": ""}
    command = [sys.executable, "-c", program]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout == "1970-01-01T02:00:00+01:00\n"


def test_a_leap_day_is_found_however_far_it_is() -> None:
    cron = parse_cron("0 0 29 2 *", "UTC")
    assert next(cron.after(at("2096-03-01T00:00"))) == at("2104-02-29T00:00")
    assert cron.latest(at("2026-11-30T00:00")) == at("2024-02-29T00:00")


# ---- what is due -------------------------------------------------------------------------

NIGHTLY = parse_cron("0 2 * * *", "UTC")
HOURLY = parse_cron("0 * * * *", "UTC")


def test_an_occurrence_is_due_when_its_time_has_come_and_not_again() -> None:
    two = at("2026-11-30T02:00")
    assert find_due(NIGHTLY, two - HOUR, two - 0.001) is None
    assert find_due(NIGHTLY, two - HOUR, two) == Due(at=two, num_missed=0, is_late=False)
    assert find_due(NIGHTLY, two, two + HOUR) is None


def test_a_runner_that_was_stopped_for_days_has_one_occurrence_to_catch_up_with() -> None:
    two = at("2026-11-30T02:00")
    due = find_due(NIGHTLY, two, two + 5 * DAY + 9 * HOUR)
    assert due == Due(at=two + 5 * DAY, num_missed=4, is_late=True)
    assert find_due(NIGHTLY, due.at, two + 5 * DAY + 9 * HOUR) is None


def test_years_of_minutes_are_not_counted_to_the_end() -> None:
    cron = parse_cron("* * * * *", "UTC")
    now = at("2076-11-30T02:00")
    due = find_due(cron, at("2026-11-30T02:00"), now)
    assert due is not None and (due.at, due.num_missed) == (now, 1000)


class Clockwork:
    """A schedule that is looked at every `step` seconds, by a clock that may be wrong."""

    def __init__(self, cron: Cron, now: float) -> None:
        self.cron = cron
        self.now = self.looked_at = now
        self.ran: list[float] = []

    def look(self) -> None:
        if (due := find_due(self.cron, self.looked_at, self.now, self.ran)) is not None:
            self.ran.append(due.at)
        self.looked_at = self.now

    def pass_time(self, seconds: float, step: float = 5 * MINUTE) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += step
            self.look()


def test_a_clock_set_back_runs_nothing_twice() -> None:
    """Case 98."""
    start = at("2026-11-30T00:30")
    clock = Clockwork(HOURLY, start)
    clock.pass_time(2 * HOUR)
    clock.now -= HOUR
    clock.look()
    clock.pass_time(2 * HOUR)
    assert clock.ran == [start + HOUR * n - 30 * MINUTE for n in (1, 2, 3)]


def test_a_clock_set_forward_makes_one_catch_up_and_set_right_again_loses_nothing() -> None:
    """Case 98: a day ahead and back; the hours between are run in their time, each once."""
    start = at("2026-11-30T00:30")
    clock = Clockwork(HOURLY, start)
    clock.pass_time(HOUR)
    clock.now += DAY
    clock.look()
    one, tomorrow = start + 30 * MINUTE, start + DAY + 30 * MINUTE
    assert clock.ran == [one, tomorrow]
    clock.now -= DAY
    clock.look()
    clock.pass_time(26 * HOUR)
    assert len(clock.ran) == len(set(clock.ran))
    assert sorted(clock.ran) == [one + HOUR * n for n in range(27)]


def test_after_a_clock_set_back_what_ran_is_not_counted_as_missed() -> None:
    one = at("2026-11-30T01:00")
    ran = {one, one + HOUR}
    due = find_due(HOURLY, one - MINUTE, one + 3 * HOUR, ran)
    assert due is not None and (due.at, due.num_missed) == (one + 3 * HOUR, 1)
    assert find_due(HOURLY, one - MINUTE, one + HOUR, ran) is None
    due = find_due(HOURLY, one - MINUTE, one + HOUR, {one + HOUR})
    assert due is not None and due.at == one


@pytest.mark.parametrize("zone", ["Europe/Berlin", "America/Santiago"])
@pytest.mark.parametrize("expression", ["30 2 * * *", "0 0 * * *", "15 23 * * *", "0 */6 * * *"])
def test_each_occurrence_of_2026_runs_once_whenever_somebody_looks(
    zone: str, expression: str
) -> None:
    """A year in two zones, looked at every four hours: 364 days, 364 nights."""
    cron = parse_cron(expression, zone)
    clock = Clockwork(cron, at("2026-01-01T12:00"))
    clock.pass_time(364 * DAY, step=4 * HOUR)
    expected = list(takewhile(lambda found: found <= clock.now, cron.after(at("2026-01-01T12:00"))))
    assert clock.ran == expected
    assert len(expected) == 364 * (4 if "*/6" in expression else 1)


@pytest.mark.parametrize(
    ("overlap", "is_busy", "is_waiting", "action"),
    [
        ("skip", False, False, "run"),
        ("skip", True, False, "skip"),
        ("queue", False, False, "run"),
        ("queue", True, False, "wait"),
        ("queue", True, True, "skip"),
        ("queue", False, True, "skip"),
        ("allow", True, False, "run"),
    ],
)
def test_overlapping_runs_are_skipped_queued_or_allowed(
    overlap: Overlap, is_busy: bool, is_waiting: bool, action: Action
) -> None:
    due = Due(at=0.0, num_missed=0, is_late=False)
    busy = {"is_busy": is_busy, "is_waiting": is_waiting}
    assert choose_action(due, overlap=overlap, catch_up=False, **busy) == action


def test_without_catch_up_a_late_occurrence_is_missed() -> None:
    two = at("2026-11-30T02:00")
    for now, action in ((two + LATE_S, "run"), (two + LATE_S + 1, "miss")):
        due = find_due(NIGHTLY, two - DAY, now)
        assert due is not None
        free = {"is_busy": False, "is_waiting": False}
        assert choose_action(due, overlap="skip", catch_up=False, **free) == action
        assert choose_action(due, overlap="skip", catch_up=True, **free) == "run"


# ---- windows, lengths of time, placeholders ----------------------------------------------


def test_a_window_holds_for_the_wall_clock_and_may_go_over_midnight() -> None:
    night, day = parse_window("22:00-07:00"), parse_window("9:00 - 17:30")
    assert str(night) == "22:00-07:00"
    hours = {"21:59": False, "22:00": True, "00:00": True, "06:59": True, "07:00": False}
    for clock, is_open in hours.items():
        assert night.is_open(datetime.fromisoformat(f"2026-03-29T{clock}")) is is_open, clock
    assert day.is_open(datetime(2026, 1, 1, 9, 0)) and not day.is_open(datetime(2026, 1, 1, 17, 30))


@pytest.mark.parametrize("text", ["22-7", "22:00", "25:00-07:00", "07:00-07:00", "22:00-07:60", ""])
def test_what_is_no_window_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match="like 22:00-07:00"):
        parse_window(text)


def test_lengths_of_time_are_read_and_written() -> None:
    for text, seconds in {"6h": 21600, "1h30m": 5400, "90s": 90, "45": 45, "2m5s": 125}.items():
        assert parse_duration(text) == seconds
    assert [duration_text(s) for s in (21600, 5400, 90)] == ["6h", "1h30m", "1m30s"]
    for text in ("", "0", "h", "6 h", "-1h", "1d", "0h0m"):
        with pytest.raises(SpecError, match="like 6h"):
            parse_duration(text)


def test_date_and_run_are_filled_in_where_they_stand_in_single_braces() -> None:
    text = "out/{date}/{run}: {{date}} {{ run }} {day} {date}"
    assert fill_in(text, date="2026-03-29", run=7) == (
        "out/2026-03-29/7: {{date}} {{ run }} {day} 2026-03-29"
    )
    assert has_placeholder("{run}") and not has_placeholder("{{run}} {x}")


def test_the_date_is_that_of_the_zone() -> None:
    cron = parse_cron("0 0 * * *", "Europe/Madrid")
    assert cron.date(at("2026-06-30T22:30")) == "2026-07-01"
