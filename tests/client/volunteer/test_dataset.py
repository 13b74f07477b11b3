"""Token shards reach a volunteer from a web server or from the coordinator, verified."""

from __future__ import annotations

import base64
import functools
import hashlib
import http.server
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import trio

from kits.power_cut.lab import FEW_SEEDS, PowerCutDisk, at_every_instant
from swarm_client.connectivity.web_download import WebClient
from swarm_client.machine.home import Home
from swarm_client.volunteer import dataset
from swarm_client.volunteer.dataset import fetch_data
from swarm_shared.base.errors import NetworkError
from swarm_shared.identity.credentials import MembershipCertificate, sign_certificate
from swarm_shared.identity.keys import Identity
from swarm_shared.network import Node, open_node
from swarm_shared.run.manifest import DataConfig, ShardInfo
from swarm_shared.transfer.transfer import TransferSource, certificate_check, serve_transfers

RUN = "ab" * 32
TOKENS = bytes(range(200)) * 50
LOOPBACK = WebClient(allow_private=True)


@contextmanager
def web_server(folder: Path) -> Iterator[str]:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            return

    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def shard(name: str, split: str, url: str | None) -> ShardInfo:
    digest = hashlib.sha256(TOKENS).hexdigest()
    return ShardInfo(name=name, split=split, tokens=len(TOKENS), sha256=digest, url=url)


def manifest_of(*shards: ShardInfo) -> SimpleNamespace:
    data = DataConfig(token_bytes=1, shards=shards, tokenizer="bytes", unigram_entropy_nats=1.0)
    return SimpleNamespace(data=data, model=SimpleNamespace(vocabulary_size=256))


@asynccontextmanager
async def coordinator_and_volunteer(
    served: dict[str, Path], asked: list[str]
) -> AsyncIterator[tuple[Node, TransferSource, str]]:
    organiser, volunteer = Identity.generate(), Identity.generate()
    certificate = sign_certificate(
        organiser,
        MembershipCertificate(
            peer=volunteer.peer_id, run=RUN, generation=1, not_before=time.time() - 1,
            expires=time.time() + 60, role="volunteer",
        ),
    )  # fmt: skip

    def catalogue(item: str, _peer: str) -> Path | None:
        asked.append(item)
        return served.get(item)

    async with (
        open_node(organiser, ["/ip4/127.0.0.1/tcp/0"]) as holder,
        open_node(volunteer, []) as node,
    ):
        serve_transfers(holder, catalogue, certificate_check(RUN, organiser.peer_id))
        source = TransferSource(holder.peer_id, holder.addresses)
        yield node, source, base64.b64encode(certificate).decode()


async def test_a_shard_with_a_url_never_asks_the_coordinator(tmp_path: Path) -> None:
    (tmp_path / "web").mkdir()
    (tmp_path / "web" / "a.tokens").write_bytes(TOKENS)
    asked: list[str] = []
    with web_server(tmp_path / "web") as url:
        manifest = manifest_of(
            shard("a.tokens", "train", f"{url}/a.tokens"),
            shard("a.tokens", "heldout", f"{url}/a.tokens"),
        )
        async with coordinator_and_volunteer({}, asked) as (node, source, certificate):
            folder = await fetch_data(
                node, Home.create(tmp_path / "h"), RUN, manifest, source, certificate, web=LOOPBACK
            )
    assert (folder / "a.tokens").read_bytes() == TOKENS
    assert asked == []


@pytest.mark.parametrize("trouble", ["missing", "too long", "other bytes"])
async def test_a_web_server_that_fails_or_lies_is_replaced_by_the_coordinator(
    tmp_path: Path, trouble: str
) -> None:
    (tmp_path / "web").mkdir()
    wrong = {"missing": None, "too long": TOKENS + b"x", "other bytes": b"\0" * len(TOKENS)}
    if (content := wrong[trouble]) is not None:
        (tmp_path / "web" / "a.tokens").write_bytes(content)
    true = tmp_path / "true.tokens"
    true.write_bytes(TOKENS)
    asked: list[str] = []
    with web_server(tmp_path / "web") as url:
        manifest = manifest_of(
            shard("a.tokens", "train", f"{url}/a.tokens"), shard("b.tokens", "heldout", None)
        )
        served = {"data/a.tokens": true, "data/b.tokens": true}
        async with coordinator_and_volunteer(served, asked) as (node, source, certificate):
            folder = await fetch_data(
                node, Home.create(tmp_path / "h"), RUN, manifest, source, certificate, web=LOOPBACK
            )
    assert (folder / "a.tokens").read_bytes() == TOKENS
    assert set(asked) == {"data/a.tokens", "data/b.tokens"}


async def test_a_shard_that_no_source_serves_whole_is_an_error_and_leaves_nothing_behind(
    tmp_path: Path,
) -> None:
    lie = tmp_path / "lie.tokens"
    lie.write_bytes(b"\1" * len(TOKENS))
    manifest = manifest_of(shard("a.tokens", "train", None), shard("b.tokens", "heldout", None))
    async with coordinator_and_volunteer({"data/a.tokens": lie}, []) as (node, source, proof):
        with pytest.raises(NetworkError):
            await fetch_data(
                node, Home.create(tmp_path / "h"), RUN, manifest, source, proof, web=None
            )
    assert not (Home.create(tmp_path / "h").data_folder(RUN) / "a.tokens").exists()


async def test_what_is_here_and_whole_is_not_fetched_again_and_a_damaged_file_is(
    tmp_path: Path,
) -> None:
    home = Home.create(tmp_path / "h")
    folder = home.data_folder(RUN)
    folder.mkdir(parents=True)
    (folder / "a.tokens").write_bytes(TOKENS)
    (folder / "b.tokens").write_bytes(TOKENS[:-1] + b"\xff")
    true = tmp_path / "true.tokens"
    true.write_bytes(TOKENS)
    asked: list[str] = []
    manifest = manifest_of(shard("a.tokens", "train", None), shard("b.tokens", "heldout", None))
    served = {"data/a.tokens": true, "data/b.tokens": true}
    async with coordinator_and_volunteer(served, asked) as (node, source, certificate):
        await fetch_data(node, home, RUN, manifest, source, certificate, web=None)
    assert set(asked) == {"data/b.tokens"}
    assert (folder / "b.tokens").read_bytes() == TOKENS


@pytest.mark.process
def test_a_power_cut_leaves_no_torn_shard_of_a_web_server(
    tmp_path: Path, disk: PowerCutDisk
) -> None:
    (tmp_path / "web").mkdir()
    (tmp_path / "web" / "a.tokens").write_bytes(TOKENS)
    home = disk.place / "home"
    with web_server(tmp_path / "web") as url:
        manifest = manifest_of(
            shard("a.tokens", "train", f"{url}/a.tokens"),
            shard("a.tokens", "heldout", f"{url}/a.tokens"),
        )

        def fetch() -> None:
            # Neither a node nor a coordinator: it is not asked.
            trio.run(
                functools.partial(
                    fetch_data, None, Home.create(home), RUN, manifest, None, "", web=LOOPBACK
                )
            )

        def check(ended: bool) -> None:
            path = Home.locate(home).data_folder(RUN) / "a.tokens"
            assert path.exists() or not ended
            assert not path.exists() or path.read_bytes() == TOKENS

        assert at_every_instant(disk, fetch, check, FEW_SEEDS) > 40


async def test_a_web_server_that_sends_a_byte_at_a_time_is_replaced_by_the_coordinator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataset, "STALL_SECONDS", 0.1)
    monkeypatch.setattr(dataset, "LEAST_BYTES_PER_SECOND", 10 * len(TOKENS))
    asked: list[str] = []
    true = tmp_path / "true.tokens"
    true.write_bytes(TOKENS)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        # It accepts connections, and never answers.
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/a.tokens"
        manifest = manifest_of(shard("a.tokens", "train", url), shard("b.tokens", "heldout", None))
        served = {"data/a.tokens": true, "data/b.tokens": true}
        async with coordinator_and_volunteer(served, asked) as (node, source, certificate):
            folder = await fetch_data(
                node, Home.create(tmp_path / "h"), RUN, manifest, source, certificate, web=LOOPBACK
            )
    assert (folder / "a.tokens").read_bytes() == TOKENS
    assert set(asked) == {"data/a.tokens", "data/b.tokens"}
