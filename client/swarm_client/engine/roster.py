"""Who may be used, as the coordinator last said it, and somebody to wake when that changes."""

from __future__ import annotations

from collections.abc import Mapping

import trio

from swarm_shared.messages import PeerRecord, Roster
from swarm_shared.types import PeerId, StageIndex


class RosterView:
    """The newest roster. Kept while the coordinator is away: its members are still there."""

    def __init__(self) -> None:
        self._peers: dict[PeerId, PeerRecord] = {}
        self._changed = trio.Event()

    def replace(self, roster: Roster) -> None:
        self._peers = {record.peer: record for record in roster.peers}
        self.wake()

    def refresh(self, record: PeerRecord) -> None:
        """Newer addresses of a member, from the directory. Members come from rosters alone."""
        known = self._peers.get(record.peer)
        if known is not None and known.stage == record.stage:
            self._peers[record.peer] = known.model_copy(
                update={"addresses": record.addresses, "carrier": record.carrier}
            )

    def wake(self) -> None:
        """Let everybody who waits look again."""
        self._changed.set()
        self._changed = trio.Event()

    async def wait_changed(self) -> None:
        await self._changed.wait()

    def get(self, peer: PeerId) -> PeerRecord | None:
        return self._peers.get(peer)

    def of_stage(self, stage: StageIndex) -> Mapping[PeerId, PeerRecord]:
        """Members of a stage that accept new microbatches."""
        return {p: r for p, r in self._peers.items() if r.stage == stage and r.accepts_work}

    def __contains__(self, peer: PeerId) -> bool:
        return peer in self._peers
