"""Switches with hysteresis: the thresholds for switching on and off lie apart.

Pure and immutable: each update with a reading returns the new switch. Times are of a monotonic
clock, so setting the clock back changes nothing here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Band:
    """Switches on after a reading has been at `on_at` or above for `on_seconds`; off after it has
    been at `off_at` or below for `off_seconds`."""

    on_at: float
    off_at: float
    on_seconds: float = 0.0
    off_seconds: float = 0.0

    def __post_init__(self) -> None:
        assert self.off_at < self.on_at, "without a gap the switch would flicker"


@dataclass(frozen=True, slots=True)
class Switch:
    """A state that changes only after readings beyond a band, for some time."""

    on: bool = False
    since: float | None = None
    """The time since which the readings have asked for the other state without interruption."""
    unread_since: float | None = None

    def update(
        self, reading: float | None, band: Band, now: float, max_unread_seconds: float
    ) -> Switch:
        """Return the switch after a reading at `now`, in seconds.

        A missing reading changes nothing until it has been missing for `max_unread_seconds`: a lost
        probe must not suspend a machine permanently.
        """
        if reading is None:
            unread_since = self.unread_since if self.unread_since is not None else now
            if now - unread_since >= max_unread_seconds:
                return Switch(unread_since=unread_since)
            return replace(self, unread_since=unread_since)
        asks = reading <= band.off_at if self.on else reading >= band.on_at
        if not asks:
            return Switch(self.on)
        since = self.since if self.since is not None else now
        if now - since < (band.off_seconds if self.on else band.on_seconds):
            return Switch(self.on, since)
        return Switch(not self.on)


OFF = Switch()


@dataclass(frozen=True, slots=True)
class Presence:
    """The time at which a user was last seen, in seconds of the steady clock."""

    last_seen: float | None = None

    def update(self, idle_seconds: float | None, now: float) -> Presence:
        """Return the presence after a reading of the seconds since the last input; None changes
        nothing."""
        if idle_seconds is None:
            return self
        input_at = now - idle_seconds
        return (
            self
            if self.last_seen is not None and self.last_seen >= input_at
            else Presence(input_at)
        )

    def seconds_left(self, idle_seconds: float, now: float) -> float:
        """Seconds for which a user who does nothing more still counts as present; 0: no user is
        present."""
        if self.last_seen is None:
            return 0.0
        return max(0.0, self.last_seen + idle_seconds - now)


NEVER_SEEN = Presence()
