"""What an auditor accepts as the inputs of the receipt that it audits."""

from __future__ import annotations

from swarm_client.auditing.inputs import inputs_fit
from swarm_client.stage.protocol.slot_sizes import SlotSizes
from swarm_shared.base.types import MicrobatchIndex, PeerId, StageIndex, Step
from swarm_shared.identity.work_statements import wire_digest
from swarm_shared.protocol import Audit

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
        targets=wire_digest(targets) if targets else "",
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
