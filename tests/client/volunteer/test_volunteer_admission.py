"""A volunteer when the coordinator renews its certificate or revokes a peer.

The volunteer is the real one over real links; the coordinator is scripted.
"""

from __future__ import annotations

import base64
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
import trio

from kits import members
from kits.manifests import manifest_of
from kits.members import ORGANISER, peer_record
from kits.waiting import until
from swarm_client.averaging.handle.options import AveragingOptions
from swarm_client.averaging.handle.supervisor import AveragingWorker
from swarm_client.control.contribution_log import ContributionCounter, ContributionLog
from swarm_client.control.status_document import SuspendReason
from swarm_client.machine.devices import Device
from swarm_client.machine.home import Home
from swarm_client.training_data.leaf_cache import LeafCache
from swarm_client.volunteer.context import VolunteerContext, VolunteerOptions
from swarm_client.volunteer.stage_manager import StageManager
from swarm_client.volunteer.volunteer import Volunteer
from swarm_shared.base.errors import AdmissionError, NetworkError
from swarm_shared.base.memory import StageMemory
from swarm_shared.base.types import Generation, PeerId, StageIndex
from swarm_shared.identity.invite import Invite
from swarm_shared.identity.keys import Identity
from swarm_shared.identity.signed_manifest import run_id_of, sign_manifest
from swarm_shared.network import FramedStream, FrameLimits, Node, open_node
from swarm_shared.protocol import (
    CONTROL_PROTOCOL,
    CertificateRenewed,
    CoordinatorMessage,
    Goodbye,
    Heartbeat,
    Hello,
    Leaving,
    Refused,
    Roster,
    Welcome,
    client_messages,
    encode,
    parse,
)
from swarm_shared.run.manifest import StageRange
from swarm_shared.transfer.source import TransferSource
from swarm_shared.transfer.transfer import fetch

LIMITS = FrameLimits(max_header_bytes=2**20)
SMALL = StageMemory(device_bytes=1_000_000, comfortable_bytes=1_000_000, host_bytes=1_000_000)
MANIFEST = manifest_of(
    organiser=ORGANISER.peer_id,
    stages=(StageRange(first_layer=0, end_layer=1, memory=SMALL, work_flops=1.0),),
    training={"steps": 1, "evaluation_microbatches": 0},
)
RUN = run_id_of(MANIFEST)


def certificate(
    peer: PeerId, seconds: float = 3600.0, signer: Identity = ORGANISER, ahead_seconds: float = 0.0
) -> str:
    now = time.time() + ahead_seconds
    return members.certificate(peer, RUN, signer, now=now, seconds=seconds)


class Script:
    """The coordinator: welcomes, and then says what the test wants it to."""

    def __init__(self) -> None:
        self.hellos: list[Hello] = []
        self.streams: list[FramedStream] = []
        self.beats = 0
        self.manifest = MANIFEST
        """What the next welcome has."""
        self.ahead_seconds = 0.0
        """Of the coordinator's clock, to that of the volunteer."""
        self.refuse = False
        """Whether it hangs up on whoever comes."""
        self.paused: list[bool] = []
        """As each heartbeat said it."""
        self.heard: list[list[Heartbeat]] = []
        """By session."""
        self.lets_go = True
        """Whether it agrees when a volunteer asks to leave."""
        self.leaving = 0
        """How often one has asked."""
        self.ended = 0
        """Sessions whose end it has noticed."""

    async def handle(self, stream: FramedStream) -> None:
        try:
            await self._converse(stream)
        finally:
            self.ended += 1

    async def _converse(self, stream: FramedStream) -> None:
        frame = await stream.receive()
        if self.refuse:
            await stream.reset()
            return
        hello = parse(client_messages, frame.header)
        assert isinstance(hello, Hello)
        welcome = Welcome(
            generation=Generation(1),
            certificate=certificate(stream.remote, ahead_seconds=self.ahead_seconds),
            manifest=base64.b64encode(sign_manifest(ORGANISER, self.manifest)).decode(), stages=(),
            keep=True,
        )  # fmt: skip
        await stream.send(encode(welcome))
        self.streams.append(stream)
        self.hellos.append(hello)
        heard: list[Heartbeat] = []
        self.heard.append(heard)
        while True:
            frame = await stream.receive()
            message = parse(client_messages, frame.header)
            if isinstance(message, Heartbeat):
                self.beats += 1
                self.paused.append(message.paused)
                heard.append(message)
            elif isinstance(message, Leaving):
                self.leaving += 1
                if self.lets_go:
                    await stream.send(encode(Goodbye(reason="as you like")))

    async def say(self, message: CoordinatorMessage) -> None:
        await self.streams[-1].send(encode(message))

    async def sessions(self, count: int, within_seconds: float = 10.0) -> None:
        await until(lambda: len(self.hellos) >= count, within_seconds)


class Scene:
    def __init__(self, script: Script, volunteer: Volunteer, ended: list[BaseException]) -> None:
        self.script, self.volunteer, self.ended = script, volunteer, ended
        self.done = False
        """It is attached no more, and will not be."""

    @property
    def certificate(self) -> str:
        assert self.volunteer.membership is not None
        return self.volunteer.membership.certificate

    async def until(self, true: object) -> None:
        assert callable(true)
        with trio.fail_after(10):
            while not true():
                await trio.sleep(0.02)


@asynccontextmanager
async def scene(
    tmp_path: Path, long_pause_seconds: float = 600.0, self_test_seconds: float = 60.0
) -> AsyncIterator[Scene]:
    script, ended = Script(), []
    home = Home.create(tmp_path / "home")
    async with open_node(ORGANISER, ["/ip4/127.0.0.1/tcp/0"]) as coordinator:
        coordinator.serve(CONTROL_PROTOCOL, script.handle, LIMITS, public=True)
        invite = Invite(
            coordinator=ORGANISER.peer_id, addresses=coordinator.addresses[:1], run_id=RUN,
            organiser=ORGANISER.peer_id,
        )  # fmt: skip
        identity = Identity.generate()
        async with (
            open_node(identity, ["/ip4/127.0.0.1/tcp/0"]) as node,
            trio.open_nursery() as nursery,
        ):
            options = VolunteerOptions(
                Device("cpu", "a test", 2**27), 1, None, None,
                long_pause_seconds=long_pause_seconds, self_test_seconds=self_test_seconds,
            )  # fmt: skip
            context = VolunteerContext(
                identity, invite, home, node, options, ContributionCounter(ContributionLog()),
                LeafCache(home.data_folder(RUN), 2**20), lambda size_bytes: None,
                lambda line: None, nursery,
            )  # fmt: skip
            volunteer = Volunteer(context, AveragingWorker(AveragingOptions(home=home.path)))

            async def attached() -> None:
                try:
                    await volunteer.run()
                except AdmissionError as error:
                    ended.append(error)
                found.done = True

            found = Scene(script, volunteer, ended)
            nursery.start_soon(attached)
            await script.sessions(1)
            # The answer to its hello may be on its way still.
            await found.until(lambda: volunteer.membership is not None or found.done)
            yield found
            nursery.cancel_scope.cancel()


async def test_a_newer_certificate_is_shown_from_then_on_without_a_new_session(
    tmp_path: Path,
) -> None:
    async with scene(tmp_path) as s:
        newer = certificate(s.volunteer.node.peer_id, seconds=7200)
        await s.script.say(CertificateRenewed(certificate=newer))
        await s.until(lambda: s.certificate == newer)
        assert s.volunteer.member is not None
        assert s.volunteer.member.pipeline.links.member.membership.now.certificate == newer
        beats = s.script.beats
        await s.until(lambda: s.script.beats > beats)
        assert len(s.script.hellos) == 1


async def test_after_every_loss_of_the_coordinator_everything_is_sent_again(
    tmp_path: Path,
) -> None:
    async with scene(tmp_path) as s:
        coordinator = ORGANISER.peer_id
        for session in range(1, 3):
            await s.script.sessions(session)
            await s.until(lambda: len(s.script.heard[-1]) >= 3)
            first, *later = s.script.heard[-1]
            assert (first.microbatches_per_second, first.up_bytes_per_second) == (0.0, 0.0)
            assert [path.remote for path in first.changed_paths] == [coordinator]
            assert coordinator in {link.remote for link in first.changed_links}
            assert all(beat.microbatches_per_second is None for beat in later)
            await s.script.streams[-1].reset()


async def test_a_certificate_that_fails_is_not_taken_and_another_is_fetched(
    tmp_path: Path,
) -> None:
    async with scene(tmp_path) as s:
        me = s.volunteer.node.peer_id
        wrong = (
            certificate(Identity.generate().peer_id),
            certificate(me, signer=Identity.generate()),
            certificate(me, seconds=-1000.0),
            "?",
        )
        for number, bad in enumerate(wrong, start=2):
            held = s.certificate
            await s.script.say(CertificateRenewed(certificate=bad))
            await s.script.sessions(number)
            await s.until(lambda held=held: s.certificate != held)
            assert s.certificate not in wrong
        assert s.ended == []


@pytest.mark.parametrize("ahead_seconds", [-7200.0, 7200.0])
async def test_a_machine_whose_clock_is_wrong_takes_part_by_the_clock_of_the_coordinator(
    ahead_seconds: float, tmp_path: Path
) -> None:
    async with scene(tmp_path) as s:
        run, other = s.volunteer.context.invite.run_id, Identity.generate().peer_id
        shown = certificate(other, ahead_seconds=ahead_seconds)
        with pytest.raises(AdmissionError):
            s.volunteer._gate.check(other, run, shown)
        s.script.ahead_seconds = ahead_seconds
        await s.script.streams[-1].reset()
        await s.script.sessions(2)
        await s.until(lambda: abs(s.volunteer.context.clock() - time.time()) > 7000)
        s.volunteer._gate.check(other, run, shown)
        assert s.ended == []


async def test_a_stage_ends_before_another_manifest_of_the_run_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which may have fewer stages."""
    async with scene(tmp_path) as s:
        member = s.volunteer.member
        assert member is not None
        used: list[int] = []

        async def drop(_: StageManager) -> None:
            await trio.lowlevel.checkpoint()
            used.append(member.membership.manifest.training.steps)

        monkeypatch.setattr(StageManager, "drop", drop)
        longer = MANIFEST.training.model_copy(update={"steps": 2})
        s.script.manifest = MANIFEST.model_copy(update={"training": longer})
        await s.script.streams[-1].reset()
        await s.until(lambda: member.membership.manifest == s.script.manifest)
        assert used == [1]


async def test_a_wanted_stage_that_the_run_does_not_have_does_not_fit(tmp_path: Path) -> None:
    async with scene(tmp_path) as s:
        s.volunteer.context.options.wanted_stage = StageIndex(MANIFEST.stage_count)
        s.volunteer.context.options.shortage.offer_fell()
        await s.until(lambda: s.volunteer.suspended is not None)
        assert s.volunteer.suspended is not None
        assert s.volunteer.suspended.reason is SuspendReason.MEMORY_SHORT


@asynccontextmanager
async def stranger_with(s: Scene) -> AsyncIterator[Node]:
    """A member that is connected to the volunteer and fetches from it."""
    async with open_node(Identity.generate(), ["/ip4/127.0.0.1/tcp/0"]) as node:
        await node.connect(s.volunteer.node.peer_id, s.volunteer.node.addresses)
        yield node


async def refusal(s: Scene, node: Node, folder: Path) -> str:
    """Why the volunteer gives this member nothing."""
    source = TransferSource(s.volunteer.node.peer_id, s.volunteer.node.addresses)
    with pytest.raises(NetworkError) as caught:
        await fetch(
            node, [source], "state/1/0", 10, "0" * 64, folder / "x", certificate(node.peer_id), RUN
        )
    return str(caught.value)


def roster(*nodes: Node, revoked: tuple[PeerId, ...] = ()) -> Roster:
    return Roster(
        serial=1, revoked=revoked,
        peers=tuple(
            peer_record(
                node.peer_id, addresses=node.addresses, certificate=certificate(node.peer_id)
            )
            for node in nodes
        ),
    )  # fmt: skip


async def test_links_with_a_revoked_peer_end_at_once_and_it_is_served_nothing_more(
    tmp_path: Path,
) -> None:
    async with scene(tmp_path) as s, stranger_with(s) as good, stranger_with(s) as bad:
        await s.script.say(roster(good, bad))
        await s.until(lambda: bad.peer_id in s.volunteer.roster)
        assert "there is no state/1/0 here" in await refusal(s, bad, tmp_path)
        await s.script.say(roster(good, revoked=(bad.peer_id,)))
        await until(lambda: not bad.is_connected(s.volunteer.node.peer_id), 5)
        assert s.volunteer.node.is_connected(good.peer_id)
        assert "has revoked" in await refusal(s, bad, tmp_path)
        assert "there is no state/1/0 here" in await refusal(s, good, tmp_path)
        # Reinstated, it is served again.
        await s.script.say(roster(good, bad))
        await s.until(lambda: bad.peer_id in s.volunteer.roster)
        assert "there is no state/1/0 here" in await refusal(s, bad, tmp_path)


async def test_what_was_revoked_stays_so_while_the_coordinator_is_away(tmp_path: Path) -> None:
    async with scene(tmp_path) as s, stranger_with(s) as bad:
        await s.script.say(roster(revoked=(bad.peer_id,)))
        await s.until(lambda: s.volunteer.roster.is_revoked(bad.peer_id))
        await s.script.streams[-1].reset()
        await s.until(lambda: s.volunteer.attachment.session is None)
        assert "has revoked" in await refusal(s, bad, tmp_path)


async def test_a_volunteer_that_is_banned_ends_with_the_reason(tmp_path: Path) -> None:
    async with scene(tmp_path) as s:
        reason = "the organiser has banned this peer from the run: it cheats"
        await s.script.say(Refused(code="admission", reason=reason))
        await s.until(lambda: s.ended)
        assert str(s.ended[0]) == reason
        assert len(s.script.hellos) == 1


async def test_a_volunteer_that_is_refused_for_some_time_comes_back_after_it(
    tmp_path: Path,
) -> None:
    async with scene(tmp_path) as s:
        said: list[str] = []
        s.volunteer.attachment._report = said.append
        began = trio.current_time()
        await s.script.say(Refused(code="protocol", reason="it lost an audit", retry_seconds=2.0))
        await s.script.sessions(2)
        assert trio.current_time() - began >= 2.0
        assert [line for line in said if "it lost an audit" in line] == [
            "the run refuses this volunteer: it lost an audit; trying again in 2 s"
        ]


# ---------------------------------------------------------------- self-tests

TESTABLE = Refused(code="protocol", reason="it lost an audit", retry_seconds=3600.0, self_test=True)


def processes_of_self_tests(s: Scene) -> list[psutil.Process]:
    """The compute processes besides the spare one."""
    log = s.volunteer.context.home.log_folder / "self-test.log"
    return [
        child
        for child in psutil.Process().children()
        if any(Path(f"/proc/{child.pid}/fd/{n}").resolve() == log.resolve() for n in (1, 2))
    ]


async def test_a_volunteer_that_passes_its_self_test_says_so_in_its_next_hello(
    tmp_path: Path,
) -> None:
    async with scene(tmp_path, self_test_seconds=0.5) as s:
        said: list[str] = []
        s.volunteer.attachment._report = said.append
        await s.script.say(TESTABLE)
        await s.script.sessions(2, within_seconds=60.0)
        assert [hello.self_tested for hello in s.script.hellos] == [False, True]
        assert said[0] == "the run refuses this volunteer: it lost an audit"
        assert processes_of_self_tests(s) == []


async def test_a_pause_ends_a_self_test_at_once_and_it_begins_anew_after_it(tmp_path: Path) -> None:
    async with scene(tmp_path, self_test_seconds=3600.0) as s:
        await s.script.say(TESTABLE)
        await s.until(lambda: processes_of_self_tests(s))
        s.volunteer.suspend(SuspendReason.PAUSED_BY_USER)
        await s.until(lambda: not processes_of_self_tests(s))
        await s.until(lambda: s.volunteer.pause.over.statistics().tasks_waiting)
        s.volunteer.resume()
        await s.until(lambda: processes_of_self_tests(s))
        s.volunteer.leave()
        await s.until(lambda: s.done)
        assert processes_of_self_tests(s) == []
        assert len(s.script.hellos) == 1
