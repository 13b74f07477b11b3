"""The socket by which commands reach a coordinator: private, bounded, and never its undoing."""

from __future__ import annotations

import json
import os
import socket
import stat
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from kits.local_socket import first_answer
from swarm_coordinator.server import admin_socket
from swarm_coordinator.server.admin_socket import send_request, serve
from swarm_shared.base.errors import NetworkError, StorageError
from swarm_shared.base.local_socket import MAX_LINE_BYTES


async def echo(question: dict[str, Any]) -> dict[str, Any]:
    return {"you asked": question}


@asynccontextmanager
async def serving(path: Path, answer: admin_socket.Answer = echo) -> AsyncIterator[None]:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve, path, answer)
        while not path.exists() or not await trio.to_thread.run_sync(accepts, path):
            await trio.sleep(0.01)
        yield
        nursery.cancel_scope.cancel()


def accepts(path: Path) -> bool:
    try:
        send_request(path, {})
    except (ConnectionRefusedError, FileNotFoundError):
        return False
    except NetworkError:
        return True
    return True


async def asked(path: Path, question: dict[str, Any]) -> dict[str, Any]:
    return await trio.to_thread.run_sync(send_request, path, question)


async def test_a_request_is_answered_and_the_socket_is_private(tmp_path: Path) -> None:
    path = tmp_path / "s"
    async with serving(path):
        assert await asked(path, {"do": "ü"}) == {"you asked": {"do": "ü"}}
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not path.exists()
    with pytest.raises(FileNotFoundError):
        send_request(path, {})


async def test_the_socket_of_a_coordinator_that_was_killed_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s"
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(path))
    left.close()
    with pytest.raises(ConnectionRefusedError):
        send_request(path, {})
    async with serving(path):
        assert await asked(path, {"a": 1}) == {"you asked": {"a": 1}}


async def test_a_run_folder_may_lie_as_deep_as_it_likes(tmp_path: Path) -> None:
    folder = tmp_path / ("a folder with a long name " * 4) / ("x" * 120)
    folder.mkdir(parents=True)
    path = folder / "s"
    assert len(os.fsencode(path)) > 200
    async with serving(path):
        assert await asked(path, {"a": 1}) == {"you asked": {"a": 1}}
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not path.exists()


@pytest.mark.parametrize(
    "content",
    [
        b"\n",
        b"nonsense\n",
        b"[1]\n",
        b"\xff\xfe\n",
        b'{"a": ' + b"[" * 5000 + b"\n",
        b"x" * (3 * MAX_LINE_BYTES),
    ],
    ids=range(6),
)
async def test_nonsense_gets_no_answer_and_does_no_harm(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "s"
    async with serving(path):
        assert await first_answer(path, content) == b""
        assert await asked(path, {"a": 1}) == {"you asked": {"a": 1}}


async def test_a_silent_connection_is_closed_and_delays_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "s"
    async with serving(path):
        monkeypatch.setattr(admin_socket, "ANSWER_SECONDS", 0.3)
        silent = await trio.open_unix_socket(path)
        async with silent:
            assert await asked(path, {"a": 1}) == {"you asked": {"a": 1}}
            assert await silent.receive_some(10) == b""


async def test_a_fault_in_one_answer_is_that_questions_only(tmp_path: Path) -> None:
    path = tmp_path / "s"

    async def answer(question: dict[str, Any]) -> dict[str, Any]:
        return {"done": 1 / question["by"]}

    async with serving(path, answer):
        with pytest.raises(NetworkError, match="did not answer"):
            await asked(path, {"by": 0})
        assert await asked(path, {"by": 2}) == {"done": 0.5}


async def test_a_disconnect_before_the_reply_does_not_stop_the_request(
    tmp_path: Path,
) -> None:
    path = tmp_path / "s"
    begun, done = trio.Event(), trio.Event()

    async def answer(question: dict[str, Any]) -> dict[str, Any]:
        if question.get("slow"):
            begun.set()
            await trio.sleep(0.2)
            done.set()
        return {}

    async with serving(path, answer):
        stream = await trio.open_unix_socket(path)
        await stream.send_all(json.dumps({"slow": True}).encode() + b"\n")
        await begun.wait()
        await stream.aclose()
        await done.wait()
        assert await asked(path, {}) == {}


async def test_a_folder_in_which_there_can_be_no_socket_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"cannot write .*gone"):
        await serve(tmp_path / "gone" / "s", echo)


def test_a_coordinator_that_breaks_off_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def hang_up() -> None:
            listener.accept()[0].close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        with pytest.raises(NetworkError, match=r"did not answer .*try again"):
            send_request(path, {"a": 1})
        thread.join()
