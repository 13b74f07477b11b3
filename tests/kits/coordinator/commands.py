"""What an organiser does: edit `run.toml`, and type `swarm-coordinator`, in this process and as a
process of its own."""

from __future__ import annotations

import signal
import subprocess
import sys
from types import TracebackType

import pytest

from swarm_coordinator.cli.main import run
from swarm_coordinator.run_dir.folder import RunFolder


def edit(folder: RunFolder, *changes: tuple[str, str]) -> str:
    """Edit a run's `run.toml`, as an organiser does: each text that stands there once is replaced
    by another one. Returns what was written before."""
    before = text = folder.settings.read_text()
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    folder.settings.write_text(text)
    return before


def said(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """What a command that succeeds prints."""
    code = run([str(word) for word in words])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return captured.out


def complaint(capsys: pytest.CaptureFixture[str]) -> str:
    """The one sentence on stderr."""
    captured = capsys.readouterr()
    lines = captured.err.strip().splitlines()
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("swarm-coordinator: error: ")
    assert "Traceback" not in captured.err + captured.out
    return lines[0]


def complains(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str]:
    """Exit code and sentence of a command that fails."""
    code = run([str(word) for word in words])
    return code, complaint(capsys)


class Started:
    """`swarm-coordinator start`, or another program, as a process that the block's end stops."""

    def __init__(self, folder: RunFolder, *words: str, program: str | None = None) -> None:
        command = ["-m", "swarm_coordinator", "start"] if program is None else ["-c", program]
        self.process = subprocess.Popen(
            [sys.executable, *command, str(folder.path), *words],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        self.lines: list[str] = []

    def until(self, *words: str) -> str:
        """Read up to a line with one of these words in it; return it."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if any(word in line for word in words):
                return line.strip()
        raise AssertionError("".join(self.lines))

    def invite(self) -> str:
        return self.until("swarm1")

    def stop(self) -> int:
        self.process.send_signal(signal.SIGINT)
        self.lines.append(self.process.communicate()[0])
        return self.process.returncode

    def __enter__(self) -> Started:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:  # fmt: skip
        if kind is not None:
            self.process.kill()
        if self.process.poll() is None:
            code = self.stop()
            assert kind is not None or code == 0
