"""The run's folder: what lies in it, and who may use it.

Owns the names of the files, making and opening the folder, the lock that keeps two coordinators
apart, and the two small files that only the coordinator remembers things in (port, token). What
the other files hold is their owners' business.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from swarm_shared.base.atomic_file import PRIVATE_MODE, storage_error, write_atomically
from swarm_shared.base.errors import StorageError, UsageError

_MAX_SMALL_FILE_BYTES = 16 * 1024 * 1024


def quoted(path: Path) -> str:
    """As part of a command that a person copies into a shell."""
    return shlex.quote(str(path))


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Names only; `create` and `open` check the disk."""

    path: Path

    @property
    def settings(self) -> Path:
        return self.path / "run.toml"

    @property
    def manifest(self) -> Path:
        """The signed envelope."""
        return self.path / "manifest.json"

    @property
    def organiser_key(self) -> Path:
        return self.path / "organiser.key"

    @property
    def data(self) -> Path:
        return self.path / "data"

    @property
    def tokenizer(self) -> Path:
        """Only there if the tokenizer is bpe."""
        return self.path / "tokenizer.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def database(self) -> Path:
        return self.path / "coordinator.sqlite"

    @property
    def status(self) -> Path:
        return self.path / "status.json"

    @property
    def log(self) -> Path:
        return self.path / "log"

    @property
    def lock_file(self) -> Path:
        return self.path / "lock"

    @property
    def port_file(self) -> Path:
        return self.path / "port"

    @property
    def socket(self) -> Path:
        """Where a running coordinator takes commands; there only while it runs."""
        return self.path / "commands.sock"

    @property
    def token_file(self) -> Path:
        return self.path / "admission.token"

    @property
    def dashboard_token_file(self) -> Path:
        return self.path / "dashboard.token"

    @property
    def http_port_file(self) -> Path:
        return self.path / "http.port"

    @classmethod
    def create(cls, path: Path) -> RunFolder:
        """A new folder with its subfolders; UsageError if something is there already."""
        refuse_existing(path)
        folder = cls(path)
        try:
            # The key and the token are private anyway; names of volunteers in the log are too.
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            for part in (folder.data, folder.checkpoints, folder.log):
                part.mkdir()
        except OSError as error:
            raise storage_error(path, error) from error
        return folder

    @classmethod
    def open(cls, path: Path, *, complete: bool = True) -> RunFolder:
        """An existing run folder; UsageError if it is none, StorageError if part of it is lost.

        Not `complete`: for whoever wants to know what is lost.
        """
        folder = cls(path)
        if not path.is_dir():
            what = "is a file" if path.exists() else "does not exist"
            raise UsageError(
                f"{path} {what}; make a run there with `swarm-coordinator init {quoted(path)}`, "
                "or name the folder of a run"
            )
        if not folder.settings.exists() and not folder.manifest.exists():
            raise UsageError(
                f"{path} is not the folder of a run (it has no run.toml); make one with "
                "`swarm-coordinator init NEW_FOLDER`"
            )
        for part in (folder.settings, folder.manifest, folder.organiser_key, folder.data):
            if complete and not part.exists():
                raise StorageError(
                    f"the run folder {path} has lost its {part.name}; restore it from a copy"
                )
        return folder

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Held as long as the block runs; the system frees it when the process dies."""
        try:
            descriptor = os.open(self.lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise storage_error(self.lock_file, error) from error
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    raise storage_error(self.lock_file, error) from error
                holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
                raise UsageError(
                    f"another coordinator (process {holder or 'unknown'}) is using {self.path}; "
                    "stop that one first"
                ) from error
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode("ascii"), 0)
            yield
        finally:
            os.close(descriptor)

    def in_use(self) -> bool:
        """Whether a process holds the lock now."""
        try:
            descriptor = os.open(self.lock_file, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
        else:
            return False
        finally:
            os.close(descriptor)

    def set_database_aside(self) -> list[Path]:
        """Move a damaged database out of the way, with the files that SQLite keeps beside it."""
        beside = [Path(f"{self.database}{suffix}") for suffix in ("", "-wal", "-shm")]
        number = 1
        while (aside := self.path / f"damaged-{number}-{self.database.name}").exists():
            number += 1
        moved: list[Path] = []
        for path in beside:
            if path.exists():
                target = aside.with_name(aside.name + path.name.removeprefix(self.database.name))
                try:
                    path.rename(target)
                except OSError as error:
                    raise storage_error(path, error) from error
                moved.append(target)
        return moved

    def remembered_port(self) -> int | None:
        """The port picked at the first start, which invites name."""
        return _remembered(self.port_file, "write the port that your invites name into it, or "
                           "delete it and send new invites")  # fmt: skip

    def remember_port(self, port: int) -> None:
        write_atomically(self.port_file, f"{port}\n".encode("ascii"))

    def remembered_http_port(self) -> int | None:
        """The port picked for the pages, which people's bookmarks name."""
        return _remembered(self.http_port_file, "delete it, and another port is picked")

    def remember_http_port(self, port: int) -> None:
        write_atomically(self.http_port_file, f"{port}\n".encode("ascii"))

    def dashboard_token(self) -> str:
        """The secret that opens the organiser's pages; made on first use."""
        return _secret_in(
            self.dashboard_token_file, "delete it, and `swarm-coordinator dashboard` prints a new "
            "link after the next start"
        )  # fmt: skip

    def admission_token(self) -> str:
        """The secret of the run's own invite where [admission] mode is "token"; made on first use.

        In clear, so that `invite` can print it again; the database has its hash only.
        """
        return _secret_in(
            self.token_file, "delete it, and send new invites, as `swarm-coordinator token create` "
            "makes them"
        )  # fmt: skip


def _secret_in(path: Path, advice: str) -> str:
    if not path.exists():
        token = secrets.token_urlsafe(24)
        write_atomically(path, f"{token}\n".encode("ascii"), PRIVATE_MODE)
    token = read_bytes(path).decode("ascii", "replace").strip()
    if not token:
        raise StorageError(f"{path} is empty; {advice}")
    return token


def _remembered(path: Path, advice: str) -> int | None:
    if not path.exists():
        return None
    text = read_bytes(path).decode("ascii", "replace").strip()
    if not (text.isdecimal() and 0 < int(text) < 65_536):
        raise StorageError(f"{path} holds {text[:20]!r}, which is no port; {advice}")
    return int(text)


def refuse_existing(path: Path) -> None:
    """UsageError unless a run folder may be made at `path`: nothing there, or an empty folder."""
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise UsageError(f"{path} is there already and no folder; choose another name")
    try:
        occupied = path.is_dir() and any(path.iterdir())
    except OSError as error:
        raise storage_error(path, error) from error
    if occupied:
        what = "holds a run already" if RunFolder(path).settings.exists() else "is not empty"
        raise UsageError(f"{path} {what}; choose another name, or delete that folder")


def read_bytes(path: Path, largest_bytes: int = _MAX_SMALL_FILE_BYTES) -> bytes:
    """A small file's content; StorageError says what is wrong with it."""
    try:
        with path.open("rb") as file:
            content = file.read(largest_bytes + 1)
    except OSError as error:
        raise StorageError(
            f"cannot read {path} ({error.strerror}); check its permissions or restore it"
        ) from error
    if len(content) > largest_bytes:
        raise StorageError(
            f"{path} is longer than {largest_bytes} bytes, so it is not what its name says; "
            "restore it from a copy"
        )
    return content
