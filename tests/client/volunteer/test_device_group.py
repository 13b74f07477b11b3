"""Several devices of one machine: how their words become one, and where each keeps its own."""

from __future__ import annotations

import base64
from pathlib import Path

from kits.memory import offers
from swarm_client.control.contribution_log import ContributionCounter, ContributionLog
from swarm_client.control.status_document import DaemonState, DeviceView, SuspendReason
from swarm_client.control.status_sentence import combine_devices
from swarm_client.daemon.participation import listen_address, owner_binding
from swarm_client.machine.home import Home
from swarm_shared.base.types import RunId
from swarm_shared.identity.credentials import open_owner_binding
from swarm_shared.identity.keys import Identity
from swarm_shared.protocol import Hello, client_messages, encode, parse

RUN = RunId("a" * 64)


def device(
    word: DaemonState, sentence: str, name: str = "cpu", reason: SuspendReason | None = None
) -> DeviceView:
    return DeviceView(id=name, label="L", state=word, sentence=sentence, reason=reason)


def test_devices_that_do_the_same_are_reported_once() -> None:
    paused = device(DaemonState.PAUSED, "paused by you", reason=SuspendReason.PAUSED_BY_USER)
    described = combine_devices([paused, paused.model_copy(update={"id": "cpu#2"})])
    assert (described.state, described.sentence, described.reason) == (
        DaemonState.PAUSED,
        "paused by you",
        SuspendReason.PAUSED_BY_USER,
    )


def test_a_machine_contributes_while_one_of_its_devices_does_and_shows_what_each_does() -> None:
    hot = device(DaemonState.PAUSED, "too hot", "cuda:1", SuspendReason.TOO_HOT)
    described = combine_devices(
        [hot, device(DaemonState.CONTRIBUTING, "computing stage 0", "cuda:0")]
    )
    assert (described.state, described.reason) == (DaemonState.CONTRIBUTING, None)
    assert described.sentence == "cuda:1: too hot; cuda:0: computing stage 0"
    refused = device(DaemonState.STOPPED, "no", "cuda:0", SuspendReason.NOT_ADMITTED)
    assert combine_devices([refused, hot]).reason is SuspendReason.TOO_HOT
    away = device(DaemonState.DEGRADED, "away", reason=SuspendReason.COORDINATOR_AWAY)
    assert (
        combine_devices([device(DaemonState.CONTRIBUTING, "x"), away]).state is DaemonState.DEGRADED
    )


def test_each_device_has_a_home_of_its_own_and_the_first_ones_data(tmp_path: Path) -> None:
    home = Home.create(tmp_path / "home")
    second = home.of_device(2)
    assert home.of_device(1) is home
    assert second.data_folder(RUN) == home.data_folder(RUN)
    assert second.state_folder(RUN) != home.state_folder(RUN)
    assert second.identity_path == home.path / "devices" / "2" / "identity.key"
    assert second.log_folder.is_dir()


def test_the_machines_key_signs_for_each_further_device_and_the_device_shows_it() -> None:
    machine, device = Identity.generate(), Identity.generate()
    binding = open_owner_binding(
        base64.b64decode(owner_binding(machine, device.peer_id)), device.peer_id
    )
    assert binding.owner == machine.peer_id
    hello = Hello(
        run=RUN, software="1", addresses=(), device="cpu", memory=offers(1),
        owner=owner_binding(machine, device.peer_id),
    )  # fmt: skip
    assert parse(client_messages, encode(hello)) == hello


def test_devices_listen_on_ports_beside_each_other() -> None:
    assert listen_address("/ip4/0.0.0.0/tcp/4001", 1) == "/ip4/0.0.0.0/tcp/4001"
    assert listen_address("/ip4/0.0.0.0/tcp/4001", 3) == "/ip4/0.0.0.0/tcp/4003"
    assert listen_address("/ip4/0.0.0.0/tcp/0", 3) == "/ip4/0.0.0.0/tcp/0"


def test_a_step_that_two_devices_counted_in_is_one_step() -> None:
    given = ContributionCounter(ContributionLog())
    for step in (1, 2):
        given.add_step(step, 3, 10, 0.5)
        given.add_step(step, 2, 10, 0.5)
    log = given.log
    assert (log.steps, log.microbatches, log.tokens, log.credit) == (2, 10, 100, 50.0)
    assert str(given) == "contributed 10 microbatches (100 tokens) in 2 steps"
