"""Two real coordinators on one PostgreSQL server: one takes over, the other one is fenced."""

from __future__ import annotations

import shutil
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import trio

from kits.coordinator.commands import edit
from kits.coordinator.coordinator_lab import (
    Lab,
    Lasting,
    check_nothing_forgotten,
    coordinators,
    lasting_crew,
)
from kits.coordinator.postgresql import Server
from kits.coordinator.shell_world import crew_of, make_run, train_to_the_end
from kits.runs.fault_run import STEPS, TINY
from kits.runs.real_run import Run, runs
from swarm_coordinator.demo.local_swarm import LocalSwarm
from swarm_coordinator.demo.subprocesses import (
    COORDINATOR_MODULE,
    Subprocess,
    run_to_end,
    wait_until,
)
from swarm_coordinator.durability.run_files import load_manifest
from swarm_coordinator.run_dir.folder import RunFolder
from swarm_coordinator.storage.connection import PostgresqlLocation
from swarm_coordinator.storage.history import history
from swarm_coordinator.storage.postgresql import LeaderWatch
from swarm_shared.host.python_modules import module_command
from swarm_shared.settings.commented_toml import toml_value

pytestmark = pytest.mark.process

LEASE_SECONDS = 2.0
FEW_PEERS = {"limits__starting_peers_per_stage": 1, "checkpoint__every_steps": 2}


@dataclass
class Pair:
    """Two folders of one run, as on two machines, and a parent process for each."""

    folders: tuple[RunFolder, RunFolder]
    labs: tuple[Lab, Lab]
    place: PostgresqlLocation


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("template") / "a run", steps=100_000).path


@contextmanager
def pair(template: Path, path: Path, place: PostgresqlLocation) -> Iterator[Pair]:
    ports = [free_port(), free_port()]
    announced = tuple(f"/ip4/127.0.0.1/tcp/{port}" for port in ports)
    folders = []
    for name, port in zip(("first", "second"), ports, strict=True):
        shutil.copytree(template, path / name)
        folder = RunFolder(path / name)
        edit(
            folder,
            ('store = "sqlite"', f"store = {toml_value(place.url)}"),
            ("lease_seconds = 5", f"lease_seconds = {LEASE_SECONDS}"),
            ("listen_port = 0", f"listen_port = {port}"),
            ("announce = []", f"announce = {toml_value(announced)}"),
        )
        folders.append(folder)
    with coordinators(path / "a") as one, coordinators(path / "b") as other:
        yield Pair((folders[0], folders[1]), (one, other), place)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Progress:
    """What the volunteers have seen: the newest generation, and steps."""

    def __init__(self, crew: list[Lasting]) -> None:
        self.crew = crew
        self.generations: list[int] = []
        for volunteer in crew:
            volunteer.attached = self.generations.append

    async def of_generation(self, generation: int) -> None:
        """Every volunteer has been welcomed in it."""
        while self.generations.count(generation) < len(self.crew):
            await trio.sleep(0.01)

    async def steps(self, count: int) -> None:
        """So many more have been applied by everybody."""
        wanted = max(len(volunteer.told) for volunteer in self.crew) + count
        while min(len(volunteer.told) for volunteer in self.crew) < wanted:
            await trio.sleep(0.01)


async def until_standing_by(text) -> None:
    while "standing by: the coordinator on" not in text():
        await trio.sleep(0.01)


async def test_a_standby_takes_over_when_the_leader_is_killed(
    template: Path, tmp_path: Path, postgresql: Server
) -> None:
    place = PostgresqlLocation(postgresql.new_database(), LEASE_SECONDS)
    with pair(template, tmp_path, place) as two:
        manifest = load_manifest(two.folders[0])
        leader = await two.labs[0].start(two.folders[0])
        invite = await leader.serves()
        crew = lasting_crew(invite, manifest, tmp_path)
        progress = Progress(crew)
        async with trio.open_nursery() as nursery:
            for volunteer in crew:
                nursery.start_soon(volunteer.come_back)
            await progress.of_generation(1)
            for generation in (2, 3, 4):
                turn = generation % 2
                standby = await two.labs[1 - turn].start(two.folders[1 - turn], "--standby")
                await until_standing_by(standby.text)
                await progress.steps(2)
                killed_at = time.monotonic()
                leader.kill()
                await standby.serves()
                serving = time.monotonic() - killed_at
                await progress.of_generation(generation)
                welcomed = time.monotonic() - killed_at
                await progress.steps(1)
                print(
                    f"take-over after kill -9: serves after {serving:.2f} s, all volunteers "
                    f"back after {welcomed:.2f} s, a step {time.monotonic() - killed_at:.2f} s"
                )
                assert await leader.ended() == -signal.SIGKILL
                check_nothing_forgotten(place, manifest, crew)
                leader = standby
            # Stopped in order, it gives the lease back.
            leader.kill(signal.SIGINT)
            assert await leader.ended() == 0
            assert await trio.to_thread.run_sync(LeaderWatch(place).leader) is None
            nursery.cancel_scope.cancel()
        check_nothing_forgotten(place, manifest, crew)


async def test_a_leader_that_was_frozen_and_wakes_behind_its_successor_writes_nothing_and_ends(
    template: Path, tmp_path: Path, postgresql: Server
) -> None:
    place = PostgresqlLocation(postgresql.new_database(), LEASE_SECONDS)
    with pair(template, tmp_path, place) as two:
        manifest = load_manifest(two.folders[0])
        leader = await two.labs[0].start(two.folders[0])
        crew = lasting_crew(await leader.serves(), manifest, tmp_path)
        progress = Progress(crew)
        async with trio.open_nursery() as nursery:
            for volunteer in crew:
                nursery.start_soon(volunteer.come_back)
            await progress.of_generation(1)
            standby = await two.labs[1].start(two.folders[1], "--standby")
            await until_standing_by(standby.text)
            await progress.steps(2)
            frozen_at = time.monotonic()
            leader.kill(signal.SIGSTOP)
            await standby.serves()
            print(f"take-over after SIGSTOP: serves after {time.monotonic() - frozen_at:.2f} s")
            leader.kill(signal.SIGCONT)
            assert await leader.ended() == 12, leader.text()
            assert "another coordinator has taken over this run" in leader.text()
            await progress.of_generation(2)
            await progress.steps(3)
            check_nothing_forgotten(place, manifest, crew)
            standby.kill(signal.SIGINT)
            assert await standby.ended() == 0
            nursery.cancel_scope.cancel()
        check_nothing_forgotten(place, manifest, crew)


@pytest.mark.timeout(500)
@pytest.mark.nightly
def test_real_volunteers_train_on_after_a_take_over_and_after_a_restore(
    tmp_path: Path, postgresql: Server
) -> None:
    """No step is done twice, none is lost, and losses and parameters are the reference's."""
    place = PostgresqlLocation(postgresql.new_database(), LEASE_SECONDS)
    with runs(tmp_path) as make:
        made = make(2, STEPS, **{**TINY, **FEW_PEERS})
        with pair(made.folder.path, tmp_path / "pair", place) as two:
            children = made.swarm.children
            first = Run(
                made.manifest, two.folders[0], LocalSwarm(two.folders[0].path, children), place
            )
            second = replace(
                first, folder=two.folders[1], swarm=LocalSwarm(two.folders[1].path, children)
            )
            invite = first.swarm.start_coordinator()
            for stage in (0, 1):
                first.swarm.start_volunteer(invite, stage)
            standby = start_standby(second)
            first.wait_for_version(3)
            order("backup", first.folder.path, tmp_path / "saved")
            first.wait_for_version(first.version() + 3)
            take_over(first, second, standby)
            stopped_at = stop_coordinator(second)
            second.assert_equals_reference(stopped_at)

            order("restore", tmp_path / "saved", second.folder.path, "--force")
            restored = history(place).restored
            assert restored.rolled_back
            assert restored.version < stopped_at
            # The volunteers have run all the time, and are ahead of it.
            assert second.swarm.start_coordinator() == invite
            second.wait_for_version(stopped_at + 2)
            assert history(place).restored.generation > 1000, "behind a fence"
            second.assert_equals_reference(second.stop())


def start_standby(run: Run) -> Subprocess:
    command = module_command(COORDINATOR_MODULE, "start", str(run.folder.path), "--standby")
    standby = run.swarm.children.start("standby", command, run.folder.path / "standby.out")
    wait_until(
        lambda: "standing by" in standby.log.read_text(), run.swarm.children, 60.0, "the standby"
    )
    run.swarm.coordinator = standby
    return standby


def take_over(first: Run, second: Run, standby: Subprocess) -> None:
    """Kill the leader; wait until its successor has made steps with the volunteers."""
    assert first.swarm.coordinator is not None
    before = first.version()
    killed_at = time.monotonic()
    first.swarm.expect_exit(first.swarm.coordinator)
    first.swarm.coordinator.kill()
    second.wait_for_version(before + 2)
    print(f"take-over with real volunteers: two steps on after "
          f"{time.monotonic() - killed_at:.1f} s")  # fmt: skip
    found = second.history()
    assert found is not None
    assert found.restored.generation == 2
    assert not found.restored.rolled_back, "the volunteers kept what they held"
    assert set(found.names.values()) >= {"volunteer-1", "volunteer-2"}
    check_nothing_forgotten(second.database, second.manifest, [])


def stop_coordinator(run: Run) -> int:
    """Stop it with a checkpoint of the version that the run has reached; volunteers wait for it."""
    coordinator = run.swarm.coordinator
    assert coordinator is not None
    run.swarm.expect_exit(coordinator)
    coordinator.signal(signal.SIGINT)
    assert coordinator.wait(60.0) == 0
    return run.version()


def order(command: str, *words: str | Path) -> None:
    name = f"swarm-coordinator {command}"
    run_to_end(name, module_command(COORDINATOR_MODULE, command, *map(str, words)), 60.0)


async def test_a_second_start_is_refused_while_the_first_one_lives(
    template: Path, tmp_path: Path, postgresql: Server
) -> None:
    place = PostgresqlLocation(postgresql.new_database(), LEASE_SECONDS)
    with pair(template, tmp_path, place) as two:
        leader = await two.labs[0].start(two.folders[0])
        await leader.serves()
        second = await two.labs[1].start(two.folders[1])
        assert await second.ended() == 12
        assert "--standby" in second.text()
        leader.kill()
        await leader.ended()
        again = await two.labs[0].start(two.folders[0])
        await again.serves()
        again.kill(signal.SIGINT)
        assert await again.ended() == 0


async def test_a_standby_ends_with_the_run(tmp_path: Path, postgresql: Server) -> None:
    place = PostgresqlLocation(postgresql.new_database(), LEASE_SECONDS)
    with pair(make_run(tmp_path / "run").path, tmp_path, place) as two:
        leader = await two.labs[0].start(two.folders[0])
        invite = await leader.serves()
        standby = await two.labs[1].start(two.folders[1], "--standby")
        await until_standing_by(standby.text)
        await train_to_the_end(crew_of(invite, load_manifest(two.folders[0]), tmp_path))
        assert await leader.ended() == 0
        assert await standby.ended() == 0, standby.text()
        assert "finished after 4 steps" in standby.text()
        assert "the model is on the machine whose coordinator finished it" in standby.text()
        again = await two.labs[0].start(two.folders[0])
        while "telling volunteers that the run is over" not in again.text():
            await trio.sleep(0.01)
        again.kill(signal.SIGINT)
        assert await again.ended() == 0


async def test_standing_by_needs_a_database_that_both_reach(template: Path, tmp_path: Path) -> None:
    shutil.copytree(template, tmp_path / "run")
    with coordinators(tmp_path / "a") as lab:
        process = await lab.start(RunFolder(tmp_path / "run"), "--standby")
        assert await process.ended() == 2
        assert "PostgreSQL" in process.text()
