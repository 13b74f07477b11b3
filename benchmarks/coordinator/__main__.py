"""Message latency of the real coordinator under thousands of volunteers.

    make bench-coordinator ARGS="--volunteers 10000 --seconds 60"

The coordinator is the one that `start` runs: shell, core, database and status file. Simulated
volunteers send real control messages over in-memory streams on the same core; their cost, except
parsing, counting and signing, is part of the figures. Then a smaller number of volunteers uses
sockets, from other processes. One volunteer dies and one joins every three seconds. Latency is the
time from sending a message until the core has acted on it. In memory, time is that of a dedicated
core (`dedicated_clock`), because the machine may be shared; over sockets it is wall-clock time.
`heartbeats_since_due` counts from the time a heartbeat was due: in memory the coordinator may have
occupied the core that the volunteers need for sending it. `--holds` reports what occupied it.

Writes benchmarks/results/coordinator.json.
"""

from __future__ import annotations

import cProfile
import datetime
import functools
import json
import logging
import os
import pstats
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import trio

import swarm_coordinator.core.transition as core
import swarm_coordinator.server.coordinator as server
import swarm_coordinator.server.startup as starting
from benchmarks.coordinator.dedicated_clock import DedicatedCoreClock
from benchmarks.coordinator.loop_holds import LoopHolds
from benchmarks.coordinator.sockets import STAMP_PROTOCOL
from benchmarks.coordinator.volunteers import SimulatedVolunteer, World, beat_for_ever
from benchmarks.machine import describe_machine
from benchmarks.outcome import out_option, write_result
from swarm_coordinator.core.events import Command, Event, HeartbeatsReceived
from swarm_coordinator.core.state.run import RunState
from swarm_coordinator.durability.run_files import load_identity, load_settings
from swarm_coordinator.run_creation.initialise import initialise_run
from swarm_coordinator.run_dir.folder import RunFolder
from swarm_coordinator.run_dir.sampled_tokens import RunTokens
from swarm_coordinator.server.startup import CoordinatorContext
from swarm_coordinator.storage.store import SqliteStore
from swarm_shared.base.clock import Clock
from swarm_shared.identity.invite import Invite
from swarm_shared.identity.keys import Identity
from swarm_shared.identity.signed_manifest import run_id_of
from swarm_shared.network import open_node
from swarm_shared.run.manifest import Manifest

JOINS_AT_ONCE = 50
SOCKET_PROCESSES = 4
"""Number of processes that hold the socket volunteers; a thousand connections take more than one
core."""
CHURN_SECONDS = 3.0


def make_run(folder: Path, volunteers: int, stages: int, microbatches: int) -> Manifest:
    text = folder / "text"
    text.mkdir()
    for index in range(40):
        (text / f"{index}.txt").write_text(f"document {index}: " + "some words of text. " * 60)
    return initialise_run(
        folder / "run", "tiny", str(text), stages,
        {
            "model.layers": stages, "model.hidden_size": 64, "model.intermediate_size": 64,
            "model.sequence_length": 32, "training.microbatches_per_step": microbatches,
            "training.steps": 10_000, "training.evaluation_microbatches": 0,
            "checkpoint.every_steps": 10_000, "network.listen_host": "127.0.0.1",
            "limits.starting_peers_per_stage": max(1, volunteers * 95 // 100 // stages),
            # What is simulated has no tensors to audit.
            "trust.audit_share": 0.0, "trust.probation_cells": 0,
        },
    )  # fmt: skip


class Latencies:
    """Latencies of all messages in seconds, with the time of handling and the kind."""

    def __init__(self, clock: Clock) -> None:
        self.volunteers: dict[str, SimulatedVolunteer] = {}
        self.found: list[tuple[float, float, str]] = []
        self.since_due: list[float] = []
        self.holds: LoopHolds | None = None
        self.events = 0
        self._clock = clock
        self._transition = core.transition

    def transition(self, run: RunState, event: Event, now: float) -> list[Command]:
        commands = self._transition(run, event, now)
        self.events += 1
        if self.holds is not None:
            self.holds.does(type(event).__name__)
        moment = self._clock()
        if isinstance(event, HeartbeatsReceived):
            for beat in event.heartbeats:
                for link in beat.message.changed_links:
                    if link.protocol == STAMP_PROTOCOL:
                        self.found.append((moment, moment - link.sent / 1e9, "heartbeat"))
                self._acted_on(beat.peer, "heartbeat", moment)
        elif type(event).__name__ in _WORDS:
            kind = getattr(getattr(event, "message", None), "kind", type(event).__name__)
            self._acted_on(getattr(event, "peer", ""), kind, moment)
        return commands

    def _acted_on(self, peer: str, kind: str, moment: float) -> None:
        volunteer = self.volunteers.get(peer)
        if volunteer is None:
            return
        if kind != "heartbeat":
            if volunteer.words:
                self.found.append((moment, moment - volunteer.words.popleft(), kind))
        elif volunteer.beats:
            due, said = volunteer.beats.popleft()
            self.found.append((moment, moment - said, kind))
            self.since_due.append(moment - due)


@dataclass(frozen=True)
class Serving:
    coordinator: server.Coordinator
    latencies: Latencies
    invite: Invite
    nursery: trio.Nursery


_WORDS = frozenset({"MessageReceived", "ReceiptsVerified", "LeaseResolved", "SumsStated"})


@asynccontextmanager
async def serving(folder: Path, manifest: Manifest, clock: Clock) -> AsyncIterator[Serving]:
    """Run the coordinator of a run folder in this process."""
    run_folder = RunFolder.open(folder / "run")
    store = SqliteStore.open(run_folder.database)
    invites: list[Invite] = []
    ready = trio.Event()

    def serves(invite: Invite) -> None:
        invites.append(invite)
        ready.set()

    context = CoordinatorContext(
        folder=run_folder, settings=load_settings(run_folder), manifest=manifest,
        identity=load_identity(run_folder), store=store, report=lambda line: None,
        clock=clock, on_serving=serves,
    )  # fmt: skip
    latencies = Latencies(clock)
    # The shell calls the core through this attribute.
    setattr(server, "transition", latencies.transition)  # noqa: B010
    coordinator = server.Coordinator(context)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(coordinator.run)
        await ready.wait()
        yield Serving(coordinator, latencies, invites[0], nursery)
        nursery.cancel_scope.cancel()
    store.close()


class Fleet:
    """Simulated volunteers on the coordinator's core, connected by in-memory streams."""

    def __init__(self, served: Serving, world: World, clock: DedicatedCoreClock) -> None:
        self.everybody: list[SimulatedVolunteer] = []
        self._served, self._world, self._clock = served, world, clock
        served.nursery.start_soon(beat_for_ever, self.everybody)
        served.nursery.start_soon(world.act)

    def join(self) -> SimulatedVolunteer:
        served = self._served
        with self._clock.elsewhere():
            volunteer = SimulatedVolunteer(self._world, Identity.generate())
        served.latencies.volunteers[volunteer.peer] = volunteer
        served.nursery.start_soon(served.coordinator.control.handle, volunteer.stream)
        volunteer.attach()
        self.everybody.append(volunteer)
        return volunteer

    async def join_all(self, volunteers: int) -> float:
        """Join all volunteers and return the seconds taken."""
        began = self._clock.current_time()
        for number in range(volunteers):
            newest = self.join()
            if number % JOINS_AT_ONCE == JOINS_AT_ONCE - 1:
                while newest.stage is None:
                    await trio.sleep(0.01)
        joined_seconds = self._clock.current_time() - began
        click.echo(f"{volunteers:,} joined in {joined_seconds:.0f} s")
        return joined_seconds

    async def churn(self, volunteers: int, seconds: float) -> None:
        """Periodically kill one volunteer and join another."""
        began = self._clock.current_time()
        while self._clock.current_time() < began + seconds:
            await trio.sleep(CHURN_SECONDS)
            self._world.rng.choice(self.everybody[: volunteers // 2]).die()
            self.join()


async def measure_memory(
    folder: Path, manifest: Manifest, volunteers: int, seconds: float, step_seconds: float,
    profile: bool, clock: DedicatedCoreClock, holds: LoopHolds | None,
) -> dict[str, Any]:  # fmt: skip
    """Measure with all volunteers on the coordinator's core, without a network."""
    async with serving(folder, manifest, clock.current_time) as served:
        coordinator, latencies = served.coordinator, served.latencies
        world = World(
            run_id_of(manifest), manifest, step_seconds, clock, volunteers,
            RunTokens(manifest, folder / "run" / "data"),
        )  # fmt: skip
        fleet = Fleet(served, world, clock)
        joined_seconds = await fleet.join_all(volunteers)
        await trio.sleep(3.0)
        latencies.found.clear()
        latencies.since_due.clear()
        latencies.holds = holds
        first_step, said, events = world.applied, world.said, latencies.events
        began, cpu = clock.current_time(), time.thread_time() - clock.elsewhere_seconds
        with profiled() if profile else holds.watched() if holds else nullcontext():
            await fleet.churn(volunteers, seconds)
        elapsed = clock.current_time() - began
        used = time.thread_time() - clock.elsewhere_seconds - cpu
        words = list(latencies.found)
        return {
            "volunteers": coordinator.attached,
            "seconds": elapsed,
            "joined_seconds": joined_seconds,
            "core_used": used / elapsed,
            "words_per_second": (world.said - said) / elapsed,
            "events_per_second": (latencies.events - events) / elapsed,
            "steps": world.applied - first_step,
            "refused": world.refused,
            "sessions_ended": dict(coordinator.control.ended),
            **percentiles([waited for _, waited, _ in words]),
            "heartbeats_since_due": percentiles(latencies.since_due),
            "of_each_kind": {
                kind: percentiles([waited for _, waited, k in words if k == kind])
                for kind in sorted({k for _, _, k in words})
            },
        }


@contextmanager
def profiled() -> Iterator[None]:
    """Print a profile of the block."""
    profiler = cProfile.Profile()
    profiler.enable()
    yield
    profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(35)


async def measure_sockets(
    folder: Path, manifest: Manifest, volunteers: int, seconds: float, step_seconds: float
) -> dict[str, Any]:
    """Measure with all volunteers in other processes, each with its own loopback connection.

    Heartbeats carry the time of sending; the machine's cores serve all processes.
    """
    # A thousand volunteers behind one address exist in this benchmark only.
    many = functools.partial(open_node, max_connections_per_address=2 * volunteers)
    setattr(starting, "open_node", many)  # noqa: B010
    async with serving(folder, manifest, time.monotonic) as served:
        path = folder / "manifest.json"
        path.write_text(manifest.model_dump_json())
        began = time.monotonic()
        processes = [
            await trio.lowlevel.open_process(
                [
                    sys.executable, "-m", "benchmarks.coordinator.sockets", served.invite.encode(),
                    str(count), str(path), str(step_seconds), str(volunteers),
                ]
            )
            for count in shares(volunteers, SOCKET_PROCESSES)
        ]  # fmt: skip
        try:
            while served.coordinator.attached < volunteers:
                if any(process.poll() is not None for process in processes):
                    raise click.ClickException("volunteers ended while others were still joining")
                await trio.sleep(0.1)
            joined_seconds = time.monotonic() - began
            click.echo(f"{volunteers:,} joined over sockets in {joined_seconds:.0f} s")
            await trio.sleep(3.0)
            served.latencies.found.clear()
            began, cpu, events = time.monotonic(), time.process_time(), served.latencies.events
            await trio.sleep(seconds)
            elapsed = time.monotonic() - began
            waited = [seconds for _, seconds, kind in served.latencies.found]
            return {
                "volunteers": served.coordinator.attached,
                "seconds": elapsed,
                "joined_seconds": joined_seconds,
                "core_used": (time.process_time() - cpu) / elapsed,
                "events_per_second": (served.latencies.events - events) / elapsed,
                "sessions_ended": dict(served.coordinator.control.ended),
                "heartbeats": percentiles(waited),
            }
        finally:
            for process in processes:
                process.kill()
                await process.wait()


def shares(whole: int, parts: int) -> list[int]:
    """Split `whole` into parts as equal as possible, leaving out empty ones."""
    found = [whole // parts + (part < whole % parts) for part in range(parts)]
    return [share for share in found if share]


def percentiles(waited: list[float]) -> dict[str, float]:
    ordered = sorted(waited)
    if not ordered:
        return {"words": 0}
    return {
        "words": len(ordered),
        **{
            f"p{share}_ms": 1000 * ordered[min(len(ordered) - 1, int(len(ordered) * share / 100))]
            for share in (50, 99)
        },
        "longest_ms": 1000 * ordered[-1],
    }


@click.command()
@click.option("--volunteers", default=10_000, help="Volunteers in memory; 0: none.")
@click.option("--sockets", default=1000, help="Volunteers over real sockets; 0: none.")
@click.option("--stages", default=64)
@click.option("--microbatches", default=128, help="Microbatches per step.")
@click.option("--seconds", default=60.0)
@click.option(
    "--step-seconds", default=20.0, help="Until the last microbatch of a step is completed."
)
@click.option("--profile", is_flag=True)
@click.option("--holds", is_flag=True, help="Print what occupies the event loop; write no result.")
@out_option("coordinator.json")
def main(
    volunteers: int, sockets: int, stages: int, microbatches: int, seconds: float,
    step_seconds: float, profile: bool, holds: bool, out: Path,
) -> None:  # fmt: skip
    logging.basicConfig(level=logging.ERROR)
    document: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "machine": describe_machine(["trio", "pydantic", "libp2p"]),
        "load_average": os.getloadavg(),
        "stages": stages,
        "microbatches_per_step": microbatches,
    }
    # Sockets first: the state left by ten thousand volunteers would slow them down.
    if sockets and not (profile or holds):
        with tempfile.TemporaryDirectory() as name:
            manifest = make_run(Path(name), sockets, stages, microbatches)
            document["sockets"] = trio.run(
                measure_sockets, Path(name), manifest, sockets, seconds, step_seconds
            )
        click.echo(json.dumps(document["sockets"], indent=1))
    if volunteers:
        with tempfile.TemporaryDirectory() as name:
            manifest = make_run(Path(name), volunteers, stages, microbatches)
            clock = DedicatedCoreClock()
            watch = LoopHolds(clock.current_time) if holds else None
            document["clock"] = "dedicated core" if clock.exact else "monotonic"
            document["memory"] = trio.run(
                measure_memory, Path(name), manifest, volunteers, seconds, step_seconds, profile,
                clock, watch, clock=clock, instruments=[watch] if watch else [],
            )  # fmt: skip
        click.echo("\n".join(watch.lines() if watch else ()))
        click.echo(json.dumps(document["memory"], indent=1))
    if not (profile or holds):
        write_result(out, document)


if __name__ == "__main__":
    main()
