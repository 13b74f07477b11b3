from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from kits.processes import has_ended
from swarm_coordinator.demo import subprocesses
from swarm_coordinator.demo.subprocesses import Subprocesses, run_to_end, wait_until
from swarm_shared.base.errors import StorageError, SwarmError

SLEEPER = "import time; print('ready', flush=True); time.sleep(600)"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + SLEEPER
PATIENCE_SECONDS = 30.0


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-S", "-c", code)


def wait_for_line(children: Subprocesses, log: Path, line: str) -> None:
    wait_until(lambda: log.exists() and line in log.read_text(), children, PATIENCE_SECONDS, line)


def test_what_a_child_prints_lies_in_its_log_and_its_exit_code_is_known(tmp_path: Path) -> None:
    with Subprocesses() as children:
        log = tmp_path / "new folder" / "child.log"
        child = children.start(
            "talker", python("print('one'); print('two'); raise SystemExit(3)"), log
        )
        assert child.wait(PATIENCE_SECONDS) == 3
        assert child.last_lines(1) == ["two"]
        assert children.failed() == [child]
        assert "talker exited with code 3" in subprocesses.failure_text(child)


def test_leaving_the_block_ends_everybody_even_who_ignores_the_request(tmp_path: Path) -> None:
    with Subprocesses(grace_seconds=0.3) as children:
        polite = children.start("polite", python(SLEEPER), tmp_path / "polite.log")
        stubborn = children.start("stubborn", python(STUBBORN), tmp_path / "stubborn.log")
        for child in (polite, stubborn):
            wait_for_line(children, child.log, "ready")
    assert polite.exit_code() == -signal.SIGTERM
    assert stubborn.exit_code() == -signal.SIGKILL
    assert "was ended by SIGKILL" in stubborn.describe_exit()
    assert has_ended(stubborn.pid)


def test_a_killed_child_takes_its_process_group_along(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-S', '-c', {SLEEPER!r}])\n"
        "print('grandchild', child.pid, flush=True)\ntime.sleep(600)"
    )
    with Subprocesses() as children:
        child = children.start("parent", python(code), tmp_path / "log")
        wait_for_line(children, child.log, "ready")
        words = child.log.read_text().split()
        grandchild = int(words[words.index("grandchild") + 1])
        assert not has_ended(grandchild)
        child.kill()
        # It is init's to reap now; until then it is there as a zombie.
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not has_ended(grandchild):
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for PR_SET_PDEATHSIG")
def test_a_child_ends_when_the_process_that_started_it_is_killed(tmp_path: Path) -> None:
    log = tmp_path / "inner.log"
    code = (
        "import pathlib, sys, time\n"
        "from swarm_coordinator.demo.subprocesses import Subprocesses\n"
        f"child = Subprocesses().start('inner', [sys.executable, '-S', '-c', {SLEEPER!r}], "
        f"pathlib.Path({str(log)!r}))\n"
        "print('inner', child.pid, flush=True)\ntime.sleep(600)"
    )
    with Subprocesses() as children:
        outer = children.start("outer", (sys.executable, "-c", code), tmp_path / "outer.log")
        wait_for_line(children, log, "ready")
        wait_for_line(children, outer.log, "inner")
        inner = int(outer.log.read_text().split()[1])
        os.kill(outer.pid, signal.SIGKILL)
        outer.wait(PATIENCE_SECONDS)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not has_ended(inner):
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_a_child_gets_no_ctrl_c_from_our_terminal(tmp_path: Path) -> None:
    code = "import os; print(os.getsid(0) == os.getpid() == os.getpgid(0))"
    with Subprocesses() as children:
        child = children.start("session", python(code), tmp_path / "log")
        assert child.wait(PATIENCE_SECONDS) == 0
    assert child.last_lines() == ["True"]


def test_waiting_stops_when_a_child_fails_and_shows_its_last_words(tmp_path: Path) -> None:
    with Subprocesses() as children:
        children.start(
            "broken", python("raise SystemExit('no such thing')"), tmp_path / "broken.log"
        )
        with pytest.raises(SwarmError, match=r"(?s)broken exited with code 1.*no such thing"):
            wait_until(lambda: False, children, PATIENCE_SECONDS, "a wonder")


def test_waiting_is_bounded(tmp_path: Path) -> None:
    with Subprocesses() as children:
        children.start("sleeper", python(SLEEPER), tmp_path / "log")
        with pytest.raises(SwarmError, match=f"a wonder without success.*{tmp_path.name}"):
            wait_until(lambda: False, children, 0.1, "a wonder")


def test_a_log_folder_that_cannot_be_made_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match="could not be started"):
        Subprocesses().start("child", python("pass"), tmp_path / "file" / "child.log")


def test_only_the_end_of_a_long_log_is_read(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("x" * subprocesses.TAIL_BYTES * 2 + "\nlast but one\nlast\n")
    assert subprocesses.last_lines(log, 2) == ["last but one", "last"]
    assert subprocesses.last_lines(tmp_path / "none", 2) == []


def test_a_program_run_to_its_end_gives_its_output_or_its_complaint() -> None:
    assert run_to_end("talker", python("print('fine')"), PATIENCE_SECONDS) == "fine\n"
    with pytest.raises(SwarmError, match="talker failed with exit code 1: not this way"):
        run_to_end("talker", python("raise SystemExit('not this way')"), PATIENCE_SECONDS)
    with pytest.raises(SwarmError, match="had not ended"):
        run_to_end("sleeper", python(SLEEPER), 0.2)
