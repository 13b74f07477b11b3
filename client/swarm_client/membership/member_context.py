"""What the parts of an admitted volunteer share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import trio

from swarm_client.membership.admission_gate import AdmissionGate
from swarm_client.membership.coordinator_link import CoordinatorLink
from swarm_client.membership.membership import CurrentMembership
from swarm_client.membership.roster import RosterView
from swarm_shared.identity.keys import Identity
from swarm_shared.network import Node


@dataclass(frozen=True, slots=True)
class MemberContext:
    """What the parts of one member of one run share."""

    identity: Identity
    node: Node
    membership: CurrentMembership
    roster: RosterView
    gate: AdmissionGate
    coordinator: CoordinatorLink
    nursery: trio.Nursery
    """Runs the background tasks."""
    report: Callable[[str], None]
    """Reports one line for people."""
