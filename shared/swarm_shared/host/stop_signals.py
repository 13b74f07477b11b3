"""The signals that ask this process to stop in order."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator


def stop_signals() -> tuple[signal.Signals, ...]:
    """Return Ctrl-C's signal, a service manager's, and that of a terminal that closes, unless the
    process was started to outlive it (`nohup`)."""
    found = [signal.SIGINT, signal.SIGTERM]
    hangup = getattr(signal, "SIGHUP", None)  # not on Windows
    if hangup is not None and signal.getsignal(hangup) is not signal.SIG_IGN:
        found.append(hangup)
    return tuple(found)


@contextlib.contextmanager
def on_stop_signals(handler: Callable[[], object]) -> Iterator[None]:
    """Call `handler` at each of these signals during the block. For a program without an event
    loop; of the main thread only."""
    before = {number: signal.signal(number, lambda *_: handler()) for number in stop_signals()}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


def asks_again(number: int) -> bool:
    """Whether a signal that follows another one asks to stop at once. A closing terminal sends its
    own twice: the system does, and the shell."""
    return number != getattr(signal, "SIGHUP", None)
