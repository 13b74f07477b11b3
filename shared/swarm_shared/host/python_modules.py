"""Modules of this program as processes of their own."""

from __future__ import annotations

import sys


def module_command(module: str, *arguments: str) -> tuple[str, ...]:
    """Return the command that runs a module with this interpreter.

    `-P`: else Python imports what lies in the folder in which it is started before anything that
    is installed. In /tmp, or in a folder that is shared, that may be another user's program.
    """
    # One option: the benchmarks' instruments take the module from the third place.
    return (sys.executable, "-Pm", module, *arguments)
