"""Whether this machine computes now, why not, and how much it may use: one pure function.

`decide` takes the preferences, the readings, its memory of the previous decision, and the time; it
returns the decision and the new memory. Readings that are not available (None) never suspend a
machine: a server has no battery, no display and no user.

Order of the reasons: first what a person has just done or decided, then what passes by itself, then
what needs a remedy. The decision has all that apply; the first one is shown.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta, tzinfo

from swarm_client.control.status_document import SuspendReason
from swarm_client.governor.hysteresis import NEVER_SEEN, OFF, Band, Presence, Switch
from swarm_client.governor.probes.readings import Readings
from swarm_client.machine.device_names import number_of
from swarm_client.preferences import GpuPreferences, Preferences

GIB = 2**30

CPU_BUSY_SECONDS = 10.0
"""Seconds of other programs' work before it counts: opening a page is no reason to stop. BOINC's
interval."""
CPU_CALM_SECONDS = 30.0
"""Seconds without such work before computing continues."""
CPU_MARGIN_SHARE = 0.05
"""Share of all cores by which other programs must fall below the limit before this program
continues."""

MAX_UNREAD_SECONDS = 60.0
"""Seconds without a reading after which a probe counts as lost and its last reading as outdated."""

DISK_MARGIN_SHARE = 0.05
DISK_MARGIN_BYTES = 64 * 2**20
MEMORY_MARGIN_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class ClockReading:
    """`wall`: Unix seconds, for hours and days; may be set back. `steady`: seconds of a monotonic
    clock, for all durations."""

    wall: float
    steady: float


@dataclass(frozen=True, slots=True)
class PolicyMemory:
    """The state that one decision hands to the next."""

    at_display: Presence = NEVER_SEEN
    at_any: Presence = NEVER_SEEN
    cpu_busy: Switch = OFF
    too_hot: Switch = OFF
    disk_short: Switch = OFF
    disk_used_up: Switch = OFF
    memory_short: Switch = OFF


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of what may be used. None in a field: as much as there is."""

    cores: int | None = None
    nice: int = 0
    duty_cycle: float = 1.0
    """Fraction of the time that the device computes."""
    vram_bytes: int | None = None
    upload_bytes_per_second: int | None = None
    download_bytes_per_second: int | None = None
    quota_bytes: int | None = None
    own_transport_only: bool = False
    """Nothing may be sent over a transport on which it is neither counted nor limited."""


@dataclass(frozen=True, slots=True)
class Cause:
    """A cause not to compute, with the sentence in which users read it."""

    reason: SuspendReason
    sentence: str
    until: float | None = None
    """Unix seconds; None: unknown."""


@dataclass(frozen=True, slots=True)
class GovernorDecision:
    """The device computes if and only if there is no cause against it."""

    causes: tuple[Cause, ...]
    limits: Limits
    quota_used_bytes: int = 0

    @property
    def reason(self) -> SuspendReason | None:
        """The reason of the first cause; None if the device computes."""
        return self.causes[0].reason if self.causes else None

    @property
    def reasons(self) -> tuple[SuspendReason, ...]:
        return tuple(cause.reason for cause in self.causes)

    @property
    def sentence(self) -> str:
        """All causes in one sentence."""
        if not self.causes:
            return "the preferences allow computing"
        return "; also, ".join(cause.sentence for cause in self.causes)

    @property
    def until(self) -> float | None:
        """The time at which the last of the causes passes, in Unix seconds; None unless it is known
        of all."""
        ends = [cause.until for cause in self.causes if cause.until is not None]
        return max(ends) if ends and len(ends) == len(self.causes) else None


def decide(
    preferences: Preferences,
    readings: Readings,
    memory: PolicyMemory,
    now: ClockReading,
    device: str = "cpu",
    zone: tzinfo | None = None,
) -> tuple[GovernorDecision, PolicyMemory]:
    """Decide for one device, given by its name. `zone`: this machine's time zone if
    not given."""
    case = _Evaluation(preferences, readings, now, number_of(device), zone)
    remembered = case.remember(memory)
    limits = case.limits()
    used = transferred_bytes(readings, preferences.transfer_days, case.today)
    return GovernorDecision(tuple(case.causes(remembered)), limits, used), remembered


def transferred_bytes(readings: Readings, days: int, today: date) -> int:
    """Bytes transferred in the last `days`. Future days count too: setting the clock back frees
    nothing."""
    first = today - timedelta(days=days - 1)
    return sum(n for day, n in readings.transferred_bytes_by_day.items() if day >= first)


@dataclass(frozen=True, slots=True)
class _Evaluation:
    """The inputs of one decision."""

    preferences: Preferences
    readings: Readings
    now: ClockReading
    gpu_index: int | None
    zone: tzinfo | None

    @property
    def today(self) -> date:
        return datetime.fromtimestamp(self.now.wall, self.zone).date()

    @property
    def gpu(self) -> GpuPreferences | None:
        """The preferences for the GPU that is decided for; None for the processor."""
        return None if self.gpu_index is None else self.preferences.for_gpu(self.gpu_index)

    # ---- memory

    def remember(self, memory: PolicyMemory) -> PolicyMemory:
        """Return the memory with the readings of now in it."""
        steady, readings = self.now.steady, self.readings
        at_display = memory.at_display.update(readings.display_idle_seconds, steady)
        return PolicyMemory(
            at_display=at_display,
            at_any=memory.at_any.update(readings.user_idle_seconds, steady),
            cpu_busy=self._cpu_busy(memory.cpu_busy),
            too_hot=self._too_hot(memory.too_hot),
            disk_short=self._disk_short(memory.disk_short),
            disk_used_up=self._disk_used_up(memory.disk_used_up),
            memory_short=self._memory_short(memory.memory_short, at_display),
        )

    def _look(self, switch: Switch, reading: float | None, band: Band) -> Switch:
        return switch.update(reading, band, self.now.steady, MAX_UNREAD_SECONDS)

    def _cpu_busy(self, switch: Switch) -> Switch:
        percent = self.preferences.suspend_if_cpu_above_percent
        if percent <= 0:
            return OFF
        allowed = percent / 100
        off_at = max(allowed / 2, allowed - CPU_MARGIN_SHARE)
        band = Band(allowed, off_at, CPU_BUSY_SECONDS, CPU_CALM_SECONDS)
        return self._look(switch, self.readings.others_cpu_share, band)

    def _too_hot(self, switch: Switch) -> Switch:
        gpu = self.gpu
        if gpu is None or self.gpu_index is None or gpu.temperature_ceiling_celsius <= 0:
            return OFF
        ceiling = gpu.temperature_ceiling_celsius
        band = Band(ceiling, ceiling - gpu.temperature_hysteresis_celsius)
        reading = self.readings.gpu(self.gpu_index)
        return self._look(switch, reading.temperature_celsius if reading else None, band)

    def _disk_short(self, switch: Switch) -> Switch:
        leave = self.preferences.disk_leave_free_gib * GIB
        if leave <= 0:
            return OFF
        margin = max(DISK_MARGIN_BYTES, DISK_MARGIN_SHARE * leave)
        # Bytes missing of the space that must stay free.
        free = self.readings.disk_free_bytes
        missing = None if free is None else leave - free
        return self._look(switch, missing, Band(1.0, -margin))

    def _disk_used_up(self, switch: Switch) -> Switch:
        limit_bytes = self.preferences.disk_gib * GIB
        if limit_bytes <= 0:
            return OFF
        band = Band(limit_bytes, limit_bytes * (1 - DISK_MARGIN_SHARE))
        return self._look(switch, self.readings.disk_used_bytes, band)

    def _memory_short(self, switch: Switch, at_display: Presence) -> Switch:
        allowed = self._memory_bytes(at_display)
        if allowed is None:
            return OFF
        # A limit of all memory cannot be exceeded.
        band = Band(allowed + 1.0, allowed * (1 - MEMORY_MARGIN_SHARE))
        return self._look(switch, self.readings.own_memory_bytes, band)

    # ---- presence

    def _idle_seconds(self) -> float:
        return self.preferences.idle_minutes * 60

    def _memory_bytes(self, at_display: Presence) -> int | None:
        """Bytes of this machine's memory that all processes of this program may take now."""
        total = self.readings.memory_total_bytes
        if total is None:
            return None
        busy = at_display.seconds_left(self._idle_seconds(), self.now.steady) > 0
        preferences = self.preferences
        percent = preferences.memory_percent_idle
        if busy:
            percent = min(percent, preferences.memory_percent_busy)
        return int(total * percent / 100)

    # ---- limits

    def limits(self) -> Limits:
        """Return the limits that the preferences set."""
        preferences, gpu = self.preferences, self.gpu
        percent = preferences.cpu_percent if gpu is None else gpu.duty_cycle_percent
        return Limits(
            cores=preferences.max_cores or None,
            nice=preferences.nice,
            duty_cycle=percent / 100,
            vram_bytes=int(gpu.vram_gib * GIB) or None if gpu is not None else None,
            upload_bytes_per_second=preferences.upload_bytes_per_second or None,
            download_bytes_per_second=preferences.download_bytes_per_second or None,
            quota_bytes=int(preferences.transfer_gib * GIB) or None,
            own_transport_only=preferences.limits_transport,
        )

    # ---- causes

    def causes(self, memory: PolicyMemory) -> Iterator[Cause]:
        """Yield every cause not to compute; the first one is reported as the reason."""
        yield from self._exclusive()
        yield from self._user_active(memory)
        yield from self._batteries()
        yield from self._hours()
        yield from self._not_used()
        yield from self._quota()
        yield from self._too_hot_cause(memory)
        yield from self._short(memory)
        if memory.cpu_busy.on:
            yield Cause(SuspendReason.CPU_BUSY, self._cpu_sentence())

    def _exclusive(self) -> Iterator[Cause]:
        exclusive_apps = list(self.preferences.exclusive_apps)
        if self.gpu is not None:
            exclusive_apps += self.preferences.exclusive_gpu_apps
        running = [app for app in exclusive_apps if app in self.readings.running_apps]
        if running:
            yield Cause(
                SuspendReason.EXCLUSIVE_APP,
                f"{running[0]} is running, and nothing may be computed beside it",
            )

    def _user_active(self, memory: PolicyMemory) -> Iterator[Cause]:
        preferences = self.preferences
        if self.gpu is None:
            allowed, presence, place = preferences.run_if_user_active, memory.at_any, "this machine"
        else:
            allowed, presence = preferences.run_gpu_if_user_active, memory.at_display
            place = "this machine's display"
        seconds_left = presence.seconds_left(self._idle_seconds(), self.now.steady)
        if not allowed and seconds_left > 0:
            yield Cause(
                SuspendReason.USER_ACTIVE,
                f"{place} is in use; continues after {preferences.idle_minutes:g} minutes without "
                "input",
                self.now.wall + seconds_left,
            )

    def _batteries(self) -> Iterator[Cause]:
        if self.readings.on_batteries and not self.preferences.run_on_batteries:
            yield Cause(
                SuspendReason.ON_BATTERIES,
                "this machine runs on battery power; continues when it is plugged in",
            )

    def _hours(self) -> Iterator[Cause]:
        for hours, reason, activity in (
            (self.preferences.running_hours, SuspendReason.TIME_OF_DAY, "computing"),
            (self.preferences.networking_hours, SuspendReason.NETWORK_HOURS, "the network"),
        ):
            if hours.contain(self.now.wall, self.zone):
                continue
            opens = hours.next_opening(self.now.wall, self.zone)
            when = "there are none" if opens is None else f"continues {self._clock(opens)}"
            yield Cause(
                reason, f"it is outside the hours that you allow for {activity}; {when}", opens
            )

    def _clock(self, moment: float) -> str:
        local = datetime.fromtimestamp(moment, self.zone)
        if local.date() == self.today:
            return f"at {local:%H:%M}"
        return f"on {local:%A} at {local:%H:%M}"

    def _not_used(self) -> Iterator[Cause]:
        if self.gpu is not None and not self.gpu.use:
            # No reason of its own: an owner's decision, so closest to the user's pause.
            yield Cause(
                SuspendReason.PAUSED_BY_USER,
                f"GPU {self.gpu_index} is excluded by your preferences; `swarm-client config set "
                f"gpu.{self.gpu_index}.use true` allows it",
            )

    def _quota(self) -> Iterator[Cause]:
        preferences = self.preferences
        quota = int(preferences.transfer_gib * GIB)
        days = preferences.transfer_days
        used = transferred_bytes(self.readings, days, self.today)
        if not quota or used < quota:
            return
        until = None
        for ahead in range(1, days + 1):
            day = self.today + timedelta(days=ahead)
            if transferred_bytes(self.readings, days, day) < quota:
                until = datetime.combine(day, time(), self.zone).timestamp()
                break
        when = "" if until is None else f"; continues {self._clock(until)}"
        yield Cause(
            SuspendReason.QUOTA_USED,
            f"{used / GIB:.2f} of {preferences.transfer_gib:g} GiB allowed in {days} days have "
            f"been transferred{when}",
            until,
        )

    def _too_hot_cause(self, memory: PolicyMemory) -> Iterator[Cause]:
        gpu, index = self.gpu, self.gpu_index
        if not memory.too_hot.on or gpu is None or index is None:
            return
        reading = self.readings.gpu(index)
        seen = reading.temperature_celsius if reading is not None else None
        now = "" if seen is None else f" ({seen:.0f} °C now)"
        cool = gpu.temperature_ceiling_celsius - gpu.temperature_hysteresis_celsius
        advice = ""
        if reading is not None and reading.power_limit_watts:
            watts = 0.8 * reading.power_limit_watts
            advice = f"; `sudo nvidia-smi -i {index} -pl {watts:.0f}` would keep it cooler"
        yield Cause(
            SuspendReason.TOO_HOT,
            f"GPU {index} has reached {gpu.temperature_ceiling_celsius:g} °C{now}; continues at "
            f"{cool:g} °C{advice}",
        )

    def _short(self, memory: PolicyMemory) -> Iterator[Cause]:
        preferences = self.preferences
        if memory.disk_short.on:
            yield Cause(
                SuspendReason.DISK_FULL,
                f"less than {preferences.disk_leave_free_gib:g} GiB of disk space is free; free "
                "some space, or lower disk_leave_free_gib",
            )
        if memory.disk_used_up.on:
            yield Cause(
                SuspendReason.DISK_FULL,
                f"the {preferences.disk_gib:g} GiB of disk space allowed are used; raise disk_gib",
            )
        if memory.memory_short.on:
            yield Cause(
                SuspendReason.MEMORY_SHORT,
                "this program uses more memory than the preferences allow at the moment; raise "
                "memory_percent_busy or memory_percent_idle",
            )

    def _cpu_sentence(self) -> str:
        share = self.readings.others_cpu_share
        seen = "" if share is None else f" ({100 * share:.0f} % now)"
        return (
            f"other programs use more than {self.preferences.suspend_if_cpu_above_percent:g} % "
            f"of the processor{seen}"
        )
