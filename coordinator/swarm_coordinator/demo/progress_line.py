"""The live progress of a run: one line updated in place, or plain lines in a log.

Owns the text of the line, the estimate of the remaining time, how often the line is written, and
the lines of events between.
The caller supplies figures, clock and stream.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Self, TextIO

from swarm_coordinator.storage.history import HistoryStep
from swarm_shared.base.clock import Clock
from swarm_shared.base.text import duration_text

RECENT_STEPS = 10
"""Number of last steps behind the rate and the ETA; the first ones are slower, while peers join."""

PLAIN_INTERVAL_SECONDS = 5.0
"""Least seconds between two lines where output goes to a file or a pipe."""

BAR_CHARACTERS = 20
CLEAR_TO_END_OF_LINE = "\x1b[K"


@dataclass(frozen=True, slots=True)
class Progress:
    """A run at one moment."""

    steps_wanted: int
    steps: Sequence[HistoryStep]
    peers_per_stage: Sequence[int]
    note: str = ""
    """Activity before the first step and after the last."""


def progress_line(progress: Progress) -> str:
    """Return step, loss, tokens/s, peers per stage and remaining time in one line."""
    peers = "+".join(str(count) for count in progress.peers_per_stage) or "-"
    done = len(progress.steps)
    parts = [f"step {done}/{progress.steps_wanted} {_bar(done, progress.steps_wanted)}"]
    if done:
        parts.append(f"loss {progress.steps[-1].loss:.3f}")
        parts.append(f"{tokens_per_second(progress.steps[-RECENT_STEPS:]):,.0f} tokens/s")
    parts.append(f"peers {peers}")
    if done and done < progress.steps_wanted:
        parts.append(f"ETA {duration_text(eta_seconds(progress))}")
    if progress.note:
        parts.append(progress.note)
    return "  ".join(parts)


def tokens_per_second(steps: Sequence[HistoryStep]) -> float:
    """Return all tokens over all seconds of the steps, including waits for peers."""
    seconds = sum(step.seconds for step in steps)
    return sum(step.tokens for step in steps) / seconds if seconds > 0 else 0.0


def eta_seconds(progress: Progress) -> float:
    """Estimate the remaining seconds from the median step, which one slow step does not affect."""
    recent = [step.seconds for step in progress.steps[-RECENT_STEPS:]]
    return median(recent) * (progress.steps_wanted - len(progress.steps))


class ProgressDisplay:
    """Writes progress in place on a terminal, and elsewhere as a line every few seconds.

    Leaving its `with` block writes the last state in full and starts a new line.
    """

    def __init__(self, stream: TextIO, clock: Clock) -> None:
        self._stream = stream
        self._clock = clock
        self._in_place = stream.isatty()
        self._latest = ""
        self._written = ""
        self._written_at: float | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._in_place and self._latest:
            self._write(f"\r{self._latest}{CLEAR_TO_END_OF_LINE}\n")
        elif self._latest != self._written:
            self._write(f"{self._latest}\n")

    def show(self, progress: Progress) -> None:
        self._latest = progress_line(progress)
        if self._latest == self._written:
            return
        if self._in_place:
            width = shutil.get_terminal_size().columns
            self._write(f"\r{self._latest[: width - 1]}{CLEAR_TO_END_OF_LINE}")
        else:
            now = self._clock()
            if self._written_at is not None and now - self._written_at < PLAIN_INTERVAL_SECONDS:
                return
            self._written_at = now
            self._write(f"{self._latest}\n")
        self._written = self._latest

    def write_line(self, text: str) -> None:
        """Write a line that stays, above the progress."""
        self._write(f"\r{text}{CLEAR_TO_END_OF_LINE}\n" if self._in_place else f"{text}\n")
        self._written = ""

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


def _bar(done: int, wanted: int) -> str:
    filled = BAR_CHARACTERS * done // max(1, wanted)
    return "[" + "#" * filled + "." * (BAR_CHARACTERS - filled) + "]"
