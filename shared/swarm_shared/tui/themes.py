"""Themes, and the filters of the screen for terminals with fewer capabilities.

Owns the five themes and the last step before the terminal: without colour only bold, dim and
reverse are left; without Unicode everything a widget draws becomes ASCII of the same width.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from rich.cells import cell_len
from rich.segment import Segment
from textual.color import Color
from textual.filter import LineFilter
from textual.theme import BUILTIN_THEMES, Theme

from swarm_shared.tui.terminal_style import ThemeName

_DARK = Theme(
    name=ThemeName.DARK, dark=True,
    primary="#5fafd7", secondary="#87afd7", accent="#5fd7af", warning="#ffd75f", error="#ff8787",
    success="#87d787", foreground="#e4e4e4", background="#121212", surface="#1c1c1c",
    panel="#303030",
)  # fmt: skip
_LIGHT = Theme(
    name=ThemeName.LIGHT, dark=False,
    primary="#005f87", secondary="#005faf", accent="#00696b", warning="#875f00", error="#af0000",
    success="#006400", foreground="#1c1c1c", background="#f8f8f8", surface="#eeeeee",
    panel="#d7d7d7",
)  # fmt: skip
_CONTRAST = Theme(
    name=ThemeName.CONTRAST, dark=True,
    primary="#00ffff", secondary="#ffffff", accent="#00ffff", warning="#ffff00", error="#ff8080",
    success="#00ff00", foreground="#ffffff", background="#000000", surface="#000000",
    panel="#000000", text_alpha=1.0,
)  # fmt: skip

THEMES: tuple[Theme, ...] = (
    _DARK,
    _LIGHT,
    _CONTRAST,
    replace(BUILTIN_THEMES["ansi-dark"], name=ThemeName.TERMINAL),
    replace(BUILTIN_THEMES["ansi-dark"], name=ThemeName.NONE),
)

_ASCII = {
    **dict.fromkeys("─━═▔╌┄╸╺╶╴", "-"),
    **dict.fromkeys("│┃║▏▎▍▌▋▊▕▐", "|"),
    **dict(zip("▁▂▃▄▅▆▇█", "_.-=+*%#", strict=True)),
    **dict.fromkeys("┌┐└┘├┤┬┴┼╭╮╯╰┏┓┗┛╔╗╚╝", "+"),
    **dict.fromkeys("▉▀■", "#"),
    **dict.fromkeys("░▒▓", "."),
    **dict.fromkeys("●•◉⬤∙·", "*"),
    **dict.fromkeys("▶►❯›→", ">"),
    **dict.fromkeys("◀◄❮‹←", "<"),
    **dict.fromkeys("▲↑△", "^"),
    **dict.fromkeys("▼↓▽", "v"),
    **dict.fromkeys("–—−‑", "-"),
    **dict.fromkeys("’‘", "'"),
    **dict.fromkeys("“”", '"'),
    **{chr(braille): "*" for braille in range(0x2801, 0x2900)},
    "▪": "o",
    "…": "~", "×": "x", "⏎": "<", "␣": "_", "✓": "+", "✗": "x", " ": " ", "°": " ", "🔎": "> ",
}  # fmt: skip


@lru_cache(4096)
def ascii_of(text: str) -> str:
    """Return the text in ASCII, as wide as before; unknown characters become question marks."""
    if text.isascii():
        return text
    return "".join(_ascii_character(character) for character in text)


def _ascii_character(character: str) -> str:
    if character.isascii():
        return character
    return _ASCII.get(character, "?" * cell_len(character))


class AsciiOnly(LineFilter):
    """Converts every segment to ASCII, for terminals without Unicode."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        return [Segment(ascii_of(text), style, control) for text, style, control in segments]
