"""Messages in which a volunteer describes itself: hello, heartbeat, directory record. Maps, decides
nothing."""

from __future__ import annotations

from swarm_client.membership.membership import Membership
from swarm_client.pipeline.held_stage import Holding
from swarm_client.volunteer.context import VolunteerOptions
from swarm_shared.base.types import Version
from swarm_shared.identity.invite import Invite
from swarm_shared.network import Node
from swarm_shared.protocol import (
    SOFTWARE_VERSION,
    AddressUpdate,
    CarrierAddress,
    DoctorHello,
    Heartbeat,
    Hello,
    LinkBytes,
    PeerRecord,
)
from swarm_shared.protocol.versions import PROTOCOL_VERSIONS
from swarm_shared.volunteer_rules.heartbeat import HeartbeatDelta, HeartbeatSnapshot


def hello(
    invite: Invite, options: VolunteerOptions, announcement: AddressUpdate, holding: Holding | None
) -> Hello:
    return Hello(
        run=invite.run_id,
        software=SOFTWARE_VERSION,
        protocols=PROTOCOL_VERSIONS,
        token=invite.token,
        name=options.name,
        team=options.team,
        owner=options.owner,
        addresses=announcement.addresses,
        carrier=announcement.carrier,
        reachability=announcement.reachability,
        offers_relay=announcement.offers_relay,
        device=options.device.label,
        memory=options.device.memory,
        wanted_stage=options.wanted_stage,
        stage=holding.stage if holding is not None else None,
        version=holding.version if holding is not None else Version(0),
        digest=holding.worker.digest if holding is not None else "",
        averaged_attempt=holding.close.averaged_attempt if holding is not None else None,
        receipts=holding.account.receipts() if holding is not None else (),
    )


def doctor_hello(invite: Invite, membership: Membership | None) -> DoctorHello:
    """The hello to a peer that is asked to probe this one from outside."""
    return DoctorHello(
        run=invite.run_id,
        software=SOFTWARE_VERSION,
        protocols=PROTOCOL_VERSIONS,
        token=None if membership is not None else invite.token,
        certificate=None if membership is None else membership.certificate,
    )


def heartbeat(
    delta: HeartbeatDelta, members: int, holding: Holding | None, node: Node,
    links: tuple[LinkBytes, ...], *, paused: bool,
) -> Heartbeat:  # fmt: skip
    computed, busy_seconds = holding.meter.take_work() if holding else (0, 0.0)
    return delta.heartbeat(
        HeartbeatSnapshot(
            microbatches_per_second=holding.meter.microbatches_per_second if holding else 0.0,
            queued=holding.in_flight if holding else 0,
            up_bytes_per_second=node.bandwidth.own_up_bytes_per_second,
            links=links,
            paths=tuple(node.paths()),
            paused=paused,
            computed=computed,
            busy_seconds=busy_seconds,
        ),
        members,
    )


def directory_record(
    holding: Holding, node: Node, membership: Membership, carrier: CarrierAddress | None
) -> PeerRecord:
    return PeerRecord(
        peer=node.peer_id,
        stage=holding.stage,
        addresses=node.addresses,
        certificate=membership.certificate,
        microbatches_per_second=holding.meter.microbatches_per_second,
        carrier=carrier,
    )
