"""What tests of nodes on loopback share."""

from __future__ import annotations

import pytest

from swarm_shared.network.nat import hole_punch


@pytest.fixture
def no_waiting_for_holes(monkeypatch: pytest.MonkeyPatch) -> None:
    """For nodes that do not listen: no hole can be punched, and nothing should wait for one."""
    monkeypatch.setattr(hole_punch, "PUNCH_WAIT_SECONDS", 0.0)
