"""What every contender gets: the network, the fleet on it, the run, and where to write."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks.pace import PACE_VARIABLE
from benchmarks.wan.fleet import Member, Sizes
from benchmarks.wan.network import Network
from benchmarks.wan.templates import Templates
from kits.network_lab import Host
from swarm_coordinator.demo.subprocesses import Subprocess, Subprocesses, failure_text, wait_until
from swarm_shared.base.errors import SwarmError
from swarm_shared.run.codec_sizes import ActivationCodec

COORDINATOR = "coordinator"
"""A machine with a good line, for whoever needs one that holds no stage."""
TRAINER = "trainer"
"""A machine that holds no stage, with the best of the fleet's own lines."""
LIMIT_SECONDS = 1800.0
DEVICE = "eth0"


@dataclass(frozen=True, slots=True)
class Field:
    network: Network
    members: tuple[Member, ...]
    """In the order of their stages."""
    templates: Templates
    sizes: Sizes
    steps: int

    @property
    def stages(self) -> int:
        return self.sizes.stages

    def run_folder(
        self, chunks: int = 1, codec: ActivationCodec = "none", staleness: int = 0
    ) -> Path:
        """Not to be written into. With so many stages for each machine."""
        return self.templates.folder(self.stages * chunks, self.pipelines, codec, staleness)

    @property
    def pipelines(self) -> int:
        """How many whole pipelines the fleet makes."""
        return len(self.members) // self.stages

    def host(self, member: Member) -> Host:
        return self.network.hosts[member.name]

    def environment(self, flops_per_second: float) -> dict[str, str]:
        """Of a process that computes: one thread, at its machine's pace."""
        return {
            PACE_VARIABLE: repr(flops_per_second), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": DEVICE, "PYTHONUNBUFFERED": "1",
        }  # fmt: skip


def wait_for_all(children: Subprocesses, what: str) -> None:
    """SwarmError with the last words of whoever failed, or when it takes too long."""
    if children.wait(LIMIT_SECONDS):
        raise SwarmError(f"{what} had not ended after {LIMIT_SECONDS:.0f} seconds")
    if failed := children.failed():
        raise SwarmError(failure_text(failed[0]))


def wait_for(child: Subprocess, children: Subprocesses, what: str) -> None:
    """One of them has ended as it should. SwarmError as above."""
    wait_until(lambda: child.exit_code() == 0, children, LIMIT_SECONDS, what)
