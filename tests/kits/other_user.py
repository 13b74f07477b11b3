"""What belongs to another user of the machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

OTHER_USER_ID = 65_534


def give_to_another_user(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As root truly; else this process takes itself for another user."""
    if os.geteuid() == 0:
        os.chown(path, OTHER_USER_ID, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: OTHER_USER_ID)
