"""Log files quote remotes, and people read them in terminals."""

from __future__ import annotations

import logging

from swarm_shared.base.text import LogFormatter


def formatted(message: str, error: Exception | None = None) -> list[str]:
    cause = None if error is None else (type(error), error, None)
    record = logging.LogRecord("swarm", logging.INFO, __file__, 1, message, (), cause)
    return LogFormatter("%(levelname)s %(message)s").format(record).split("\n")


def test_a_text_of_a_remote_steers_no_terminal() -> None:
    (line,) = formatted("it says \x1b[2J\x1b]0;title\x07\u202e")
    assert line.isprintable()


def test_a_text_of_a_remote_passes_for_no_record() -> None:
    for text in ("it says\nINFO forged", "it says\rINFO forged", "it says\u2028INFO forged"):
        assert formatted(text) == ["INFO it says", "    INFO forged"]
    lines = formatted("it failed", ValueError("bad\nINFO forged"))
    assert lines == ["INFO it failed", "    ValueError: bad", "    INFO forged"]
