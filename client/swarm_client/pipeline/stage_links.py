"""A volunteer's links to stages: streams to other peers' servers, and to its own in this
process."""

from __future__ import annotations

import logging
import random
from dataclasses import dataclass

import trio

from swarm_client.membership.member_context import MemberContext
from swarm_client.pipeline.downstream import Downstream
from swarm_client.pipeline.edge import Edge, Stream, open_edge
from swarm_client.pipeline.local_stream import LocalStream, local_pair
from swarm_client.pipeline.mask_client import MaskClient
from swarm_client.pipeline.stage_server import StageServer, stage_limits
from swarm_shared.base.error_groups import expected_error
from swarm_shared.base.errors import SwarmError
from swarm_shared.base.types import StageIndex
from swarm_shared.protocol import STAGE_PROTOCOL, PeerRecord, StageHello
from swarm_shared.scheduling.routing import StageRouting

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StageLinks:
    """Opens streams to other peers' stages, and to this volunteer's own within the process."""

    member: MemberContext
    own_server: StageServer
    masks: MaskClient

    def downstream(self, stage: StageIndex, nursery: trio.Nursery) -> Downstream:
        """Return a sender to `stage` that lives as long as `nursery`."""
        manifest = self.member.membership.now.manifest
        routing = StageRouting(random.Random(), manifest.training.microbatches_per_step)
        return Downstream(
            stage, self.member.roster, self.open_edge, self.masks, nursery, routing,
            depth=manifest.stage_count - stage,
        )  # fmt: skip

    async def open_edge(self, record: PeerRecord) -> Edge:
        """Open an edge to a peer, or to this volunteer's own stage."""
        stream, member = await self._open_stream(record), self.member.membership.now
        try:
            return await open_edge(
                stream, StageHello(run=member.run, certificate=member.certificate)
            )
        except BaseException:
            with trio.CancelScope(shield=True):
                await stream.reset()
            raise

    async def _open_stream(self, record: PeerRecord) -> Stream:
        if record.peer == self.member.node.peer_id:
            own_end, served_end = local_pair(record.peer)
            self.member.nursery.start_soon(self._serve_locally, served_end)
            return own_end
        return await self.member.node.open_stream(
            record.peer,
            STAGE_PROTOCOL,
            stage_limits(self.member.membership.now.manifest),
            record.addresses,
        )

    async def _serve_locally(self, stream: LocalStream) -> None:
        try:
            await self.own_server.handle(stream)
        except (SwarmError, BaseExceptionGroup) as error:
            expected = expected_error(error)
            if expected is None:
                raise
            log.warning("this volunteer's own stage closed a link: %s", expected)
        finally:
            await stream.reset()
