"""The coordinator's shell with real nodes over loopback, a real database and scripted clients."""

from __future__ import annotations

import base64
import json
import os
import signal
import time
from collections.abc import Awaitable
from pathlib import Path

import pytest
import trio

from kits.coordinator.commands import Started
from kits.coordinator.coordinator_lab import lasting_crew
from kits.coordinator.leaves import fetch_leaf
from kits.coordinator.shell_world import (
    LINK,
    Volunteer,
    checkpoint_of,
    client,
    crew_of,
    hello_for,
    loss_of,
    make_run,
    receipt_for,
    served,
    snapshot_content,
    train_to_the_end,
)
from kits.waiting import until
from swarm_coordinator.core.events import (
    Ban,
    Command,
    Event,
    HeldAccountRecord,
    HeldTimeRecord,
    MessageReceived,
    PeerAttached,
)
from swarm_coordinator.core.state.run import RunState
from swarm_coordinator.durability.run_files import load_manifest
from swarm_coordinator.run_dir.checkpoint_files import CheckpointFolder
from swarm_coordinator.run_dir.folder import RunFolder
from swarm_coordinator.server import control_protocol, coordinator
from swarm_coordinator.server.event_queue import EventQueue
from swarm_coordinator.server.sessions import MAX_OUTBOX_BYTES, ClientSessions
from swarm_coordinator.simulator.transcripts import simulated_transcript
from swarm_coordinator.storage.admission_rows import read_admission
from swarm_coordinator.storage.history import history
from swarm_shared.base.errors import AdmissionError, LinkClosed, NetworkError
from swarm_shared.base.types import Generation, MicrobatchIndex, StageIndex, Step, Version
from swarm_shared.data.merkle import LEAF_BYTES
from swarm_shared.data.sample_ranges import LeafId
from swarm_shared.identity.credentials import Receipt, check_certificate
from swarm_shared.identity.invite import Invite
from swarm_shared.identity.keys import Identity
from swarm_shared.identity.signed_manifest import open_manifest
from swarm_shared.network import FramedStream, FrameLimits, open_node
from swarm_shared.protocol import (
    Goodbye,
    Heartbeat,
    MaskRequest,
    NotCounted,
    Receipts,
    Refused,
    Welcome,
)
from swarm_shared.protocol.versions import VersionRange
from swarm_shared.transfer.source import TransferSource
from swarm_shared.transfer.transfer import fetch

BEAT = Heartbeat(microbatches_per_second=1.0, queued=0)


def let_checkpoints_keep_up(folder: RunFolder, volunteers: list[Volunteer]) -> None:
    """These volunteers train a step in milliseconds; a newer checkpoint replaces one under way."""

    async def wait(step: Step) -> None:
        if step == 3:
            await checkpoint_of(folder, 2)

    volunteers[0].before_closing = wait


async def welcomed(invite: Invite, **changes: object) -> Welcome | Refused:
    async with client(invite) as one:
        return await one.hello(**changes)


async def test_a_run_is_trained_to_its_end_and_everything_is_durable(folder: RunFolder) -> None:
    async with served(folder) as run:
        volunteers = crew_of(run.invite, run.manifest, folder.path)
        let_checkpoints_keep_up(folder, volunteers)
        await run.train(*volunteers)
    assert all(v.goodbyes[0].finished for v in volunteers)
    found = history(folder.database)
    assert [(s.step, s.loss) for s in found.steps] == [(n, loss_of(n)) for n in range(1, 5)]
    assert found.restored.finished
    assert found.heldout_loss == loss_of(5)
    assert {(c.peer, c.stage, c.microbatches) for c in found.contributions} == {
        (v.identity.peer_id, v.stage, 8) for v in volunteers
    }
    assert set(found.names.values()) >= {"volunteer-0", "volunteer-1"}
    assert {(k.reporter, k.sent) for k in found.links if k.protocol == LINK} == {
        (v.identity.peer_id, 10) for v in volunteers
    }
    assert any(k.reporter == run.invite.coordinator and k.received for k in found.links)
    checkpoints = CheckpointFolder(folder.checkpoints, run.invite.run_id, 2, keep=3)
    assert checkpoints.versions() == [4, 2]
    assert checkpoints.latest_valid() == found.restored.checkpoint
    content = checkpoints.stage_files(4)[1].read_bytes()
    assert content == snapshot_content(run.manifest, 4, 1)
    status = json.loads(folder.status.read_text())
    assert (status["phase"], status["running"], status["version"]) == ("finished", False, 4)
    assert {link["protocol"] for link in status["links"]} >= {"/test/link/1"}
    assert any("holds stage 0" in line for line in run.lines)


async def test_a_welcome_carries_a_certificate_and_the_manifest_that_hold(
    folder: RunFolder,
) -> None:
    identity = Identity.generate()
    async with served(folder) as run, client(run.invite, identity) as one:
        answer = await one.join()
    certificate = check_certificate(
        base64.b64decode(answer.certificate), run.invite.run_id, run.invite.organiser,
        time.time(), identity.peer_id,
    )  # fmt: skip
    assert certificate.role == "volunteer"
    assert open_manifest(base64.b64decode(answer.manifest), run.invite.organiser) == run.manifest


async def test_a_client_that_attaches_again_and_again_is_to_wait(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_protocol, "ATTACH_BURST", 3.0)
    identity = Identity.generate()

    async def attached(invite: Invite, identity: Identity) -> Welcome | Refused:
        async with client(invite, identity) as one:
            return await one.hello()

    async with served(folder) as run:
        answers = [await attached(run.invite, identity) for _ in range(5)]
        assert [answer.kind for answer in answers] == ["welcome"] * 3 + ["refused"] * 2
        refused = answers[-1]
        assert isinstance(refused, Refused)
        assert 0 < (refused.retry_seconds or 0) <= 5
        assert sum("admitted" in line for line in run.lines) == 3
        other = await attached(run.invite, Identity.generate())
        assert other.kind == "welcome"  # others need not wait


async def test_an_incompatible_client_is_refused_with_the_reason(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", admission__mode="token")
    async with served(folder) as run:
        assert run.invite.token == folder.admission_token()
        for changes, code, reason in (
            ({"token": "wrong"}, "admission", "token is not the right one"),
            ({"token": None}, "admission", "the invite carries no token"),
            (
                {"protocols": VersionRange(oldest=0, newest=0), "software": "0.0.9"},
                "version",
                "(swarmtrain 0.0.9) version 0: update swarmtrain on this machine",
            ),
            (
                {"protocols": VersionRange(oldest=2, newest=3), "software": "0.9.0"},
                "version",
                "(swarmtrain 0.9.0) versions 2 to 3: install swarmtrain 0.1.0 on this machine, or "
                "ask the organiser to update",
            ),
            ({"run": "cd" * 32}, "admission", "not cdcdcdcdcdcd"),
        ):
            answer = await welcomed(run.invite, **changes)
            assert isinstance(answer, Refused)
            assert answer.code == code
            assert reason in answer.reason
        wider = VersionRange(oldest=0, newest=9)
        assert isinstance(await welcomed(run.invite, protocols=wider), Welcome)


async def test_the_first_message_must_be_hello(folder: RunFolder) -> None:
    async with served(folder) as run, client(run.invite) as one:
        await one.send(BEAT)
        assert "must be hello" in (await one.until(Refused)).reason


async def test_a_silent_connection_is_closed(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_protocol, "HELLO_SECONDS", 0.2)
    async with served(folder) as run, client(run.invite) as one:
        await one.until_closed()


def receipt_of(signer: Identity, run: str) -> str:
    cell = Step(1), MicrobatchIndex(0), StageIndex(0)
    receipt = Receipt(
        run=run, generation=Generation(1), step=cell[0], microbatch=cell[1], stage=cell[2],
        peer=signer.peer_id, samples=1, tokens=1,
        transcript=simulated_transcript(*cell, StageIndex(1)),
    )  # fmt: skip
    return receipt_for(signer, receipt)


def forged_receipt(named: Identity, run: str) -> str:
    raw = bytearray(base64.b64decode(receipt_of(named, run)))
    raw[-1] ^= 1  # in the signature
    return base64.b64encode(bytes(raw)).decode()


async def test_one_large_message_of_a_session_waits_for_the_core_at_a_time(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound, waits, stands = coordinator.Coordinator._handle_event, trio.Event(), trio.Event()
    put: list[int] = []

    async def slow(self: coordinator.Coordinator, event: Event) -> bool:
        if isinstance(event, MessageReceived):
            waits.set()
            await stands.wait()
        return await sound(self, event)

    def counted(self: EventQueue, event: Event) -> Awaitable[list[Command]]:
        put.append(1)
        return put_and_wait(self, event)

    put_and_wait = EventQueue.put_and_wait
    monkeypatch.setattr(coordinator.Coordinator, "_handle_event", slow)
    monkeypatch.setattr(EventQueue, "put_and_wait", counted)
    large = NotCounted(step=Step(1), microbatches=(MicrobatchIndex(0),) * 10_000)
    async with served(folder) as run, client(run.invite) as one:
        await one.join()
        for _ in range(3):
            await one.send(large)
        await one.send(MaskRequest(request=7, step=Step(1), microbatch=MicrobatchIndex(0)))
        await waits.wait()
        with trio.move_on_after(0.1):
            await until(lambda: len(put) > 1)
        assert len(put) == 1
        stands.set()
        while (await one.receive()).kind != "mask":
            pass
    assert len(put) == 3


async def test_one_clients_nonsense_ends_its_session_only(folder: RunFolder) -> None:
    named = Identity.generate()
    async with (
        served(folder) as run,
        client(run.invite) as honest,
        client(run.invite, named) as forger,
        client(run.invite) as babbler,
    ):
        for one in (honest, forger, babbler):
            await one.join()
        await forger.send(Receipts(receipts=(forged_receipt(named, run.invite.run_id),)))
        answer = await forger.until(Refused)
        assert (answer.code, "signature" in answer.reason) == ("protocol", True)
        await forger.until_closed()
        await babbler.stream.send(b'{"kind": "nonsense"}')
        await babbler.until_closed()
        with pytest.raises(LinkClosed):
            await forger.receive()
        # The honest one is still heard: its request is answered.
        await honest.send(MaskRequest(request=7, step=Step(1), microbatch=MicrobatchIndex(0)))
        while (await honest.receive()).kind != "mask":
            pass


async def test_a_peer_on_whose_message_the_core_fails_is_refused_for_now_and_the_run_ends_as_ever(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failure is put into the core: no message is known on which it fails."""
    attacker = Identity.generate()
    sound = coordinator.transition

    def fails(run: RunState, event: Event, now: float) -> list[Command]:
        if isinstance(event, PeerAttached) and event.peer == attacker.peer_id:
            run.history.version = Version(99)  # half-changed
            raise OverflowError("a number that no list can have")
        return sound(run, event, now)

    refusals: list[Refused] = []

    async def attack(step: Step) -> None:
        if step == 2 and not refusals:
            async with client(run.invite, attacker) as one:
                await one.send(hello_for(run.invite))
                try:
                    answer = await one.receive()
                except LinkClosed:
                    return
                assert isinstance(answer, Refused)
                refusals.append(answer)
        elif step == 3:
            await checkpoint_of(folder, 2)

    monkeypatch.setattr(coordinator, "transition", fails)
    async with served(folder) as run:
        volunteers = lasting_crew(run.invite, run.manifest, folder.path)
        volunteers[0].before_closing = attack
        async with trio.open_nursery() as nursery:
            for volunteer in volunteers:
                nursery.start_soon(volunteer.come_back)
        await run.ended.wait()
        text = f"failed on PeerAttached of {attacker.peer_id}, which is refused for"
        assert [line for line in run.lines if text in line]
        assert not run.store.read(read_admission).bans, "another peer may have caused it"
    [refusal] = refusals
    assert refusal.code == "protocol"
    assert refusal.retry_seconds == pytest.approx(60, abs=30)
    found = history(folder.database)
    assert [(s.step, s.loss) for s in found.steps] == [(n, loss_of(n)) for n in range(1, 5)]
    assert found.restored.finished
    assert found.restored.generation == 2


async def test_a_receipt_of_another_run_is_refused(folder: RunFolder) -> None:
    other = receipt_of(Identity.generate(), "cd" * 32)
    async with served(folder) as run:
        answer = await welcomed(run.invite, receipts=(other,))
        assert isinstance(answer, Refused)
        assert "not of this one" in answer.reason


async def test_a_peer_that_attaches_again_closes_its_older_session(folder: RunFolder) -> None:
    identity = Identity.generate()
    async with served(folder) as run, client(run.invite, identity) as older:
        await older.join(name="twice")
        async with client(run.invite, identity) as newer:
            await newer.join(name="twice")
            await older.until_closed()
            await newer.send(BEAT)
            while True:
                await trio.sleep(0.05)
                status = json.loads(folder.status.read_text())
                if status["sessions"] == 1:
                    break
            assert [p["name"] for p in status["peers"]] == ["twice"]


async def test_a_client_that_does_not_read_is_cut_off() -> None:
    sessions = ClientSessions()
    async with open_node(Identity.generate(), ["/ip4/127.0.0.1/tcp/0"]) as here:
        cut: list[str | None] = []
        done = trio.Event()

        async def serve_one(stream: FramedStream) -> None:
            session = sessions.open(stream.remote, stream)
            sessions.make_current(session.number, session.peer)
            with session.scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(session.write_all)
                    while session.disconnect_reason is None:
                        session.send(b"x" * 2**20)
                        await trio.lowlevel.checkpoint()
            cut.append(session.disconnect_reason)
            sessions.ended(session)
            done.set()

        here.serve("/test/1", serve_one, FrameLimits())
        async with open_node(Identity.generate()) as there:
            limits = FrameLimits(max_header_bytes=MAX_OUTBOX_BYTES)
            await there.open_stream(here.peer_id, "/test/1", limits, here.addresses)
            await done.wait()
    assert cut == ["it does not read what it is sent"]
    assert len(sessions) == 0


async def test_a_finished_run_is_served_again_until_it_is_stopped(
    folder: RunFolder, tmp_path: Path
) -> None:
    async with served(folder) as run:
        await run.train()
    identity = Identity.generate()
    async with served(folder) as run, client(run.invite, identity) as one:
        welcome = await one.join()
        assert welcome.finished
        assert (await one.until(Goodbye)).finished
        await one.until_closed()
        record = history(folder.database).restored.checkpoint
        assert record is not None
        content = snapshot_content(run.manifest, 4, 1)
        await fetch(
            one.node, [TransferSource(run.invite.coordinator, run.invite.addresses)],
            "checkpoint/4/1", len(content), record.stages[1].sha256, tmp_path / "model",
            welcome.certificate, run.invite.run_id,
        )  # fmt: skip
        assert (tmp_path / "model").read_bytes() == content
        status = json.loads(folder.status.read_text())
        assert (status["phase"], status["running"]) == ("finished", True)
        os.kill(os.getpid(), signal.SIGINT)
        await run.ended.wait()
    assert run.lines == [], "nothing is under way that a stop would have to finish"


async def test_data_is_served_to_members_only(folder: RunFolder, tmp_path: Path) -> None:
    identity = Identity.generate()
    async with served(folder) as run, client(run.invite, identity) as one:
        welcome = await one.join()
        shard = run.manifest.data.shards[0]
        source = TransferSource(run.invite.coordinator, run.invite.addresses)
        first = LeafId(0, 0)
        found = await fetch_leaf(one.node, run.invite, run.manifest, welcome.certificate, first)
        assert found == (folder.data / shard.name).read_bytes()[:LEAF_BYTES]
        for wanted in (LeafId(0, 2**28 - 1), LeafId(len(run.manifest.data.shards), 0)):
            with pytest.raises(AdmissionError, match="there is no"):
                await fetch_leaf(one.node, run.invite, run.manifest, welcome.certificate, wanted)
        for item in (
            f"data/{shard.name}",
            *("data/../organiser.key", "organiser.key", "checkpoint/1/../../x"),
        ):
            with pytest.raises(NetworkError, match="there is no"):
                await fetch(
                    one.node, [source], item, 1, "0" * 64, tmp_path / "stolen",
                    welcome.certificate, run.invite.run_id,
                )  # fmt: skip
        async with open_node(Identity.generate()) as stranger:
            with pytest.raises(AdmissionError, match="shows the certificate of"):
                await fetch_leaf(stranger, run.invite, run.manifest, welcome.certificate, first)


async def test_a_taken_port_is_one_clear_sentence(folder: RunFolder, tmp_path: Path) -> None:
    async with served(folder) as run:
        port = int(run.invite.addresses[0].rsplit("/", 1)[1])
        assert folder.remembered_port() == port
        other = make_run(tmp_path / "other")
        with pytest.raises(NetworkError, match=f"Port {port} .* is in use"):
            async with served(other, port=port):
                raise AssertionError("it must not serve")


async def test_a_second_start_listens_on_the_port_that_invites_name(folder: RunFolder) -> None:
    async with served(folder) as run:
        first = run.invite
    async with served(folder) as run:
        assert run.invite == first


async def test_a_checkpoint_that_cannot_be_stored_does_not_stop_the_training(
    folder: RunFolder,
) -> None:
    # A file where the checkpoint's folder has to go: no disk takes it, not even as root.
    (folder.checkpoints / "step-00000002.partial").write_text("in the way")
    async with served(folder) as run:
        await run.train()
    notes = [n.text for n in history(folder.database).notes]
    failed = [n for n in notes if "checkpoint of step 2 could not be stored" in n]
    assert len(failed) == 1
    checkpoints = CheckpointFolder(folder.checkpoints, run.invite.run_id, 2, keep=3)
    assert checkpoints.versions() == [4]


async def test_the_run_goes_on_after_ctrl_c_where_it_stopped(folder: RunFolder) -> None:
    async with served(folder) as run:
        volunteers = crew_of(run.invite, run.manifest, folder.path)

        async def stop_after_three_steps() -> None:
            await until(lambda: len(history(folder.database).steps) >= 3)
            os.kill(os.getpid(), signal.SIGINT)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(stop_after_three_steps)
            await run.train(*volunteers)
    stopped_at = history(folder.database).restored
    assert stopped_at.version >= 3
    assert stopped_at.checkpoint is not None
    assert stopped_at.checkpoint.version == stopped_at.version
    assert not volunteers[0].goodbyes[0].finished
    async with served(folder) as run:
        await run.train()
    found = history(folder.database)
    assert found.restored.finished
    assert [s.loss for s in found.steps] == [loss_of(n) for n in range(1, 5)]


async def test_a_restarted_coordinator_knows_the_states_digests_and_who_is_refused(
    folder: RunFolder,
) -> None:
    refused = Identity.generate()

    async def no_further(step: Step) -> None:
        if step == 3:
            await trio.sleep_forever()

    async with served(folder) as run:
        volunteers = crew_of(run.invite, run.manifest, folder.path)

        async def end_after_two_steps() -> None:
            # What the members have reported follows the step by some milliseconds.
            while not (found := run.store.restore()).state_digests or found.version < 2:
                await trio.sleep(0.02)
            account = HeldAccountRecord(refused.peer_id, 0.0, 1800.0, "it lost an audit")
            await run.store.write(HeldTimeRecord((account,)))
            run.scope.cancel()

        volunteers[0].before_closing = no_further
        async with trio.open_nursery() as nursery:
            nursery.start_soon(end_after_two_steps)
            await train_to_the_end(volunteers)
    async with served(folder) as run:
        version = run.store.restore().version
        claim = {"stage": 0, "version": version}
        for digest, kept in (("made up", False), ("d", True)):
            answer = await welcomed(run.invite, **claim, digest=digest)
            assert isinstance(answer, Welcome)
            assert answer.keep is kept
        async with client(run.invite, refused) as one:
            answer = await one.hello()
        assert isinstance(answer, Refused)
        assert "it lost an audit" in answer.reason
        assert 1700.0 < (answer.retry_seconds or 0.0) <= 1800.0


async def test_a_run_whose_database_was_lost_continues_from_its_checkpoint(
    folder: RunFolder,
) -> None:
    async with served(folder) as run:
        volunteers = crew_of(run.invite, run.manifest, folder.path)
        let_checkpoints_keep_up(folder, volunteers)

        async def end_at_the_checkpoint() -> None:
            await until(lambda: history(folder.database).restored.checkpoint is not None)
            run.scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(end_at_the_checkpoint)
            await train_to_the_end(volunteers)
    for path in folder.path.glob("coordinator.sqlite*"):
        path.unlink()
    async with served(folder) as run:
        restored = run.store.restore()
        assert restored.version in (2, 4)
        assert restored.checkpoint is not None
        assert any("the database is new" in line for line in run.lines)


async def test_a_damaged_checkpoint_is_named_and_an_older_one_used(folder: RunFolder) -> None:
    async with served(folder) as run:
        volunteers = crew_of(run.invite, run.manifest, folder.path)
        let_checkpoints_keep_up(folder, volunteers)
        await run.train(*volunteers)
    checkpoints = CheckpointFolder(folder.checkpoints, run.invite.run_id, 2, keep=3)
    with checkpoints.stage_files(4)[0].open("r+b") as file:
        file.write(b"damage")
    async with served(folder) as run:
        assert any("step-00000004" in line and "damaged" in line for line in run.lines)
        status = json.loads(folder.status.read_text())
        assert status["checkpoint_version"] == 2


async def test_text_from_volunteers_cannot_control_the_organisers_terminal(
    folder: RunFolder,
) -> None:
    async with served(folder) as run:
        name = "eve\x1b[2J\r\nstep 9 applied"
        assert isinstance(await welcomed(run.invite, name=name), Welcome)
    assert any("eve\N{REPLACEMENT CHARACTER}[2J" in line for line in run.lines)
    assert all(line.isprintable() for line in run.lines)


@pytest.mark.process
async def test_a_second_ctrl_c_ends_at_once(folder: RunFolder) -> None:
    with Started(folder) as started:
        invite = Invite.decode(await trio.to_thread.run_sync(started.invite))
        volunteers = crew_of(invite, load_manifest(folder), folder.path)
        in_close = trio.Event()

        async def never(step: Step) -> None:
            if step == 3:
                in_close.set()
                await trio.sleep_forever()

        volunteers[0].before_closing = never
        async with trio.open_nursery() as nursery:
            nursery.start_soon(train_to_the_end, volunteers)
            await in_close.wait()
            started.process.send_signal(signal.SIGINT)
            await trio.to_thread.run_sync(started.until, "stopping")
            assert await trio.to_thread.run_sync(started.stop) == 130
            nursery.cancel_scope.cancel()
    assert history(folder.database).restored.version == 2


@pytest.mark.parametrize("of", ["a volunteer", "the organiser"])
async def test_a_ban_by_the_runs_own_rules_ends_no_coordinator(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, of: str
) -> None:
    """What a lost audit says can be longer than the reason of a ban; a device of the organiser's
    own can be bound to the key of the run."""
    reason = 300 * "what it computed "

    def bans(state: RunState, event: Event, now: float) -> list[Command]:
        commands = transition(state, event, now)
        if isinstance(event, MessageReceived) and isinstance(event.message, MaskRequest):
            owner = event.peer if of == "a volunteer" else state.start.record.peer
            commands.append(Ban(owner, reason))
        return commands

    transition = coordinator.transition
    monkeypatch.setattr(coordinator, "transition", bans)
    async with served(folder) as run, client(run.invite) as one, client(run.invite) as other:
        await one.join()
        await one.send(MaskRequest(request=1, step=Step(1), microbatch=MicrobatchIndex(0)))
        if of == "a volunteer":
            refused = await one.until(Refused)
            assert "what it computed what it computed" in refused.reason
        else:
            with trio.fail_after(10):
                while not any("is this run's own coordinator" in line for line in run.lines):
                    await trio.sleep(0.02)
        await other.join()
        assert not run.ended.is_set()
