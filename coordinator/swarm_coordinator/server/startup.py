"""The start of a coordinator: its inputs, restoring the run, and opening the network."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from random import SystemRandom

import anyio.to_thread

from swarm_coordinator.admission.authority import RENEW_AFTER_SECONDS
from swarm_coordinator.configuration.run_settings import RebalancingSection, RunSettings
from swarm_coordinator.core.events import CheckpointRecord, Restored, RolledBack
from swarm_coordinator.core.state.moves import RebalancingRule, RebalancingSettings
from swarm_coordinator.core.state.run import RunState
from swarm_coordinator.core.transition import begin
from swarm_coordinator.core.trust.audits import AuditBook
from swarm_coordinator.run_dir.checkpoint_files import CheckpointFolder
from swarm_coordinator.run_dir.folder import RunFolder, read_bytes
from swarm_coordinator.run_dir.sampled_tokens import RunTokens
from swarm_coordinator.server.core_failures import CoreFailures
from swarm_coordinator.server.listen_addresses import dialable_addresses, dual_stack, listen_address
from swarm_coordinator.server.processes.dashboard import DashboardProcess
from swarm_coordinator.server.processes.evaluator import EvaluatorProcess
from swarm_coordinator.server.processes.supervisor import Report
from swarm_coordinator.storage.records import generation_floor, read_checkpoints
from swarm_coordinator.storage.store import Store
from swarm_shared.base.clock import Clock, monotonic, wall
from swarm_shared.base.errors import NetworkError
from swarm_shared.base.types import PeerId, StageIndex
from swarm_shared.host.ports import lasting_port
from swarm_shared.identity.invite import Invite
from swarm_shared.identity.keys import Identity
from swarm_shared.identity.signed_manifest import MAX_MANIFEST_BYTES
from swarm_shared.identity.signing import encode_envelope
from swarm_shared.network import Node, open_node
from swarm_shared.protocol import PeerRecord
from swarm_shared.run.manifest import Manifest
from swarm_shared.scheduling.placement import MovePolicy

log = logging.getLogger(__name__)

MAX_STREAMS = 128
"""Inbound streams of one client: its circuits through this relay, and all other streams."""


@dataclass(frozen=True, slots=True)
class CoordinatorContext:
    """The run's folder, settings and store, the clocks, and the callbacks of one start."""

    folder: RunFolder
    settings: RunSettings
    manifest: Manifest
    identity: Identity
    store: Store
    report: Report
    port: int | None = None
    clock: Clock = monotonic
    renew_after_seconds: float = RENEW_AFTER_SECONDS
    verified: CheckpointRecord | None = None
    """The newest checkpoint if its files have been verified already."""
    on_serving: Callable[[Invite], None] = field(default=lambda invite: None)
    dashboard_process: DashboardProcess | None = None
    """None where no dashboard is configured."""
    evaluator_process: EvaluatorProcess | None = None
    """None where no evaluations are configured."""
    core_failures: CoreFailures = field(default_factory=CoreFailures)


async def restore(
    context: CoordinatorContext, checkpoints: CheckpointFolder, note: Callable[[str], None]
) -> Restored:
    """Restore the run from the store, with the newest checkpoint whose files are complete."""
    earlier = context.store.restore()
    stored_checkpoints = context.store.read(read_checkpoints)
    lost = earlier.generation == 0 and bool(checkpoints.versions())
    context.store.next_generation(generation_floor(wall()) if lost else 0)
    restored = context.store.restore()
    await anyio.to_thread.run_sync(checkpoints.discard_all_partial)
    checkpoint = context.verified
    if checkpoint is None or checkpoint.version not in stored_checkpoints:
        checkpoint = await anyio.to_thread.run_sync(
            lambda: checkpoints.latest_valid(note, None if lost else stored_checkpoints)
        )
    if lost and checkpoint is not None:
        # The database was moved away or lost: the run continues from the checkpoint.
        step = checkpoint.version
        reason = f"the database is new; the run continues from its checkpoint of step {step}"
        note(reason)
        await context.store.write(checkpoint)
        await context.store.write(RolledBack(checkpoint.version, reason))
        restored = context.store.restore()
    if checkpoint is None and stored_checkpoints:
        note("no checkpoint of this run is usable")
    at_end = restored.version >= context.manifest.training.steps
    return replace(restored, checkpoint=checkpoint, finished=restored.finished and at_end)


async def open_network(
    context: CoordinatorContext, stack: AsyncExitStack
) -> tuple[Node, tuple[str, ...]]:
    """Open the node on the port asked for, or on that of the first start, which invites contain."""
    network = context.settings.network
    wanted = context.port or network.listen_port
    remembered = None if wanted else context.folder.remembered_port()
    port = wanted or remembered or 0
    listen = listen_address(network.listen_host, port)
    if not port:
        port = lasting_port(network.listen_host)
        listen = listen_address(network.listen_host, port)
    try:
        node = await stack.enter_async_context(
            open_node(context.identity, [listen], max_inbound_streams_per_peer=MAX_STREAMS)
        )
    except NetworkError as error:
        hint = (
            " Invites name this port since the first start; "
            "--port chooses another one, and then new invites are needed."
        )
        raise NetworkError(f"{error}{hint if remembered else ''}") from error
    if context.folder.remembered_port() != port:
        context.folder.remember_port(port)
    addresses = dialable_addresses(network.listen_host, port, network.announce)
    if network.listen_host == "0.0.0.0":
        try:
            await node.listen([f"/ip6/::/tcp/{port}"])
        except NetworkError as error:
            log.info("no IPv6 here: %s", error)
        else:
            addresses = dual_stack(addresses, port)
    node.announce(addresses)
    node.admit_only(lambda peer, protocol: False)
    return node, addresses


def begin_run(
    context: CoordinatorContext,
    restored: Restored,
    addresses: tuple[str, ...],
    certificate: str,
    revoked: Mapping[PeerId, float],
    tokens: RunTokens,
) -> RunState:
    """Make the core's first state. `certificate` and `addresses` are the coordinator's own."""
    envelope = read_bytes(context.folder.manifest, MAX_MANIFEST_BYTES)
    coordinator = PeerRecord(
        peer=context.identity.peer_id, stage=StageIndex(0), addresses=addresses,
        certificate=certificate, microbatches_per_second=0.0, accepts_work=False,
    )  # fmt: skip
    return begin(
        context.manifest, encode_envelope(envelope), coordinator, restored,
        context.clock(), revoked, rebalancing_settings(context.settings.rebalancing),
        AuditBook(context.settings.trust.audit_settings, SystemRandom().random, tokens.drawn),
        context.settings.checkpoint.keep,
    )  # fmt: skip


def rebalancing_settings(section: RebalancingSection) -> RebalancingSettings:
    policy = MovePolicy(
        period_seconds=section.period_seconds, minimum_replicas=section.minimum_replicas
    )
    return RebalancingSettings(RebalancingRule(section.rule), policy)
