"""The envelopes of receipts that the coordinator keeps as evidence."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import trio

from kits import lost_audit as kit
from kits.coordinator.shell_world import LIMITS, Client, client, make_run, served
from swarm_coordinator.core.events import VerdictRecord
from swarm_coordinator.server import control_protocol
from swarm_coordinator.server.control_protocol import ReceiptChecker
from swarm_shared.base.errors import FrameError, SignatureError
from swarm_shared.base.transcript import Transcript
from swarm_shared.base.types import PeerId, RunId, Step
from swarm_shared.identity.credentials import Receipt
from swarm_shared.protocol import CONTROL_PROTOCOL, Refused, Welcome
from swarm_shared.trust.votes import Claim

RUN = RunId("ab" * 32)
SENDER = kit.AUDITED.peer_id


def receipt_checker(
    may_count: Callable[[PeerId, Receipt], bool] = lambda sender, receipt: True,
    most_microbatches: int = 100,
) -> ReceiptChecker:
    return ReceiptChecker(RUN, may_count, most_microbatches)


def verdict(transcript: Transcript) -> VerdictRecord:
    return VerdictRecord(
        kit.STEP, kit.MICROBATCH, kit.STAGE, kit.AUDITED.peer_id, kit.AUDITED.peer_id,
        kit.AUDITED.peer_id, "it lies", Step(0), kit.evidence(RUN, receipt=""),
        claim=Claim(transcript, 100.0),
    )  # fmt: skip


async def test_a_liar_that_signs_the_truth_later_does_not_replace_the_evidence() -> None:
    false, true = kit.receipt(RUN), kit.receipt(RUN, transcript=kit.TRUE)
    checker = receipt_checker()
    await checker.check([false], SENDER)
    await checker.check([true], SENDER)
    assert checker.envelope(verdict(kit.FALSE)) == false
    assert checker.envelope(verdict(kit.TRUE)) == true
    assert receipt_checker().envelope(verdict(kit.FALSE)) == ""


async def test_a_receipt_that_no_ledger_could_show_does_not_count() -> None:
    """The last character of base64 may have bits that belong to no byte; evidence has none set."""
    receipt = next(one for n in range(3) if (one := kit.receipt(RUN, tokens=10**n)).endswith("="))
    digits = receipt.rstrip("=")
    changed = digits[:-1] + chr(ord(digits[-1]) + 1) + "=" * (len(receipt) - len(digits))
    assert base64.b64decode(changed, validate=True) == base64.b64decode(receipt)
    with pytest.raises(FrameError, match="a receipt is not spelt as base64 is"):
        await receipt_checker().check([changed], SENDER)


async def test_what_a_liar_signs_later_does_not_push_out_the_evidence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(control_protocol, "_MAX_OTHER_ENVELOPES", 10)
    checker = receipt_checker()
    false = kit.receipt(RUN)
    (counted,) = await checker.check([false], SENDER)
    checker.counted(counted)
    for number in range(20):
        transcript = kit.TRUE.model_copy(update={"gradient": f"{number:032x}"})
        await checker.check([kit.receipt(RUN, transcript=transcript)], SENDER)
    assert checker.envelope(verdict(kit.FALSE)) == false


def variants(count: int, **changes: object) -> list[str]:
    """Receipts of one cell that contradict each other, all signed by its peer."""
    transcripts = (kit.TRUE.model_copy(update={"gradient": f"{n:032x}"}) for n in range(count))
    return [kit.receipt(RUN, transcript=transcript, **changes) for transcript in transcripts]


async def test_a_peer_cannot_have_any_number_of_its_receipts_verified_and_kept() -> None:
    checker = receipt_checker(most_microbatches=1)
    signed = variants(20)
    first = await checker.check(signed, SENDER)
    assert len(first) == 8
    assert await checker.check(signed, SENDER) == first
    assert len(await checker.check(variants(20, step=Step(kit.STEP + 1)), SENDER)) == 8
    another = kit.receipt(RUN, peer=kit.FIRST.peer_id, signer=kit.FIRST)
    assert len(await checker.check([another], SENDER)) == 1


async def test_a_receipt_that_cannot_count_is_not_verified() -> None:
    [good] = variants(1)
    forged = good.replace("AAAA", "AAAB") if "AAAA" in good else good[:-8] + "AAAA" + good[-4:]
    with pytest.raises(SignatureError):
        await receipt_checker().check([forged], SENDER)
    asked: list[tuple[PeerId, Step]] = []

    def may_count(sender: PeerId, receipt: Receipt) -> bool:
        asked.append((sender, receipt.step))
        return False

    sender = kit.FIRST.peer_id
    assert await receipt_checker(may_count).check([good, forged], sender) == ()
    assert asked == [(sender, kit.STEP)] * 2


async def test_verified_receipts_of_steps_long_ago_are_forgotten() -> None:
    checker = receipt_checker()
    for step in range(1, 50):
        await checker.check(variants(2, step=Step(step)), SENDER)
    assert sum(map(len, checker._verified.values())) == 6


async def test_receipts_that_count_in_a_run_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: set[tuple[int, int, int]] = set()
    counted = ReceiptChecker.counted

    def recording(self: ReceiptChecker, receipt: Receipt) -> None:
        kept.add((receipt.step, receipt.microbatch, receipt.stage))
        counted(self, receipt)

    monkeypatch.setattr(ReceiptChecker, "counted", recording)
    async with served(make_run(tmp_path / "run", steps=2)) as run:
        await run.train()
    assert {cell for cell in kept if cell[0] <= 2} == {
        (step, microbatch, stage) for step in (1, 2) for microbatch in (0, 1) for stage in (0, 1)
    }


async def test_a_device_has_no_other_owner_than_the_one_whose_binding_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A verdict names the owner, and its evidence has the binding."""
    checked, waits, both = ReceiptChecker.check, trio.Event(), trio.Event()

    async def slow_for_the_first(
        self: ReceiptChecker, envelopes: Sequence[str], sender: PeerId
    ) -> tuple[Receipt, ...]:
        if envelopes:
            waits.set()
            await both.wait()
        return await checked(self, envelopes, sender)

    monkeypatch.setattr(ReceiptChecker, "check", slow_for_the_first)
    answers: list[Welcome | Refused] = []
    async with served(make_run(tmp_path / "run")) as run:
        device, receipt = kit.AUDITED, kit.receipt(run.invite.run_id)
        async with client(run.invite, device) as one:
            coordinator = run.invite.coordinator
            stream = await one.node.open_stream(coordinator, CONTROL_PROTOCOL, LIMITS)
            other = Client(one.node, stream, run.invite)

            async def first() -> None:
                binding = kit.binding(kit.FIRST, device)
                answers.append(await one.hello(owner=binding, receipts=(receipt,)))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(first)
                await waits.wait()
                await other.join(owner=kit.binding(kit.SECOND, device))
                both.set()
    [refused] = answers
    assert isinstance(refused, Refused)
    assert "named another owner since" in refused.reason
