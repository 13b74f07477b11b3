"""The form of log files, which people read in terminals."""

from __future__ import annotations

import logging

from swarm_shared.base.text import printable

CONTINUATION = "    "
"""Begins further lines of a record, as those of a traceback: no text passes for a record."""


class LogFormatter(logging.Formatter):
    """Formats records that may quote a remote: without control characters, each begun by itself."""

    def format(self, record: logging.LogRecord) -> str:
        lines = super().format(record).splitlines()
        return f"\n{CONTINUATION}".join(printable(line.expandtabs()) for line in lines)
