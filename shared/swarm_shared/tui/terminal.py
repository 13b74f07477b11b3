"""The check for a terminal to draw on, and what it can show."""

from __future__ import annotations

import os
import sys

from swarm_shared.base.errors import UsageError
from swarm_shared.tui.terminal_style import Look, look_of


def this_terminal(instead: str, *, unicode: bool | None) -> Look:
    """Return how to draw here. UsageError for a file or a pipe; `instead` names the command for
    those."""
    # The view is written to standard error (as Textual does), and keys come from standard input.
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise UsageError(f"top needs a terminal and this is none; use `{instead}` here")
    return look_of(os.environ, coerced=sys.flags.utf8_mode == 1, unicode=unicode)
