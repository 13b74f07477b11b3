"""Whether there is a terminal to draw on, and what it can show."""

from __future__ import annotations

import os
import sys

from swarm_shared.base.errors import UsageError
from swarm_shared.tui.terminal_style import Look, look_of


def this_terminal(instead: str, *, unicode: bool | None) -> Look:
    """UsageError where the view would go into a file or a pipe; `instead` names the command."""
    # The view is written to standard error (as Textual does), and keys come from standard input.
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise UsageError(f"top draws on a terminal and this is none; `{instead}` fits here")
    return look_of(os.environ, coerced=sys.flags.utf8_mode == 1, unicode=unicode)
