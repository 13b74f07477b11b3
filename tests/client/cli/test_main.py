"""What a volunteer sees after a typing error: one sentence, an exit code, no traceback."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from swarm_client.cli.main import main
from swarm_shared.base.errors import (
    CapacityError,
    DaemonError,
    InviteError,
    NetworkError,
    StorageError,
    UsageError,
)
from swarm_shared.identity.invite import Invite
from swarm_shared.identity.keys import Identity

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    monkeypatch.chdir(tmp_path)

    def call(*words: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["swarm-client", *words])
        code = 0
        try:
            main()
        except SystemExit as ended:
            code = int(ended.code or 0)
        seen = capsys.readouterr()
        return code, seen.out + seen.err

    return call


def invite(port: int = 1) -> str:
    peer = Identity.generate().peer_id
    return Invite(
        coordinator=peer, addresses=(f"/ip4/127.0.0.1/tcp/{port}",), run_id="ab" * 32,
        organiser=peer,
    ).encode()  # fmt: skip


def one_sentence(text: str) -> str:
    assert "Traceback" not in text
    lines = [line for line in text.splitlines() if "error:" in line]
    assert len(lines) == 1
    return lines[0]


def test_a_damaged_invite_is_reported_before_any_network_use(run: Run, tmp_path: Path) -> None:
    good = invite()
    damaged = good[:40] + ("a" if good[40] != "a" else "b") + good[41:]
    for wrong, told in ((damaged, "damaged"), ("hello", "begins with 'hello'")):
        code, text = run("join", wrong, "--home", str(tmp_path / "h"))
        assert code == InviteError.exit_code == 4
        assert told in one_sentence(text)
        assert not (tmp_path / "h").exists()


@pytest.mark.process
def test_an_invite_on_standard_input_is_in_no_argument(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Arguments are shown to all users of a machine, and an invite may hold a token."""
    for text in (invite(), f"  {invite()}\n\n"):
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        code, shown = run("join", "-", "--home", str(tmp_path / "h"), "--device", "toaster")
        assert code == UsageError.exit_code, "the invite was good, the device is not"
        assert "cpu, cuda:0, mps, xpu:0 or auto" in one_sentence(shown)
    for text in ("", "hello", "a" * 100_000):
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        assert run("join", "-")[0] == InviteError.exit_code


def test_the_doctor_takes_an_invite_on_standard_input(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello"))
    code, shown = run("doctor", "-")
    assert code == InviteError.exit_code
    assert "begins with 'hello'" in shown


@pytest.mark.parametrize(
    ("device", "home", "code", "told"),
    [
        ("toaster", "h", UsageError.exit_code, "cpu, cuda:0, mps, xpu:0 or auto"),
        ("cuda:99", "h", CapacityError.exit_code, "--device cpu"),
        ("cpu", "file/h", StorageError.exit_code, "--home"),
    ],
    ids=["an unknown device", "a GPU that is not there", "a home that cannot be made"],
)
def test_what_cannot_be_is_reported_with_a_remedy(
    run: Run, tmp_path: Path, device: str, home: str, code: int, told: str
) -> None:
    (tmp_path / "file").write_text("not a folder")
    words = ("--home", str(tmp_path / home), "--device", device)
    assert (found := run("join", invite(), *words))[0] == code
    assert told in one_sentence(found[1])


def test_a_second_client_in_the_same_home_is_refused(run: Run, tmp_path: Path) -> None:
    from swarm_client.machine.home import Home

    with Home.create(tmp_path / "h").locked():
        code, text = run("join", invite(), "--home", str(tmp_path / "h"), "--device", "cpu")
    assert code == StorageError.exit_code
    assert "another swarm-client" in one_sentence(text)


def test_a_port_in_use_is_reported_by_its_number(run: Run, tmp_path: Path) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, text = run(
            "join", invite(), "--home", str(tmp_path / "h"), "--device", "cpu",
            "--listen", f"/ip4/127.0.0.1/tcp/{port}",
        )  # fmt: skip
    assert code == NetworkError.exit_code == 8
    assert str(port) in one_sentence(text)


def test_logs_of_a_home_without_any_say_what_to_do(run: Run, tmp_path: Path) -> None:
    code, text = run("logs", "--home", str(tmp_path / "h"))
    assert code == DaemonError.exit_code
    assert "swarm-client join INVITE" in one_sentence(text)


def test_a_missing_argument_and_an_unknown_command_are_usage_errors(run: Run) -> None:
    assert run("join")[0] == 2
    assert run("jion", "x")[0] == 2
    assert run("--version")[0] == 0
