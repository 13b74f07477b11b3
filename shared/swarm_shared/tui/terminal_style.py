"""What a terminal can show: Unicode or ASCII, how many colours, and which theme suits it.

Owns reading that off the environment, once, at the start. What cannot be known is taken to be
less than it may be: ASCII bars look poor on a good terminal, Unicode looks broken on a bad one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class ThemeName(StrEnum):
    DARK = "dark"
    LIGHT = "light"
    CONTRAST = "high contrast"
    TERMINAL = "the terminal's colours"
    """The terminal's own 16."""
    NONE = "no colour"


@dataclass(frozen=True, slots=True)
class Look:
    """How to draw."""

    unicode: bool = True
    colour: bool = True
    theme: ThemeName = ThemeName.DARK


_COLOURLESS = ("dumb", "unknown", "vt")
"""What TERM begins with for terminals that have no colours; a vt100 has none."""
_COERCED = ("C.UTF-8", "C.utf8", "UTF-8")
"""What Python itself writes into LC_CTYPE when it starts in the C locale (PEP 538)."""


def look_of(
    environment: Mapping[str, str], *, coerced: bool = False, unicode: bool | None = None
) -> Look:
    """The look for a terminal. `unicode` is the person's own word and outweighs the locale's.

    `coerced`: Python was started in the C locale (`sys.flags.utf8_mode` tells), so that LC_CTYPE is
    its own doing and says nothing of the terminal.
    """
    if unicode is None:
        unicode = _speaks_unicode(environment, coerced)
    colours = _colours(environment)
    if environment.get("NO_COLOR") or colours == 0:
        return Look(unicode=unicode, colour=False, theme=ThemeName.NONE)
    if colours < 256:
        return Look(unicode=unicode, theme=ThemeName.TERMINAL)
    return Look(unicode=unicode)


def _speaks_unicode(environment: Mapping[str, str], coerced: bool) -> bool:
    """By the first of the variables that is set, as the C library reads them."""
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
    # Of terminals whose name says nothing, those in use have 16 at least, and most call
    # themselves something-256color when they have more.
    return 256 if "256color" in term or "kitty" in term or "direct" in term else 16
