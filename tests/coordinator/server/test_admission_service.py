"""Admission at a running coordinator: real nodes over loopback, a real database, real commands."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import trio

from kits.coordinator.commands import edit
from kits.coordinator.leaves import fetch_leaf
from kits.coordinator.shell_world import Client, client, hello_for, make_run, served
from kits.peer_names import named
from kits.waiting import until
from swarm_coordinator.admission.authority import CERTIFICATE_SECONDS
from swarm_coordinator.admission.requests import (
    CreateToken,
    PeerAllowed,
    PeerBanned,
    PeerDisallowed,
    PeerUnbanned,
    Request,
    TokenRevoked,
)
from swarm_coordinator.cli.admission import submit_request
from swarm_coordinator.run_dir.folder import RunFolder
from swarm_coordinator.server import control_protocol
from swarm_coordinator.server.admin_socket import send_request
from swarm_coordinator.storage.admission_rows import read_admission
from swarm_shared.base.errors import AdmissionError, NetworkError, StorageError
from swarm_shared.base.types import PeerId
from swarm_shared.data.sample_ranges import LeafId
from swarm_shared.identity.credentials import check_certificate
from swarm_shared.identity.invite import Invite
from swarm_shared.identity.keys import Identity
from swarm_shared.protocol import (
    AddressUpdate,
    CertificateRenewed,
    Heartbeat,
    LinkPath,
    PathKind,
    Reachability,
    Refused,
    Roster,
)

WITHIN_SECONDS = 5.0
"""Seconds within which a revocation must reach all peers."""


async def order(folder: RunFolder, request: Request) -> dict[str, Any]:
    """As a command does it, in another thread as from another process."""
    return await trio.to_thread.run_sync(submit_request, folder, request)


async def tries(invite: Invite, identity: Identity, token: str | None = None) -> str:
    """Attach, and leave: "welcome", or the reason why not."""
    async with client(invite, identity) as one:
        answer = await one.hello(token=token)
    return answer.reason if isinstance(answer, Refused) else "welcome"


async def holding(one: Client, stage: int, **changes: object) -> None:
    """Hold a stage, and be in the roster."""
    await one.hold(stage, **changes)
    await one.until(Roster, lambda roster: any(r.peer == one.node.peer_id for r in roster.peers))


# ---------------------------------------------------------------- tokens


async def test_a_token_lets_in_as_many_peers_as_it_has_uses_and_no_more(
    token_run: RunFolder,
) -> None:
    async with served(token_run) as run:
        made = (await order(token_run, CreateToken(uses=2)))["details"]
        crowd = [Identity.generate() for _ in range(6)]
        answers: dict[int, str] = {}

        async def one_tries(number: int) -> None:
            answers[number] = await tries(run.invite, crowd[number], made["secret"])

        async with trio.open_nursery() as nursery:
            for number in range(len(crowd)):  # all at once
                nursery.start_soon(one_tries, number)
        let_in = [number for number, answer in answers.items() if answer == "welcome"]
        assert len(let_in) == 2
        others = {a for a in answers.values() if a != "welcome"}
        assert others == {
            "the token of this invite was used already, as often as it could be; "
            "ask the organiser for a new invite"
        }
        # Whoever is in comes back without the token, and by none of its uses.
        for number in let_in:
            assert await tries(run.invite, crowd[number]) == "welcome"


async def test_a_member_comes_back_after_a_restart_and_the_token_stays_used(
    token_run: RunFolder,
) -> None:
    anna, bert = Identity.generate(), Identity.generate()
    async with served(token_run) as run:
        secret = (await order(token_run, CreateToken(uses=1)))["details"]["secret"]
        assert await tries(run.invite, anna, secret) == "welcome"
    async with served(token_run) as run:
        assert await tries(run.invite, anna, secret) == "welcome"
        assert "was used already" in await tries(run.invite, bert, secret)


async def test_a_used_token_is_marked_before_the_peer_is_welcomed(token_run: RunFolder) -> None:
    """Else a coordinator that dies in between would let a second peer in by it."""
    async with served(token_run) as run:
        secret = (await order(token_run, CreateToken(uses=1)))["details"]["secret"]
        identity = Identity.generate()
        async with client(run.invite, identity) as one:
            await one.join(token=secret)
            book = run.store.read(read_admission)
            assert book.is_member(identity.peer_id)


async def test_a_token_expires(token_run: RunFolder) -> None:
    async with served(token_run) as run:
        made = (await order(token_run, CreateToken(expires_seconds=0.5)))["details"]
        early, late = Identity.generate(), Identity.generate()
        assert await tries(run.invite, early, made["secret"]) == "welcome"
        await until(lambda: time.time() >= made["expires_at"])
        assert "has expired" in await tries(run.invite, late, made["secret"])
        assert await tries(run.invite, early, made["secret"]) == "welcome"


async def test_revoking_a_token_ends_the_sessions_of_those_that_it_let_in(
    token_run: RunFolder,
) -> None:
    async with served(token_run) as run, AsyncExitStack() as stack:
        made = [(await order(token_run, CreateToken()))["details"] for _ in range(2)]
        anna, bert, carl = [await stack.enter_async_context(client(run.invite)) for _ in "abc"]
        await holding(anna, 0, token=made[0]["secret"])
        await holding(bert, 1, token=made[0]["secret"])
        await holding(carl, 0, token=made[1]["secret"])
        answer = await order(token_run, TokenRevoked(token=made[0]["token"]))
        assert answer["text"] == (
            f"token {made[0]['token']} is revoked; it had admitted 2 peer(s); "
            "2 sessions were ended, 1 volunteer was notified"
        )
        for one in (anna, bert):
            refused = await one.until(Refused)
            assert refused.code == "admission"
            assert "has revoked the token that let this peer in" in refused.reason
            await one.until_closed()
        revoked = {anna.node.peer_id, bert.node.peer_id}
        await carl.until(Roster, lambda roster: set(roster.revoked) == revoked)
        assert "was revoked" in await tries(run.invite, Identity.generate(), made[0]["secret"])


async def test_the_token_of_the_standing_invite_is_written_down_with_the_first_start(
    token_run: RunFolder,
) -> None:
    """Before it, the token is a file."""
    secret = token_run.admission_token()
    async with served(token_run) as run:
        assert run.invite.token == secret
        assert await tries(run.invite, Identity.generate(), secret) == "welcome"
        [standing] = run.store.read(read_admission).tokens.values()
        assert (standing.token, standing.note) == (1, "the run's standing invite")


async def test_a_revoked_standing_invite_is_not_made_again(token_run: RunFolder) -> None:
    async with served(token_run) as run:
        secret = run.invite.token
        await order(token_run, TokenRevoked(token=1))
        assert not token_run.token_file.exists()
    async with served(token_run) as run:
        assert run.invite.token is None
        assert "was revoked" in await tries(run.invite, Identity.generate(), secret)
        made = (await order(token_run, CreateToken()))["details"]
        assert made["token"] == 2
        assert await tries(run.invite, Identity.generate(), made["secret"]) == "welcome"


# ---------------------------------------------------------------- bans


async def test_a_banned_peer_is_out_within_seconds_and_all_peers_have_the_ban(
    folder: RunFolder,
) -> None:
    identity = Identity.generate()
    async with served(folder) as run, client(run.invite, identity) as bad, AsyncExitStack() as s:
        await holding(bad, 0)
        good = [await s.enter_async_context(client(run.invite)) for _ in range(2)]
        for stage, one in enumerate(good):
            await holding(one, stage)
        answer = await order(folder, PeerBanned(peer=identity.peer_id, reason="it cheats"))
        assert answer["text"] == (
            f"banned {identity.peer_id}; 1 session was ended, 2 volunteers were notified"
        )
        refused = await bad.until(Refused)
        assert refused.reason == "the organiser has banned this peer from the run: it cheats"
        await bad.until_closed()
        for one in good:
            roster = await one.until(Roster, lambda r: identity.peer_id in r.revoked)
            assert {r.peer for r in roster.peers} == {o.node.peer_id for o in good}
        # Its connection ends, too, so that nothing else of it goes on here.
        await until(lambda: not bad.node.is_connected(run.invite.coordinator), WITHIN_SECONDS)
        assert "it cheats" in await tries(run.invite, identity)
        assert any("it cheats" in line for line in run.lines)

        back = await order(folder, PeerUnbanned(peer=identity.peer_id))
        assert back["text"] == f"{identity.peer_id} is not banned any more"
        assert await tries(run.invite, identity) == "welcome"
        for one in good:
            await one.until(Roster, lambda r: not r.revoked)


async def test_a_banned_peer_gets_no_data(folder: RunFolder) -> None:
    identity = Identity.generate()
    async with served(folder) as run:
        async with client(run.invite, identity) as one:
            welcome = await one.join()
        await order(folder, PeerBanned(peer=identity.peer_id))
        async with client(run.invite, identity) as one:
            with pytest.raises(AdmissionError, match="has banned this peer"):
                await fetch_leaf(
                    one.node, run.invite, run.manifest, welcome.certificate, LeafId(0, 0)
                )


async def test_what_was_decided_while_no_coordinator_ran_holds_from_its_start_on(
    folder: RunFolder,
) -> None:
    anna, bert = Identity.generate(), Identity.generate()
    async with served(folder) as run:
        assert await tries(run.invite, anna) == "welcome"
    answer = await order(folder, PeerBanned(peer=anna.peer_id, reason="later"))
    assert answer["text"] == (
        f"banned {anna.peer_id}; no coordinator is running, so it takes effect at the next start"
    )
    never_here = Identity.generate().peer_id
    await order(folder, PeerBanned(peer=never_here))
    async with served(folder) as run, client(run.invite, bert) as one:
        assert "later" in await tries(run.invite, anna)
        await holding(one, 0)
        # Anna's certificate of the first start has not expired; the other one never had any.
        async with client(run.invite) as another:
            await holding(another, 1)
            await one.until(Roster, lambda r: r.revoked == (anna.peer_id,))


async def test_a_peer_that_is_banned_between_its_hello_and_the_core_stays_out(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The certificate is made, the ban is decided, and only then the core hears of the peer."""
    arrived, go_on = trio.Event(), trio.Event()
    check = control_protocol.ReceiptChecker.check

    async def slowly(self: control_protocol.ReceiptChecker, envelopes: Any, sender: Any) -> Any:
        arrived.set()
        await go_on.wait()
        return await check(self, envelopes, sender)

    monkeypatch.setattr(control_protocol.ReceiptChecker, "check", slowly)
    async with served(folder) as run, client(run.invite) as one:
        await one.send(hello_for(run.invite))
        await arrived.wait()
        await order(folder, PeerBanned(peer=one.node.peer_id, reason="in time"))
        go_on.set()
        answer = await one.receive()
        assert isinstance(answer, Refused)
        assert "in time" in answer.reason
        await one.until_closed()
        assert not any("was admitted" in line for line in run.lines)


async def test_nonsense_from_a_command_is_refused_and_the_run_goes_on(folder: RunFolder) -> None:
    async with served(folder) as run:
        for question, reason in (
            ({}, "not an admission request"),
            ({"do": "format the disk"}, "not an admission request"),
            ({"do": "ban", "peer": "nobody"}, "is not the peer ID"),
            ({"do": "ban", "peer": run.invite.coordinator}, "is this run's own coordinator"),
            ({"do": "unban", "peer": Identity.generate().peer_id}, "is not banned"),
            ({"do": "revoke token", "token": 7}, "there is no token 7"),
            ({"do": "create token", "uses": 0}, "greater than or equal to 1"),
            ({"do": "disallow", "peer": Identity.generate().peer_id}, "is not on the list"),
        ):
            answer = await trio.to_thread.run_sync(send_request, folder.socket, question)
            assert (answer["ok"], answer["exit_code"]) == (False, 2)
            assert reason in answer["error"]
        assert await tries(run.invite, Identity.generate()) == "welcome"


async def ban_many(folder: RunFolder, count: int) -> None:
    for _ in range(count):
        await order(folder, PeerBanned(peer=Identity.generate().peer_id, reason="x" * 200))


async def test_a_coordinator_with_a_full_disk_reports_that_the_ban_is_not_written(
    folder: RunFolder,
) -> None:
    async with served(folder) as run:
        run.store.read(lambda c: c.execute("PRAGMA max_page_count = 1").fetchall())
        with pytest.raises(StorageError, match="the disk is full"):
            await ban_many(folder, 300)
        assert await tries(run.invite, Identity.generate()) == "welcome"


# ---------------------------------------------------------------- the list


async def test_only_peers_on_the_list_are_let_in(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", admission__mode="allow-list")
    anna, bert = Identity.generate(), Identity.generate()
    await order(folder, PeerAllowed(peer=anna.peer_id))  # before the first start
    async with served(folder) as run:
        assert await tries(run.invite, anna) == "welcome"
        assert bert.peer_id in await tries(run.invite, bert)
        await order(folder, PeerAllowed(peer=bert.peer_id))
        async with client(run.invite, bert) as one:
            await one.join()
            answer = await order(folder, PeerDisallowed(peer=bert.peer_id))
            assert answer["text"] == (
                f"{bert.peer_id} is off the list; 1 session was ended, 0 volunteers were notified"
            )
            refused = await one.until(Refused)
            assert "is not on it" in refused.reason


async def test_another_mode_refuses_peers_that_the_former_one_admitted(folder: RunFolder) -> None:
    anna, bert = Identity.generate(), Identity.generate()
    async with served(folder) as run:
        for peer in (anna, bert):
            assert await tries(run.invite, peer) == "welcome"
    edit(folder, ('mode = "open"', 'mode = "allow-list"'))
    await order(folder, PeerAllowed(peer=bert.peer_id))
    async with served(folder) as run, client(run.invite, bert) as one:
        assert "not on it" in await tries(run.invite, anna)
        await holding(one, 0)
        await until_told(one, anna.peer_id)


async def until_told(one: Client, revoked: PeerId) -> None:
    """One roster more, and it names the revoked peer."""
    await one.send(
        AddressUpdate(addresses=("x",), reachability=Reachability.PUBLIC, offers_relay=False)
    )
    await one.until(Roster, lambda r: r.revoked == (revoked,))


# ---------------------------------------------------------------- certificates


async def test_a_session_goes_on_with_newer_and_newer_certificates(folder: RunFolder) -> None:
    identity = Identity.generate()
    async with (
        served(folder, renew_after_seconds=0.3) as run,
        client(run.invite, identity) as one,
        client(run.invite) as other,
    ):
        welcome = await one.join()
        await holding(other, 1)
        seen = [welcome.certificate]
        for _ in range(3):
            renewed = await one.until(CertificateRenewed)
            seen.append(renewed.certificate)
        certificates = [
            check_certificate(
                base64.b64decode(text), run.invite.run_id, run.invite.organiser, time.time(),
                identity.peer_id,
            )
            for text in seen
        ]  # fmt: skip
        # Each when it was due, and no sooner.
        for older, newer in pairwise(certificates):
            assert newer.not_before - older.not_before >= 0.3
        assert certificates[-1].expires <= time.time() + CERTIFICATE_SECONDS
        assert {c.generation for c in certificates} == {1}


@pytest.mark.parametrize("seconds", [-10_800.0, 10_800.0])
async def test_certificates_go_on_from_the_start_when_the_coordinators_clock_is_set(
    seconds: float, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    identity, now = Identity.generate(), time.time
    async with served(folder, renew_after_seconds=0.3) as run, client(run.invite, identity) as one:
        await one.join()
        monkeypatch.setattr(time, "time", lambda: now() + seconds)
        await one.until(CertificateRenewed)
        renewed = await one.until(CertificateRenewed)
        check_certificate(
            base64.b64decode(renewed.certificate),
            run.invite.run_id,
            run.invite.organiser,
            now(),
            identity.peer_id,
        )


# ---------------------------------------------------------------- status


async def test_the_status_holds_admission_and_the_paths_of_every_peer(
    token_run: RunFolder,
) -> None:
    async with served(token_run) as run, client(run.invite) as one:
        await one.join(name="anna")
        gone = Identity.generate().peer_id
        await order(token_run, PeerBanned(peer=gone, reason="cheats"))
        paths = (
            LinkPath(
                remote=run.invite.coordinator, kind=PathKind.RELAYED, relay=named("car1"),
                rtt_seconds=0.08, bytes_per_second=1.2e6,
            ),
        )  # fmt: skip
        beat = Heartbeat(microbatches_per_second=1.0, queued=0, changed_paths=paths)
        await one.send(beat)
        status = await shown(token_run, lambda s: len(s["paths"]) > 1 and s["admission"]["bans"])
        assert status["admission"] == {
            "mode": "token", "members": 1, "valid_tokens": 1,
            "bans": [
                {
                    "peer": gone, "reason": "cheats",
                    "banned_at": status["admission"]["bans"][0]["banned_at"],
                }
            ],
        }  # fmt: skip
        reported = [p for p in status["paths"] if p["reporter"] == one.node.peer_id]
        assert reported == [
            {
                "reporter": one.node.peer_id, "remote": run.invite.coordinator, "kind": "relayed",
                "relay": named("car1"), "rtt_seconds": 0.08, "bytes_per_second": 1.2e6,
            }
        ]  # fmt: skip
        # The coordinator's own, measured by its node.
        [own] = [p for p in status["paths"] if p["reporter"] == run.invite.coordinator]
        assert (own["remote"], own["kind"]) == (one.node.peer_id, "direct")
        await one.send(beat.model_copy(update={"paths": ()}))
        await shown(token_run, lambda s: len(s["paths"]) == 1)


async def shown(folder: RunFolder, found: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    with trio.fail_after(10):
        while True:
            status: dict[str, Any] = json.loads(folder.status.read_text())
            if found(status):
                return status
            await trio.sleep(0.05)


async def test_a_command_waits_for_a_coordinator_that_is_just_starting(
    folder: RunFolder,
) -> None:
    """It holds the folder's lock and has no socket yet: neither way is open for a moment."""
    order_it = partial(submit_request, folder, PeerBanned(peer=Identity.generate().peer_id))
    answers: list[dict[str, Any]] = []

    async def command() -> None:
        answers.append(await trio.to_thread.run_sync(order_it))

    async with trio.open_nursery() as nursery:
        with folder.lock():
            nursery.start_soon(command)
            await trio.sleep(0.5)
            assert answers == []
            async with served(folder):
                await until(lambda: answers, 10)
    assert answers[0]["text"].startswith("banned ")


def test_a_locked_folder_without_a_server_is_reported_in_one_sentence(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm_coordinator.cli.admission.CONNECT_SECONDS", 0.3)
    with folder.lock(), pytest.raises(NetworkError, match="takes no commands"):
        submit_request(folder, PeerBanned(peer=Identity.generate().peer_id))
