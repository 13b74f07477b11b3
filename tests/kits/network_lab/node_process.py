"""The caller's end of `node_program`: a bare node on a machine of the lab."""

from __future__ import annotations

from pathlib import Path

from kits.network_lab.commanded_process import ToldProcess
from kits.network_lab.commands import LabError
from kits.network_lab.machines import Host

PORT = 4001


class NodeProcess(ToldProcess):
    def __init__(self, host: Host, folder: Path, version: int = 4) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        listen = f"/ip4/0.0.0.0/tcp/{PORT}" if version == 4 else f"/ip6/::/tcp/{PORT}"
        words = [str(folder / f"{host.name}.key"), listen]
        super().__init__(host, "kits.network_lab.node_program", words, folder / f"{host.name}.out")
        self._reserved: list[str] | None = None

    @property
    def peer(self) -> str:
        return str(self.greeting["peer"])

    @property
    def addresses(self) -> list[str]:
        return self._reserved or list(self.greeting["addresses"])

    def reserve(self, *relays: NodeProcess, seconds: float = 10.0) -> None:
        """Hold a slot at each relay; `addresses` then lead through them too."""
        told = self.ask(
            "reserve", relays={relay.peer: relay.addresses for relay in relays},
            wanted=len(relays), seconds=seconds,
        )  # fmt: skip
        if told["seconds"] is None:
            raise LabError(f"{self.host.name} has no slot after {seconds:g} s; see {self.log}")
        self._reserved = told["addresses"]
