"""The daemon's log on disk: details for a bug report, in the volunteer's own folder."""

from __future__ import annotations

import logging
import logging.handlers

from swarm_client.machine.home import Home
from swarm_shared.base.atomic_file import storage_error
from swarm_shared.base.text import LogFormatter

LOG_BYTES = 5 * 2**20
LOGGERS = (logging.getLogger("swarm_client"), logging.getLogger("swarm_shared"))
"""The loggers of the program's packages, above all of its other loggers."""


class LogFile(logging.handlers.RotatingFileHandler):
    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  logging calls it
        """Ignores errors: on a full disk a traceback for each line would not help. `swarm-client
        logs` reads the lines from memory."""


def write_log(home: Home) -> None:
    """Send details for a bug report to the volunteer's own folder, never to the terminal.
    StorageError when they cannot be written there."""
    path = home.log_folder / "client.log"
    try:
        handler = LogFile(path, maxBytes=LOG_BYTES, backupCount=2)
    except OSError as error:
        raise storage_error(path, error) from error
    handler.setFormatter(LogFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    for logger in LOGGERS:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
