"""Processes that are not children of the tests."""

from __future__ import annotations

import psutil


def has_ended(pid: int) -> bool:
    """Whether it has, reaped or not."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
