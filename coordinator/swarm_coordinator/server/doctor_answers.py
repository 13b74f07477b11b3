"""What the coordinator tells a machine that is checked before it joins (`swarm-client doctor`).

Whoever names the run has its invite, and is answered: the version, whether it would be let in,
what the run takes of a machine. Who would be let in also learns of a few volunteers and gets a
pass for them.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from swarm_coordinator.admission.authority import AdmissionAuthority, compatible
from swarm_coordinator.core.state.run import RunState
from swarm_shared.base.errors import AdmissionError
from swarm_shared.base.types import PeerId
from swarm_shared.identity.probe_pass import sign_probe_pass
from swarm_shared.probe.server import AnswerHello, HelloAnswer
from swarm_shared.protocol import SOFTWARE_VERSION, DoctorHello, Neighbour, Reachability
from swarm_shared.run.manifest import Manifest

MAX_NEIGHBOURS = 3


def probe_judge(
    admission: AdmissionAuthority, state: Callable[[], RunState], manifest: Manifest
) -> AnswerHello:
    """Tokens are looked at and not used up: the visitor joins with the same one afterwards."""
    smallest_stage_bytes = min(stage.memory_bytes for stage in manifest.stages)
    tokens = sum(shard.tokens for shard in manifest.data.shards)

    def judge(remote: PeerId, hello: DoctorHello) -> HelloAnswer:
        if hello.run != admission.run:
            raise AdmissionError(
                f"this coordinator serves run {admission.run[:12]}, not {hello.run[:12]}; "
                f"ask the organiser for a new invite"
            )
        refusal = _refusal(admission, remote, hello.token)
        if refusal is not None and remote in admission.book.bans:
            raise AdmissionError(refusal)
        probe_pass: str | None = None
        neighbours: tuple[Neighbour, ...] = ()
        if refusal is None:
            now = admission.clock()
            probe_pass = sign_probe_pass(admission.organiser, remote, admission.run, now)
            neighbours = _neighbours(state(), remote)
        return HelloAnswer(
            software_fits=compatible(hello.software, SOFTWARE_VERSION),
            admission=refusal or "",
            probe_pass=probe_pass,
            neighbours=neighbours,
            smallest_stage_bytes=smallest_stage_bytes,
            data_bytes=tokens * manifest.data.token_bytes,
        )

    return judge


def _refusal(admission: AdmissionAuthority, peer: PeerId, token: str | None) -> str | None:
    """Why `admit` would not let it in; None when it would."""
    refusal = admission.refusal(peer)
    if refusal is None or admission.mode != "token" or peer in admission.book.bans:
        return refusal
    try:
        admission.book.usable_token(token, admission.clock())
    except AdmissionError as error:
        return str(error)
    return None


def _neighbours(state: RunState, visitor: PeerId) -> tuple[Neighbour, ...]:
    """Volunteers that can be dialled, in random order so that none is asked by all."""
    public = (Reachability.PUBLIC, Reachability.MAPPED)
    found = [
        Neighbour(peer=peer.peer, addresses=peer.addresses)
        for peer in state.peers.values()
        if peer.reachability in public and peer.peer != visitor
    ]
    return tuple(random.sample(found, min(MAX_NEIGHBOURS, len(found))))
