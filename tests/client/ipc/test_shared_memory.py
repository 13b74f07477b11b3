"""Shared memory between processes of one volunteer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from swarm_client.ipc import shared_memory
from swarm_shared.base.errors import CapacityError, StorageError


@pytest.fixture
def prefix() -> str:
    return f"swarm-test-{os.getpid()}-{os.urandom(3).hex()}"


def test_two_processes_see_the_same_numbers_and_the_attacher_does_not_remove_them(
    prefix: str,
) -> None:
    with shared_memory.create(prefix, 4000) as segment:
        segment.array(np.float32, 1000)[:] = np.arange(1000)
        code = (
            "import sys; from swarm_client.ipc import shared_memory as s;"
            "a = s.attach(sys.argv[1]).array('f4', 10, 4 * 990); a *= 2; print(float(a[9]))"
        )
        told = subprocess.run(
            [sys.executable, "-c", code, segment.name], check=True, capture_output=True, text=True
        )
        assert told.stdout == "1998.0\n"
        assert told.stderr == ""
        assert segment.array(np.float32, 1000)[999] == 1998
        assert segment.array(np.float32, 1000)[989] == 989
        with shared_memory.attach(segment.name) as again:
            assert again.nbytes == 4000
        segment.unlink()
    with pytest.raises(StorageError, match="no shared memory"):
        shared_memory.attach(segment.name)


def test_a_new_segment_is_private_zeroed_and_of_the_size_asked_for(prefix: str) -> None:
    with shared_memory.create(prefix, 12345) as segment:
        path = next(
            f / segment.name for f in shared_memory.segment_folders() if (f / segment.name).exists()
        )
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.stat().st_size == 12345
        # The memory is really taken, not promised.
        assert path.stat().st_blocks * 512 >= 12345
        assert not any(segment.buffer)
        segment.unlink()


def test_arrays_outlive_the_closing_of_their_segment(prefix: str) -> None:
    segment = shared_memory.create(prefix, 400)
    array = segment.array(np.float32, 100)
    segment.unlink()
    segment.close()
    segment.close()
    array[:] = 3
    assert array.sum() == 300


@pytest.mark.parametrize(("count", "offset"), [(101, 0), (100, 4), (-1, 0), (1, -4)])
def test_an_array_outside_the_segment_is_refused(prefix: str, count: int, offset: int) -> None:
    with shared_memory.create(prefix, 400) as segment:
        segment.unlink()
        with pytest.raises(ValueError, match="outside"):
            segment.array(np.float32, count, offset)


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".hidden", "a" * 250, "a\0b"])
def test_a_name_that_is_a_path_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="cannot be the name"):
        shared_memory.attach(name)


def test_what_a_killed_process_left_is_cleared_and_what_is_in_use_stays(prefix: str) -> None:
    code = (
        "import sys, time; from swarm_client.ipc import shared_memory as s;"
        "print(s.create(sys.argv[1], 100).name, flush=True); time.sleep(1000)"
    )
    with shared_memory.create(prefix, 100) as own:
        with subprocess.Popen(
            [sys.executable, "-c", code, prefix], stdout=subprocess.PIPE, text=True
        ) as other:
            assert other.stdout is not None
            name = other.stdout.readline().strip()
            shared_memory.unlink_stale(prefix)
            shared_memory.attach(name).close()
            other.send_signal(signal.SIGKILL)
        shared_memory.unlink_stale(prefix)
        with pytest.raises(StorageError):
            shared_memory.attach(name)
        shared_memory.attach(own.name).close()
        own.unlink()


def test_memory_that_is_not_there_is_refused_at_once_and_nothing_stays(
    prefix: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(shared_memory, "segment_folders", lambda: (tmp_path,))
    with pytest.raises(CapacityError, match="no room"):
        shared_memory.create(prefix, 2**60)
    assert list(tmp_path.iterdir()) == []


def test_a_full_folder_is_passed_over_for_the_next(
    prefix: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    readonly = Path("/proc")
    monkeypatch.setattr(shared_memory, "segment_folders", lambda: (readonly, tmp_path))
    with shared_memory.create(prefix, 100) as segment:
        assert (tmp_path / segment.name).exists()
        assert shared_memory.attach(segment.name).nbytes == 100


@pytest.mark.parametrize("kind", ["link", "file"])
def test_another_user_cannot_take_a_segments_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefix: str, kind: str
) -> None:
    """Of one in the fallback folder, which lies behind."""
    first, fallback = tmp_path / "first", tmp_path / "fallback"
    first.mkdir()
    fallback.mkdir()
    monkeypatch.setattr(shared_memory, "segment_folders", lambda: (fallback,))
    with shared_memory.create(prefix, 4000) as segment:
        monkeypatch.setattr(shared_memory, "segment_folders", lambda: (first, fallback))
        place = first / segment.name
        if kind == "link":
            place.symlink_to(first)
        elif os.geteuid() != 0:
            pytest.skip("only root can make another user's file")
        else:
            place.write_bytes(b"x" * 4000)
            os.chown(place, 65_534, 65_534)
        segment.buffer[:4] = b"mine"
        with shared_memory.attach(segment.name) as found:
            assert bytes(found.buffer[:4]) == b"mine"
        segment.unlink()
        with pytest.raises(StorageError, match="there is no shared memory"):
            shared_memory.attach(segment.name)
