"""Several devices of one machine: how their words become one, and where each keeps its own."""

from __future__ import annotations

import base64
from pathlib import Path

from swarm_client.control.status_document import DeviceView, SuspendReason, Word
from swarm_client.control.status_sentence import together
from swarm_client.daemon.participation import listen_address, owned
from swarm_client.machine.home import Home
from swarm_client.volunteer.contribution import Contribution
from swarm_shared.base.types import RunId
from swarm_shared.identity.credentials import open_owner_binding
from swarm_shared.identity.keys import Identity
from swarm_shared.protocol import Hello, client_messages, encode, parse

RUN = RunId("a" * 32)


def device(
    word: Word, sentence: str, name: str = "cpu", reason: SuspendReason | None = None
) -> DeviceView:
    return DeviceView(id=name, label="L", word=word, sentence=sentence, reason=reason)


def test_devices_that_do_the_same_are_told_of_once() -> None:
    paused = device(Word.PAUSED, "paused by you", reason=SuspendReason.PAUSED_BY_USER)
    saying = together([paused, paused.model_copy(update={"id": "cpu#2"})])
    assert (saying.word, saying.sentence, saying.reason) == (
        Word.PAUSED,
        "paused by you",
        SuspendReason.PAUSED_BY_USER,
    )


def test_a_machine_contributes_while_one_of_its_devices_does_and_says_what_each_does() -> None:
    hot = device(Word.PAUSED, "too hot", "cuda:1", SuspendReason.TOO_HOT)
    saying = together([hot, device(Word.CONTRIBUTING, "computing stage 0", "cuda:0")])
    assert (saying.word, saying.reason) == (Word.CONTRIBUTING, None)
    assert saying.sentence == "cuda:1: too hot; cuda:0: computing stage 0"
    refused = device(Word.STOPPED, "no", "cuda:0", SuspendReason.NOT_ADMITTED)
    assert together([refused, hot]).reason is SuspendReason.TOO_HOT
    away = device(Word.DEGRADED, "away", reason=SuspendReason.COORDINATOR_AWAY)
    assert together([device(Word.CONTRIBUTING, "x"), away]).word is Word.DEGRADED


def test_each_device_has_a_home_of_its_own_and_the_first_ones_data(tmp_path: Path) -> None:
    home = Home.at(tmp_path / "home")
    second = home.of_device(2)
    assert home.of_device(1) is home
    assert second.data_folder(RUN) == home.data_folder(RUN)
    assert second.state_folder(RUN) != home.state_folder(RUN)
    assert second.identity_path == home.path / "devices" / "2" / "identity.key"
    assert second.log_folder.is_dir()


def test_the_machines_key_signs_for_each_further_device_and_the_device_shows_it() -> None:
    machine, device = Identity.generate(), Identity.generate()
    binding = open_owner_binding(base64.b64decode(owned(machine, device.peer_id)), device.peer_id)
    assert binding.owner == machine.peer_id
    hello = Hello(
        run=RUN, software="1", addresses=(), device="cpu", memory_bytes=1,
        owner=owned(machine, device.peer_id),
    )  # fmt: skip
    assert parse(client_messages, encode(hello)) == hello


def test_devices_listen_on_ports_beside_each_other() -> None:
    assert listen_address("/ip4/0.0.0.0/tcp/4001", 1) == "/ip4/0.0.0.0/tcp/4001"
    assert listen_address("/ip4/0.0.0.0/tcp/4001", 3) == "/ip4/0.0.0.0/tcp/4003"
    assert listen_address("/ip4/0.0.0.0/tcp/0", 3) == "/ip4/0.0.0.0/tcp/0"


def test_a_step_that_two_devices_counted_in_is_one_step() -> None:
    given = Contribution()
    for step in (1, 2):
        given.add_step(step, 3, 10, 0.5)
        given.add_step(step, 2, 10, 0.5)
    assert (given.steps, given.microbatches, given.tokens, given.credit) == (2, 10, 100, 50.0)
