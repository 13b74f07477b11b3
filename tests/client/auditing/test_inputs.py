"""Where an auditor gets the inputs of the receipt that it audits, and what it accepts as these."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import trio
import trio.testing

from kits.client.held_stage import member_of
from kits.network.nodes import ANY_PORT, a_node
from swarm_client.auditing import exchange
from swarm_client.auditing.auditor import Auditor
from swarm_client.auditing.exchange import (
    FETCHING_LIMITS,
    MAX_SERVED,
    KeptServer,
    fetch_kept,
)
from swarm_client.auditing.inputs import (
    AuditInputs,
    TensorsWithheld,
    inputs_fit,
)
from swarm_client.stage.protocol.messages import AuditDone
from swarm_client.stage.protocol.slot_sizes import SlotSizes
from swarm_shared.base.errors import AdmissionError, SwarmError
from swarm_shared.base.transcript import KeptTensors, Transcript
from swarm_shared.base.types import MicrobatchIndex, PeerId, StageIndex, Step
from swarm_shared.identity.keys import Identity
from swarm_shared.identity.signing import decode_envelope, encode_envelope
from swarm_shared.identity.work_statements import AuditPermit, AuditStatement, wire_digest
from swarm_shared.protocol import (
    AUDIT_PROTOCOL,
    PART_BYTES,
    Audit,
    AuditResult,
    AuditSources,
    Comparison,
    KeptRequest,
    TransferHello,
    encode,
)

RUN = "ab" * 32
ORGANISER, STRANGER = (Identity.from_seed(letter * 32) for letter in (b"o", b"s"))
INPUT, TARGETS, GRADIENT = b"activation", b"ids!", b"slope"


def sizes_of(targets: int, gradient: int) -> SlotSizes:
    return SlotSizes(
        input_bytes=len(INPUT), target_bytes=targets, input_gradient_bytes=0, output_bytes=0,
        output_gradient_bytes=gradient, slot_bytes=4096, tensor_bytes=len(INPUT),
    )  # fmt: skip


def order(*, targets: bytes = b"", gradient: bytes = b"") -> Audit:
    return Audit(
        audit=1, step=Step(1), microbatch=MicrobatchIndex(0), stage=StageIndex(1),
        peer=PeerId("12D3KooWPeerOfThisTestThatIsAudited"), input=wire_digest(INPUT),
        output_gradient=wire_digest(gradient) if gradient else "",
        targets=wire_digest(targets) if targets else "", patience_seconds=20.0,
    )  # fmt: skip


def test_inputs_fit_if_all_their_digests_are_those_of_the_receipt() -> None:
    middle, last = sizes_of(0, len(GRADIENT)), sizes_of(len(TARGETS), 0)
    assert inputs_fit(order(gradient=GRADIENT), INPUT + GRADIENT, middle)
    assert inputs_fit(order(targets=TARGETS), INPUT + TARGETS, last)


def test_another_input_gradient_or_target_does_not_fit() -> None:
    middle, last = sizes_of(0, len(GRADIENT)), sizes_of(len(TARGETS), 0)
    assert not inputs_fit(order(gradient=GRADIENT), b"Activation" + GRADIENT, middle)
    assert not inputs_fit(order(gradient=GRADIENT), INPUT + b"SLOPE", middle)
    assert not inputs_fit(order(targets=TARGETS), INPUT + b"IDS!", last)


# ---- where they come from


@dataclass
class World:
    """An auditor of stage 1, its audited peer, and the peers of the stages before and behind."""

    members: dict[str, Any]
    given: dict[str, bytes]
    """What each peer gives; a peer that is not in it refuses."""
    asked: list[tuple[str, KeptTensors]] = field(default_factory=list)
    stalls: set[str] = field(default_factory=set)
    blocks: tuple[int, ...] = ()
    """Of a gradient, as asked for last."""
    audits: int = 0
    folder: Path = Path()

    async def fetch(self, order: Audit, targets: int = 0) -> bytes:
        sizes = sizes_of(targets, 0 if targets else len(GRADIENT))
        inputs = AuditInputs(self.members["auditor"], self)
        path = self.folder / "inputs"
        await inputs.write_inputs(order, sizes, path)
        assert [one.name for one in self.folder.iterdir() if one.is_file()] == ["inputs"]
        return path.read_bytes()

    async def audited(self, step: int, microbatch: int) -> tuple[np.ndarray, np.ndarray]:
        """Token ids and targets, as bytes of `given` say."""
        tokens, targets = (self.given.get(name, b"") for name in ("tokens", "targets"))
        return np.frombuffer(tokens, "<u4"), np.frombuffer(targets, "<u4")

    def peer(self, name: str) -> PeerId:
        return self.members[name].node.peer_id

    async def request(self, holder: str, permit: str, tensors: KeptTensors) -> None:
        auditor = self.members["auditor"]
        request = KeptRequest(permit=permit, tensors=tensors)
        path = self.folder / "inputs"
        await fetch_kept(auditor, auditor.roster[self.peer(holder)], request, len(ALL), path)

    def permitted(self, order: Audit, **changes: Any) -> Audit:
        """The order with a permit of the organiser's, as the coordinator adds it."""
        sources = order.sources
        assert sources is not None
        self.audits += 1
        values = {
            "run": RUN, "generation": 1, "audit": self.audits, "step": order.step,
            "microbatch": order.microbatch, "stage": order.stage, "auditor": self.peer("auditor"),
            "peer": order.peer, "before": sources.before, "behind": sources.behind,
            "signer": ORGANISER,
        } | changes  # fmt: skip
        signer = values.pop("signer")
        permit = encode_envelope(AuditPermit(**values).sign(signer))
        return order.model_copy(update={"permit": permit})


STAGES = {"before": 0, "auditor": 1, "audited": 1, "behind": 2}


@asynccontextmanager
async def world(folder: Path, **given: bytes) -> AsyncIterator[World]:
    """Peers on loopback with the shipped server and a worker that gives these bytes."""
    async with AsyncExitStack() as stack:
        nodes = {name: await stack.enter_async_context(a_node(None, ANY_PORT)) for name in STAGES}
        records = {
            node.peer_id: SimpleNamespace(
                peer=node.peer_id, addresses=node.addresses, stage=STAGES[name]
            )
            for name, node in nodes.items()
        }
        found = World({}, dict(given), folder=folder)
        for name, node in nodes.items():
            membership = member_of(RUN, None, "Y2VydA==")
            membership.now = replace(membership.now, organiser=ORGANISER.peer_id)
            found.members[name] = SimpleNamespace(
                node=node, roster=records, report=lambda _: None, membership=membership,
                gate=SimpleNamespace(check_transfer=lambda *_: None),
            )  # fmt: skip
            own = folder / name
            own.mkdir()
            holding = SimpleNamespace(
                stage=STAGES[name], worker=SimpleNamespace(save_kept=partial(_save, found, name))
            )
            KeptServer(found.members[name], cast(Any, SimpleNamespace(holding=holding)), own)
        yield found


async def _save(
    found: World, name: str, step: int, microbatch: int, path: Path, tensors: KeptTensors,
    blocks: tuple[int, ...],
) -> None:  # fmt: skip
    assert (step, microbatch) == (1, 0)
    found.blocks = blocks
    found.asked.append((name, tensors))
    if name in found.stalls:
        await trio.sleep_forever()
    if name not in found.given:
        raise SwarmError("nothing is kept of it")
    path.write_bytes(found.given[name])


def hidden(found: World, *, patience_seconds: float = 20.0, last: bool = False) -> Audit:
    open_order = order(targets=TARGETS) if last else order(gradient=GRADIENT)
    sources = AuditSources(
        before=found.peer("before"), behind=None if last else found.peer("behind")
    )
    changes = {"sources": sources, "patience_seconds": patience_seconds}
    return found.permitted(open_order.model_copy(update={"peer": found.peer("audited"), **changes}))


OUTPUT, INPUT_GRADIENT = KeptTensors.OUTPUT, KeptTensors.INPUT_GRADIENT
OPENLY = ("audited", KeptTensors.INPUTS)
ALL = INPUT + GRADIENT


async def test_the_peers_beside_the_audited_one_give_the_inputs_which_does_not_see_it(
    tmp_path: Path,
) -> None:
    async with world(tmp_path, before=INPUT, behind=GRADIENT, audited=ALL) as found:
        assert await found.fetch(hidden(found)) == ALL
        assert sorted(found.asked) == [("before", OUTPUT), ("behind", INPUT_GRADIENT)]


async def test_the_targets_of_the_last_stage_are_drawn_by_the_auditor(tmp_path: Path) -> None:
    async with world(tmp_path, before=INPUT, targets=TARGETS, audited=b"") as found:
        assert await found.fetch(hidden(found, last=True), len(TARGETS)) == INPUT + TARGETS
        assert found.asked == [("before", OUTPUT)]


async def test_the_token_ids_of_the_first_stage_are_drawn_by_the_auditor(tmp_path: Path) -> None:
    tokens = b"ids of a !"[: len(INPUT) // 4 * 4]
    async with world(tmp_path, tokens=tokens, behind=GRADIENT) as found:
        sizes = replace(sizes_of(0, len(GRADIENT)), input_bytes=len(tokens))
        first = hidden(found)
        assert first.sources is not None
        sources = first.sources.model_copy(update={"before": None})
        first = first.model_copy(update={"input": wire_digest(tokens), "sources": sources})
        path = tmp_path / "inputs"
        await AuditInputs(found.members["auditor"], found).write_inputs(first, sizes, path)
        assert path.read_bytes() == tokens + GRADIENT


@pytest.mark.parametrize(
    "given",
    [{"before": INPUT}, {"before": b"Activation", "behind": GRADIENT}, {}],
    ids=["one refuses", "another tensor", "both refuse"],
)
async def test_the_audited_peer_is_asked_where_its_neighbours_give_nothing_that_fits(
    tmp_path: Path, given: dict[str, bytes]
) -> None:
    async with world(tmp_path, audited=ALL, **given) as found:
        assert await found.fetch(hidden(found)) == ALL
        assert found.asked[-1] == OPENLY


async def test_a_neighbour_that_does_not_answer_is_waited_for_no_longer_than_the_order_says(
    tmp_path: Path,
) -> None:
    async with world(tmp_path, before=INPUT, audited=ALL) as found:
        found.stalls.add("behind")
        assert await found.fetch(hidden(found, patience_seconds=0.2)) == ALL
        assert found.asked[-1] == OPENLY


async def test_an_audited_peer_without_inputs_that_fit_withholds_them(tmp_path: Path) -> None:
    async with world(tmp_path, audited=b"other".ljust(len(ALL))) as found:
        with pytest.raises(TensorsWithheld, match="do not fit its receipt"):
            await found.fetch(hidden(found))
        found.given.pop("audited")
        with pytest.raises(TensorsWithheld, match="nothing is kept of it"):
            await found.fetch(hidden(found))


async def test_an_audited_peer_that_lets_its_auditor_wait_for_the_inputs_is_left_in_time(
    tmp_path: Path,
) -> None:
    """The auditor cannot tell it from a slow line, and states nothing."""
    async with world(tmp_path) as found:
        found.stalls.add("audited")
        with pytest.raises(SwarmError, match="has not given the inputs in time") as error:
            await found.fetch(hidden(found, patience_seconds=0.2))
        assert not isinstance(error.value, TensorsWithheld)


async def test_of_a_gradient_an_auditor_gets_the_blocks_that_it_asks_for(tmp_path: Path) -> None:
    async with world(tmp_path, audited=ALL) as found:
        inputs, path = AuditInputs(found.members["auditor"], found), tmp_path / "shown"
        await inputs.write_computed(hidden(found), (3, 17), len(ALL), 20.0, path)
        assert path.read_bytes() == ALL
        assert found.blocks == (3, 17)


async def test_what_a_peer_claims_and_does_not_show_in_time_is_withheld(tmp_path: Path) -> None:
    async with world(tmp_path) as found:
        found.stalls.add("audited")
        inputs = AuditInputs(found.members["auditor"], found)
        with pytest.raises(TensorsWithheld, match=r"has not shown what it claims within 0\.2 s"):
            await inputs.write_computed(hidden(found), (), 8, 0.2, tmp_path / "shown")


async def test_an_auditor_waits_for_what_is_claimed_as_long_as_the_order_says(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with world(tmp_path) as found, trio.open_nursery() as nursery:
        found.stalls.add("audited")
        answers, answered = trio.open_memory_channel[AuditResult](1)
        member = found.members["auditor"]
        member.nursery, member.coordinator = nursery, SimpleNamespace(send=answers.send_nowait)
        member.identity = Identity.from_seed(b"a" * 32)
        worker = _Computes(sizes_of(0, len(GRADIENT)))
        pipeline = SimpleNamespace(
            server=SimpleNamespace(paused=False),
            holding=SimpleNamespace(
                stage=1, worker=worker, account=SimpleNamespace(works_on=lambda _: True)
            ),
        )
        found.given |= {"before": INPUT, "behind": GRADIENT}
        auditor = Auditor(member, cast(Any, pipeline), found, tmp_path / "audits")
        comparison = Comparison(claimed=worker.transcript, sample="5eed" * 8, seconds=0.2)
        auditor.take(hidden(found).model_copy(update={"comparison": comparison}))
        answer = await answered.receive()
        assert "has not shown what it claims within 0.2 s" in caplog.text
        assert answer.statement is not None
        statement = AuditStatement.open(decode_envelope(answer.statement, "an answer"))
        assert statement.transcript == worker.transcript
        assert statement.distance is None, "what is not shown is withheld"


class _Computes:
    """A stage worker that audits."""

    transcript = Transcript(
        input=wire_digest(INPUT), output=wire_digest(b"o"), output_gradient=wire_digest(GRADIENT),
        gradient=wire_digest(b"g"),
    )  # fmt: skip

    def __init__(self, sizes: SlotSizes) -> None:
        self.sizes, self.configured = sizes, SimpleNamespace(own_elements=4, tied_elements=0)

    async def audit(self, *order: Any) -> AuditDone:
        *_, shown, _ = order
        return AuditDone(transcript=self.transcript, distance=None if shown is None else 0.0)


async def test_a_peer_that_the_roster_does_not_have_withholds_nothing(tmp_path: Path) -> None:
    async with world(tmp_path, audited=ALL) as found:
        found.members["auditor"].roster.pop(found.peer("audited"))
        with pytest.raises(SwarmError, match="is not in the roster") as error:
            await found.fetch(hidden(found))
        assert not isinstance(error.value, TensorsWithheld)


@pytest.mark.parametrize(
    ("tensors", "holder", "changes", "reason"),
    [
        (OUTPUT, "audited", {}, "is for another peer"),
        (INPUT_GRADIENT, "before", {}, "is for another peer"),
        (KeptTensors.INPUTS, "before", {}, "is for another peer"),
        (OUTPUT, "before", {"before": None}, "is for another peer"),
        (KeptTensors.INPUTS, "audited", {"run": "cd" * 32}, "permit of another one"),
        (KeptTensors.INPUTS, "audited", {"auditor": ORGANISER.peer_id}, "permit of another one"),
        (KeptTensors.INPUTS, "audited", {"signer": STRANGER}, "came without a permit"),
        (KeptTensors.INPUTS, "audited", {"stage": 2}, "does not hold stage 2"),
    ],
)
async def test_a_peer_gives_nothing_without_a_permit_of_the_coordinator_for_it(
    tmp_path: Path, tensors: KeptTensors, holder: str, changes: dict[str, Any], reason: str
) -> None:
    async with world(tmp_path, audited=ALL, before=INPUT) as found:
        permit = found.permitted(hidden(found), **changes).permit
        with pytest.raises(AdmissionError, match=reason):
            await found.request(holder, permit, tensors)
        assert found.asked == []


async def test_a_permit_is_good_for_each_kind_of_tensors_once(tmp_path: Path) -> None:
    """Otherwise a member could have others compute and send as much as they can."""
    async with world(tmp_path, audited=ALL, before=INPUT) as found:
        permit = hidden(found).permit
        for tensors in (KeptTensors.INPUTS, KeptTensors.COMPUTED):
            await found.request("audited", permit, tensors)
            with pytest.raises(AdmissionError, match="was used before"):
                await found.request("audited", permit, tensors)
        await found.request("audited", hidden(found).permit, KeptTensors.INPUTS)
        assert len(found.asked) == 3


async def test_an_auditor_that_reads_nothing_keeps_no_other_one_from_its_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The audited peer would count as one that gives auditors nothing."""
    monkeypatch.setattr(exchange, "TURN_SECONDS", 0.1)
    async with world(tmp_path, audited=ALL.ljust(8 * PART_BYTES)) as found:
        idle, holder = found.members["auditor"], found.members["audited"].node
        for number in range(MAX_SERVED):
            permit = hidden(found).permit
            stream = await idle.node.open_stream(
                holder.peer_id, AUDIT_PROTOCOL, FETCHING_LIMITS, holder.addresses
            )
            await stream.send(encode(TransferHello(run=RUN, certificate="Y2VydA==")))
            await stream.send(encode(KeptRequest(permit=permit, tensors=KeptTensors.COMPUTED)))
            while len(found.asked) == number:
                await trio.testing.wait_all_tasks_blocked()
        other = found.members["behind"]
        permit = found.permitted(hidden(found), auditor=other.node.peer_id).permit
        request = KeptRequest(permit=permit, tensors=KeptTensors.COMPUTED)
        with trio.fail_after(exchange.PART_SECONDS / 2):
            await fetch_kept(
                other, other.roster[holder.peer_id], request, 8 * PART_BYTES, tmp_path / "kept"
            )
