"""The programs of `test_reachability_class`: two observers, and the doctor's checks.

doctor_program.py coordinator|volunteer OWN_IPV4 IPV4_OF_THE_VOLUNTEER
doctor_program.py check INVITE HOME
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import trio

from swarm_client.doctor.checkup import Checkup, DoctorOptions
from swarm_shared.base.types import PeerId, RunId
from swarm_shared.identity.invite import Invite
from swarm_shared.identity.keys import Identity
from swarm_shared.identity.probe_pass import sign_probe_pass
from swarm_shared.network import open_node
from swarm_shared.probe.server import answer_members_only, serve_probe
from swarm_shared.protocol import DoctorHello, DoctorWelcome, Neighbour

RUN = RunId("ab" * 32)
CHECK_SECONDS = 25


async def observe(role: str, own: str, other: str) -> None:
    """Answer probes as the coordinator of a run or as a volunteer in it; print the run's invite."""
    organiser = Identity.from_seed(b"o" * 32)
    volunteer = Identity.from_seed(b"v" * 32)

    def welcome(remote: PeerId, hello: DoctorHello) -> DoctorWelcome:
        neighbour = Neighbour(peer=volunteer.peer_id, addresses=(f"/ip4/{other}/tcp/4000",))
        return DoctorWelcome(
            probe_pass=sign_probe_pass(organiser, remote, RUN, time.time()),
            neighbours=(neighbour,),
        )

    def no_member(remote: PeerId, run: RunId, certificate: str) -> None:
        raise AssertionError("no peer of this lab has a certificate")

    identity = organiser if role == "coordinator" else volunteer
    answer = (
        welcome if role == "coordinator" else answer_members_only(RUN, organiser.peer_id, no_member)
    )
    address = f"/ip4/{own}/tcp/4000"
    async with open_node(identity, [address]) as node:
        serve_probe(node, answer)
        invite = Invite(
            coordinator=organiser.peer_id, addresses=(address,), run_id=RUN,
            organiser=organiser.peer_id,
        )  # fmt: skip
        print(invite.encode(), flush=True)
        await trio.sleep_forever()


async def check(invite: str, home: str) -> None:
    """Run the network checks as `swarm-client doctor` does, and print them as JSON."""
    checkup = Checkup(DoctorOptions(home=Path(home)))
    with trio.move_on_after(CHECK_SECONDS):
        await checkup.check_network(Invite.decode(invite), None, False)
    print(json.dumps({found.id: found.model_dump() for found in checkup.results.all()}))


if __name__ == "__main__":
    if sys.argv[1] == "check":
        trio.run(check, *sys.argv[2:])
    else:
        trio.run(observe, *sys.argv[1:])
