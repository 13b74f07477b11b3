"""Transfers between real nodes over loopback: whole, hashed, resumable, whoever fails."""

from __future__ import annotations

import hashlib
import random
import resource
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import trio

from kits.members import ORGANISER, certificate
from swarm_shared.base.errors import NetworkError, StorageError
from swarm_shared.base.types import PeerId, RunId
from swarm_shared.identity.keys import Identity
from swarm_shared.network import FramedStream, Node, open_node
from swarm_shared.protocol import (
    TRANSFER_PROTOCOL,
    ChunkAnswer,
    ChunkRequest,
    TransferHello,
    encode,
    parse,
    transfer_messages,
)
from swarm_shared.transfer import part_file, transfer
from swarm_shared.transfer.part_file import CHUNK_BYTES, PartFile
from swarm_shared.transfer.source import TransferSource
from swarm_shared.transfer.transfer import (
    FETCHING_LIMITS,
    MAX_STREAMS_PER_PEER,
    SERVING_LIMITS,
    certificate_check,
    fetch,
    serve_transfers,
)

RUN = RunId("ab" * 32)
NOW = 1_000_000.0
ITEM = "state/7/0"


def content_of(size: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(size)


def sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def certificate_for(peer: PeerId, seconds: float = 60) -> str:
    return certificate(peer, RUN, now=NOW, seconds=seconds)


@dataclass
class Net:
    """Nodes that hold files, and one that fetches them into `folder`."""

    folder: Path
    fetcher: Node
    stack: AsyncExitStack

    async def node(self) -> tuple[Node, TransferSource]:
        node = await self.stack.enter_async_context(
            open_node(Identity.generate(), ["/ip4/127.0.0.1/tcp/0"])
        )
        return node, TransferSource(node.peer_id, node.addresses)

    async def holder(self, content: bytes, item: str = ITEM) -> TransferSource:
        path = self.folder / f"source-{sha(content)[:8]}"
        path.write_bytes(content)
        node, source = await self.node()
        serve_transfers(
            node,
            lambda asked, _: path if asked == item else None,
            certificate_check(RUN, ORGANISER.peer_id, lambda: NOW),
        )
        return source

    async def impostor(self, handler: Callable[[FramedStream], Awaitable[None]]) -> TransferSource:
        node, source = await self.node()
        node.serve(TRANSFER_PROTOCOL, handler, SERVING_LIMITS)
        return source

    async def fetch(
        self, sources: list[TransferSource], content: bytes, destination: str = "copy",
        on_progress: Callable[[int, int], None] | None = None, **options: object,
    ) -> list[int]:  # fmt: skip
        """Fetch the content and compare it; returns the bytes that were there at each report."""
        seen: list[int] = []
        path = self.folder / destination
        with trio.fail_after(30):
            await fetch(
                self.fetcher, sources, ITEM, len(content), sha(content), path,
                certificate_for(self.fetcher.peer_id), RUN,
                on_progress or (lambda here, _: seen.append(here)), **options,
            )  # type: ignore[arg-type] # fmt: skip
        assert path.read_bytes() == content
        return seen


@asynccontextmanager
async def network(folder: Path) -> AsyncIterator[Net]:
    async with AsyncExitStack() as stack:
        fetcher = await stack.enter_async_context(open_node(Identity.generate()))
        yield Net(folder, fetcher, stack)


def liar(serve: Callable[[ChunkRequest, FramedStream], Awaitable[None]]):  # type: ignore[no-untyped-def]
    """A handler that takes the hello and then does with each request what `serve` says."""

    async def handle(stream: FramedStream) -> None:
        hello = parse(transfer_messages, (await stream.receive()).header)
        assert isinstance(hello, TransferHello)
        while True:
            request = parse(transfer_messages, (await stream.receive()).header)
            assert isinstance(request, ChunkRequest)
            await serve(request, stream)

    return handle


async def answer(
    request: ChunkRequest, stream: FramedStream, whole: bytes, *, digest: str | None = None
) -> None:
    piece = whole[request.offset : request.offset + request.bytes]
    await stream.send(
        encode(
            ChunkAnswer(
                item=request.item, offset=request.offset, item_bytes=len(whole),
                sha256=digest or sha(piece),
            )
        ),
        piece,
    )  # fmt: skip


async def test_a_file_arrives_whole_from_several_peers(tmp_path: Path) -> None:
    content = content_of(5 * CHUNK_BYTES + 123)
    async with network(tmp_path) as net:
        sources = [await net.holder(content) for _ in range(3)]
        seen = await net.fetch(sources, content, "deep/er/copy")
        assert seen[0] == 0
        assert seen[-1] == len(content)
        assert sorted(p.name for p in (tmp_path / "deep" / "er").iterdir()) == ["copy"]
        received = {link.remote for link in net.fetcher.link_bytes() if link.received}
        assert received == {s.peer for s in sources}


async def test_an_empty_file_and_one_byte_arrive(tmp_path: Path) -> None:
    async with network(tmp_path) as net:
        for content in (b"", b"x"):
            await net.fetch([await net.holder(content)], content)


async def test_what_is_there_already_is_not_fetched_again(tmp_path: Path) -> None:
    content = content_of(1000)
    (tmp_path / "copy").write_bytes(content)

    async with network(tmp_path) as net:
        assert await net.fetch([], content) == [1000]


async def test_a_source_that_dies_is_replaced_by_the_others(tmp_path: Path) -> None:
    content = content_of(8 * CHUNK_BYTES)
    served = 0

    async def die(request: ChunkRequest, stream: FramedStream) -> None:
        nonlocal served
        served += 1
        if served == 2:
            await stream.reset()
        await answer(request, stream, content)

    async with network(tmp_path) as net:
        sources = [await net.impostor(liar(die)), await net.holder(content)]
        await net.fetch(sources, content)

    assert served >= 1


async def test_a_source_that_stalls_is_dropped(tmp_path: Path) -> None:
    content = content_of(4 * CHUNK_BYTES)

    async def stall(request: ChunkRequest, stream: FramedStream) -> None:
        await trio.sleep_forever()

    async with network(tmp_path) as net:
        sources = [await net.impostor(liar(stall)), await net.holder(content)]
        await net.fetch(sources, content, stall_seconds=0.3)


async def test_a_source_that_gives_the_last_chunks_late_holds_nothing_up(tmp_path: Path) -> None:
    """It would never be late enough to be dropped, and each joining peer would be."""
    content = content_of(6 * CHUNK_BYTES)
    asked = trio.Event()

    async def wait(request: ChunkRequest, stream: FramedStream) -> None:
        asked.set()
        await trio.sleep_forever()

    async with network(tmp_path) as net:
        sources = [await net.impostor(liar(wait)), await net.holder(content)]
        await net.fetch(sources, content, stall_seconds=3600.0, takeover_seconds=0.0)
        assert asked.is_set()


@pytest.mark.parametrize("lie", ["hash", "size", "short", "other chunk"])
async def test_a_source_whose_chunk_is_wrong_is_dropped(tmp_path: Path, lie: str) -> None:
    content = content_of(4 * CHUNK_BYTES)

    async def deceive(request: ChunkRequest, stream: FramedStream) -> None:
        if lie == "hash":
            await answer(request, stream, content, digest="00" * 32)
        elif lie == "size":
            await answer(request, stream, content + b"more")
        elif lie == "short":
            await answer(request.model_copy(update={"bytes": 5}), stream, content)
        else:
            other = (request.offset + CHUNK_BYTES) % len(content)
            await answer(request.model_copy(update={"offset": other}), stream, content)

    async with network(tmp_path) as net:
        sources = [await net.impostor(liar(deceive)), await net.holder(content)]
        await net.fetch(sources, content)
        with pytest.raises(NetworkError, match="cannot be fetched from any peer"):
            await net.fetch(sources[:1], content, "other")
        assert not (tmp_path / "other").exists()


async def test_a_liar_with_matching_chunk_hashes_cannot_stop_the_download(tmp_path: Path) -> None:
    content = content_of(6 * CHUNK_BYTES)
    false = content_of(6 * CHUNK_BYTES, seed=2)
    lied = trio.Event()

    async def deceive(request: ChunkRequest, stream: FramedStream) -> None:
        await answer(request, stream, false)
        lied.set()

    async with network(tmp_path) as net:
        impostor = await net.impostor(liar(deceive))
        with pytest.raises(NetworkError, match="does not have the expected hash"):
            await net.fetch([impostor], content)
        assert lied.is_set()
        sources = [impostor, await net.holder(content)]
        await net.fetch(sources, content)


async def test_a_broken_off_download_is_resumed_and_damaged_chunks_are_fetched_again(
    tmp_path: Path,
) -> None:
    content = content_of(6 * CHUNK_BYTES)
    asked: list[int] = []
    broken = True

    async def serve(request: ChunkRequest, stream: FramedStream) -> None:
        asked.append(request.offset // CHUNK_BYTES)
        if broken and len(asked) > 4:
            await stream.reset()
        await answer(request, stream, content)

    async with network(tmp_path) as net:
        source = await net.impostor(liar(serve))
        with pytest.raises(NetworkError):
            await net.fetch([source], content)
        assert not (tmp_path / "copy").exists()
        part = tmp_path / "copy.part"
        journal = (tmp_path / "copy.part.journal").read_text().splitlines()
        there = [int(line.split()[0]) for line in journal[1:]]
        assert there
        with part.open("r+b") as file:
            file.seek(there[0] * CHUNK_BYTES + 5)
            file.write(b"damage")
        broken = False
        asked.clear()
        seen = await net.fetch([source], content)
        assert seen[0] == (len(there) - 1) * CHUNK_BYTES
        assert sorted(asked) == sorted(set(range(6)) - set(there[1:]))


async def test_a_wrong_resumed_part_is_not_attributed_to_the_only_source(tmp_path: Path) -> None:
    """The chunks of an earlier source have the hashes of their journal and are wrong."""
    content = content_of(3 * CHUNK_BYTES)
    false = content_of(CHUNK_BYTES, seed=2)
    earlier = PartFile(tmp_path / "copy", ITEM, len(content), sha(content))
    earlier.open()
    earlier.write(1, false, sha(false))
    earlier.close()

    async with network(tmp_path) as net:
        seen = await net.fetch([await net.holder(content)], content)
        assert seen[0] == CHUNK_BYTES, "the download resumes"


async def test_a_stranger_gets_nothing(tmp_path: Path) -> None:
    async with network(tmp_path) as net:
        source = await net.holder(b"x")
        own = certificate_for(net.fetcher.peer_id)
        for certificate, run, reason in (
            (certificate_for(Identity.generate().peer_id), RUN, "shows the certificate of"),
            (certificate_for(net.fetcher.peer_id, seconds=-600), RUN, "expired"),
            ("", RUN, "no certificate"),
            ("not base64!", RUN, "base64"),
            (own, RunId("cd" * 32), "serves run"),
        ):
            with pytest.raises(NetworkError, match=reason):
                await fetch(
                    net.fetcher, [source], ITEM, 1, sha(b"x"), tmp_path / "copy", certificate, run
                )


async def test_an_item_that_is_not_there_is_refused_in_words(tmp_path: Path) -> None:
    async with network(tmp_path) as net:
        source = await net.holder(b"x", item="another")
        with pytest.raises(NetworkError, match="there is no state/7/0 here"):
            await net.fetch([source], b"x")


async def test_a_disk_without_space_is_one_sentence_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(part_file.shutil, "disk_usage", lambda _: usage._replace(free=20 * 2**20))

    async with network(tmp_path) as net:
        with pytest.raises(StorageError, match=r"MB free; free some space there"):
            await net.fetch([], content_of(5 * 2**20))
        assert list(tmp_path.iterdir()) == []


async def test_a_disk_that_fills_up_meanwhile_is_a_storage_error_not_a_group(
    tmp_path: Path,
) -> None:
    content = content_of(2 * CHUNK_BYTES)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill_the_disk(here: int, total: int) -> None:
        # The system then refuses every write behind the first byte, as a full disk does.
        resource.setrlimit(resource.RLIMIT_FSIZE, (1, limits[1]))

    async with network(tmp_path) as net:
        sources = [await net.holder(content) for _ in range(2)]
        try:
            with pytest.raises(StorageError, match="cannot write"):
                await net.fetch(sources, content, on_progress=fill_the_disk)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        await net.fetch(sources, content)


def test_a_part_file_of_another_item_is_not_mixed_in(tmp_path: Path) -> None:
    old = PartFile(tmp_path / "copy", "a", 10, sha(b"0123456789"))
    old.open()
    old.write(0, b"0123456789", sha(b"0123456789"))
    old.close()
    assert PartFile(tmp_path / "copy", "a", 10, sha(b"0123456789")).open() == {0}
    assert PartFile(tmp_path / "copy", "b", 10, sha(b"0123456789")).open() == set()


@pytest.mark.parametrize("reads", [True, False], ids=["idle", "reading nothing"])
async def test_peers_that_keep_streams_open_keep_no_other_one_from_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: bool
) -> None:
    monkeypatch.setattr(transfer, "MAX_CHUNK_ANSWERS", 3)
    monkeypatch.setattr(transfer, "TURN_SECONDS", 0.3)
    content = content_of(3 * CHUNK_BYTES)
    async with network(tmp_path) as net:
        source = await net.holder(content)
        other, _ = await net.node()
        for _ in range(MAX_STREAMS_PER_PEER):
            stream = await other.open_stream(
                source.peer, TRANSFER_PROTOCOL, FETCHING_LIMITS, source.addresses
            )
            hello = TransferHello(run=RUN, certificate=certificate_for(other.peer_id))
            await stream.send(encode(hello))
            await stream.send(encode(ChunkRequest(item=ITEM, offset=0, bytes=CHUNK_BYTES)))
            if reads:
                await stream.receive()
        await net.fetch([source], content)


async def test_of_sources_that_are_tried_alone_the_one_that_gave_most_is_the_first(
    tmp_path: Path,
) -> None:
    """A source that sends wrong bytes, as slowly as it may, would take a day for a large state."""
    content = content_of(12 * CHUNK_BYTES)
    wrong = content_of(len(content), seed=2)
    asked: list[int] = []

    async def serve(request: ChunkRequest, stream: FramedStream) -> None:
        asked.append(request.offset)
        await trio.sleep(0.5)
        await answer(request, stream, wrong)

    async with network(tmp_path) as net:
        slow = await net.impostor(liar(serve))
        await net.fetch([slow, await net.holder(content)], content)
    assert 1 <= len(asked) < 12
