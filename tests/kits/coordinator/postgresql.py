"""A PostgreSQL server of the tests' own, in a temporary folder, and a database in it per test.

Not as root, because the server refuses that: as the user `postgres` or, without one, `nobody`.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import psycopg
import pytest

from swarm_coordinator.storage.connection import PostgresqlLocation

_NUMBERS = count(1)


@dataclass
class Server:
    folder: Path
    port: int
    process: subprocess.Popen[bytes]

    def url(self, name: str) -> str:
        return f"postgresql://tester@127.0.0.1:{self.port}/{name}"

    def new_database(self) -> str:
        """Its URL."""
        name = f"run{next(_NUMBERS)}"
        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name} TEMPLATE template0".encode())
        return self.url(name)

    def place(self, lease_seconds: float = 5.0) -> PostgresqlLocation:
        return PostgresqlLocation(self.new_database(), lease_seconds)


def programs() -> Path:
    """Where initdb and postgres are; the test is skipped where they are not."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    plain = shutil.which("initdb")
    if not found and plain is None:
        pytest.skip(
            "there is no PostgreSQL server here; sh tools/install_postgresql.sh installs one"
        )
    return found[-1].parent if found else Path(str(plain)).resolve().parent


def _user() -> dict[str, int | list[int]]:
    """What makes a child an ordinary user, for a parent that is root."""
    if os.geteuid():
        return {}
    names = {entry.pw_name: entry for entry in pwd.getpwall()}
    entry = names.get("postgres") or names["nobody"]
    return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}


@contextlib.contextmanager
def server() -> Iterator[Server]:
    binaries, user = programs(), _user()
    folder = Path(tempfile.mkdtemp(prefix="swarm-postgresql-"))
    try:
        if user:
            os.chown(folder, int(str(user["user"])), int(str(user["group"])))
        data = folder / "data"
        subprocess.run(
            [binaries / "initdb", "--pgdata", data, "--username", "tester", "--auth", "trust",
             "--encoding", "UTF8", "--locale", "C", "--no-sync"],
            check=True, stdout=subprocess.DEVNULL, cwd=folder, **user,  # type: ignore[call-overload]
        )  # fmt: skip
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [binaries / "postgres", "-D", data, "-k", folder, "-p", str(port),
                 "-c", "listen_addresses=127.0.0.1", "-c", "fsync=off", "-c", "shared_buffers=16MB",
                 "-c", "max_connections=60"],
                stdout=log, stderr=log, cwd=folder, **user,  # type: ignore[call-overload]
            )  # fmt: skip
        try:
            _wait(folder, binaries, port, process)
            yield Server(folder, port, process)
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
            process.kill()
            process.wait()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _wait(folder: Path, binaries: Path, port: int, process: subprocess.Popen[bytes]) -> None:
    ask = [binaries / "pg_isready", "-q", "-h", "127.0.0.1", "-p", str(port), "-t", "1"]
    while subprocess.run(ask, check=False).returncode:
        if process.poll() is not None:
            raise AssertionError((folder / "log").read_text())
