"""STAGE_PROTOCOL: a sender and a stage server, one stream per ordered pair.

The request is a microbatch's activation, the answer its gradient.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from swarm_shared.base.frozen_model import FrozenModel
from swarm_shared.base.types import (
    Count,
    Envelope,
    Loss,
    MicrobatchIndex,
    MicrobatchPeers,
    MicrobatchReceipts,
    RunId,
    Seconds,
    StageIndex,
    Stages,
    Step,
    Text,
)

STAGE_PROTOCOL = "/swarmtrain/stage/1"


class RefusalReason(StrEnum):
    BUSY = "busy"
    """The queue is full; the sender chooses another peer."""
    WRONG_STEP = "wrong_step"
    """The receiver is at another parameter version, or holds another stage."""
    NOT_ADMITTED = "not_admitted"
    """The receiver does not serve this sender."""
    FAILED = "failed"
    """The receiver tried and failed; `detail` gives the reason."""


class StageHello(FrozenModel):
    """Opens an edge: the sender's certificate for this run."""

    kind: Literal["stage_hello"] = "stage_hello"
    run: RunId
    certificate: Envelope


class StageHelloAnswer(FrozenModel):
    kind: Literal["stage_hello_answer"] = "stage_hello_answer"
    credits: int = Field(ge=1, le=1024)
    """Microbatches the sender may have outstanding at this receiver."""


class StageRefused(FrozenModel):
    kind: Literal["stage_refused"] = "stage_refused"
    request: Count | None = None
    reason: RefusalReason
    detail: Text = ""


class Forward(FrozenModel):
    """One microbatch entering a stage. The payload is the input followed by the targets.

    Stage 0's input are token ids (uint32, sequences × length); elsewhere it is the activation in
    the run's wire dtype. Targets (uint32) travel along to the last stage.
    """

    kind: Literal["forward"] = "forward"
    request: Count
    step: Step
    microbatch: MicrobatchIndex
    stage: StageIndex
    accumulate: Stages
    input_bytes: Count
    target_bytes: Count
    ticket: Envelope
    """The coordinator's signed `LeaseTicket` of this microbatch."""
    is_copy: bool = False
    """Whether it has been sent before. Its peers are those that would be done soonest: the other
    copy may wait at a planned one."""


class Backward(FrozenModel):
    """The answer to Forward: the payload is the gradient of its input (empty for a trainer)."""

    kind: Literal["backward"] = "backward"
    request: Count
    receipts: MicrobatchReceipts
    service_seconds: Seconds
    """Computing time of this peer's device, without queueing and without downstream stages."""
    total_seconds: Seconds = 0.0
    """Time from the request's arrival to this answer, downstream stages included. The sender's own
    measurement less this is the time on the link."""
    uplink_seconds: Seconds = 0.0
    """Time this peer's uplink takes to send one microbatch's activation and gradient; 0 while the
    uplink has not limited sending."""
    loss_sum: Loss
    tokens: Count
    owing: MicrobatchPeers = ()
    """The peers that have yet to count the microbatch, of this stage and those after it. Each sends
    its receipt, or `NotCounted`, to the coordinator."""


class StageCancel(FrozenModel):
    """The sender has abandoned this request; the receiver frees what it keeps for it."""

    kind: Literal["stage_cancel"] = "stage_cancel"
    request: Count


StageRequestMessage = Annotated[StageHello | Forward | StageCancel, Field(discriminator="kind")]
StageAnswerMessage = Annotated[
    StageHelloAnswer | StageRefused | Backward, Field(discriminator="kind")
]


stage_requests: TypeAdapter[StageRequestMessage] = TypeAdapter(StageRequestMessage)
stage_answers: TypeAdapter[StageAnswerMessage] = TypeAdapter(StageAnswerMessage)
