"""The volunteer's folder: identity, caches and logs. Nothing is written outside it.

identity.key      the main Ed25519 key, created at first use, mode 0600
port              the TCP port of the last start: routers remember it, and hole punching needs it
p2pd.key          hivemind's own key
runs/<run>/data   ranges of the run's training data, verified, within a budget
runs/<run>/state  stage snapshots, for joining peers and checkpoints
runs/<run>/audits tensors of microbatches that are being audited
log/              one file per process
lock              held while a client works here
control.sock      the socket on which that client takes commands, mode 0600
runs.json         the runs that were joined, with their invites, mode 0600
contribution.json the contribution by day
devices/2/        the same for a machine's second device, which is a peer of its own: its identity,
                  port, p2pd, snapshots and logs; training data is shared with the first device
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from swarm_shared.base.atomic_file import make_folder, storage_error, write_atomically
from swarm_shared.base.errors import StorageError
from swarm_shared.host.user_folders import data_folder, expanded

if TYPE_CHECKING:  # pydantic, which a view must not load before its first frame
    from swarm_shared.base.types import RunId, StageIndex, Version


@dataclass(frozen=True, slots=True)
class Home:
    path: Path
    machine: Path | None = None
    """The home of the machine to which this home of a further device belongs; None for the
    machine's own."""

    @classmethod
    def locate(cls, path: Path | None) -> Home:
        """Return the home in the given folder, or in the platform's folder for application data.
        Creates nothing. StorageError for a user without a home folder, where it is needed."""
        return cls(expanded(path) if path is not None else data_folder())

    @classmethod
    def create(cls, path: Path | None) -> Home:
        """Return the home as `locate` does; its folder exists afterwards. StorageError when it
        cannot be used, or is another user's: that one could change all that is kept there, and read
        it."""
        home = cls.locate(path)
        try:
            make_folder(home.path, 0o700)
            if not home.is_of_another_user:
                home.log_folder.mkdir(exist_ok=True)
                return home
        except OSError as error:
            raise StorageError(
                f"the folder {home.path} cannot be used: {error.strerror}; "
                "choose another one with --home"
            ) from error
        raise StorageError(
            f"the folder {home.path} belongs to another user of this machine; run this as that "
            "user, or choose another folder with --home"
        )

    def of_device(self, number: int) -> Home:
        """The home of the machine's first, second, … device; it exists afterwards."""
        if number == 1:
            return self
        own = Home.create(self.path / "devices" / str(number))
        return Home(own.path, machine=self.path)

    @property
    def is_of_another_user(self) -> bool:
        return self.path.stat().st_uid not in (0, os.geteuid())

    @property
    def identity_path(self) -> Path:
        return self.path / "identity.key"

    @property
    def log_folder(self) -> Path:
        return self.path / "log"

    @property
    def socket_path(self) -> Path:
        return self.path / "control.sock"

    @property
    def runs_path(self) -> Path:
        return self.path / "runs.json"

    @property
    def contribution_path(self) -> Path:
        return self.path / "contribution.json"

    def remembered_port(self) -> int | None:
        """The port of the last start; None at the first one, or when the file is damaged."""
        return read_port(self.path / "port")

    def remember_port(self, port: int) -> None:
        write_port(self.path / "port", port)

    def run_folder(self, run: RunId) -> Path:
        return self.path / "runs" / run[:16]

    def data_folder(self, run: RunId) -> Path:
        whole = self if self.machine is None else Home(self.machine)
        return whole.run_folder(run) / "data"

    def state_folder(self, run: RunId) -> Path:
        return self.run_folder(run) / "state"

    def audit_folder(self, run: RunId) -> Path:
        return self.run_folder(run) / "audits"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder's lock: two clients with one identity would interfere with each other."""
        path = self.path / "lock"
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise storage_error(path, error) from error
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise StorageError(
                    f"another swarm-client is running in {self.path}, here or on another machine "
                    "that has this folder; stop it first (Ctrl-C or `swarm-client shutdown` "
                    "there), or give this one a folder of its own with --home"
                ) from None
            except OSError as error:
                raise StorageError(
                    f"{path} cannot be locked ({error.strerror}), so that two clients could have "
                    "one identity: its file system has no locks; choose a folder on another one "
                    "with --home"
                ) from error
            yield
        finally:
            os.close(handle)


def read_port(path: Path) -> int | None:
    """The port in a file; None when there is no such file, or when it is damaged."""
    try:
        port = int(path.read_text())
    except (OSError, ValueError):
        return None
    return port if 0 < port < 65_536 else None


def write_port(path: Path, port: int) -> None:
    """StorageError when the file cannot be written."""
    write_atomically(path, f"{port}\n".encode())


def snapshot_item(version: Version, stage: StageIndex) -> str:
    """The name under which a stage's snapshot is served."""
    return f"state/{version}/{stage}"
