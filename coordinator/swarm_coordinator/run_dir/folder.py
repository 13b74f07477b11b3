"""The run folder: names of its files, creating and opening it, and its lock.

Owns the lock that excludes a second coordinator, and the small files with ports and secrets. The
content of all other files belongs to the modules that write them.
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

from swarm_shared.base.atomic_file import PRIVATE_MODE, storage_error, sync_folder, write_atomically
from swarm_shared.base.errors import StorageError, UsageError

_MAX_SMALL_FILE_BYTES = 16 * 1024 * 1024


def quoted(path: Path) -> str:
    """Quote a path for a command that the organiser copies into a shell."""
    return shlex.quote(str(path))


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Convert the system's refusal to write `path` to a StorageError with one sentence."""
    try:
        yield
    except OSError as error:
        raise storage_error(path, error) from error


class _Part:
    """A file or folder in a run folder, by its name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, folder: RunFolder, _: type[RunFolder]) -> Path:
        return folder.path / self._name


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths of a run folder; only `create` and `open` check the disk."""

    path: Path

    settings = _Part("run.toml")
    manifest = _Part("manifest.json")
    """File of the signed manifest."""
    organiser_key = _Part("organiser.key")
    data = _Part("data")
    tokenizer = _Part("tokenizer.json")
    """File of the tokenizer; the bytes tokenizer has none."""
    initial = _Part("initial")
    """Folder of the states of version 0, in a run that continues from a given model."""
    checkpoints = _Part("checkpoints")
    database = _Part("coordinator.sqlite")
    status = _Part("status.json")
    log = _Part("log")
    lock_file = _Part("lock")
    backup_summary = _Part("backup.json")
    """File that makes the folder a backup of a run."""
    port_file = _Part("port")
    socket = _Part("commands.sock")
    """Socket on which a running coordinator takes commands."""
    token_file = _Part("admission.token")
    dashboard_token_file = _Part("dashboard.token")
    http_port_file = _Part("http.port")

    @classmethod
    def create(cls, path: Path) -> RunFolder:
        """Make a new folder with its subfolders; UsageError if something exists there."""
        refuse_existing(path)
        folder = cls(path)
        with disk_errors(path):
            # Private, because the log has names of volunteers; key and token are private files
            # anyway.
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            with contextlib.suppress(PermissionError):  # such as a volume of another user
                path.chmod(0o700)
            for part in (folder.data, folder.checkpoints, folder.log):
                part.mkdir()
        return folder

    @classmethod
    def open(cls, path: Path, *, complete: bool = True) -> RunFolder:
        """Open an existing run folder; UsageError if it is none.

        StorageError if a part of it is missing, unless `complete` is False.
        """
        folder = cls(path)
        if path.exists() and not path.is_dir():
            raise UsageError(f"{path} is a file; name the folder of a run")
        if not path.is_dir():
            raise UsageError(
                f"{path} does not exist; make a run there with `swarm-coordinator init "
                f"{quoted(path)}`, or name the folder of a run"
            )
        if not folder.settings.exists() and not folder.manifest.exists():
            raise UsageError(
                f"{path} is not the folder of a run (it has no run.toml); make one with "
                "`swarm-coordinator init NEW_FOLDER`"
            )
        for part in (folder.settings, folder.manifest, folder.organiser_key, folder.data):
            if complete and not part.exists():
                folder.refuse_backup()  # which may be without the key, or the data
                raise StorageError(
                    f"the run folder {path} has lost its {part.name}; restore it from a copy "
                    f"(`swarm-coordinator verify {quoted(path)}` names the last good backup)"
                )
        return folder

    def refuse_backup(self) -> None:
        """Raise UsageError for a backup: it stays as it was saved."""
        if self.backup_summary.exists():
            raise UsageError(
                f"{self.path} is a backup, which is kept as it is; continue its run in another "
                f"folder with `swarm-coordinator restore {quoted(self.path)} RUN_DIR`"
            )

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the lock during the block; the system releases it when the process dies."""
        with disk_errors(self.lock_file):
            descriptor = os.open(self.lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
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
        """Return whether a process holds the lock."""
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

    def database_files(self) -> list[Path]:
        """Return the database's file and those that SQLite keeps beside it, as far as they
        exist."""
        found = (Path(f"{self.database}{suffix}") for suffix in ("", "-wal", "-shm"))
        return [path for path in found if path.exists()]

    def set_database_aside(self) -> list[Path]:
        """Rename a damaged database and the files that SQLite keeps beside it; return the new
        paths."""
        number = 1
        while (aside := self.path / f"damaged-{number}-{self.database.name}").exists():
            number += 1
        moved: list[Path] = []
        for path in self.database_files():
            target = aside.with_name(aside.name + path.name.removeprefix(self.database.name))
            with disk_errors(path):
                path.rename(target)
            # In this order: without its log the database would pass for an older one.
            sync_folder(self.path)
            moved.append(target)
        return moved

    def remembered_port(self) -> int | None:
        """Return the port chosen at the first start, which invites contain."""
        return _remembered(self.port_file, "write the port that your invites name into it, or "
                           "delete it and send new invites")  # fmt: skip

    def remember_port(self, port: int) -> None:
        write_atomically(self.port_file, f"{port}\n".encode("ascii"))

    def remembered_http_port(self) -> int | None:
        """Return the port chosen for the dashboard, which bookmarks contain."""
        return _remembered(self.http_port_file, "delete it, and another port is picked")

    def remember_http_port(self, port: int) -> None:
        write_atomically(self.http_port_file, f"{port}\n".encode("ascii"))

    def dashboard_token(self) -> str:
        """Return the secret of the organiser's part of the dashboard; made on first use."""
        return _secret_in(
            self.dashboard_token_file, "delete it, and `swarm-coordinator dashboard` prints a new "
            "link after the next start"
        )  # fmt: skip

    def admission_token(self) -> str:
        """Return the secret of the run's own invite in admission mode "token"; made on first use.

        It is stored in clear text, so that `invite` can print it again; the database has its hash.
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
        raise StorageError(f"{path} holds {text[:20]!r}, which is not a port; {advice}")
    return int(text)


def refuse_existing(path: Path) -> None:
    """Raise UsageError unless `path` is free or an empty folder."""
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise UsageError(f"{path} exists and is not a folder; choose another name")
    with disk_errors(path):
        occupied = path.is_dir() and any(path.iterdir())
    if occupied:
        what = "holds a run already" if RunFolder(path).settings.exists() else "is not empty"
        raise UsageError(f"{path} {what}; choose another name, or delete that folder")


def read_bytes(path: Path, largest_bytes: int = _MAX_SMALL_FILE_BYTES) -> bytes:
    """Read a small file; StorageError when it is unreadable or too long."""
    try:
        with path.open("rb") as file:
            content = file.read(largest_bytes + 1)
    except OSError as error:
        raise StorageError(
            f"cannot read {path} ({error.strerror}); check its permissions or restore it"
        ) from error
    if len(content) > largest_bytes:
        raise StorageError(
            f"{path} is longer than {largest_bytes} bytes, so it is not the expected file; "
            "restore it from a copy"
        )
    return content
