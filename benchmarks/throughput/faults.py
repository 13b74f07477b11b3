"""Cost of faults: `make bench-faults`.

A real run of 2 stages x 4 peers on this machine. Each peer is throttled to the rate of a small
device (a plan of `swarm_client.fault_injection.faults` makes its worker wait), so that the
benchmark measures the
swarm and not eight processes competing for the CPU.

    throughput     one peer is killed every 30 s and replaced by a new one; tokens of applied steps
                   over the capacity of the peers that were alive and ready, at the rate measured
                   in the same run before the first kill
    detection      from the fault until the coordinator reports the peer disconnected or leaving
    recovery       from the fault until work is counted at 0.9 of the survivors' rate again
    work           share of gradients counted twice (speculative leases and races), and lost with
                   their peers
    coordinator    from its SIGKILL until work is counted at 0.9 of the full rate again

Nothing else should run on the machine meanwhile.
"""

from __future__ import annotations

import itertools
import json
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import psutil

from benchmarks.outcome import conclude, out_option, result_head, work_folder
from benchmarks.pages.tables import faults_markdown
from benchmarks.run_data import PLAIN_BORDERS
from swarm_client.fault_injection.faults import ANY_PEER, PLAN_VARIABLE, FaultAction, FaultPoint
from swarm_coordinator.demo.local_swarm import LocalSwarm
from swarm_coordinator.demo.subprocesses import Subprocess, Subprocesses, wait_until
from swarm_coordinator.run_creation.initialise import initialise_run

PACKAGES = ("torch", "numpy", "libp2p", "hivemind", "swarmtrain")

STAGES = 2
PEERS_PER_STAGE = 4
SLOW_SECONDS = 0.25
"""Added to each forward pass: about four microbatches a second, of which Python's share is
small."""
SETTLE_SECONDS = 20.0
POLL_SECONDS = 0.1
FULL_SHARE = 0.9
WINDOW_SECONDS = 5.0
"""Window of the rate. It spans a step close, during which nothing is counted."""
PATIENCE_SECONDS = 180.0

SETTINGS: dict[str, object] = {
    **PLAIN_BORDERS,
    "run.name": "faults",
    "model.hidden_size": 32,
    "model.intermediate_size": 64,
    "model.layers": 2,
    "model.heads": 2,
    "model.key_value_heads": 1,
    "model.sequence_length": 32,
    "training.steps": 100_000,
    "training.microbatches_per_step": 64,
    "training.sequences_per_microbatch": 1,
    "training.evaluation_microbatches": 0,
    "limits.starting_peers_per_stage": PEERS_PER_STAGE,
    "network.listen_host": "127.0.0.1",
    "checkpoint.every_steps": 1000,
}


@dataclass(frozen=True, slots=True)
class Sample:
    at: float
    cells: int
    """Cells counted since the run began, of applied steps and of the current one."""
    capacity: int
    """Number of live and ready peers of the stage that has the fewest."""


@dataclass
class Swarm:
    """The run under test and its samples."""

    swarm: LocalSwarm
    invite: str = ""
    samples: list[Sample] = field(default_factory=list)
    dead: set[str] = field(default_factory=set)
    """Names of killed or frozen peers, whether or not the coordinator has noticed."""

    def start(self) -> None:
        self.invite = self.swarm.start_coordinator()
        for _ in range(PEERS_PER_STAGE):
            for stage in range(STAGES):
                self.swarm.start_volunteer(self.invite, stage)
        wait_until(
            lambda: self.capacity() >= PEERS_PER_STAGE, self.swarm.children, PATIENCE_SECONDS,
            "all peers",
        )  # fmt: skip

    def capacity(self) -> int:
        ready = dict.fromkeys(range(STAGES), 0)
        for peer in self.swarm.status().get("peers", []):
            if peer["phase"] == "ready" and peer["name"] not in self.dead:
                ready[peer["stage"]] += 1
        return min(ready.values())

    def ready(self, stage: int) -> list[Subprocess]:
        names = [
            peer["name"]
            for peer in self.swarm.status().get("peers", [])
            if peer["stage"] == stage and peer["phase"] == "ready" and peer["name"] not in self.dead
        ]
        return [child for child in self.swarm.volunteers if child.name in names]

    def watch(self, seconds: float, until: Callable[[], bool] = lambda: False) -> bool:
        """Sample for `seconds`; return whether `until` became true."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            status = self.swarm.status()
            if status.get("running", True) and "version" in status:
                # During an apply the run has the new version and still the step's table.
                under_way = status["cells_done"] if status["step"] > status["version"] else 0
                cells = status["version"] * status["cells_total"] + under_way
                self.samples.append(Sample(time.monotonic(), cells, self.capacity()))
            if until():
                return True
            time.sleep(POLL_SECONDS)
        return False

    def rate(self, first: float, last: float) -> float:
        """Return cells per second between two moments, from the last sample before each."""
        before = [s for s in self.samples if s.at <= first]
        inside = [s for s in self.samples if first < s.at <= last]
        if not before or not inside:
            return 0.0
        return (inside[-1].cells - before[-1].cells) / (inside[-1].at - first)

    def share(self, first: float, last: float, cells_per_peer_second: float) -> float:
        """Return cells counted over the survivors' capacity."""
        inside = [s for s in self.samples if first <= s.at <= last]
        possible = sum(
            one.capacity * STAGES * cells_per_peer_second * (other.at - one.at)
            for one, other in itertools.pairwise(inside)
        )
        return (inside[-1].cells - inside[0].cells) / possible

    def note_after(self, wall: float, words: tuple[str, ...], limit: float) -> float | None:
        """Return seconds from `wall` until the coordinator logs one of `words`, by its clock."""

        def found() -> float | None:
            seen = self.swarm.history()
            notes = [] if seen is None else seen.notes
            for note in notes:
                if note.written_at >= wall and any(word in note.text for word in words):
                    return note.written_at - wall
            return None

        self.watch(limit, until=lambda: found() is not None)
        return found()

    def recovered(self, since: float, full_rate: float) -> float | None:
        """Return seconds until a window of work reaches the survivors' rate."""

        def enough() -> bool:
            now = time.monotonic()
            begun = now - WINDOW_SECONDS
            return begun >= since and self.rate(begun, now) >= FULL_SHARE * full_rate * (
                self.capacity() / PEERS_PER_STAGE
            )

        # The rate was restored at the beginning of the window.
        return time.monotonic() - since - WINDOW_SECONDS if self.watch(60.0, enough) else None

    def replace(self, stage: int) -> None:
        """Start a new peer and wait until it works."""
        before = self.capacity()
        self.swarm.start_volunteer(self.invite, stage)
        self.watch(60.0, until=lambda: self.capacity() > before or self.capacity() == 4)


@click.command()
@click.option("--kills", default=4, show_default=True, type=click.IntRange(1))
@click.option("--every", default=30.0, show_default=True, help="Seconds between two kills.")
@click.option(
    "--repetitions", default=2, show_default=True, help="Repetitions of each single fault."
)
@out_option("faults.json")
def main(kills: int, every: float, repetitions: int, out: Path) -> None:
    """Measure the cost of killed, frozen and leaving peers and of a killed coordinator."""
    with work_folder("faults") as work, Subprocesses() as children:
        document = measure(work, children, kills, every, repetitions)
    conclude(out, document, faults_markdown)


def measure(
    work: Path, children: Subprocesses, kills: int, every: float, repetitions: int
) -> dict[str, Any]:
    run_dir = work / "run"
    initialise_run(run_dir, "tiny", stages=STAGES, overrides=SETTINGS)
    bench = Swarm(LocalSwarm(run_dir, children, environment=throttled(work / "plan.json")))
    click.echo(f"starting {STAGES} x {PEERS_PER_STAGE} peers")
    bench.start()
    bench.watch(SETTLE_SECONDS)
    began = time.monotonic()
    bench.watch(2 * SETTLE_SECONDS)
    full_rate = bench.rate(began, time.monotonic())
    click.echo(f"full rate {full_rate:.1f} gradients/s")
    throughput = kill_again_and_again(bench, kills, every, full_rate)
    click.echo(f"one killed every {every:g} s: {throughput['share']:.3f} of the survivors' rate")
    work_counts = bench.swarm.status()["work"]
    single = {
        name: [single_fault(bench, name, full_rate) for _ in range(repetitions)]
        for name in ("kill", "freeze", "leave")
    }
    restart = [restart_coordinator(bench, full_rate) for _ in range(repetitions)]
    bench.swarm.stop()
    counted = max(1, work_counts["counted"])
    return {
        **result_head(PACKAGES),
        "stages": STAGES,
        "peers_per_stage": PEERS_PER_STAGE,
        "slowed_seconds_per_forward": SLOW_SECONDS,
        "settings": SETTINGS,
        "full_rate_gradients_per_second": full_rate,
        "killed_every": throughput,
        "work_while_killing": {
            **work_counts,
            "duplicated_share": work_counts["duplicated"] / counted,
            "cleared_share": work_counts["cleared"] / counted,
        },
        "single_faults": single,
        "coordinator_restart": restart,
    }


def throttled(plan: Path) -> dict[str, str]:
    """Write the plan that throttles every peer; return the environment that names it."""
    slow = {
        "id": "slow", "peer": ANY_PEER, "phase": FaultPoint.FORWARD, "action": FaultAction.DELAY,
        "seconds": SLOW_SECONDS, "repeats": True,
    }  # fmt: skip
    plan.write_text(json.dumps({"faults": [slow]}))
    return {PLAN_VARIABLE: str(plan)}


def kill_again_and_again(
    bench: Swarm, kills: int, every: float, full_rate: float
) -> dict[str, Any]:
    began = time.monotonic()
    recoveries: list[float | None] = []
    for number in range(kills):
        victim = bench.ready(number % STAGES)[0]
        bench.dead.add(victim.name)
        bench.swarm.expect_exit(victim)
        victim.kill()
        killed_at = time.monotonic()
        recoveries.append(bench.recovered(killed_at, full_rate))
        bench.swarm.start_volunteer(bench.invite, number % STAGES)
        bench.watch(max(0.0, killed_at + every - time.monotonic()))
    ended = time.monotonic()
    per_peer = full_rate / STAGES / PEERS_PER_STAGE
    return {
        "kills": kills,
        "every_seconds": every,
        "share": bench.share(began, ended, per_peer),
        "gradients_per_second": bench.rate(began, ended),
        "recovery_seconds": recoveries,
    }


def single_fault(bench: Swarm, name: str, full_rate: float) -> dict[str, float | None]:
    """Inject one fault into one peer of a complete swarm, then replace the peer."""
    bench.watch(60.0, until=lambda: bench.capacity() >= PEERS_PER_STAGE)
    bench.watch(WINDOW_SECONDS)
    victim = bench.ready(1)[0]
    bench.swarm.expect_exit(victim)
    daemon = psutil.Process(victim.pid)
    everybody = [daemon, *daemon.children(recursive=True)]
    wall, began = time.time(), time.monotonic()
    if name == "kill":
        victim.kill()
    elif name == "freeze":
        for process in everybody:
            process.send_signal(signal.SIGSTOP)
    else:
        victim.signal(signal.SIGINT)
    bench.dead.add(victim.name)
    words = ("wants to leave",) if name == "leave" else ("is gone",)
    noticed = bench.note_after(wall, words, 30.0)
    recovery = bench.recovered(began, full_rate)
    if name == "freeze":
        victim.kill()
    bench.replace(1)
    return {"noticed_seconds": noticed, "recovery_seconds": recovery}


def restart_coordinator(bench: Swarm, full_rate: float) -> dict[str, float | None]:
    bench.watch(60.0, until=lambda: bench.capacity() >= PEERS_PER_STAGE)
    bench.watch(WINDOW_SECONDS)
    assert bench.swarm.coordinator is not None
    bench.swarm.expect_exit(bench.swarm.coordinator)
    began = time.monotonic()
    bench.swarm.coordinator.kill()
    bench.swarm.start_coordinator()
    serving = time.monotonic() - began
    return {"serving_seconds": serving, "recovery_seconds": bench.recovered(began, full_rate)}


if __name__ == "__main__":
    main()
