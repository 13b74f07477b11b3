"""What a participation leaves behind when it ends."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from swarm_client.control.contribution_log import ContributionCounter, ContributionLog
from swarm_client.control.messages import JoinArguments
from swarm_client.daemon import participation
from swarm_client.machine.devices import Device
from swarm_client.machine.home import Home
from swarm_client.training_data.leaf_cache import LeafCache
from swarm_shared.base.errors import NetworkError
from swarm_shared.base.types import RunId
from swarm_shared.identity.keys import Identity


async def test_the_files_of_the_training_data_are_closed_with_a_participation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A daemon outlives its participations, and would run out of files."""
    opened: list[LeafCache] = []

    class Opened(LeafCache):
        def __init__(self, folder: Path, budget_bytes: int) -> None:
            super().__init__(folder, budget_bytes)
            self.open()
            opened.append(self)

    async def devices(*_: Any) -> tuple[Device, ...]:
        return (Device("cpu", "CPU", 2**30),)

    def no_network(*_: Any) -> Any:
        raise NetworkError("there is no network")

    monkeypatch.setattr(participation, "LeafCache", Opened)
    monkeypatch.setattr(participation, "_offered_devices", devices)
    monkeypatch.setattr(participation, "listening_node", no_network)
    invite: Any = SimpleNamespace(run_id=RunId("ab" * 32))
    with pytest.RaisesGroup(pytest.RaisesGroup(NetworkError)):
        await participation.participate(
            JoinArguments(invite="swarm1abc"), invite, Home.create(tmp_path / "home"),
            Identity.generate(), ContributionCounter(ContributionLog()), lambda _: None,
            lambda *_: None, lambda _: None,
        )  # fmt: skip
    assert [cache._files for cache in opened] == [None]
