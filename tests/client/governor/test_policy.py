"""The governor's decisions: a reason whenever it does not run, no flicker, no limit ignored."""

from __future__ import annotations

from dataclasses import fields
from datetime import UTC, date, datetime
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm_client.control.status_document import SuspendReason as Reason
from swarm_client.governor.hysteresis import OFF, Band
from swarm_client.governor.policy import (
    CPU_BUSY_SECONDS,
    CPU_CALM_SECONDS,
    CPU_MARGIN_SHARE,
    GIB,
    MAX_UNREAD_SECONDS,
    ClockReading,
    GovernorDecision,
    PolicyMemory,
    decide,
)
from swarm_client.governor.probes.readings import GpuReading, Readings
from swarm_client.preferences import Preferences

BERLIN = ZoneInfo("Europe/Berlin")
NOON = datetime(2026, 11, 20, 12, 0, tzinfo=BERLIN).timestamp()
NOW = ClockReading(NOON, 1000.0)


def prefer(**said: Any) -> Preferences:
    return Preferences.model_validate(said)


def decision(
    preferences: Preferences, readings: Readings, now: ClockReading = NOW, device: str = "cpu"
) -> GovernorDecision:
    return decide(preferences, readings, PolicyMemory(), now, device, BERLIN)[0]


class Machine:
    """Looks every second at readings that change."""

    def __init__(self, preferences: Preferences, device: str = "cpu") -> None:
        self.preferences = preferences
        self.device = device
        self.memory = PolicyMemory()
        self.now = NOW

    def update(self, readings: Readings, seconds: float = 1.0) -> GovernorDecision:
        seen, self.memory = decide(
            self.preferences, readings, self.memory, self.now, self.device, BERLIN
        )
        self.now = ClockReading(self.now.wall + seconds, self.now.steady + seconds)
        return seen


def hot(celsius: float | None) -> Readings:
    return Readings(gpus=(GpuReading(0, temperature_celsius=celsius, power_limit_watts=300),))


# ---------------------------------------------------------------- each reason


def test_a_server_without_battery_display_and_user_runs_whatever_else_it_reads() -> None:
    busy = Readings(
        cpu_share=1.0, own_cpu_share=0.0, memory_total_bytes=64 * GIB, own_memory_bytes=50 * GIB,
        memory_available_bytes=GIB, disk_free_bytes=2 * GIB, disk_used_bytes=500 * GIB,
        terminal_idle_seconds=0.0,
        transferred_bytes_by_day={date(2026, 11, 20): 10**15},
        gpus=(GpuReading(0, temperature_celsius=88.0),),
    )  # fmt: skip
    for device in ("cpu", "cuda:0"):
        for readings in (Readings(), busy):
            seen = decision(Preferences(), readings, device=device)
            assert seen.causes == ()
            assert seen.limits.duty_cycle == 1.0
            assert seen.limits.cores is None
            assert seen.limits.upload_bytes_per_second is None
            assert not seen.limits.own_transport_only


@pytest.mark.parametrize(
    ("said", "readings", "reason", "words"),
    [
        ({}, Readings(on_batteries=True), Reason.ON_BATTERIES, "plugged in"),
        (
            {"run_if_user_active": False}, Readings(terminal_idle_seconds=5),
            Reason.USER_ACTIVE, "3 minutes",
        ),
        (
            {"exclusive_apps": ("Game",)}, Readings(running_apps=frozenset({"Game"})),
            Reason.EXCLUSIVE_APP, "Game is running",
        ),
        ({"hours": "13:00-14:00"}, Readings(), Reason.TIME_OF_DAY, "at 13:00"),
        ({"network_hours": "01:00-02:00"}, Readings(), Reason.NETWORK_HOURS, "Saturday at 01:00"),
        ({"hours": "never"}, Readings(), Reason.TIME_OF_DAY, "there are none"),
        (
            {"transfer_gib": 1, "transfer_days": 2},
            Readings(transferred_bytes_by_day={date(2026, 11, 19): GIB}),
            Reason.QUOTA_USED, "continues on Saturday at 00:00",
        ),
        ({}, Readings(disk_free_bytes=GIB // 2), Reason.DISK_FULL, "1 GiB of disk"),
        ({"disk_gib": 5}, Readings(disk_used_bytes=5 * GIB), Reason.DISK_FULL, "5 GiB of disk"),
        (
            {"memory_percent_idle": 50},
            Readings(memory_total_bytes=GIB, own_memory_bytes=GIB * 6 // 10),
            Reason.MEMORY_SHORT, "memory_percent_idle",
        ),
        (
            {}, Readings(memory_total_bytes=GIB, own_memory_bytes=GIB * 6 // 10,
                         display_idle_seconds=1.0),
            Reason.MEMORY_SHORT, "memory_percent_busy",
        ),
    ],
)  # fmt: skip
def test_each_preference_has_its_reason_and_a_sentence(
    said: dict[str, Any], readings: Readings, reason: Reason, words: str
) -> None:
    seen = decision(prefer(**said), readings)
    assert seen.reasons == (reason,)
    assert words in seen.sentence


def test_a_gpu_is_its_display_users_and_a_terminal_user_does_not_count() -> None:
    at_display, at_terminal = Readings(display_idle_seconds=1), Readings(terminal_idle_seconds=1)
    assert decision(Preferences(), at_display, device="cuda:0").reason is Reason.USER_ACTIVE
    assert decision(Preferences(), at_terminal, device="cuda:0").causes == ()
    assert decision(Preferences(), at_display).causes == ()


def test_words_for_one_gpu_do_not_hold_for_another() -> None:
    said = prefer(gpu={"1": {"use": False}, "all": {"vram_gib": 4}}, exclusive_gpu_apps=("render",))
    assert decision(said, Readings(), device="cuda:0").causes == ()
    assert decision(said, Readings(), device="cuda:0").limits.vram_bytes == 4 * GIB
    assert decision(said, Readings(), device="cuda:1").causes
    rendering = Readings(running_apps=frozenset({"render"}))
    assert decision(said, rendering, device="cuda:0").reason is Reason.EXCLUSIVE_APP
    assert decision(said, rendering).causes == ()


def test_the_end_of_a_pause_is_known_only_if_that_of_every_cause_is() -> None:
    said = prefer(hours="13:00-14:00", network_hours="15:00-16:00")
    assert decision(said, Readings()).until == NOON + 3 * 3600
    both = decision(said, Readings(on_batteries=True))
    assert both.until is None
    assert both.reasons == (Reason.ON_BATTERIES, Reason.TIME_OF_DAY, Reason.NETWORK_HOURS)
    assert "; also, it is outside" in both.sentence


def test_hours_follow_the_wall_clock_when_it_is_set_back_and_durations_do_not() -> None:
    machine = Machine(prefer(hours="11:00-14:00", run_if_user_active=False, idle_minutes=2))
    assert machine.update(Readings(terminal_idle_seconds=0)).reason is Reason.USER_ACTIVE
    machine.now = ClockReading(NOON - 86_400 * 30, machine.now.steady + 60)
    assert machine.update(Readings(terminal_idle_seconds=61)).reason is Reason.USER_ACTIVE
    machine.now = ClockReading(NOON - 3 * 3600, machine.now.steady + 60)
    assert machine.update(Readings(terminal_idle_seconds=122)).reason is Reason.TIME_OF_DAY


def test_a_clock_that_is_set_back_frees_no_quota() -> None:
    said = prefer(transfer_gib=1, transfer_days=7)
    used = Readings(transferred_bytes_by_day={date(2026, 11, 20): 2 * GIB})
    for days in (0, 3, 40):
        now = ClockReading(NOON - 86_400 * days, 1000.0)
        assert decision(said, used, now).reason is Reason.QUOTA_USED
    assert decision(said, used, ClockReading(NOON + 86_400 * 6, 0)).reason is Reason.QUOTA_USED
    assert decision(said, used, ClockReading(NOON + 86_400 * 7, 0)).causes == ()


def test_whoever_was_seen_counts_until_idle_for_long_enough_also_when_nothing_tells() -> None:
    machine = Machine(prefer(run_if_user_active=False, idle_minutes=1))
    assert machine.update(Readings(display_idle_seconds=0.0)).reason is Reason.USER_ACTIVE
    for _ in range(59):
        assert machine.update(Readings()).reason is Reason.USER_ACTIVE
    assert machine.update(Readings()).causes == ()


# ---------------------------------------------------------------- no flicker


def test_a_hot_gpu_rests_until_it_is_cooler_by_the_hysteresis() -> None:
    machine = Machine(
        prefer(gpu={"0": {"temperature_ceiling_celsius": 80, "temperature_hysteresis_celsius": 8}}),
        "cuda:0",
    )
    assert machine.update(hot(79.9)).causes == ()
    seen = machine.update(hot(80.0))
    assert seen.reason is Reason.TOO_HOT
    assert "`sudo nvidia-smi -i 0 -pl 240` would keep it cooler" in seen.sentence
    assert machine.update(hot(72.5)).reason is Reason.TOO_HOT
    assert machine.update(hot(None)).reason is Reason.TOO_HOT
    assert machine.update(hot(72.0)).causes == ()
    assert machine.update(hot(79.0)).causes == ()


def test_a_sensor_that_is_gone_for_good_does_not_hold_a_gpu_for_ever() -> None:
    machine = Machine(Preferences(), "cuda:0")
    assert machine.update(hot(95)).reason is Reason.TOO_HOT
    for _ in range(int(MAX_UNREAD_SECONDS)):
        assert machine.update(hot(None)).reason is Reason.TOO_HOT
    assert machine.update(hot(None)).causes == ()


readings_of_a_switch = st.lists(st.one_of(st.none(), st.floats(0, 100)), min_size=1, max_size=80)


@given(readings_of_a_switch, st.floats(5, 95), st.floats(0.5, 30), st.floats(0, 5), st.floats(0, 5))
def test_a_switch_never_flips_within_its_hysteresis(
    seen: list[float | None], on_at: float, width: float, on_seconds: float, off_seconds: float
) -> None:
    band = Band(on_at, on_at - width, on_seconds, off_seconds)
    switch, history = OFF, []
    for second, reading in enumerate(seen):
        before, switch = switch, switch.update(reading, band, float(second), 1000.0)
        history.append(reading)
        if before.on == switch.on:
            continue
        # Only readings that ask for it, without a break, for as long as was said.
        asked = [
            r
            for r in history[-1 - int(on_seconds if switch.on else off_seconds) :]
            if r is not None
        ]
        assert asked
        if switch.on:
            assert all(r >= band.on_at for r in asked)
        else:
            assert all(r <= band.off_at for r in asked)


@settings(max_examples=60)
@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=120), st.floats(1, 100),
)  # fmt: skip
def test_other_programs_must_be_busy_for_a_while_and_then_calm_for_longer(
    shares: list[float], percent: float
) -> None:
    machine = Machine(prefer(suspend_if_cpu_above_percent=percent))
    paused_before, since = False, 0
    for second, share in enumerate(shares):
        seen = machine.update(Readings(cpu_share=share, own_cpu_share=0.0))
        paused = seen.reason is Reason.CPU_BUSY
        if paused and not paused_before:
            window = shares[second - int(CPU_BUSY_SECONDS) : second + 1]
            assert len(window) == CPU_BUSY_SECONDS + 1
            assert min(window) >= percent / 100
            since = second
        if paused_before and not paused:
            assert second - since >= CPU_CALM_SECONDS
            window = shares[second - int(CPU_CALM_SECONDS) : second + 1]
            assert max(window) <= max(percent / 200, percent / 100 - CPU_MARGIN_SHARE)
        paused_before = paused


def test_what_this_program_uses_of_the_processor_excludes_other_programs() -> None:
    machine = Machine(prefer(suspend_if_cpu_above_percent=20))
    for _ in range(60):
        assert machine.update(Readings(cpu_share=1.0, own_cpu_share=0.9)).causes == ()


# ---------------------------------------------------------------- properties of all of it

maybe = lambda strategy: st.one_of(st.none(), strategy)  # noqa: E731
some_bytes = st.integers(0, 100 * GIB)
some_readings = st.builds(
    Readings,
    on_batteries=maybe(st.booleans()),
    display_idle_seconds=maybe(st.floats(0, 1000)),
    terminal_idle_seconds=maybe(st.floats(0, 1000)),
    cpu_share=maybe(st.floats(0, 1)),
    own_cpu_share=maybe(st.floats(0, 1)),
    memory_total_bytes=maybe(some_bytes),
    own_memory_bytes=maybe(some_bytes),
    disk_free_bytes=maybe(some_bytes),
    disk_used_bytes=maybe(some_bytes),
    running_apps=st.frozensets(st.sampled_from(["game", "render"])),
    gpus=st.lists(
        st.builds(GpuReading, st.just(0), temperature_celsius=maybe(st.floats(0, 120))), max_size=1
    ).map(tuple),
    transferred_bytes_by_day=st.dictionaries(
        st.integers(739_900, 739_940).map(date.fromordinal), some_bytes
    ),
)
gib = st.one_of(st.just(0.0), st.floats(0.01, 50))
windows = st.sampled_from(["always", "never", "08:00-17:00", "22:00-06:00"])
some_preferences = st.builds(
    prefer,
    run_on_batteries=st.booleans(),
    run_if_user_active=st.booleans(),
    run_gpu_if_user_active=st.booleans(),
    idle_minutes=st.floats(0.05, 60),
    suspend_if_cpu_above_percent=st.one_of(st.just(0.0), st.floats(1, 100)),
    hours=windows,
    network_hours=windows,
    hours_on=st.dictionaries(st.sampled_from(["friday", "saturday"]), windows),
    exclusive_apps=st.sampled_from([(), ("game",)]),
    exclusive_gpu_apps=st.sampled_from([(), ("render",)]),
    max_cores=st.integers(0, 8),
    cpu_percent=st.floats(5, 100),
    memory_percent_busy=st.floats(1, 100),
    memory_percent_idle=st.floats(1, 100),
    disk_gib=gib,
    disk_leave_free_gib=gib,
    upload_bytes_per_second=st.sampled_from([0, 65536, 10**7]),
    download_bytes_per_second=st.sampled_from([0, 65536, 10**7]),
    transfer_gib=gib,
    transfer_days=st.integers(1, 40),
    gpu=st.dictionaries(
        st.sampled_from(["0", "all"]),
        st.fixed_dictionaries(
            {"use": st.booleans(), "duty_cycle_percent": st.floats(5, 100),
             "temperature_ceiling_celsius": st.sampled_from([0.0, 40.0, 90.0]), "vram_gib": gib}
        ),
    ),
)  # fmt: skip
devices = st.sampled_from(["cpu", "cuda:0"])
times = st.lists(
    st.tuples(some_readings, st.floats(-(10.0**6), 10.0**6), st.floats(0, 600)), max_size=8
)


@settings(max_examples=150)
@given(some_preferences, devices, times)
def test_there_is_a_reason_and_a_sentence_exactly_when_it_does_not_run(
    preferences: Preferences, device: str, looks: list[tuple[Readings, float, float]]
) -> None:
    memory, wall, steady = PolicyMemory(), NOON, 0.0
    for readings, wall_seconds, seconds in looks:
        wall, steady = wall + wall_seconds, steady + seconds
        seen, memory = decide(
            preferences, readings, memory, ClockReading(wall, steady), device, UTC
        )
        assert (seen.reason is None) == (seen.causes == ())
        for cause in seen.causes:
            assert cause.sentence
            assert not cause.sentence.endswith(".")
            assert cause.until is None or cause.until > wall
        # The same again changes nothing: a decision depends on nothing else.
        again = decide(preferences, readings, memory, ClockReading(wall, steady), device, UTC)
        assert again[0].reasons == seen.reasons
        assert 0 < seen.limits.duty_cycle <= 1


LOOSER: dict[str, tuple[Any, Any]] = {
    "run_on_batteries": (False, True),
    "run_if_user_active": (False, True),
    "run_gpu_if_user_active": (False, True),
    "suspend_if_cpu_above_percent": (20, 60),
    "hours": ("12:30-13:00", "11:00-14:00"),
    "network_hours": ("never", "always"),
    "exclusive_apps": (("game",), ()),
    "exclusive_gpu_apps": (("render",), ()),
    "max_cores": (1, 3),
    "cpu_percent": (20, 70),
    "memory_percent_busy": (10, 40),
    "memory_percent_idle": (10, 40),
    "disk_gib": (1, 20),
    "disk_leave_free_gib": (20, 1),
    "upload_bytes_per_second": (65536, 10**6),
    "download_bytes_per_second": (65536, 10**6),
    "transfer_gib": (1, 20),
    "idle_minutes": (10, 1),
    "gpu": ({"0": {"vram_gib": 1, "duty_cycle_percent": 10, "temperature_ceiling_celsius": 60}},
            {"0": {"vram_gib": 4, "duty_cycle_percent": 60, "temperature_ceiling_celsius": 85}}),
}  # fmt: skip


@pytest.mark.parametrize("name", LOOSER)
@settings(max_examples=40)
@given(base=some_preferences, readings=some_readings, device=devices)
def test_a_looser_preference_never_allows_less(
    name: str, base: Preferences, readings: Readings, device: str
) -> None:
    tight, loose = (
        decision(
            Preferences.model_validate({**base.model_dump(), name: value}), readings, device=device
        )
        for value in LOOSER[name]
    )
    assert set(loose.reasons) <= set(tight.reasons)
    for field in fields(tight.limits):
        less, more = getattr(tight.limits, field.name), getattr(loose.limits, field.name)
        if field.name in ("nice", "own_transport_only"):
            assert more <= less
        elif less is not None:
            assert more is None or more >= less
