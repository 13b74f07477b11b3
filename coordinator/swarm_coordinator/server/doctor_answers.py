"""Replies to a machine that `swarm-client doctor` checks before it joins.

Any client that names the run is answered: whether its version fits, whether it would be admitted,
and what the run needs of a machine. A client that would be admitted also gets a pass for probes and
a few volunteers to probe.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from swarm_coordinator.admission.authority import AdmissionAuthority
from swarm_coordinator.core.state.run import RunState
from swarm_shared.base.errors import AdmissionError
from swarm_shared.base.types import PeerId, StageIndex
from swarm_shared.identity.probe_pass import sign_probe_pass
from swarm_shared.probe.server import AnswerHello
from swarm_shared.protocol import (
    DoctorHello,
    DoctorWelcome,
    Neighbour,
    Reachability,
)
from swarm_shared.protocol.versions import PROTOCOL_VERSIONS
from swarm_shared.run.manifest import Manifest
from swarm_shared.scheduling.placement.memory_plan import stage_needs

MAX_NEIGHBOURS = 3
"""Volunteers that a client is given to probe."""


def probe_judge(
    admission: AdmissionAuthority, state: Callable[[], RunState], manifest: Manifest
) -> AnswerHello:
    """Make the function that answers a hello. Tokens are checked and not used up: the client joins
    with the same one afterwards."""
    device_bytes = [stage.memory.device_bytes for stage in manifest.stages]
    smallest = stage_needs(manifest, StageIndex(device_bytes.index(min(device_bytes))))

    def judge(remote: PeerId, hello: DoctorHello) -> DoctorWelcome:
        admission.check_run(hello.run)
        refusal = _refusal(admission, remote, hello.token)
        if refusal is not None and remote in admission.book.bans:
            raise AdmissionError(refusal)
        probe_pass: str | None = None
        neighbours: tuple[Neighbour, ...] = ()
        if refusal is None:
            now = admission.clock()
            probe_pass = sign_probe_pass(admission.organiser, remote, admission.run, now)
            neighbours = _neighbours(state(), remote)
        return DoctorWelcome(
            software_fits=hello.protocols.overlaps(PROTOCOL_VERSIONS),
            admission=(refusal or "")[:500],
            probe_pass=probe_pass,
            neighbours=neighbours,
            smallest_stage=smallest,
        )

    return judge


def _refusal(admission: AdmissionAuthority, peer: PeerId, token: str | None) -> str | None:
    """Why the peer would not be admitted; None when it would be."""
    refusal = admission.refusal(peer)
    if refusal is None or admission.mode != "token" or peer in admission.book.bans:
        return refusal
    try:
        admission.book.usable_token(token, admission.clock())
    except AdmissionError as error:
        return str(error)
    return None


def _neighbours(state: RunState, visitor: PeerId) -> tuple[Neighbour, ...]:
    """Volunteers that can be dialled, chosen at random to spread the load."""
    public = (Reachability.PUBLIC, Reachability.MAPPED)
    candidates = [
        Neighbour(peer=peer.peer, addresses=peer.contact.addresses)
        for peer in state.peers.values()
        if peer.contact.reachability in public and peer.contact.addresses and peer.peer != visitor
    ]
    return tuple(random.sample(candidates, min(MAX_NEIGHBOURS, len(candidates))))
