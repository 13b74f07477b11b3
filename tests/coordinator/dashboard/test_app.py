"""The API as a stranger, a browser and the organiser meet it, over a real port."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import anyio.lowlevel
import pytest
import trio
from fastapi.sse import ServerSentEvent

from kits.coordinator import run as run_kit
from kits.coordinator.http_server import (
    ANNA,
    BERT,
    LEAKED,
    Client,
    pages_of,
    run_with_pages,
    write_status,
)
from kits.waiting import until
from swarm_coordinator.core.events import Note, RolledBack
from swarm_coordinator.dashboard.app import MAX_PAGE
from swarm_coordinator.dashboard.middleware import GuardMiddleware
from swarm_coordinator.dashboard.page import FILES
from swarm_coordinator.dashboard.sse import EventHub
from swarm_coordinator.run_dir.folder import RunFolder
from swarm_shared.base.rate_limit import RateLimit
from swarm_shared.base.types import Version

PUBLIC = (
    "/api/v1/run", "/api/v1/health", "/api/v1/stages", "/api/v1/peers", "/api/v1/steps",
    "/api/v1/trust", "/api/v1/curve", "/api/v1/contributions", "/api/v1/teams", "/api/v1/events",
    "/healthz", "/readyz", "/metrics",
)  # fmt: skip
ORGANISERS = tuple(f"/api/v1/organiser/{name}" for name in ("peers", "bans", "tokens"))


@pytest.fixture
def folder(made: RunFolder) -> RunFolder:
    write_status(made)
    return made


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return run_with_pages(tmp_path_factory.mktemp("app") / "run")


@pytest.fixture
def its_own_run(tmp_path: Path) -> RunFolder:
    """For a test that writes history."""
    return run_with_pages(tmp_path / "run")


async def test_the_public_part_needs_no_token_and_is_not_cached(folder: RunFolder) -> None:
    async with pages_of(folder) as client:
        for path in PUBLIC:
            answer = await client.get(path)
            assert answer.status == 200, path
            assert answer.headers["cache-control"] == "no-store"


async def test_no_public_answer_holds_an_address_or_a_whole_peer_id(folder: RunFolder) -> None:
    async with pages_of(folder) as client:
        for path in (*PUBLIC, *FILES):
            body = (await client.get(path)).body.decode()
            for secret in (*LEAKED, ANNA, BERT, client.token):
                assert secret not in body, path
            assert client.pages.snapshot_loop.snapshot is not None
            assert client.pages.snapshot_loop.snapshot.status.coordinator not in body, path


async def test_the_run_has_its_idle_share_and_its_rejections(
    folder: RunFolder,
) -> None:
    async with pages_of(folder) as client:
        run = (await client.get("/api/v1/run")).json
        assert run["bubble_share"] == pytest.approx(0.3)
        assert run["rejected"]["not finite"] == 3
        _, second = (await client.get("/api/v1/stages")).json["stages"]
        assert second["idle_share"] == pytest.approx(0.5)
        assert 0.4 < second["p50_seconds"] <= second["p95_seconds"] < 0.6


async def test_owners_audits_and_verdicts_are_public_without_whole_peer_ids(
    folder: RunFolder,
) -> None:
    row = {"step": 39, "microbatch": 3, "stage": 0, "peer": BERT, "owner": BERT}
    owners = [{"owner": BERT, "passed": 2, "lost": 1, "made": 4, "established": False}]
    write_status(
        folder,
        trust={
            "audit_share": 0.02, "passed": 7, "lost": 1, "probation_cells": 50,
            "on_probation": 1, "owners": owners,
            "verdicts": [{**row, "reason": f"it lied {LEAKED[0]}"}],
        },
    )  # fmt: skip
    async with pages_of(folder) as client:
        body = (await client.get("/api/v1/trust")).json
    assert (body["passed"], body["lost"], body["probation_cells"]) == (7, 1, 50)
    [owner], [verdict] = body["owners"], body["verdicts"]
    assert (owner["id_end"], owner["passed"], owner["established"]) == (BERT[-8:], 2, False)
    assert (verdict["id_end"], verdict["step"]) == (BERT[-8:], 39)
    assert LEAKED[0] not in verdict["reason"]


async def test_the_organisers_part_needs_the_token(folder: RunFolder) -> None:
    async with pages_of(folder) as client:
        for path in ORGANISERS:
            for given in (
                None, "", "Bearer ", f"Bearer {client.token[:-1]}", f"Bearer {client.token}s",
                "Bearer é", f"Basic {client.token}", client.token,
            ):  # fmt: skip
                headers = {} if given is None else {"Authorization": given}
                answer = await client.get(path, **headers)
                assert answer.status == 401, (path, given)
                assert answer.headers["www-authenticate"] == "Bearer"
                assert "dashboard" in answer.json["error"]
            # In the address it would stand in logs and histories: it does not count there.
            assert (await client.get(f"{path}?token={client.token}")).status == 401
            assert (await client.organiser(path)).status == 200
            spaced = f"bearer  {client.token} "
            assert (await client.get(path, Authorization=spaced)).status == 200
        found = (await client.organiser("/api/v1/organiser/peers")).json
        assert [peer["peer"] for peer in found["peers"]] == [ANNA, BERT]
        assert found["peers"][0]["paths"][0]["remote"] == BERT


async def test_every_response_has_the_security_headers(folder: RunFolder) -> None:
    async with pages_of(folder) as client:
        for path in ("/", "/api/v1/run", "/nowhere", "/api/v1/organiser/bans"):
            headers = (await client.get(path)).headers
            policy = headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert headers["x-content-type-options"] == "nosniff"
            assert headers["referrer-policy"] == "no-referrer"
            assert "server" not in headers


async def test_the_page_loads_nothing_from_elsewhere(folder: RunFolder) -> None:
    async with pages_of(folder) as client:
        for path in FILES:
            answer = await client.get(path)
            assert answer.status == 200
            named = re.findall(r"https?://[^\s\"'<>)]+", answer.body.decode())
            assert set(named) <= {"http://www.w3.org/2000/svg"}, path
        page = (await client.get("/")).body.decode()
        assert not re.search(r"<script(?![^>]*src=)", page)
        assert not re.search(r"\son\w+=|\sstyle=", page)


async def test_lists_are_given_in_pages_of_bounded_length(folder: RunFolder) -> None:
    async with pages_of(folder) as client:
        first = (await client.get("/api/v1/steps?limit=2")).json
        assert [row["step"] for row in first["steps"]] == [1, 2]
        assert first["next_after"] == 2
        rest = (await client.get("/api/v1/steps?after=2&limit=1000")).json
        assert [row["step"] for row in rest["steps"]] == [3, 4, 5]
        assert rest["next_after"] is None
        assert (await client.get("/api/v1/steps?after=99")).json["steps"] == []
        peers = (await client.get("/api/v1/peers?offset=1&limit=1")).json
        assert (peers["total"], len(peers["peers"])) == (2, 1)
        assert len((await client.get("/api/v1/contributions?limit=1")).json["contributions"]) == 1
        for wrong in (
            "steps?limit=0", "steps?limit=1001", f"peers?limit={MAX_PAGE + 1}", "peers?offset=-1",
            "steps?after=x", "events?after=99999999999999999999",
        ):  # fmt: skip
            answer = await client.get(f"/api/v1/{wrong}")
            assert answer.status == 422, wrong
            assert set(answer.json) == {"error"}


async def test_unknown_paths_and_wrong_methods_are_answered_in_json(
    folder: RunFolder,
) -> None:
    async with pages_of(folder) as client:
        for path, method, status in (
            ("/nowhere", "GET", 404), ("/api/v1/run", "POST", 405), ("/api/v1/run/", "GET", 404),
            ("/%2e%2e/%2e%2e/etc/passwd", "GET", 404), ("/../organiser.key", "GET", 404),
        ):  # fmt: skip
            answer = await client.get(path, method)
            assert (answer.status, set(answer.json)) == (status, {"error"}), path


async def test_healthz_is_liveness_and_readyz_readiness(folder: RunFolder) -> None:
    async with pages_of(folder) as client:
        assert (await client.get("/healthz")).status == 200
        assert (await client.get("/readyz")).status == 200
        write_status(folder, peers=[])
        await client.served.call(client.pages.snapshot_loop.refresh)
        assert (await client.get("/healthz")).status == 200
        degraded = await client.get("/readyz")
        assert (degraded.status, degraded.json["state"]) == (503, "degraded")
        write_status(folder, time=time.time() - 60)
        await client.served.call(client.pages.snapshot_loop.refresh)
        assert (await client.get("/healthz")).status == 503


async def test_a_status_that_cannot_be_read_leaves_the_last_one_and_is_counted(
    folder: RunFolder,
) -> None:
    async with pages_of(folder) as client:
        folder.status.write_text("{")
        await until(lambda: client.pages.snapshot_loop.failures)
        assert (await client.get("/api/v1/run")).json["version"] == 5
        write_status(folder, version=6)
        while (await client.get("/api/v1/run")).json["version"] != 6:
            await trio.sleep(0.05)


async def test_before_the_first_status_requests_are_answered_with_503(
    folder: RunFolder,
) -> None:
    async with pages_of(folder) as client:
        client.pages.snapshot_loop.snapshot = None
        for path in ("/api/v1/run", "/healthz", "/readyz", "/metrics"):
            answer = await client.get(path)
            if client.pages.snapshot_loop.snapshot is None:  # it looks again by itself each second
                assert (answer.status, set(answer.json)) == (503, {"error"})


async def test_too_many_requests_are_refused_with_the_time_to_wait(folder: RunFolder) -> None:
    async with pages_of(folder) as client:
        client.pages.server.application = GuardMiddleware(
            client.pages.app, overall=RateLimit(2, 0.01, clock=lambda: 0.0)
        )
        answers = [await client.get("/api/v1/run") for _ in range(3)]
        assert [answer.status for answer in answers] == [200, 200, 429]
        assert int(answers[2].headers["retry-after"]) == 100


def test_one_address_has_a_rate_of_its_own() -> None:
    guard = GuardMiddleware(lambda *_: None, RateLimit(1, 0.01, clock=lambda: 0.0))  # type: ignore[arg-type, return-value]
    assert guard._wait_seconds("198.51.100.1") == 0
    assert guard._wait_seconds("198.51.100.1") > 0
    assert guard._wait_seconds("198.51.100.2") == 0
    assert guard._wait_seconds("2001:db8::1") == 0
    assert guard._wait_seconds("2001:db8::2") > 0, "of the same /64"
    assert [guard._wait_seconds("127.0.0.1") for _ in range(5)] == [0] * 5


def test_requests_of_other_machines_leave_this_one_its_own() -> None:
    frozen = RateLimit(1, 0.01, max_keys=2, clock=lambda: 0.0)
    guard = GuardMiddleware(lambda *_: None, overall=frozen)  # type: ignore[arg-type, return-value]
    assert guard._wait_seconds("198.51.100.1") == 0
    assert guard._wait_seconds("198.51.100.2") > 0
    assert guard._wait_seconds("127.0.0.1") == 0
    assert guard._wait_seconds("::1") > 0


@pytest.mark.parametrize(
    ("host", "is_served"),
    [
        ("127.0.0.1:8080", True), ("localhost", True), ("LOCALHOST:80", True), ("[::1]:8080", True),
        ("127.0.0.2", True), ("run.example.org", True), ("Run.Example.org:443", True),
        ("evil.example", False), ("evil.example:8080", False), ("127.0.0.1.evil.example", False),
        ("localhost.evil.example", False), ("192.0.2.1", False), ("", False),
        ("2130706433", False),
    ],
)  # fmt: skip
async def test_a_page_of_another_site_whose_name_leads_here_reads_nothing(
    folder: RunFolder, host: str, is_served: bool
) -> None:
    """DNS rebinding: the browser sends the name of the site that it believes to read."""
    async with pages_of(folder) as client:
        client.pages.guard.hosts = frozenset({"run.example.org"})
        for path in (*PUBLIC, "/"):
            assert ((await client.get(path, host=host)).status == 200) is is_served, path


async def test_every_name_is_served_where_other_machines_connect() -> None:
    guard = GuardMiddleware(lambda *_: None)  # type: ignore[arg-type, return-value]
    for address, name, is_served in (
        ("192.0.2.7", b"run.example.org", True), ("::1", b"run.example.org", False),
        ("127.0.0.1", b"run.example.org", False), ("2001:db8::7", b"run.example.org", True),
    ):  # fmt: skip
        scope = {"server": (address, 0), "headers": [(b"host", name)]}
        assert guard._is_for_this_host(scope) is is_served


# ---------------------------------------------------------------- live events


class Listener:
    """Reads server-sent events off a connection."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self._read = b""

    async def next(self, wanted: str) -> dict[str, object]:
        """The next event of that name."""
        while True:
            while b"\n\n" not in self._read:
                part = await self.stream.receive_some(65_536)
                assert part, "the stream ended"
                self._read += part
            one, _, self._read = self._read.partition(b"\n\n")
            # A chunk's length may stand before it.
            found = re.search(rb"event: (\w+)\ndata: (.*)", one)
            if found and found[1].decode() == wanted:
                document: dict[str, object] = json.loads(found[2])
                return document


async def follow(client: Client) -> Listener:
    stream = await client.served.connect()
    await stream.send_all(b"GET /api/v1/events/stream HTTP/1.1\r\nhost: localhost\r\n\r\n")
    return Listener(stream)


async def test_events_are_streamed_live(its_own_run: RunFolder) -> None:
    folder = its_own_run
    async with pages_of(folder) as client:
        listener = await follow(client)
        assert (await listener.next("run"))["version"] == 5
        await trio.to_thread.run_sync(
            run_kit.one_start, folder, run_kit.step(6), Note(f"anna came from {LEAKED[0]}")
        )
        write_status(folder, version=6)
        assert (await listener.next("step"))["step"] == 6
        assert (await listener.next("event"))["text"] == "anna came from (address)"
        await trio.to_thread.run_sync(
            run_kit.one_start, folder, RolledBack(Version(2), "lost"), run_kit.step(3, attempt=9)
        )
        while (await client.get("/api/v1/steps")).json["steps"][-1]["step"] != 3:
            await trio.sleep(0.05)


async def test_a_reader_that_leaves_is_forgotten(folder: RunFolder) -> None:
    async with pages_of(folder) as client:
        hub = client.pages.snapshot_loop.hub
        listener = await follow(client)
        await listener.next("run")
        assert len(hub) == 1
        await listener.stream.aclose()
        await until(lambda: not len(hub))
        assert hub.dropped == 0


async def flood(hub: EventHub) -> None:
    for _ in range(1000):
        hub.publish(ServerSentEvent(raw_data="x" * 65_536))
        await anyio.lowlevel.checkpoint()


async def test_readers_beyond_the_limit_are_refused_and_slow_ones_disconnected(
    folder: RunFolder,
) -> None:
    async with pages_of(folder) as client:
        hub = client.pages.snapshot_loop.hub
        hub._max_readers = 1
        client.pages.server.send_seconds = 0.2
        listener = await follow(client)
        await listener.next("run")
        refused = await client.get("/api/v1/events/stream")
        assert (refused.status, refused.headers["retry-after"]) == (503, "30")
        # It reads nothing while more happens than its queue and the sockets' buffers hold.
        await client.served.call(flood, hub)
        assert hub.dropped == 1
        assert not len(hub)
        await until(lambda: not client.pages.server.connections)
        assert (await client.get("/api/v1/run")).status == 200
