"""Whom a peer serves: certificates, revocation, and certificates of earlier starts."""

from __future__ import annotations

import pytest

from kits import members
from kits.members import ORGANISER, peer_record
from swarm_client.membership.admission_gate import FENCE_SECONDS, AdmissionGate
from swarm_client.membership.roster import RosterView
from swarm_shared.base.errors import AdmissionError
from swarm_shared.base.types import Generation, PeerId, RunId
from swarm_shared.identity.keys import Identity
from swarm_shared.protocol import Roster, TransferHello

RUN, OTHER_RUN = RunId("ab" * 32), RunId("cd" * 32)
ANNA = Identity.from_seed(b"a" * 32)
NOW = 1_900_000_000.0
DAY = 86_400.0


def certificate(generation: int = 1, peer: Identity = ANNA, signer: Identity = ORGANISER) -> str:
    return members.certificate(
        peer.peer_id, RUN, signer, generation=generation, now=NOW, seconds=DAY
    )


def roster(*revoked: PeerId, present: tuple[PeerId, ...] = ()) -> Roster:
    return Roster(serial=1, peers=tuple(map(peer_record, present)), revoked=revoked)


class Scene:
    def __init__(self) -> None:
        self.now, self.wall_now = 0.0, NOW
        self.view = RosterView()
        self.gate = AdmissionGate(
            RUN, ORGANISER.peer_id, self.view, lambda: self.wall_now, lambda: self.now
        )

    def serves(self, shown: str, remote: Identity = ANNA, run: RunId = RUN) -> str:
        """ "yes", or why not."""
        try:
            self.gate.check(remote.peer_id, run, shown)
            self.gate.check_transfer(remote.peer_id, TransferHello(run=run, certificate=shown))
        except AdmissionError as error:
            return str(error)
        return "yes"


@pytest.mark.parametrize(
    ("shown", "reason"),
    [
        ("?", "is not base64"),
        ("AAAA", "shows no certificate of this run"),
        ("ÄÄÄÄ", "is not base64"),
        (certificate(peer=Identity.from_seed(b"b" * 32)), "shows the certificate of"),
        (certificate(signer=ANNA), "shows no certificate of this run"),
    ],
)
def test_what_is_no_certificate_of_this_remote_is_refused(shown: str, reason: str) -> None:
    assert reason in Scene().serves(shown)


def test_a_member_of_another_run_is_refused() -> None:
    assert "this peer serves run" in Scene().serves(certificate(), run=OTHER_RUN)


def test_an_expired_certificate_is_refused() -> None:
    scene = Scene()
    scene.wall_now += DAY + 121.0
    assert "expired" in scene.serves(certificate())


# ---------------------------------------------------------------- revoked


def test_a_revoked_peer_is_refused_whatever_it_shows_and_until_it_is_reinstated() -> None:
    scene = Scene()
    assert scene.view.replace(roster(ANNA.peer_id)) == {ANNA.peer_id}
    assert "has revoked" in scene.serves(certificate())
    assert scene.view.replace(roster(ANNA.peer_id)) == frozenset()  # nothing new
    scene.view.replace(roster())
    assert scene.serves(certificate()) == "yes"


def test_a_link_that_is_open_is_refused_too() -> None:
    scene = Scene()
    scene.view.replace(roster(ANNA.peer_id))
    with pytest.raises(AdmissionError, match="has revoked"):
        scene.gate.check_not_revoked(ANNA.peer_id)


def test_a_revoked_peer_is_no_member_even_if_a_roster_has_both() -> None:
    view = RosterView()
    view.replace(roster(ANNA.peer_id, present=(ANNA.peer_id,)))
    assert view.get(ANNA.peer_id) is None
    assert ANNA.peer_id not in view
    assert not view.knows(ANNA.peer_id)
    assert view.is_revoked(ANNA.peer_id)


# ---------------------------------------------------------------- the fence


def test_a_restart_of_the_coordinator_cuts_no_peer_off_at_once() -> None:
    scene = Scene()
    scene.gate.attached(Generation(2))
    assert scene.serves(certificate(1)) == "yes"
    scene.now += FENCE_SECONDS - 1
    assert scene.serves(certificate(1)) == "yes"


def test_a_certificate_of_an_earlier_start_is_refused_when_members_had_time_to_attach() -> None:
    scene = Scene()
    scene.gate.attached(Generation(2))
    scene.now += FENCE_SECONDS
    assert "is of the coordinator's start 1" in scene.serves(certificate(1))
    assert scene.serves(certificate(2)) == "yes"
    # That of a later start, too, before this peer has attached to it.
    assert scene.serves(certificate(3)) == "yes"


def test_a_coordinator_that_crashes_again_and_again_cuts_no_peer_off() -> None:
    """Each start lives too shortly for everybody to attach to it."""
    scene = Scene()
    scene.gate.attached(Generation(1))
    for generation in range(2, 30):
        scene.now += 60.0
        scene.gate.detached()
        scene.now += 600.0
        scene.gate.attached(Generation(generation))
        assert scene.serves(certificate(1)) == "yes"


def test_while_the_coordinator_is_away_the_time_stands_still() -> None:
    scene = Scene()
    scene.gate.attached(Generation(2))
    scene.now += 10.0
    scene.gate.detached()
    scene.now += 10 * FENCE_SECONDS
    assert scene.serves(certificate(1)) == "yes"


def test_a_fence_that_stands_is_not_taken_down_by_losing_the_coordinator() -> None:
    scene = Scene()
    scene.gate.attached(Generation(2))
    scene.now += FENCE_SECONDS
    scene.gate.detached()
    assert "start 1" in scene.serves(certificate(1))
    scene.gate.attached(Generation(3))
    assert "start 1" in scene.serves(certificate(1))
    assert scene.serves(certificate(2)) == "yes"


def test_a_coordinator_that_lost_its_database_counts_from_one_and_is_believed() -> None:
    scene = Scene()
    scene.gate.attached(Generation(7))
    scene.now += FENCE_SECONDS
    assert "start 1" in scene.serves(certificate(1))
    scene.gate.attached(Generation(1))
    assert scene.serves(certificate(1)) == "yes"
