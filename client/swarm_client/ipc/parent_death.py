"""The end of a process with its parent (Linux). Imports no event loop, as `numbered` does not."""

from __future__ import annotations

import ctypes
import signal
import sys

_PR_SET_PDEATHSIG = 1  # include/uapi/linux/prctl.h
# Opened here, because a process between fork and exec must not load a library.
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def end_with_parent(number: signal.Signals) -> None:
    """Have the system send this process a signal when its parent ends. Does nothing on other
    systems, or if the parent has ended before."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
