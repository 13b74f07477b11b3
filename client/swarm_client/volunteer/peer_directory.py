"""The second peer directory: signed records in hivemind's DHT (design: hivemind's DHT).

The form of a record and its check are in `swarm_client.averaging.protocol.directory_record`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from swarm_client.averaging.handle.supervisor import AveragingWorker
from swarm_client.averaging.protocol.directory_record import open_record, sign_record
from swarm_shared.addresses.announced import is_tcp
from swarm_shared.addresses.dial_order import Interfaces, direct_addresses
from swarm_shared.base.clock import Clock
from swarm_shared.base.errors import AdmissionError, FrameError, NetworkError, SignatureError
from swarm_shared.base.types import PeerId, RunId
from swarm_shared.identity.keys import Identity
from swarm_shared.protocol import PeerRecord

log = logging.getLogger(__name__)

RECORD_LIFETIME_SECONDS = 120.0
"""Lifetime of a record: a peer that has left disappears within two minutes."""
PUBLISH_INTERVAL_SECONDS = 20.0
"""Seconds between two renewals of this peer's record."""


@dataclass(slots=True, eq=False)
class PeerDirectory:
    """Publishes this peer and looks other members up. Does nothing without hivemind."""

    identity: Identity
    worker: AveragingWorker
    run_id: RunId
    organiser: PeerId
    clock: Clock
    """Unix seconds of the run's time, in which records expire."""
    _bootstrap_addresses: tuple[str, ...] = ()

    def bootstrap_from(self, addresses: tuple[str, ...]) -> None:
        """Use these p2pd addresses (…/p2p/ID) to enter the DHT at the next publication."""
        interfaces = Interfaces.of_this_machine()
        plain = filter(is_tcp, addresses)
        if direct := tuple(direct_addresses(plain, interfaces)):
            self._bootstrap_addresses = direct

    async def publish(self, record: PeerRecord) -> None:
        """Sign and store a record in the directory; a failure is logged."""
        if not self.worker.available:
            return
        expires = self.clock() + RECORD_LIFETIME_SECONDS
        signed = sign_record(self.identity, record, expires)
        try:
            # A bootstrap peer may be unavailable for a moment, for example while its p2pd restarts.
            if self._bootstrap_addresses and await self.worker.bootstrap(self._bootstrap_addresses):
                self._bootstrap_addresses = ()
            await self.worker.publish(f"swarm/{self.run_id}", record.peer, signed, expires)
        except NetworkError as error:
            log.info("this peer's record could not be published: %s", error)

    async def lookup(self) -> list[PeerRecord]:
        """Return every record of this run with a valid signature and certificate."""
        if not self.worker.available:
            return []
        try:
            by_subkey = await self.worker.lookup(f"swarm/{self.run_id}")
        except NetworkError as error:
            log.info("the directory lookup failed: %s", error)
            return []
        records: list[PeerRecord] = []
        for value in by_subkey.values():
            try:
                records.append(open_record(value, self.run_id, self.organiser, self.clock()))
            except (AdmissionError, FrameError, SignatureError) as error:
                log.info("a directory record was rejected: %s", error)
        return records
