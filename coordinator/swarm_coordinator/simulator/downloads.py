"""The time of state downloads from holders to joining and moving peers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from swarm_coordinator.simulator.volunteer import (
    COORDINATOR_UP_BYTES_PER_SECOND,
    SHARED_UPLINK_FRACTION,
    SimulatedVolunteer,
)
from swarm_shared.base.types import PeerId
from swarm_shared.protocol import AssignStage

if TYPE_CHECKING:
    from swarm_coordinator.simulator.swarm import Swarm


class Downloads:
    """Downloads in progress and their sources. A download keeps its initial rate."""

    def __init__(self, swarm: Swarm) -> None:
        self._swarm = swarm
        self._from_coordinator = 0
        self._sources: dict[int, list[SimulatedVolunteer]] = {}
        self.bytes = 0

    def under_way(self) -> set[int]:
        """Identities (`id`) of the assignments that are being downloaded."""
        return set(self._sources)

    def begin(self, volunteer: SimulatedVolunteer, message: AssignStage) -> float:
        """Start a download; returns its duration in seconds."""
        swarm = self._swarm
        self.bytes += message.bytes
        sources: list[SimulatedVolunteer] = []
        offered = 0.0
        for record in message.holders:
            if record.peer == swarm.coordinator:
                self._from_coordinator += 1
                offered += COORDINATOR_UP_BYTES_PER_SECOND / self._from_coordinator
                continue
            holder = swarm.volunteers.get(PeerId(record.peer))
            if holder is not None:
                sources.append(holder)
                holder.uploads += 1
                swarm.plane.changed(holder)
                offered += (
                    SHARED_UPLINK_FRACTION * holder.hardware.up_bytes_per_second / holder.uploads
                )
        self._sources[id(message)] = sources
        rate = min(volunteer.hardware.down_bytes_per_second, offered)
        # Without a source it fails after a while; the coordinator then assigns others.
        return message.bytes / rate if rate else 30.0

    def end(self, message: AssignStage) -> None:
        """Release the sources of a finished or abandoned download; repeated calls do nothing."""
        if id(message) not in self._sources:
            return
        if any(record.peer == self._swarm.coordinator for record in message.holders):
            self._from_coordinator -= 1
        for holder in self._sources.pop(id(message)):
            holder.uploads -= 1
            self._swarm.plane.changed(holder)
