"""What the daemon and its stage worker say to each other. Values only; no torch.

Rules
-----
1. The worker says Awake when it has imported what it needs. The first request is ConfigureStage;
its
   answer carries the names of the shared memory. The end of the daemon's side of the socket ends
   the worker.
2. Every request but Discard has exactly one answer with the same `request` number:
   the one named after it, or Failed. The worker lives on after a Failed.
3. **Slots.** One shared segment of `slot_count` slots, owned by the daemon alone. A compute
   request (RunForward, RunBackward, RunEvaluation) names one slot with its payload; the worker
   copies the
   payload out and writes the answer's payload **into the same slot**. The slot is the daemon's
   again with the answer. So the worker never waits for a slot and cannot be part of a dead lock;
   how many requests it holds is bounded by the number of slots.
4. **Order.** Between two computations the inbox is drained. Control requests are carried out
   there, in the order they came and ahead of queued computations; then one computation: a
   RunBackward before any RunForward or RunEvaluation (1F1B: it frees memory soonest), one of an
   older step
   before one of the next, else in order of arrival. Under a duty cycle a rest goes before that
   computation, and control requests are carried out in it. Who needs a control request after a
   computation awaits the computation's answer first.
5. **Steps.** A worker at parameter version v computes microbatches of step v + 1 only, or of v + 1
   and v + 2 where the manifest's staleness is 1; each step has an accumulator of its own.
   PrepareRound, ComputeNorm and ApplyUpdate are of step v + 1, whatever is computed of step v + 2
   meanwhile.
   ApplyUpdate forgets what is in flight of its step, LoadStageState and ReinitialiseStage
   everything accumulated or
   in flight; a RunBackward for it is Failed "unknown_microbatch". RunEvaluation uses version v.
6. **Once.** A microbatch is in the accumulator at most once, `added` says whether this request
   put it there, and what failed left no trace.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from swarm_shared.base.frozen_model import FrozenModel
from swarm_shared.base.types import MicrobatchIndex, StageIndex, Step, Version

Request = Annotated[int, Field(ge=0, lt=2**53)]
Bytes = Annotated[int, Field(ge=0, lt=2**53)]
Slot = Annotated[int, Field(ge=0, lt=65_536)]
Microbatches = Annotated[tuple[MicrobatchIndex, ...], Field(max_length=65_536)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
SquaredNorm = Annotated[float, Field(ge=0)]

FailureCode = Literal[
    "not_finite",  # an output or a gradient of this worker's holds an infinity or a NaN
    "out_of_memory",
    "bad_input",  # a size, a token id or a number that cannot be, as it came in
    "wrong_step",  # not the step (or version) that this worker is at
    "unknown_microbatch",  # RunBackward for what is not (any more) in flight
    "discarded",  # given up by the daemon before it was computed, or in the middle of that
    "storage",  # a state file that cannot be written or read
    "device",  # the device is not there or does not work
]


class Numbered(FrozenModel):
    """Base of every message: which request this is, or answers."""

    request: Request


# ------------------------------------------------------------------------- daemon to worker


class ConfigureStage(Numbered):
    """Build the stage from the manifest's seed: version 0."""

    kind: Literal["configure"] = "configure"
    manifest_json: Annotated[str, Field(max_length=8 * 2**20)]
    stage: StageIndex
    device: Annotated[str, Field(pattern=r"^(cpu|cuda:[0-9]{1,3})$")]
    threads: int = Field(ge=1, le=1024)
    graph_budget_bytes: Bytes
    """Autograd graphs are kept between forward and backward while they fit; else recomputed."""
    kept_budget_bytes: Bytes
    """Host memory for inputs and gradients of accumulated microbatches, so that they can be
    taken out again; the oldest go first."""
    slot_bytes: Bytes
    slot_count: int = Field(ge=1, le=65_536)
    namespace: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    """Prefix of the names of the shared memory."""


class RunForward(Numbered):
    """One microbatch; the slot holds its input and, on the last stage, its targets after it.

    On the last stage the backward pass is done at once and the answer is a BackwardDone; else a
    ForwardDone with the output activation, and a RunBackward is to follow.
    """

    kind: Literal["forward"] = "forward"
    step: Step
    microbatch: MicrobatchIndex
    accumulate: bool
    slot: Slot
    nbytes: Bytes


class RunBackward(Numbered):
    """The gradient of the output of the RunForward whose request number was `forward`."""

    kind: Literal["backward"] = "backward"
    forward: Request
    slot: Slot
    nbytes: Bytes


class RunEvaluation(Numbered):
    """A forward pass that nothing follows: ForwardDone, on the last stage EvaluateDone."""

    kind: Literal["evaluate"] = "evaluate"
    slot: Slot
    nbytes: Bytes


class Discard(Numbered):
    """Give up the computation with this number, queued or waiting for its RunBackward. No answer.

    A computation that is still queued is answered with Failed "discarded", one that is being
    carried out ends so at its next layer; one that is done stays done (ListAccumulated tells).
    """

    kind: Literal["discard"] = "discard"


class Uncommit(Numbered):
    """Take these microbatches out of the step's accumulator: all of them, or nothing changes.

    Ones that are not in it are skipped, so that a repeated Uncommit is harmless.
    """

    kind: Literal["uncommit"] = "uncommit"
    step: Step
    microbatches: Microbatches


class ResetAccumulator(Numbered):
    """Empty the step's accumulator and forget its microbatches in flight."""

    kind: Literal["reset_accumulator"] = "reset_accumulator"
    step: Step


class ListAccumulated(Numbered):
    """Which microbatches are in the step's accumulator."""

    kind: Literal["accumulated"] = "accumulated"
    step: Step


class PrepareRound(Numbered):
    """Copy the step's accumulator into the `gradients` segment; it keeps what it has."""

    kind: Literal["prepare_round"] = "prepare_round"
    step: Step


class ComputeNorm(Numbered):
    """Squared norms of `result` divided by step_tokens."""

    kind: Literal["norm"] = "norm"
    step: Step
    step_tokens: int = Field(ge=1)


class ApplyUpdate(Numbered):
    """Clip to the whole model's norm, step, empty the step's accumulator: version = step."""

    kind: Literal["apply"] = "apply"
    step: Step
    step_tokens: int = Field(ge=1)
    global_norm: float = Field(ge=0, allow_inf_nan=False)
    learning_rate: float = Field(ge=0, allow_inf_nan=False)


class SaveStageState(Numbered):
    kind: Literal["save_state"] = "save_state"
    path: str
    version: Version


class LoadStageState(Numbered):
    kind: Literal["load_state"] = "load_state"
    path: str
    version: Version


class ReinitialiseStage(Numbered):
    """Start again from the manifest's seed, and call that `version`."""

    kind: Literal["reinitialise"] = "reinitialise"
    version: Version


class SetLimits(Numbered):
    """How much of the device may be used from now on; may be said at any time."""

    kind: Literal["limit"] = "limit"
    duty_cycle: float = Field(gt=0, le=1)
    """Share of the time that is computed in."""
    threads: int = Field(ge=1, le=1024)
    """At most those that ConfigureStage gave."""
    vram_bytes: Bytes | None = None
    """What the allocator may take of a GPU's memory; None: all of it."""


ComputeRequest = RunForward | RunBackward | RunEvaluation
WorkerRequest = Annotated[
    ConfigureStage | RunForward | RunBackward | RunEvaluation | Discard | Uncommit |
    ResetAccumulator
    | ListAccumulated | PrepareRound | ComputeNorm | ApplyUpdate | SaveStageState | LoadStageState
    | ReinitialiseStage
    | SetLimits,
    Field(discriminator="kind"),
]  # fmt: skip


# ------------------------------------------------------------------------- worker to daemon


class Awake(Numbered):
    """Said once and to nobody's request: from now on answers come without delay."""

    kind: Literal["awake"] = "awake"
    request: Request = 0


class StageConfigured(Numbered):
    """Ready, at version 0."""

    kind: Literal["configured"] = "configured"
    version: Version
    digest: str
    own_elements: Bytes
    tied_elements: Bytes
    slots_name: str
    gradients_name: str
    result_name: str
    input_bytes: Bytes
    output_bytes: Bytes


class ForwardDone(Numbered):
    kind: Literal["forward_done"] = "forward_done"
    nbytes: Bytes
    seconds: Finite
    """Compute alone, without the time in the queue; with the rest that a duty cycle asks for."""


class BackwardDone(Numbered):
    """The slot holds the gradient of the input (`nbytes` 0 on stage 0).

    loss_sum (a sum over `tokens`, in nats) on the last stage only.
    """

    kind: Literal["backward_done"] = "backward_done"
    nbytes: Bytes
    tokens: Bytes
    added: bool
    loss_sum: Finite | None = None
    seconds: Finite


class EvaluateDone(Numbered):
    kind: Literal["evaluate_done"] = "evaluate_done"
    loss_sum: Finite
    tokens: Bytes
    seconds: Finite


class Uncommitted(Numbered):
    kind: Literal["uncommitted"] = "uncommitted"
    ok: bool


class AccumulatorReset(Numbered):
    kind: Literal["accumulator_reset"] = "accumulator_reset"


class AccumulatedMicrobatches(Numbered):
    """Sorted."""

    kind: Literal["accumulated_are"] = "accumulated_are"
    microbatches: Microbatches


class RoundPrepared(Numbered):
    """`microbatches` are exactly those whose gradients are in the segment."""

    kind: Literal["round_prepared"] = "round_prepared"
    microbatches: Microbatches
    finite: bool = True


class NormComputed(Numbered):
    """`finite` False: the result must not be applied, and the squares are 0."""

    kind: Literal["norm_done"] = "norm_done"
    own_squared: SquaredNorm
    tied_squared: SquaredNorm
    finite: bool


class UpdateApplied(Numbered):
    kind: Literal["applied"] = "applied"
    version: Version
    digest: str
    norm: Finite
    """Of the parameters."""


class StageStateSaved(Numbered):
    kind: Literal["state_saved"] = "state_saved"
    path: str
    nbytes: Bytes


class StageStateLoaded(Numbered):
    """Answer to LoadStageState and ReinitialiseStage."""

    kind: Literal["state_loaded"] = "state_loaded"
    version: Version
    digest: str


class LimitsSet(Numbered):
    kind: Literal["limited"] = "limited"


class Failed(Numbered):
    kind: Literal["failed"] = "failed"
    code: FailureCode
    message: str


WorkerAnswer = Annotated[
    Awake | StageConfigured | ForwardDone | BackwardDone | EvaluateDone | Uncommitted |
    AccumulatorReset
    | AccumulatedMicrobatches | RoundPrepared | NormComputed | UpdateApplied | StageStateSaved |
    StageStateLoaded | LimitsSet
    | Failed,
    Field(discriminator="kind"),
]  # fmt: skip

worker_requests: TypeAdapter[WorkerRequest] = TypeAdapter(WorkerRequest)
worker_answers: TypeAdapter[WorkerAnswer] = TypeAdapter(WorkerAnswer)
