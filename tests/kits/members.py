"""What a coordinator hands out about the members of a run: certificates and records."""

from __future__ import annotations

import base64
import time
from typing import Any

from swarm_shared.base.types import Generation, PeerId, RunId, StageIndex
from swarm_shared.identity.credentials import MembershipCertificate
from swarm_shared.identity.keys import Identity
from swarm_shared.protocol import PeerRecord

ORGANISER = Identity.from_seed(b"o" * 32)


def certificate(
    peer: PeerId, run: RunId, organiser: Identity = ORGANISER, *, generation: int = 1,
    now: float | None = None, seconds: float = 3600.0,
) -> str:  # fmt: skip
    """A certificate in base64 that holds from a second before `now` for so many seconds."""
    now = time.time() if now is None else now
    content = MembershipCertificate(
        peer=peer, run=run, generation=Generation(generation), not_before=now - 1,
        expires=now + seconds, role="volunteer",
    )  # fmt: skip
    return base64.b64encode(content.sign(organiser)).decode()


def peer_record(peer: PeerId | str, stage: int = 0, **changes: Any) -> PeerRecord:
    """A member without addresses and certificate, unless they are given."""
    values = {"addresses": (), "certificate": "", "microbatches_per_second": 1.0, **changes}
    return PeerRecord(peer=PeerId(peer), stage=StageIndex(stage), **values)
