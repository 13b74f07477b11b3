"""Children of the daemon and the message link, with real processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import pytest
import trio
from pydantic import Field, TypeAdapter

from swarm_client.ipc import child_process
from swarm_client.ipc.child_process import (
    MAX_LOG_BYTES,
    SyncLink,
    TrioLink,
    _opened_log,
    start_child,
)
from swarm_shared.base.errors import FrameError, LinkClosed
from swarm_shared.base.frozen_model import FrozenModel
from swarm_shared.base.json_messages import MAX_MESSAGE_BYTES, PrefixedDecoder, encode_prefixed


class Ping(FrozenModel):
    kind: Literal["ping"] = "ping"
    text: str


class Pong(FrozenModel):
    kind: Literal["pong"] = "pong"
    number: int


messages: TypeAdapter[Ping | Pong] = TypeAdapter(
    Annotated[Ping | Pong, Field(discriminator="kind")]
)

# Sends its process id, then echoes pings; "deaf" makes it stop reading.
ECHO_CHILD = """
import os, sys, time
from typing import Annotated, Literal
from pydantic import Field, TypeAdapter
from swarm_client.ipc.child_process import prepare_child_process, inherited_link
from swarm_shared.run.model_config import FrozenModel

class Ping(FrozenModel):
    kind: Literal["ping"] = "ping"
    text: str

class Pong(FrozenModel):
    kind: Literal["pong"] = "pong"
    number: int

prepare_child_process()
link = inherited_link(int(sys.argv[-1]), TypeAdapter(Ping))
link.send(Pong(number=os.getpid()))
while (message := link.receive()) is not None:
    if message.text == "exit":
        print("leaving as told", file=sys.stderr)
        sys.exit(7)
    if message.text == "deaf":
        while True:
            time.sleep(60)
    link.send(message)
"""


@pytest.fixture
def child_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "echo_child_for_test.py").write_text(ECHO_CHILD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "echo_child_for_test"


def test_messages_arrive_whole_however_the_bytes_are_cut() -> None:
    decoder = PrefixedDecoder(messages)
    stream = encode_prefixed(Ping(text="ä" * 300)) + encode_prefixed(Pong(number=2))
    seen = []
    for byte in stream:
        decoder.feed(bytes([byte]))
        while (message := decoder.next_message()) is not None:
            seen.append(message)
    assert seen == [Ping(text="ä" * 300), Pong(number=2)]
    decoder.finish()


def test_a_message_that_is_too_long_is_refused_before_it_is_read_or_sent() -> None:
    decoder = PrefixedDecoder(messages)
    decoder.feed((MAX_MESSAGE_BYTES + 1).to_bytes(4, "little"))
    with pytest.raises(FrameError, match="at most"):
        decoder.next_message()
    with pytest.raises(FrameError, match="longer"):
        encode_prefixed(Ping(text="x" * MAX_MESSAGE_BYTES))


def test_a_truncated_message_and_an_unknown_one_are_refused() -> None:
    decoder = PrefixedDecoder(messages)
    decoder.feed(encode_prefixed(Pong(number=1))[:-1])
    assert decoder.next_message() is None
    with pytest.raises(FrameError, match="in the middle"):
        decoder.finish()
    decoder = PrefixedDecoder(messages)
    decoder.feed(encode_prefixed(Pong(number=1)).replace(b"number", b"nomber"))
    with pytest.raises(FrameError):
        decoder.next_message()


def test_the_blocking_side_knows_whether_a_message_is_there() -> None:
    ours, theirs = socket.socketpair()
    link = SyncLink(ours, messages)
    assert not link.has_message()
    theirs.sendall(encode_prefixed(Ping(text="a")) + encode_prefixed(Ping(text="b")))
    assert link.has_message()
    assert link.receive() == Ping(text="a")
    # The second one is in the buffer already, and no longer in the socket.
    assert link.has_message()
    assert link.receive() == Ping(text="b")
    assert not link.has_message()
    theirs.close()
    assert link.has_message()
    assert link.receive() is None
    with pytest.raises(LinkClosed):
        link.send(Ping(text="x" * 1000))
    link.close()


async def test_the_trio_side_reads_and_writes_the_same_frames() -> None:
    ours, theirs = socket.socketpair()
    link = TrioLink(ours, messages)
    await link.send(Pong(number=3))
    other = SyncLink(theirs, messages)
    assert other.receive() == Pong(number=3)
    other.send(Ping(text="back"))
    assert await link.receive() == Ping(text="back")
    other.close()
    assert await link.receive() is None
    with pytest.raises(LinkClosed):
        await link.send(Pong(number=4))
    await link.aclose()


async def test_a_child_talks_logs_and_reports_how_it_ended(
    child_module: str, tmp_path: Path
) -> None:
    log_path = tmp_path / "logs" / "child.log"

    async with start_child(child_module, incoming=messages, log_path=log_path) as child:
        assert await child.link.receive() == Pong(number=child.pid)
        await child.link.send(Ping(text="hello"))
        assert await child.link.receive() == Ping(text="hello")
        await child.link.send(Ping(text="exit"))
        assert await child.link.receive() is None
        assert await child.wait() == 7
    assert log_path.read_text() == "leaving as told\n"
    assert log_path.stat().st_mode & 0o777 == 0o600


def test_a_long_log_gives_way_to_another_one(tmp_path: Path) -> None:
    path = tmp_path / "log" / "worker.log"
    for content in (bytes(MAX_LOG_BYTES), b"more", b"new"):
        with _opened_log(path) as log:
            log.write(content)
    assert path.read_bytes() == b"new"
    assert path.with_suffix(".log.1").read_bytes() == bytes(MAX_LOG_BYTES) + b"more"


async def test_leaving_ends_a_child_that_listens_and_kills_one_that_does_not(
    child_module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = partial(start_child, child_module, incoming=messages, log_path=tmp_path / "log")
    async with start() as polite:
        await polite.link.receive()
    assert polite.process.returncode == 0
    monkeypatch.setattr(child_process, "CLOSE_GRACE_SECONDS", 0.2)
    async with start() as deaf:
        await deaf.link.receive()
        await deaf.link.send(Ping(text="deaf"))
    assert deaf.process.returncode == -signal.SIGKILL


async def test_a_child_ignores_ctrl_c(child_module: str, tmp_path: Path) -> None:
    async with start_child(child_module, incoming=messages, log_path=tmp_path / "log") as child:
        await child.link.receive()
        assert os.getpgid(child.pid) != os.getpgid(0)
        os.kill(child.pid, signal.SIGINT)
        await child.link.send(Ping(text="still here"))
        assert await child.link.receive() == Ping(text="still here")


PARENT = """
import sys, trio
from pathlib import Path
from pydantic import TypeAdapter
from swarm_client.ipc.child_process import start_child
from swarm_shared.run.model_config import FrozenModel

class Ping(FrozenModel):
    kind: str = "ping"
    text: str

class Pong(FrozenModel):
    kind: str
    number: int

async def main():
    async with start_child(
        "echo_child_for_test", incoming=TypeAdapter(Pong), log_path=Path(sys.argv[1])
    ) as child:
        await child.link.receive()
        # Deaf, it cannot notice the end of its socket.
        await child.link.send(Ping(text="deaf"))
        print(child.pid, flush=True)
        await trio.sleep_forever()

trio.run(main)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="waits for a stranger's end by pidfd")
async def test_a_child_dies_with_a_parent_that_is_killed(child_module: str, tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path / "log")], stdout=subprocess.PIPE
    ) as parent:
        try:
            assert parent.stdout is not None
            watch = os.pidfd_open(int(parent.stdout.readline()))
        finally:
            parent.kill()

    try:
        await trio.lowlevel.wait_readable(watch)
    finally:
        os.close(watch)
