"""A coordinator whose draws are all below one half: with this folder on PYTHONPATH, Python imports
this module at its start. Half of the members are audited whole where every cell is audited; with
these draws all of them are."""

from __future__ import annotations

import random

_honest = random.SystemRandom.random


def _below_half(self: random.SystemRandom) -> float:
    return _honest(self) / 2


random.SystemRandom.random = _below_half  # type: ignore[method-assign]
