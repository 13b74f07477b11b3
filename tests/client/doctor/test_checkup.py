"""The doctor's checks of the network, against real nodes; and the command as a whole."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
import trio
from click.testing import CliRunner

from client.doctor.test_machine import CPU
from kits.memory import needs, takes
from swarm_client.cli.offline import doctor as doctor_command
from swarm_client.connectivity.port_mapping import PortMapper
from swarm_client.connectivity.reachability import ReachabilityFinding
from swarm_client.doctor import checkup as checkup_module
from swarm_client.doctor.checkup import Checkup, DoctorOptions
from swarm_client.doctor.report import CHECKS, NETWORK_CHECKS, Check, Report, State
from swarm_shared.base.errors import (
    AdmissionError,
    InviteError,
    NetworkError,
    StorageError,
    SwarmError,
    UsageError,
    VersionError,
)
from swarm_shared.base.types import PeerId, RunId
from swarm_shared.identity.invite import Invite
from swarm_shared.identity.keys import Identity
from swarm_shared.identity.probe_pass import sign_probe_pass
from swarm_shared.network import Node, open_node
from swarm_shared.probe.server import ProbeLimits, answer_members_only, serve_probe
from swarm_shared.protocol import DoctorHello, DoctorWelcome, Neighbour, Reachability

ANY_PORT = "/ip4/127.0.0.1/tcp/0"
RUN = RunId("ab" * 32)
ORGANISER = Identity.from_seed(b"o" * 32)
NOW = 1_800_000_000.0


def invite_to(node: Node, addresses: tuple[str, ...] = ()) -> Invite:
    return Invite(
        coordinator=node.peer_id, addresses=addresses or node.addresses, run_id=RUN,
        organiser=ORGANISER.peer_id, token="a token",
    )  # fmt: skip


def anybody(remote: PeerId, hello: DoctorHello) -> DoctorWelcome:
    assert hello.token == "a token"
    return DoctorWelcome(smallest_stage=needs(takes(2**20)))


@asynccontextmanager
async def coordinator(
    judge: Callable[[PeerId, DoctorHello], DoctorWelcome] = anybody,
    limits: ProbeLimits | None = None,
) -> AsyncIterator[Node]:
    async with open_node(Identity.generate(), [ANY_PORT]) as node:
        serve_probe(node, judge, limits, lambda: NOW)
        yield node


async def checks(
    invite: Invite, tmp_path: Path, ahead_seconds: float = 0.0, in_use: bool = False
) -> dict[str, Check]:
    options = DoctorOptions(home=tmp_path / "home", wall_clock=lambda: NOW + ahead_seconds)
    checkup = Checkup(options)
    await checkup.check_network(invite, None, in_use)
    return {check.id: check for check in checkup.results.all()}


# ---------------------------------------------------------------- the coordinator


async def test_a_coordinator_in_order_leaves_nothing_to_say(tmp_path: Path) -> None:
    async with coordinator() as node:
        found = await checks(invite_to(node), tmp_path)
    assert found.keys() == set(NETWORK_CHECKS)
    assert {found[id].state for id in NETWORK_CHECKS if id not in ("peers", "reachability")} == {
        State.OK
    }
    assert abs(float(found["clock"].details["ahead_seconds"] or 0)) < 0.5
    link = found["link"].details
    assert 0 < float(link["rtt_seconds"] or 0) < 1
    assert float(link["upload_bytes_per_second"] or 0) > 1e6
    assert float(link["download_bytes_per_second"] or 0) > 1e6
    assert found["peers"].state is State.SKIPPED
    # On one machine no observer is outside.
    assert found["reachability"].state is State.SKIPPED
    assert found["reachability"].details["class"] == "unknown"
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize(
    ("ahead_seconds", "state"),
    [(0, State.OK), (60, State.WARNING), (-60, State.WARNING), (-7200, State.WARNING)],
)
async def test_a_wrong_clock_is_measured_against_the_coordinators(
    ahead_seconds: float, state: State, tmp_path: Path
) -> None:
    async with coordinator() as node:
        found = (await checks(invite_to(node), tmp_path, ahead_seconds))["clock"]
    assert found.state is state
    if state is State.WARNING:
        assert ("ahead" if ahead_seconds > 0 else "behind") in found.seen
        assert "The run goes by the coordinator's clock" in found.fix


async def test_a_coordinator_that_is_down_is_named_and_the_rest_is_skipped(tmp_path: Path) -> None:
    async with coordinator() as node:
        invite = invite_to(node)
    found = await checks(invite, tmp_path)
    assert found["coordinator"].exit_code == NetworkError.exit_code
    assert "connection refused" in found["coordinator"].seen
    assert all(found[id].state is State.SKIPPED for id in NETWORK_CHECKS[1:])


async def test_another_peer_at_the_address_is_not_taken_for_the_coordinator(
    tmp_path: Path,
) -> None:
    async with coordinator() as other:
        invite = invite_to(other).model_copy(update={"coordinator": Identity.generate().peer_id})
        found = (await checks(invite, tmp_path))["coordinator"]
    assert found.exit_code == NetworkError.exit_code
    assert "another peer than the coordinator" in found.seen


async def test_one_address_that_works_is_enough(tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        closed = f"/ip4/127.0.0.1/tcp/{unused.getsockname()[1]}"
    async with coordinator() as node:
        invite = invite_to(node, (closed, *node.addresses))
        found = (await checks(invite, tmp_path))["coordinator"]
    assert found.state is State.OK
    assert closed not in found.seen


async def test_another_version_is_a_problem_that_names_the_right_one(tmp_path: Path) -> None:
    async with coordinator(lambda remote, hello: DoctorWelcome(software_fits=False)) as node:
        found = (await checks(invite_to(node), tmp_path))["version"]
    assert found.exit_code == VersionError.exit_code
    assert found.fix.startswith("Install swarmtrain ")


async def test_a_run_that_would_not_take_this_machine_gives_the_reason(tmp_path: Path) -> None:
    def refusing(remote: PeerId, hello: DoctorHello) -> DoctorWelcome:
        return DoctorWelcome(admission="the list does not name you")

    def silent(remote: PeerId, hello: DoctorHello) -> DoctorWelcome:
        raise AdmissionError("you are banned")

    async with coordinator(refusing) as node:
        found = await checks(invite_to(node), tmp_path)
        running = await checks(invite_to(node), tmp_path, in_use=True)
    assert found["admission"].exit_code == AdmissionError.exit_code
    assert found["admission"].seen == "the list does not name you"
    assert found["link"].state is State.OK
    assert running["admission"].state is State.SKIPPED
    async with coordinator(silent) as node:
        found = await checks(invite_to(node), tmp_path)
    assert found["admission"].exit_code == AdmissionError.exit_code
    assert found["admission"].seen == "you are banned"
    assert found["link"].state is State.SKIPPED


async def test_a_coordinator_too_old_for_this_is_reported_as_that(tmp_path: Path) -> None:
    async with open_node(Identity.generate(), [ANY_PORT]) as node:
        found = await checks(invite_to(node), tmp_path)
    assert found["version"].exit_code == VersionError.exit_code
    assert found["link"].state is State.SKIPPED


async def test_a_busy_coordinator_is_a_warning(tmp_path: Path) -> None:
    async with coordinator(limits=ProbeLimits(visits=0)) as node:
        found = await checks(invite_to(node), tmp_path)
    assert found["link"].state is State.WARNING
    assert all(not check.exit_code for check in found.values())


# ---------------------------------------------------------------- peers and reachability


async def test_the_lines_to_some_peers_are_measured_with_the_coordinators_pass(
    tmp_path: Path,
) -> None:
    def nobody_is_a_member(remote: PeerId, run: RunId, certificate: str) -> None:
        raise AdmissionError("the visitor has no certificate")

    async with (
        open_node(Identity.generate(), [ANY_PORT]) as one,
        open_node(Identity.generate(), [ANY_PORT]) as other,
    ):
        for volunteer in (one, other):
            judge = answer_members_only(RUN, ORGANISER.peer_id, nobody_is_a_member, lambda: NOW)
            serve_probe(volunteer, judge)

        def naming(remote: PeerId, hello: DoctorHello) -> DoctorWelcome:
            neighbours = [
                Neighbour(peer=node.peer_id, addresses=node.addresses) for node in (one, other)
            ]
            gone = Neighbour(peer=Identity.generate().peer_id, addresses=one.addresses)
            return DoctorWelcome(
                probe_pass=sign_probe_pass(ORGANISER, remote, RUN, NOW),
                neighbours=(*neighbours, gone),
            )

        async with coordinator(naming) as node:
            found = (await checks(invite_to(node), tmp_path))["peers"]
    assert found.state is State.OK
    assert "2 of 3 measured" in found.seen
    assert found.details["peer_1"] == one.peer_id
    assert found.details["peer_1_path"] == "direct"
    assert float(found.details["peer_2_upload_bytes_per_second"] or 0) > 1e6


def test_each_class_of_reachability_is_reported() -> None:
    def told(**known: object) -> Check:
        finding = ReachabilityFinding(**{"behind_router": True, **known})  # type: ignore[arg-type]
        return checkup_module.reachability.judge(finding, 4001, PortMapper())

    public = told(reachability=Reachability.PUBLIC, addresses=("/ip4/1.2.3.4/tcp/4001",))
    assert (public.state, "1.2.3.4" in public.seen) == (State.OK, True)
    mapped = told(reachability=Reachability.MAPPED, addresses=("/ip4/1.2.3.4/tcp/4001",))
    assert "the router forwards" in mapped.seen
    behind = Reachability.BEHIND_NAT
    keeping = told(reachability=behind, port_preserved=True)
    assert (keeping.state, "hole punching" in keeping.seen) == (State.OK, True)
    symmetric = told(reachability=behind, port_preserved=False, endpoint_independent=False)
    assert symmetric.state is State.WARNING
    assert "relays" in symmetric.seen
    assert "TCP port 4001" in symmetric.fix
    assert told(reachability=behind, port_preserved=False).state is State.OK
    assert "firewall" in told(reachability=behind, behind_router=False).seen
    unknown = told(reachability=Reachability.UNKNOWN, note="no observer was available")
    assert (unknown.state, "no observer was available" in unknown.seen) == (State.SKIPPED, True)
    assert all(
        not check.exit_code for check in (public, mapped, keeping, symmetric, unknown)
    )  # fmt: skip


# ---------------------------------------------------------------- the whole


async def test_a_check_that_hangs_or_breaks_costs_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(self: Checkup) -> None:
        raise ZeroDivisionError("a bug")

    async def hanging(self: Checkup) -> None:
        await trio.sleep_forever()

    monkeypatch.setattr(Checkup, "probe_torch", broken)
    monkeypatch.setattr(Checkup, "check_p2pd", hanging)
    options = DoctorOptions(home=tmp_path / "home", total_seconds=0.5)
    report = await checkup_module.check_up(options)
    found = {check.id: check for check in report.checks}
    assert list(found) == list(CHECKS)
    assert "a bug" in found["torch"].seen
    assert "not finished" in found["p2pd"].seen
    assert found["disk"].state is not State.SKIPPED
    assert found["invite"].seen == "no invite was given"
    assert report.exit_code == 0
    assert "a bug" in caplog.text


async def test_a_self_test_is_part_of_a_check_up_that_asks_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def nothing(self: Checkup) -> None:
        """What this test is not about, and takes seconds."""

    async def torch() -> tuple[dict[str, object], float]:
        return CPU, 0.0

    monkeypatch.setattr(Checkup, "check_p2pd", nothing)
    monkeypatch.setattr(checkup_module.machine, "probe_torch", torch)
    options = DoctorOptions(
        home=tmp_path / "home", device="cpu", total_seconds=100.0, self_test_seconds=1.0
    )
    report = await checkup_module.check_up(options)
    found = {check.id: check for check in report.checks}
    assert found["self-test"].state is State.OK, found["self-test"].seen
    assert "the same to the bit" in found["self-test"].seen


async def test_preferences_that_cannot_be_read_are_a_problem_of_the_device_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def torch() -> tuple[dict[str, object], float]:
        await trio.lowlevel.checkpoint()
        return CPU, 0.0

    monkeypatch.setattr(checkup_module.machine, "probe_torch", torch)
    (tmp_path / "preferences.toml").mkdir()
    checkup = Checkup(DoctorOptions(home=tmp_path))
    await checkup.probe_torch()
    found = {check.id: check for check in checkup.results.all()}
    assert found["torch"].state is State.OK
    assert found["device"].exit_code == StorageError.exit_code
    assert "preferences.toml cannot be read" in found["device"].seen


@pytest.mark.parametrize(
    ("words", "seconds"),
    [((), 0.0), (("--self-test",), 60.0), (("--self-test", "--self-test-seconds", "5"), 5.0)],
)
def test_the_command_tests_the_device_only_when_asked_to(
    words: tuple[str, ...], seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[DoctorOptions] = []

    async def check_up(options: DoctorOptions) -> Report:
        await trio.lowlevel.checkpoint()
        asked.append(options)
        return Report.of([], 0.0, 0.0)

    monkeypatch.setattr(checkup_module, "check_up", check_up)
    assert CliRunner().invoke(doctor_command, words).exit_code == 0
    assert [options.self_test_seconds for options in asked] == [seconds]


def doctor(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "swarm_client", "doctor", *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        (("swarm1damaged",), InviteError),
        (("--device", "toaster"), UsageError),
        (("--device", "cpu,cuda:0"), UsageError),
    ],
)
def test_wrong_input_is_refused_before_any_check(
    words: tuple[str, ...], kind: type[SwarmError], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkup_module, "check_up", None)
    result = CliRunner().invoke(doctor_command, (*words, "--self-test"))
    assert isinstance(result.exception, kind)
    assert result.output == ""


def test_without_an_invite_the_machine_alone_is_checked(tmp_path: Path) -> None:
    home = tmp_path / "home"
    with doctor("--home", str(home), "--json") as running:
        out, err = running.communicate(timeout=60)
    document = json.loads(out)
    found = {check["id"]: check for check in document["checks"]}
    assert err == ""
    assert running.returncode == document["exit_code"] == 0
    assert all(found[id]["state"] == "skipped" for id in ("invite", *NETWORK_CHECKS))
    assert found["torch"]["state"] == "ok"
    assert found["self-test"]["state"] == "skipped"
    assert not home.exists()


def test_ctrl_c_ends_it_at_once_and_cleanly(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(60)
        invite = Invite(
            coordinator=ORGANISER.peer_id,
            addresses=(f"/ip4/127.0.0.1/tcp/{silent.getsockname()[1]}",),
            run_id=RUN,
            organiser=ORGANISER.peer_id,
        )
        with doctor(invite.encode(), "--home", str(tmp_path / "home")) as running:
            # It waits for an answer by now, and its children look at torch and p2pd.
            connection, _ = silent.accept()
            os.kill(running.pid, signal.SIGINT)
            out, err = running.communicate(timeout=60)
            connection.close()
    assert running.returncode == 130
    assert "Traceback" not in out + err
    assert not _of_group(running.pid)


def _of_group(group: int) -> list[int]:
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(pid) == group:
                found.append(pid)
    return found
