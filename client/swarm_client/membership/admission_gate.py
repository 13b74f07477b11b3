"""Which peers this peer serves: the one check for all its protocols.

A remote shows its certificate. It is served unless the certificate is invalid, the coordinator has
revoked the remote, or the certificate is of a coordinator generation that the members have left
behind (docs/decisions/0010-admission.md).
"""

from __future__ import annotations

from swarm_client.membership.roster import RosterView
from swarm_shared.base.clock import Clock, monotonic, wall
from swarm_shared.base.errors import AdmissionError, FrameError
from swarm_shared.base.types import Generation, PeerId, RunId, StageIndex
from swarm_shared.identity.credentials import check_certificate
from swarm_shared.identity.signing import decode_envelope
from swarm_shared.protocol import TransferHello

FENCE_SECONDS = 120.0
"""Seconds attached to a newer coordinator generation after which certificates of older ones are
refused. By then every working peer has attached: clients retry every twelve seconds."""


class AdmissionGate:
    """Checked at every hello, and again at every request of a link that stays open."""

    def __init__(
        self,
        run: RunId,
        organiser: PeerId,
        roster: RosterView,
        wall_clock: Clock = wall,
        clock: Clock = monotonic,
    ) -> None:
        self._run = run
        self._organiser = organiser
        self._roster = roster
        self._wall_clock = wall_clock
        self._clock = clock
        self._oldest_generation = Generation(0)
        self._attached: tuple[Generation, float] | None = None

    def attached(self, generation: Generation) -> None:
        """Record that the coordinator has welcomed this peer in this generation."""
        if generation < self._oldest_generation:
            # The coordinator's database was lost and its generations start from one again.
            self._oldest_generation = Generation(0)
        self._attached = (generation, self._clock())

    def detached(self) -> None:
        """Suspend the fence while the coordinator is absent: other members may be cut off from it
        too."""
        self._advance_fence()
        self._attached = None

    def check(self, remote: PeerId, run: RunId, certificate: str) -> None:
        """Raise AdmissionError, with the reason, unless the remote may be served.

        `remote` must come from the connection.
        """
        if run != self._run:
            raise AdmissionError(f"this peer serves run {self._run[:12]}, not {run[:12]}")
        self.check_not_revoked(remote)
        try:
            envelope = decode_envelope(certificate, f"the certificate of {remote}")
        except FrameError as error:
            raise AdmissionError(str(error)) from error
        self._advance_fence()
        check_certificate(
            envelope,
            self._run,
            self._organiser,
            self._wall_clock(),
            remote,
            self._oldest_generation,
        )

    def check_not_revoked(self, remote: PeerId) -> None:
        """Raise AdmissionError for a revoked remote, which showed its certificate when it opened
        this link."""
        if self._roster.is_revoked(remote):
            raise AdmissionError(f"the organiser has revoked {remote}")

    def may_send(self, remote: PeerId, stage: StageIndex) -> bool:
        """Whether the remote's role includes sending microbatches to `stage`: trainers, all of
        which hold a stage, send to the first; the peers of each stage to the next.

        Also False for a moment before the roster with the remote's stage arrives.
        """
        record = self._roster.get(remote)
        return record is not None and (stage == 0 or record.stage == stage - 1)

    def check_transfer(self, remote: PeerId, hello: TransferHello) -> None:
        self.check(remote, hello.run, hello.certificate)

    def _advance_fence(self) -> None:
        if self._attached is not None:
            generation, since = self._attached
            if generation > self._oldest_generation and self._clock() - since >= FENCE_SECONDS:
                self._oldest_generation = generation
