"""What a volunteer sees after a typing error: one sentence, an exit code, no traceback."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from swarm_client.cli.main import main
from swarm_shared.base.errors import (
    CapacityError,
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
    code, text = run("join", damaged, "--home", str(tmp_path / "h"))
    assert code == InviteError.exit_code == 4
    assert "damaged" in one_sentence(text)
    assert not (tmp_path / "h").exists()


def test_something_that_is_no_invite_is_reported_as_such(run: Run) -> None:
    code, text = run("join", "hello")
    assert code == InviteError.exit_code
    one_sentence(text)


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


def test_an_unknown_device_is_a_usage_error(run: Run, tmp_path: Path) -> None:
    code, text = run("join", invite(), "--home", str(tmp_path / "h"), "--device", "toaster")
    assert code == UsageError.exit_code == 2
    assert "cpu, cuda:0, mps, xpu:0 or auto" in one_sentence(text)


def test_a_gpu_that_is_not_there_is_reported_with_what_is(run: Run, tmp_path: Path) -> None:
    code, text = run("join", invite(), "--home", str(tmp_path / "h"), "--device", "cuda:99")
    assert code == CapacityError.exit_code == 6
    assert "--device cpu" in one_sentence(text)


def test_a_home_that_cannot_be_made_is_reported_with_a_remedy(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    code, text = run("join", invite(), "--home", str(tmp_path / "file" / "h"), "--device", "cpu")
    assert code == StorageError.exit_code == 7
    assert "--home" in one_sentence(text)


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


def test_a_missing_argument_and_an_unknown_command_are_usage_errors(run: Run) -> None:
    assert run("join")[0] == 2
    assert run("jion", "x")[0] == 2
    assert run("--version")[0] == 0


def test_the_daemon_and_its_command_line_import_neither_torch_nor_hivemind() -> None:
    script = (
        "import sys, json, swarm_client.cli.main, swarm_client.daemon.daemon;"
        "print(json.dumps([m for m in ('torch', 'hivemind', 'textual') if m in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    assert json.loads(done.stdout) == []
