"""Replies of the coordinator to a client that is checked before it joins."""

from __future__ import annotations

import ipaddress
from pathlib import Path

import pytest

from kits.coordinator.shell_world import client, make_run, served
from kits.swarm_world.facts import COORDINATOR, Options, manifest_of
from swarm_coordinator.admission.authority import AdmissionAuthority
from swarm_coordinator.admission.book import (
    AdmissionBook,
    AdmissionMode,
    AdmissionRecord,
    MemberAdmitted,
    PeerAllowed,
    PeerBanned,
    TokenCreated,
    hash_of,
)
from swarm_coordinator.admission.device_owners import DeviceOwners
from swarm_coordinator.core.events import Restored
from swarm_coordinator.core.transition import begin
from swarm_coordinator.durability.run_files import load_manifest
from swarm_coordinator.run_dir.folder import RunFolder
from swarm_coordinator.server.doctor_answers import probe_judge
from swarm_shared.addresses.dial_order import Interfaces
from swarm_shared.base.errors import AdmissionError
from swarm_shared.base.types import Generation, RunId, StageIndex, Version
from swarm_shared.identity.invite import Invite
from swarm_shared.identity.keys import Identity
from swarm_shared.identity.probe_pass import check_probe_pass
from swarm_shared.network import open_node
from swarm_shared.probe.client import open_probe
from swarm_shared.probe.server import AnswerHello
from swarm_shared.protocol import (
    SOFTWARE_VERSION,
    DoctorHello,
    DoctorWelcome,
    Reachability,
)
from swarm_shared.protocol.versions import VersionRange
from swarm_shared.scheduling.placement.memory_plan import stage_needs

NOW = 1_800_000_000.0
RUN = RunId("ab" * 32)
ORGANISER, VISITOR = Identity.from_seed(b"o" * 32), Identity.from_seed(b"v" * 32)
HELLO = DoctorHello(run=RUN, software=SOFTWARE_VERSION)


async def look(invite: Invite, **changes: object) -> DoctorWelcome:
    hello = DoctorHello(run=invite.run_id, software=SOFTWARE_VERSION, token=invite.token)
    hello = hello.model_copy(update=changes)
    async with (
        open_node(Identity.generate(), ["/ip4/127.0.0.1/tcp/0"]) as node,
        open_probe(node, invite.coordinator, hello, invite.addresses) as probe,
    ):
        (result,) = await probe.dial_back([node.addresses[0].split("/p2p/")[0]])
        assert result.reached
        return probe.welcome


async def test_an_unadmitted_client_gets_needs_and_peers_to_probe(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The volunteers come from this machine, so that its addresses are proved to be theirs.
    here = Interfaces(hosts=frozenset(map(ipaddress.ip_address, ("127.0.0.1", "1.2.3.4"))))
    monkeypatch.setattr(Interfaces, "of_this_machine", lambda: here)
    manifest = load_manifest(folder)
    public = Identity.generate()
    async with served(folder) as run:
        alone = await look(run.invite)
        assert alone.neighbours == ()
        public_address, foreign = ("/ip4/1.2.3.4/tcp/4001",), "/ip4/9.9.9.9/tcp/22"
        async with (
            client(run.invite, public) as one,
            client(run.invite) as other,
            client(run.invite) as liar,
        ):
            for volunteer, reach in ((one, Reachability.PUBLIC), (other, Reachability.BEHIND_NAT)):
                await volunteer.join(addresses=(*public_address, foreign), reachability=reach)
            await liar.join(addresses=(foreign,), reachability=Reachability.PUBLIC)
            welcome = await look(run.invite)
    assert [neighbour.peer for neighbour in welcome.neighbours] == [public.peer_id]
    assert welcome.neighbours[0].addresses == public_address
    assert welcome.software_fits
    assert welcome.admission == ""
    stages = [stage_needs(manifest, StageIndex(at)) for at in range(manifest.stage_count)]
    assert welcome.smallest_stage == min(stages, key=lambda one: one.memory.device_bytes)


async def test_a_visitor_takes_no_part_and_uses_no_token(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a run", admission__mode="token")
    async with served(folder) as run:
        assert run.invite.token is not None
        assert (await look(run.invite)).admission == ""
        refused = await look(run.invite, token="another")
        assert "token" in refused.admission
        assert refused.probe_pass is None
        assert refused.neighbours == ()
        with pytest.raises(AdmissionError, match="ask the organiser for a new invite"):
            await look(run.invite, run="cd" * 32)
        async with client(run.invite) as one:
            await one.join()


def judge_with(mode: AdmissionMode, *records: AdmissionRecord) -> AnswerHello:
    async def write(record: AdmissionRecord) -> None:
        raise AssertionError("nothing is written for a visitor")

    admission = AdmissionAuthority(
        ORGANISER, RUN, Generation(1), mode, AdmissionBook(), write, lambda: NOW, DeviceOwners()
    )
    for record in records:
        admission.book.enter(record, NOW)
    manifest = manifest_of(Options())
    state = begin(manifest, "", COORDINATOR, Restored(1, Version(0), None, None, False, None), 0.0)
    return probe_judge(admission, lambda: state, manifest)


def test_a_visitor_that_would_be_let_in_gets_a_pass_that_holds() -> None:
    verdict = judge_with("open")(VISITOR.peer_id, HELLO)
    assert verdict.admission == ""
    assert verdict.probe_pass is not None
    check_probe_pass(verdict.probe_pass, RUN, ORGANISER.peer_id, NOW, VISITOR.peer_id)


def test_the_verdict_is_that_of_joining() -> None:
    visitor = VISITOR.peer_id
    token = TokenCreated(1, hash_of("secret"), uses=1)
    used = MemberAdmitted(Identity.generate().peer_id, 1)
    secret = HELLO.model_copy(update={"token": "secret"})

    def admission(mode: AdmissionMode, hello: DoctorHello, *records: AdmissionRecord) -> str:
        return judge_with(mode, *records)(visitor, hello).admission

    assert "carries no token" in admission("token", HELLO, token)
    assert admission("token", secret, token) == ""
    assert "ask the organiser" in admission("token", secret, token, used)
    assert admission("token", HELLO, token, MemberAdmitted(visitor, 1)) == ""
    assert admission("allow-list", secret, token) != ""
    assert admission("allow-list", HELLO, PeerAllowed(visitor)) == ""


def test_a_banned_visitor_is_not_answered() -> None:
    for mode in ("open", "token", "allow-list"):
        with pytest.raises(AdmissionError, match="too many wrong gradients"):
            judge_with(mode, PeerBanned(VISITOR.peer_id, "too many wrong gradients"))(
                VISITOR.peer_id, HELLO
            )


def test_another_version_is_reported_and_answered() -> None:
    hello = HELLO.model_copy(update={"protocols": VersionRange(oldest=7, newest=7)})
    verdict = judge_with("open")(VISITOR.peer_id, hello)
    assert not verdict.software_fits
    assert verdict.probe_pass is not None
