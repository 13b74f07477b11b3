"""Hours of the day: over midnight, on other days, where clocks change."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm_client.preferences.hours import WEEKDAYS, Hours, parse_window

BERLIN = ZoneInfo("Europe/Berlin")
LORD_HOWE = ZoneInfo("Australia/Lord_Howe")  # its clocks change by half an hour


def at(zone: ZoneInfo, *parts: int, fold: int = 0) -> float:
    return datetime(*parts, tzinfo=zone, fold=fold).timestamp()  # type: ignore[misc, arg-type]


def test_a_window_over_midnight_belongs_to_the_day_on_which_it_begins() -> None:
    hours = Hours.of("never", {"friday": "22:00-06:00"})
    assert not hours.contain(at(BERLIN, 2026, 11, 20, 21, 59), BERLIN)  # a Friday
    assert hours.contain(at(BERLIN, 2026, 11, 20, 22, 0), BERLIN)
    assert hours.contain(at(BERLIN, 2026, 11, 21, 5, 59), BERLIN)
    assert not hours.contain(at(BERLIN, 2026, 11, 21, 6, 0), BERLIN)
    assert not hours.contain(at(BERLIN, 2026, 11, 20, 5, 0), BERLIN)


def test_a_day_with_hours_of_its_own_has_no_others() -> None:
    hours = Hours.of("08:00-10:00", {"saturday": "never", "sunday": "12:00-13:00"})
    assert hours.contain(at(BERLIN, 2026, 11, 20, 9, 0), BERLIN)
    assert not hours.contain(at(BERLIN, 2026, 11, 21, 9, 0), BERLIN)
    assert not hours.contain(at(BERLIN, 2026, 11, 22, 9, 0), BERLIN)
    assert hours.contain(at(BERLIN, 2026, 11, 22, 12, 59), BERLIN)
    assert hours.next_opening(at(BERLIN, 2026, 11, 20, 11, 0), BERLIN) == at(
        BERLIN, 2026, 11, 22, 12, 0
    )


def test_hours_that_begin_where_the_clock_is_put_forward_begin_then() -> None:
    hours = Hours.of("02:30-04:00", {})
    evening = at(BERLIN, 2026, 3, 28, 20, 0)
    # At 02:00 it becomes 03:00: half past two is never shown.
    assert hours.next_opening(evening, BERLIN) == at(BERLIN, 2026, 3, 29, 3, 0)


def test_hours_are_shown_twice_where_the_clock_is_put_back() -> None:
    hours = Hours.of("02:15-02:45", {})
    first, second = (at(BERLIN, 2026, 10, 25, 2, 15, fold=fold) for fold in (0, 1))
    assert second - first == 3600
    assert hours.next_opening(first - 3600, BERLIN) == first
    assert hours.contain(first, BERLIN)
    assert not hours.contain(first + 1800, BERLIN)
    assert hours.next_opening(first + 1800, BERLIN) == second


@pytest.mark.parametrize("text", ["25:00-26:00", "8-9", "08:00", "", "08:60-09:00", "07:00-07:00"])
def test_what_is_no_window_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="22:00-06:30"):
        parse_window(text)


minutes = st.integers(0, 24 * 60 - 1)


def spelt(start: int, end: int) -> str:
    return f"{start // 60:02}:{start % 60:02}-{end // 60:02}:{end % 60:02}"


windows = st.one_of(
    st.sampled_from(["always", "never"]),
    st.tuples(minutes, minutes).filter(lambda pair: pair[0] != pair[1]).map(lambda p: spelt(*p)),
)
moments = st.datetimes(datetime(2026, 1, 1), datetime(2027, 12, 31)).map(
    lambda moment: moment.replace(tzinfo=UTC).timestamp()
)


@given(windows, st.dictionaries(st.sampled_from(WEEKDAYS), windows), moments)
@pytest.mark.parametrize("zone", [BERLIN, LORD_HOWE], ids=str)
def test_the_next_opening_lies_ahead_and_inside_and_nothing_before_it_does(
    zone: ZoneInfo, every_day: str, on: dict[str, str], now: float
) -> None:
    hours = Hours.of(every_day, on)
    if hours.contain(now, zone):
        return
    opening = hours.next_opening(now, zone)
    if opening is None:
        # Nobody waits in vain: then no minute of the next week is inside.
        opening = now + timedelta(days=8).total_seconds()
    else:
        assert opening > now
        assert hours.contain(opening, zone)
    looked_at = now
    while looked_at < opening - 1:
        assert not hours.contain(looked_at, zone)
        looked_at += 17 * 60
    assert opening - now < 1 or not hours.contain(opening - 1, zone)
