"""A terminal's capabilities: Unicode or ASCII, the number of colours, and the theme for it.

Read from the environment once, at the start. Unknown capabilities are assumed to be missing: ASCII
bars look poor on a good terminal, Unicode looks broken on a bad one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from swarm_shared.base.errors import UsageError


class ThemeName(StrEnum):
    DARK = "dark"
    LIGHT = "light"
    CONTRAST = "high contrast"
    TERMINAL = "the terminal's colours"
    """The terminal's own 16 colours."""
    NONE = "no colour"


@dataclass(frozen=True, slots=True)
class Look:
    """How to draw."""

    unicode: bool = True
    theme: ThemeName = ThemeName.DARK


_COLOURLESS = ("dumb", "unknown", "vt")
"""Prefixes of TERM of terminals that have no colours; a vt100 has none."""
_COERCED = ("C.UTF-8", "C.utf8", "UTF-8")
"""Values that Python itself writes into LC_CTYPE when it starts in the C locale (PEP 538)."""


def this_terminal(instead: str, *, unicode: bool | None) -> Look:
    """Return how to draw here. UsageError for a file or a pipe; `instead` names the command for
    those."""
    # The view is written to standard error (as Textual does), and keys come from standard input.
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise UsageError(f"top needs a terminal and this is none; use `{instead}` here")
    return look_of(os.environ, coerced=sys.flags.utf8_mode == 1, unicode=unicode)


def look_of(
    environment: Mapping[str, str], *, coerced: bool = False, unicode: bool | None = None
) -> Look:
    """Return how to draw on a terminal. `unicode` is the person's choice and overrides the locale.

    `coerced`: Python was started in the C locale (`sys.flags.utf8_mode`), so that LC_CTYPE is
    Python's own and does not describe the terminal.
    """
    if unicode is None:
        unicode = _speaks_unicode(environment, coerced)
    colours = _colours(environment)
    if environment.get("NO_COLOR") or colours == 0:
        return Look(unicode=unicode, theme=ThemeName.NONE)
    if colours < 256:
        return Look(unicode=unicode, theme=ThemeName.TERMINAL)
    return Look(unicode=unicode)


def _speaks_unicode(environment: Mapping[str, str], coerced: bool) -> bool:
    """Whether the first of the variables that is set, in the C library's order, names UTF-8."""
    names = ["LC_ALL", "LC_CTYPE", "LANG"]
    if coerced and environment.get("LC_CTYPE") in _COERCED:
        names.remove("LC_CTYPE")
    locale = next((environment[name] for name in names if environment.get(name)), "C")
    return "utf8" in locale.lower().replace("-", "")


def _colours(environment: Mapping[str, str]) -> int:
    term = environment.get("TERM", "").lower()
    if term == "" or term.startswith(_COLOURLESS):
        return 0
    if environment.get("COLORTERM", "").lower() in ("truecolor", "24bit"):
        return 2**24
    # Terminals in use have at least 16 colours, and most with more are named
    # something-256color.
    return 256 if "256color" in term or "kitty" in term or "direct" in term else 16
