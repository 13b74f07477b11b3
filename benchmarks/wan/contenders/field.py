"""Environment of a contender: the network, its fleet, the run, and the output folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks.instruments.pace import PACE_VARIABLE
from benchmarks.wan.fleet import Member, Sizes
from benchmarks.wan.links.network import Network
from benchmarks.wan.templates import Templates
from kits.network_lab import Host
from swarm_coordinator.demo.subprocesses import Subprocess, Subprocesses, wait_until
from swarm_shared.run.codec_sizes import ActivationCodec

COORDINATOR = "coordinator"
"""Name of a machine with a good link that holds no stage."""
TRAINER = "trainer"
"""Name of a machine that holds no stage, with the best of the fleet's links."""
LIMIT_SECONDS = 1800.0
DEVICE = "eth0"


@dataclass(frozen=True, slots=True)
class Field:
    network: Network
    members: tuple[Member, ...]
    """Members in the order of their stages."""
    templates: Templates
    sizes: Sizes
    steps: int

    @property
    def stages(self) -> int:
        return self.sizes.stages

    def run_folder(
        self, chunks: int = 1, codec: ActivationCodec = "none", staleness: int = 0
    ) -> Path:
        """Return a run folder, to be read only, with the given number of stages per machine."""
        return self.templates.folder(self.stages * chunks, self.pipelines, codec, staleness)

    @property
    def pipelines(self) -> int:
        """Number of complete pipelines of the fleet."""
        return len(self.members) // self.stages

    def host(self, member: Member) -> Host:
        return self.network.hosts[member.name]

    def environment(self, flops_per_second: float) -> dict[str, str]:
        """Return the environment of a computing process: one thread, at its machine's pace."""
        return {
            PACE_VARIABLE: repr(flops_per_second), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": DEVICE, "PYTHONUNBUFFERED": "1",
        }  # fmt: skip


def wait_for_all(children: Subprocesses, what: str) -> None:
    """Wait until all children have ended successfully; raises SwarmError on a failure, with its
    last output, or a timeout."""
    wait_until(
        lambda: all(child.exit_code() == 0 for child in children.started), children,
        LIMIT_SECONDS, what,
    )  # fmt: skip


def wait_for(child: Subprocess, children: Subprocesses, what: str) -> None:
    """Wait until `child` has ended successfully; raises SwarmError like `wait_for_all`."""
    wait_until(lambda: child.exit_code() == 0, children, LIMIT_SECONDS, what)
