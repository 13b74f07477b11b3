"""Files of the averaging worker: its log, and the folder with its sockets."""

from __future__ import annotations

import contextlib
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

MAX_LOG_BYTES = 4 * 2**20
# A unix socket's path has at most 107 bytes on Linux; hivemind's names take 34 of them.
_MAX_FOLDER_CHARACTERS = 70


def rotate_log(log_path: Path) -> None:
    """Put a long log aside, and the one that was put aside before away."""
    with contextlib.suppress(FileNotFoundError):
        if log_path.stat().st_size > MAX_LOG_BYTES:
            log_path.replace(log_path.with_suffix(".log.1"))


@contextlib.contextmanager
def socket_folder(home: Path) -> Iterator[Path]:
    """A private folder for p2pd's sockets and the bridge's. Their paths must be short and plain."""
    own = home.absolute() / "s"
    if len(str(own)) <= _MAX_FOLDER_CHARACTERS and re.fullmatch(r"[A-Za-z0-9_./-]+", str(own)):
        # What a killed daemon left in it goes first.
        shutil.rmtree(own, ignore_errors=True)
        own.mkdir(mode=0o700)
    else:
        own = Path(tempfile.mkdtemp(prefix="swarm-"))
    try:
        yield own
    finally:
        shutil.rmtree(own, ignore_errors=True)
