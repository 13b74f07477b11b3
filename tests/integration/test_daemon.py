"""A volunteer's daemon through its commands: real programs, output and exit codes."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from swarm_client.daemon.sleep_watch import MIN_INTERRUPTION_SECONDS
from swarm_coordinator.dashboard.database_reader import DatabaseReader
from swarm_coordinator.demo.subprocesses import (
    CLIENT_MODULE,
    COORDINATOR_MODULE,
    run_to_end,
    wait_until,
)
from swarm_shared.host.python_modules import module_command

pytestmark = [pytest.mark.process, pytest.mark.timeout(420)]

PATIENCE_SECONDS = 240.0
STEPS = 5000
"""More than any machine makes during the commands: the run is stopped after them."""


class Person:
    """A user at a terminal, with a home of their own."""

    def __init__(self, home: Path) -> None:
        self.home = home

    def types(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            module_command(CLIENT_MODULE, *words, "--home", str(self.home)),
            capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False,
        )  # fmt: skip

    def does(self, *words: str) -> str:
        done = self.types(*words)
        assert (done.returncode, done.stderr) == (0, ""), done
        return done.stdout

    def sees(self) -> dict[str, Any]:
        status: dict[str, Any] = json.loads(self.does("status", "--json"))
        return status


@contextmanager
def person(home: Path) -> Iterator[Person]:
    """Make a user; at the end no daemon of theirs is left."""
    someone = Person(home)
    try:
        yield someone
    finally:
        done = someone.types("status", "--json")
        if done.returncode == 0:
            daemon = psutil.Process(json.loads(done.stdout)["pid"])
            family = [daemon, *daemon.children(recursive=True)]
            someone.types("shutdown")
            for process in psutil.wait_procs(family, timeout=20)[1]:
                process.kill()


def test_a_daemon_pauses_resumes_finishes_and_leaves_without_a_changed_loss(
    make_run: Callable[..., Any],
) -> None:
    run = make_run(1, steps=STEPS, limits__starting_peers_per_stage=2)
    swarm = run.swarm
    invite = swarm.start_coordinator()
    swarm.start_volunteer(invite)
    with person(swarm.home("a daemon's home")) as bob:

        def until(true: Callable[[dict[str, Any]], bool], what: str) -> None:
            wait_until(lambda: true(bob.sees()), swarm.children, PATIENCE_SECONDS, what)

        def shown() -> dict[str, Any]:
            peers = [p for p in swarm.status().get("peers", []) if p["name"] == "bob"]
            return peers[0] if peers else {}

        nobody = bob.types("status")
        assert nobody.returncode == 13
        assert "no daemon is running" in nobody.stderr
        options = ("--device", "cpu", "--threads", "1", "--name", "bob")
        said = bob.does("join", invite, "--detach", *options)
        assert "admitted to run" in said
        run.wait_for_version(2)
        until(lambda s: s["contribution"]["steps"] >= 1, "the daemon to contribute")
        seen = bob.sees()
        assert seen["run"]["name"] == run.manifest.name
        # Both volunteers compute on this machine's processor, with one thread.
        wait_until(
            lambda: len([p for p in swarm.status()["peers"] if p["arithmetic"]]) == 2,
            swarm.children, PATIENCE_SECONDS, "both classes",
        )  # fmt: skip
        [device] = seen["devices"]
        assert {p["arithmetic"] for p in swarm.status()["peers"]} == {device["arithmetic"]}
        assert "already working" in bob.does("join", invite, *options)

        # A pause: nothing is computed here, and the other volunteer continues.
        assert "paused until" in bob.does("pause", "--for", "1h")
        wait_until(lambda: shown()["paused"], swarm.children, PATIENCE_SECONDS, "the pause")
        paused = bob.sees()
        assert (paused["state"], paused["reason"]) == ("paused", "paused_by_user")
        version = run.version()
        run.wait_for_version(version + 3)
        later = bob.sees()
        assert later["run"]["version"] > version, "it closes steps with the others"
        assert later["devices"][0]["queued"] == 0
        bob.does("resume")
        counted = later["contribution"]["microbatches"]
        until(lambda s: s["contribution"]["microbatches"] > counted, "work after the pause")
        assert bob.sees()["leaderboard"]

        # Finished, the daemon stays and can take the run up again.
        bob.does("finish")
        stopped = bob.sees()
        assert (stopped["state"], stopped["run"]) == ("stopped", None)
        assert "continuing run" in bob.does("resume")
        until(lambda s: s["state"] in ("contributing", "queued"), "the run to be taken up again")

        bob.does("leave")
        [known] = json.loads(bob.does("runs", "--json"))["runs"]
        assert not known["chosen"]
        assert "admitted to run" in bob.does("logs")
        assert int(bob.sees()["contribution"]["microbatches"]) >= counted
        bob.does("shutdown")
        assert bob.types("pause").returncode == 13
        assert not (bob.home / "control.sock").exists()
    run.assert_equals_reference(run.stop())


def test_a_daemon_that_is_refused_exits_with_the_reason_and_its_code_and_leaves_nothing(
    make_run: Callable[..., Any],
) -> None:
    run = make_run(1, steps=5, admission__mode="allow-list")
    invite = run.swarm.start_coordinator()
    with person(run.swarm.home("an uninvited one's")) as eve:
        refused = eve.types("join", invite, "--detach", "--device", "cpu")
        assert refused.returncode == 9, refused
        assert "on its list" in refused.stderr
        wait_until(lambda: eve.types("status").returncode == 13, run.swarm.children, 60, "its end")
        assert json.loads(eve.does("runs", "--json"))["runs"] == []


@pytest.mark.nightly
def test_two_devices_of_one_machine_are_two_members_and_one_row_of_the_ledger(
    make_run: Callable[..., Any],
) -> None:
    """Each device holds one of the two stages."""
    run = make_run(2, steps=400, limits__starting_peers_per_stage=1)
    swarm = run.swarm
    invite = swarm.start_coordinator()
    with person(swarm.home("a daemon's home")) as bob:

        def until(true: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
            found: dict[str, Any] = {}

            def look() -> bool:
                found.update(bob.sees())
                return true(found)

            wait_until(look, swarm.children, PATIENCE_SECONDS, what)
            return found

        refused = bob.types("join", invite, "--device", "cpu", "--device", "cpu", "--stage", "0")
        assert (refused.returncode, "--stage is for one device" in refused.stderr) == (2, True)
        devices = ("--device", "cpu", "--device", "cpu", "--threads", "2", "--name", "bob")
        assert bob.does("join", invite, "--detach", *devices).count("admitted to run") >= 1
        run.wait_for_version(2)
        seen = until(lambda s: s["contribution"]["steps"] >= 2, "the daemon to contribute")
        assert [device["id"] for device in seen["devices"]] == ["cpu", "cpu#2"]
        assert sorted(device["stage"] for device in seen["devices"]) == [0, 1]
        assert seen["peer"] == seen["devices"][0]["peer"]
        members = {peer["peer"] for peer in swarm.status()["peers"]}
        assert members == {device["peer"] for device in seen["devices"]}
        assert [peer["path"] for peer in seen["peers"]] == ["own", "own"]
        given = seen["contribution"]
        assert given["steps"] <= seen["run"]["version"]
        assert given["microbatches"] >= 2 * 12 * (given["steps"] - 1)
        assert "cpu#2" in bob.does("status")

        # A command of their owner reaches both.
        bob.does("pause")
        wait_until(
            lambda: all(peer["paused"] for peer in swarm.status()["peers"]),
            swarm.children, PATIENCE_SECONDS, "both to pause",
        )  # fmt: skip
        paused = bob.sees()
        assert (paused["state"], paused["reason"]) == ("paused", "paused_by_user")
        assert {device["phase"] for device in paused["devices"]} == {"paused"}
        bob.does("resume")
        version = run.version()
        run.wait_for_version(version + 2)

        bob.does("finish")
        assert bob.sees()["state"] == "stopped"
        assert swarm.status()["peers"] == []
        before = [device["peer"] for device in seen["devices"]]
        # Both devices are one row of the leaderboard, and later of the ledger.
        [row] = DatabaseReader(run.folder.database, (0.5, 0.5)).refresh(time.time()).contributions
        assert row.devices == 2
        bob.does("resume")
        again = until(
            lambda s: len([d for d in s["devices"] if d["stage"] is not None]) == 2, "both"
        )
        assert [device["peer"] for device in again["devices"]] == before
        version = run.version()
        run.wait_for_version(version + 2)

        stopped_at = run.stop()
        bob.does("leave")
        assert bob.sees()["devices"] == []
        bob.does("shutdown")
    run.assert_equals_reference(stopped_at)
    assert people_of_ledger(run) == {seen["peer"]: ("bob", sorted(before))}


def people_of_ledger(run: Any) -> dict[str, tuple[str, list[str]]]:
    """Export the ledger and verify it; return each person's name and devices."""
    file = run.folder.path / "run.ledger"
    export = module_command(COORDINATOR_MODULE, "ledger", "export", str(run.folder.path), str(file))
    run_to_end("swarm-coordinator ledger", export, 60.0)
    verify = module_command(CLIENT_MODULE, "verify-ledger", str(file), "--json")
    document = json.loads(run_to_end("swarm-client verify-ledger", verify, 60.0))
    return {row["peer"]: (row["name"], sorted(row["devices"])) for row in document["people"]}


@pytest.mark.nightly
def test_a_machine_that_was_suspended_joins_again_by_itself_and_reports_why(
    make_run: Callable[..., Any],
) -> None:
    run = make_run(1, steps=400, limits__starting_peers_per_stage=2)
    swarm = run.swarm
    invite = swarm.start_coordinator()
    swarm.start_volunteer(invite)
    with person(swarm.home("a daemon's home")) as bob:
        bob.does("join", invite, "--detach", "--device", "cpu", "--threads", "1", "--name", "bob")
        run.wait_for_version(2)
        seen = bob.sees()
        assert seen["away"] is None

        def is_member() -> bool:
            return seen["peer"] in {peer["peer"] for peer in swarm.status().get("peers", [])}

        daemon = psutil.Process(seen["pid"])
        family = [daemon, *daemon.children(recursive=True)]
        for process in family:
            process.suspend()
        try:
            wait_until(lambda: not is_member(), swarm.children, PATIENCE_SECONDS, "its loss")
            # Longer than a busy machine delays a program, and steps without it.
            began = run.version()
            time.sleep(MIN_INTERRUPTION_SECONDS + 2)
            run.wait_for_version(began + 2)
        finally:
            for process in family:
                process.resume()
        version = run.version()
        run.wait_for_version(version + 1)
        given = bob.sees()["contribution"]

        def contributes() -> bool:
            seen.update(bob.sees())
            now = seen["contribution"]
            more = now["microbatches"] > given["microbatches"]
            # One step more could be the one in flight when it was stopped.
            return seen["state"] == "contributing" and more and now["steps"] >= given["steps"] + 2

        wait_until(contributes, swarm.children, PATIENCE_SECONDS, "work after its absence")
        assert is_member()
        assert seen["away"]["sentence"].startswith("this program was stopped for")
        assert seen["away"]["seconds"] >= MIN_INTERRUPTION_SECONDS
        assert "this program was stopped for" in bob.does("status")
        assert "joining again" in bob.does("logs", "--events")
        bob.does("leave")
        bob.does("shutdown")
    run.assert_equals_reference(run.stop())


@pytest.mark.nightly
def test_a_refused_device_leaves_the_other_one_at_work(
    make_run: Callable[..., Any],
) -> None:
    """An invite for one use, and two devices."""
    run = make_run(1, steps=400, limits__starting_peers_per_stage=1, admission__mode="token")
    swarm = run.swarm
    swarm.start_coordinator()
    command = module_command(
        COORDINATOR_MODULE, "token", "create", str(run.folder.path), "--uses", "1"
    )
    invite = run_to_end("swarm-coordinator token", command, 60.0).split()[-1]
    with person(swarm.home("a daemon's home")) as bob:
        bob.does("join", invite, "--detach", "--device", "cpu", "--device", "cpu")

        def words() -> list[str]:
            return sorted(device["state"] for device in bob.sees()["devices"])

        def until(wanted: list[str]) -> None:
            wait_until(lambda: words() == wanted, swarm.children, PATIENCE_SECONDS, str(wanted))

        until(["contributing", "stopped"])
        seen = bob.sees()
        [out] = [device for device in seen["devices"] if device["state"] == "stopped"]
        assert out["reason"] == "not_admitted"
        assert (seen["state"], seen["reason"]) == ("contributing", None)
        assert out["sentence"] in seen["sentence"]
        bob.does("pause")
        until(["paused", "stopped"])
        assert bob.sees()["reason"] == "paused_by_user"
        bob.does("resume")
        until(["contributing", "stopped"])
        run.wait_for_version(run.version() + 2)
        stopped_at = run.stop()
        bob.does("shutdown")
    run.assert_equals_reference(stopped_at)
