"""Whom this peer serves: the one place that its protocols ask.

A remote shows its certificate; it is served unless that does not hold, the coordinator has revoked
the remote, or the certificate is of a start of the coordinator that members have left behind
(docs/decisions/0010-admission.md).
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
"""Attached to a newer coordinator for so long, a peer refuses certificates of older ones: whoever
works for the run has attached by then, for clients try again every twelve seconds."""


class AdmissionGate:
    """Asked at every hello, and again at every request of a link that stays open."""

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
        """The coordinator has welcomed this peer in this generation."""
        if generation < self._oldest_generation:
            # Its database was lost and it counts from one again; its word is what counts.
            self._oldest_generation = Generation(0)
        self._attached = (generation, self._clock())

    def detached(self) -> None:
        """The coordinator is away: others may be cut off from it, too, and work on."""
        self._advance_fence()
        self._attached = None

    def check(self, remote: PeerId, run: RunId, certificate: str) -> None:
        """Raises AdmissionError, which says why, unless the remote is to be served.

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
        """The same for a remote that has shown its certificate when it opened this link."""
        if self._roster.is_revoked(remote):
            raise AdmissionError(f"the organiser does not let {remote} take part any more")

    def may_send(self, remote: PeerId, stage: StageIndex) -> bool:
        """Whether it is this peer's part to send microbatches to `stage`: trainers, which all hold
        a stage, to the first; the peers of each stage to the next.

        False for a moment, too, while the roster that says so is on its way.
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
