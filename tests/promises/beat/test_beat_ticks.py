"""Names of ticks: they depend on the schedule and the moment, not on the beat that asks.

Each schedule here has a clock that stands at one moment. What must be the same in every beat is
the name; what may differ is what each remembers as the last run.
"""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any
from zoneinfo import ZoneInfo

import celery
import pytest
from celery import Celery
from celery.schedules import BaseSchedule, crontab, schedstate, schedule
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from celery_redlock.beat.ticks import FINAL_S, GRACE_S, Tick, current_tick
from tests.promises.beat.beat_moments import ZONES, cron, set_up, utc

DAY, HOUR, MINUTE = timedelta(days=1), timedelta(hours=1), timedelta(minutes=1)


def name_of(due: datetime) -> str:
    return f"{due.astimezone(timezone.utc):%Y-%m-%dT%H:%M:%SZ}"


def tick_of(made: Any, now: str, last: str | datetime | None, zone: str = "UTC") -> Tick:
    last = utc(last) if isinstance(last, str) else last
    return current_tick(set_up(made, utc(now), zone), last)


# -- Crontabs -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "last", "now", "due", "following"),
    [
        ("* * * * *", "2026-11-21 09:59:00", "2026-11-21 10:00:00.004", "2026-11-21 10:00", 60),
        ("*/15 * * * *", "2026-11-21 09:45:00", "2026-11-21 10:00:30", "2026-11-21 10:00", 900),
        ("0 4 * * *", "2026-11-20 04:00:00", "2026-11-21 04:00:01", "2026-11-21 04:00", 86_400),
        ("0 4 * * *", "2026-11-20 04:00:00", "2026-11-22 03:59:59", "2026-11-21 04:00", 86_400),
        ("30 6 * * mon", "2026-11-15 12:00", "2026-11-16 06:30:02", "2026-11-16 06:30", 604_800),
        ("0 0 1 * *", "2026-10-31 12:00", "2026-11-01 00:00:00.5", "2026-11-01", 30 * 86_400),
        ("0 12 29 2 *", "2027-01-01", "2028-02-29 12:00:01", "2028-02-29 12:00", 1461 * 86_400),
    ],
)
def test_a_crontab_tick_is_named_by_its_due_time(
    spec: str, last: str, now: str, due: str, following: float
) -> None:
    tick = tick_of(cron(spec), now, last)
    assert tick.due == utc(due)
    assert tick.name == name_of(utc(due))
    late = (utc(now) - utc(due)).total_seconds()
    assert tick.next_in == pytest.approx(following - late)
    assert tick.kept == pytest.approx(following - late + GRACE_S)
    assert tick.period is None


class Counted(crontab):
    """Counts how often its arithmetic is done."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.calls: list[datetime] = []

    def remaining_delta(self, last_run_at: datetime, *args: Any, **kwargs: Any) -> Any:
        self.calls.append(last_run_at)
        return super().remaining_delta(last_run_at, *args, **kwargs)


@pytest.mark.parametrize("pause", [2 * MINUTE, HOUR, 3 * DAY, 400 * DAY, 9000 * DAY])
@pytest.mark.parametrize(
    ("fields", "due"),
    [
        ({}, "2026-11-21 10:07"),
        ({"minute": "*/15"}, "2026-11-21 10:00"),
        ({"minute": 0, "hour": 4}, "2026-11-21 04:00"),
        ({"minute": 0, "hour": 4, "day_of_week": "mon"}, "2026-11-16 04:00"),
        ({"minute": 0, "hour": 4, "day_of_month": 29, "month_of_year": 2}, "2024-02-29 04:00"),
    ],
)
def test_latest_tick_after_a_pause_is_found_in_a_few_steps(
    fields: dict[str, Any], due: str, pause: timedelta
) -> None:
    now = "2026-11-21 10:07:31"
    last = utc(due) - pause
    made = Counted(**fields)
    tick = tick_of(made, now, last)
    assert tick.name == name_of(utc(due))
    assert len(made.calls) < 200


@pytest.mark.parametrize(
    "last",
    [
        datetime(2026, 11, 21, 9, 50),  # naive: UTC, as Celery has it
        utc("2026-11-21 09:50"),
        utc("2026-11-21 09:50").astimezone(ZONES["America/New_York"]),
        utc("2026-11-21 09:50").astimezone(ZONES["Asia/Kolkata"]),
    ],
)
@pytest.mark.parametrize("enable_utc", [True, False])
@pytest.mark.parametrize("zone", ["UTC", "Europe/Berlin"])
def test_zone_of_the_last_run_does_not_change_the_tick(
    last: datetime, enable_utc: bool, zone: str
) -> None:
    made = set_up(crontab(minute="*/15"), utc("2026-11-21 10:00:30"), zone, enable_utc=enable_utc)
    assert current_tick(made, last).name == "2026-11-21T10:00:00Z"


def test_crontab_with_a_zone_of_its_own_ignores_the_zone_of_the_app() -> None:
    """The zone is that of the entry of django-celery-beat, whatever the zone of the app is."""
    tzcrontab = pytest.importorskip("django_celery_beat.tzcrontab")
    now = utc("2026-11-21 12:00")
    for zone, due in (("Asia/Kolkata", "2026-11-20T22:30:00Z"), ("UTC", "2026-11-21T04:00:00Z")):
        made = tzcrontab.TzAwareCrontab(minute=0, hour=4, tz=ZONES[zone])
        set_up(made, now, "Europe/Berlin").nowfun = lambda zone=zone: now.astimezone(ZONES[zone])
        for last in (now - HOUR * 14, now - DAY * 5):
            assert made.is_due(last).is_due
            assert current_tick(made, last).name == due


def test_starting_deadline_does_not_change_the_name_of_a_tick() -> None:
    now = utc("2026-11-21 10:03")
    made = set_up(crontab(minute="*/15"), now, beat_cron_starting_deadline=300)
    for last in (now - 10 * MINUTE, now - DAY, now - 30 * DAY):
        assert made.is_due(last).is_due
        assert current_tick(made, last).name == "2026-11-21T10:00:00Z"


def test_tick_is_computed_from_one_reading_of_the_clock() -> None:
    """A process may be stopped between two readings of the clock."""
    made = set_up(crontab(), utc("2026-11-21 10:00"))
    clock = iter(utc("2026-11-21 10:00:00.5") + HOUR * n for n in range(100))
    made.nowfun = lambda: next(clock)
    tick = current_tick(made, utc("2026-11-21 09:59:00.5"))
    assert tick.name == "2026-11-21T10:00:00Z"
    assert tick.next_in == pytest.approx(59.5)
    seven = set_up(EverySeven(), utc("2026-11-21 10:00"))
    clock = iter(utc("2026-11-21 00:00:15") + 5 * HOUR * n for n in range(100))
    seven.nowfun = lambda: next(clock)
    tick = current_tick(seven, utc("2026-11-21 00:00:08"))
    assert tick.name == "2026-11-21T00:00:14Z"
    assert tick.next_in == pytest.approx(6.0)


# -- Intervals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("period", "margin"), [(0.5, 0.025), (2, 0.1), (10, 0.5), (3600, 0.5)])
def test_claim_of_an_interval_is_kept_a_little_less_than_the_interval(
    period: float, margin: float
) -> None:
    one = tick_of(schedule(period), "2026-11-21 10:00:00.3", "2026-11-21 09:00")
    other = tick_of(schedule(period), "2026-11-21 10:00:09.1", None)
    assert one.name == other.name == f"every-{period:g}s"
    assert one.due is None
    assert one.period == period
    assert one.margin == pytest.approx(margin)
    assert one.kept == other.kept == pytest.approx(period - margin)


@pytest.mark.parametrize(
    ("period", "zone", "left"),
    [
        (60, "UTC", 17.6),  # to the next full minute
        (3600, "UTC", 29 * 60 + 17.6),
        (7200, "UTC", 89 * 60 + 17.6),
        (86_400, "UTC", 13 * 3600 + 29 * 60 + 17.6),
        (86_400, "Europe/Berlin", 12 * 3600 + 29 * 60 + 17.6),
    ],
)
def test_claim_of_a_relative_interval_is_kept_until_the_clock_is_round(
    period: int, zone: str, left: float
) -> None:
    made = schedule(period, relative=True)
    tick = tick_of(made, "2026-11-21 10:30:42.4", "2026-11-19 12:00", zone)
    assert tick.name == f"every-{period}s-relative"
    assert tick.due is None
    assert tick.next_in == pytest.approx(left)
    assert tick.kept == pytest.approx(left - 0.5)


# -- Schedules of other kinds ---------------------------------------------------------------------


class EverySeven(BaseSchedule):
    """A user's own schedule that is due when the seconds since midnight are divisible by seven."""

    def remaining_estimate(self, last_run_at: datetime) -> timedelta:
        last = self.maybe_make_aware(last_run_at)
        midnight = last.replace(hour=0, minute=0, second=0, microsecond=0)
        since = int((last - midnight).total_seconds())
        due = midnight + timedelta(seconds=since - since % 7 + 7)
        return due - self.maybe_make_aware(self.now())

    def is_due(self, last_run_at: datetime) -> schedstate:
        left = self.remaining_estimate(last_run_at).total_seconds()
        if left > 0:
            return schedstate(False, left)
        return schedstate(True, self.remaining_estimate(self.now()).total_seconds())


class SinceLast(EverySeven):
    """A user's own schedule that counts from the last run: an interval by another name."""

    def remaining_estimate(self, last_run_at: datetime) -> timedelta:
        return self.maybe_make_aware(last_run_at) + timedelta(seconds=7) - self.now()


@pytest.mark.parametrize("last", ["2026-11-21 00:00:06.9", "2026-11-20 23:00", "2026-09-01", None])
def test_own_schedule_with_due_times_names_its_ticks_by_them(last: str | None) -> None:
    tick = tick_of(EverySeven(), "2026-11-21 00:00:10.25", last)
    assert tick.name == "2026-11-21T00:00:07Z"
    assert tick.next_in == pytest.approx(3.75)
    assert tick.kept == pytest.approx(3.75 + GRACE_S)


@pytest.mark.parametrize("last", ["2026-11-21 00:00:03.1", "2026-11-20 23:00", "2026-09-01", None])
def test_own_schedule_counting_from_the_last_run_is_an_interval(last: str | None) -> None:
    tick = tick_of(SinceLast(), "2026-11-21 00:00:10.25", last)
    assert tick.due is None
    assert tick.name == "next"


def test_schedule_that_is_due_once_is_claimed_for_long() -> None:
    """Such as `clocked` of django-celery-beat."""
    clocked = pytest.importorskip("django_celery_beat.clockedschedule").clocked
    for now in ("2026-11-21 10:00:00.2", "2026-11-24 11:00"):
        for last in ("2026-11-21 09:00", "2026-09-01", None):
            tick = tick_of(clocked(utc("2026-11-21 10:00")), now, last)
            assert tick.name == "2026-11-21T10:00:00Z"
            assert tick.next_in is None
            assert tick.kept == FINAL_S + GRACE_S


def test_ticks_of_recurrence_rules_are_named_by_due_time() -> None:
    """The rules are those of celery-redbeat; the last tick counts, too."""
    rrule = pytest.importorskip("redbeat.schedules").rrule
    app = Celery(set_as_current=False)
    for last in (utc("2026-11-21 09:58"), utc("2026-11-21 09:45"), None):
        made = rrule("MINUTELY", dtstart=utc("2026-11-21 09:30"), interval=5, count=8, app=app)
        tick = tick_of(made, "2026-11-21 10:03:10", last)
        assert tick.name == "2026-11-21T10:00:00Z"
        assert tick.next_in == pytest.approx(110)
        tick = tick_of(made, "2026-11-21 10:07:00", last)
        assert tick.name == "2026-11-21T10:05:00Z"
        assert tick.next_in is None
        assert tick.kept == FINAL_S + GRACE_S


@pytest.mark.parametrize(
    ("event", "noon_before"),
    [
        ("sunset", "2026-01-12 12:00"),  # at 15:17:30.48
        ("sunset", "2026-02-19 12:00"),  # at 16:26:37.51
        ("dawn_civil", "2026-02-23 12:00"),  # at 05:29:27.55
        ("solar_noon", "2026-11-21 00:00"),
    ],
)
def test_solar_event_has_one_tick_name(event: str, noon_before: str) -> None:
    """The event is rounded differently if it is computed from other starts."""
    pytest.importorskip("ephem")
    from celery.schedules import solar

    def made(now: datetime) -> Any:
        return set_up(solar(event, 52.5, 13.4), now, "Europe/Berlin")

    noon = utc(noon_before)
    due = noon + made(noon).remaining_estimate(noon)
    names = set()
    for minutes in range(0, 720, 10):
        now = due + timedelta(seconds=1 + 7 * minutes)
        last = due - timedelta(seconds=1 + 60 * minutes)
        assert made(now).is_due(last).is_due
        names.add(current_tick(made(now), last).name)
    assert len(names) == 1
    named = utc(names.pop().rstrip("Z").replace("T", " "))
    assert abs(named - due) <= timedelta(seconds=1)


# -- By chance ------------------------------------------------------------------------------------

fields = st.fixed_dictionaries(
    {
        "minute": st.sampled_from(["*", "*/5", "*/7", "0", "59"])
        | st.frozensets(st.integers(0, 59), min_size=1, max_size=4),
        "hour": st.sampled_from(["*", "*/3", "2", "0,23"])
        | st.frozensets(st.integers(0, 23), min_size=1, max_size=3),
        "day_of_week": st.sampled_from(["*", "*", "mon-fri", "sun", "0,3"]),
        "day_of_month": st.sampled_from(["*", "*", "1", "*/2", "29-31", "1-7"]),
        "month_of_year": st.sampled_from(["*", "*", "*/2", "2,11"]),
    }
)
moments = st.datetimes(datetime(2023, 1, 1), datetime(2032, 1, 1)).map(
    lambda moment: moment.replace(tzinfo=timezone.utc)
)
seconds = st.floats(1.0, 100.0) | st.floats(1.0, 4e6)


def latest_due(made: crontab, now: datetime, zone: ZoneInfo, days: int = 800) -> datetime | None:
    """The latest due time of a crontab, by walking back: every minute of every day that matches."""
    local = now.astimezone(zone).replace(second=0, microsecond=0)
    for back in range(days):
        day = local.date() - timedelta(days=back)
        if not (
            day.month in made.month_of_year
            and day.day in made.day_of_month
            and day.isoweekday() % 7 in made.day_of_week
        ):
            continue
        top = local.hour * 60 + local.minute if back == 0 else 24 * 60 - 1
        for minute in range(top, -1, -1):
            if minute % 60 in made.minute and minute // 60 in made.hour:
                wall = datetime(day.year, day.month, day.day, minute // 60, minute % 60)
                return wall.replace(tzinfo=zone)
    return None


def is_near_a_change(moment: datetime, zone: ZoneInfo) -> bool:
    """Return True if the zone's clocks change within a day; other tests cover such days."""
    around = (moment + timedelta(hours=hours) for hours in (-25, 0, 25))
    return len({when.astimezone(zone).utcoffset() for when in around}) > 1


@pytest.mark.skipif(
    celery.VERSION < (5, 7), reason="a lone beat leaves some out, at the ends of days that match"
)
@settings(max_examples=300, deadline=None, derandomize=True)
@given(fields, moments, st.sampled_from(sorted(ZONES)), seconds, seconds)
def test_two_beats_name_one_tick_and_it_is_the_latest(
    spec: dict[str, Any], now: datetime, zone: str, one: float, other: float
) -> None:
    made = set_up(
        crontab(**{key: set(s) if isinstance(s, frozenset) else s for key, s in spec.items()}),
        now,
        zone,
    )
    due = latest_due(made, now, ZONES[zone])
    assume(due is not None)
    assert due is not None
    assume(not any(is_near_a_change(moment, ZONES[zone]) for moment in (now, due)))
    for last in (due - timedelta(seconds=one), due - timedelta(seconds=other)):
        assert made.is_due(last).is_due
        assert current_tick(made, last).name == name_of(due)
