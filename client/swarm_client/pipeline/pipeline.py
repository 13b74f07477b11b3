"""A volunteer's part of the pipelines: the stage that it serves, and the microbatches that it
trains."""

from __future__ import annotations

from collections.abc import Callable

from swarm_client.membership.member_context import MemberContext
from swarm_client.pipeline.held_stage import Holding
from swarm_client.pipeline.mask_client import MaskClient
from swarm_client.pipeline.stage_links import StageLinks
from swarm_client.pipeline.stage_server import StageServer
from swarm_client.pipeline.trainer import Trainer
from swarm_client.pipeline.uplink_share import UplinkShare


class Pipeline:
    """The parts that carry microbatches, for the stage that is held now."""

    def __init__(self, member: MemberContext, all_reduce_bytes: Callable[[], int]) -> None:
        self.masks = MaskClient(member.coordinator)
        self.trainer = Trainer(member.coordinator, member.nursery)
        self._uplink = UplinkShare(member.node.bandwidth, all_reduce_bytes)
        self.server = StageServer(member, self._uplink)
        self.links = StageLinks(member, self.server, self.masks)

    @property
    def holding(self) -> Holding | None:
        """The stage that is served; None while there is none."""
        return self.server.holding

    def hold(self, holding: Holding | None) -> None:
        """Serve this stage from now on, and no other."""
        before, self.server.holding = self.server.holding, holding
        if before is not None and before.next_stage is not None:
            # Tasks of other senders' links outlive the stage's nursery and send through it.
            before.next_stage.close()
        self._follow_step()

    def step_applied(self) -> None:
        """The held stage has another step now."""
        self._follow_step()
        self._uplink.step_applied()

    def _follow_step(self) -> None:
        """Abandon what is in flight of an older step."""
        holding = self.holding
        if holding is not None and holding.next_stage is not None:
            holding.next_stage.oldest_step_is(holding.step)
        self.trainer.oldest_step_is(None if holding is None else holding.step)

    def roster_changed(self) -> None:
        """Open and close edges to peers of the first and the next stage, as the roster says."""
        self.trainer.roster_changed()
        if self.holding is not None and self.holding.next_stage is not None:
            self.holding.next_stage.roster_changed()

    def pause(self) -> None:
        """Take no new leases and no requests of others."""
        self.trainer.pause()
        self.server.paused = True

    def resume(self) -> None:
        """Take leases and requests again."""
        self.trainer.resume()
        self.server.paused = False
