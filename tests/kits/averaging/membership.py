"""Proofs of membership, signed as a coordinator and its volunteers sign them."""

from __future__ import annotations

import base64
import time
from dataclasses import dataclass, field

from swarm_client.averaging.protocol.messages import SetMembership
from swarm_shared.base.types import Generation, PeerId, RunId
from swarm_shared.identity.credentials import (
    CarrierBinding,
    MembershipCertificate,
)
from swarm_shared.identity.keys import Identity

RUN = RunId("ab" * 32)


@dataclass(frozen=True)
class Organiser:
    run: RunId = RUN
    key: Identity = field(default_factory=Identity.generate)

    def membership(
        self,
        member: Identity,
        p2pd_peer_id: str,
        *,
        revoked: tuple[PeerId, ...] = (),
        run: RunId | None = None,
        expires: float | None = None,
    ) -> SetMembership:
        """`member`'s certificate of `run`, and its binding of its p2pd."""
        now = time.time()
        certificate = MembershipCertificate(
            peer=member.peer_id,
            run=run or self.run,
            generation=Generation(1),
            not_before=now - 10_000,
            expires=now + 3600 if expires is None else expires,
            role="volunteer",
        )
        binding = CarrierBinding(
            peer=member.peer_id, carrier_peer_id=p2pd_peer_id, expires=now + 3600
        )
        return SetMembership(
            run=self.run,
            organiser=self.key.peer_id,
            certificate=base64.b64encode(certificate.sign(self.key)),
            binding=base64.b64encode(binding.sign(member)),
            revoked=revoked,
            unix_seconds=now,
        )
