"""Messages between the daemon and its stage worker. Values only; no torch.

Rules
-----
1. The worker sends Awake when it has imported what it needs. The first request is ConfigureStage;
   its answer carries the names of the shared memory. The worker ends when the daemon's side of the
   socket does. A RunSelfTest in its place is the only request.
2. Every request but Discard has exactly one answer with the same `request` number: the one named
   after it, Done where there is none, or Failed. The worker continues after a Failed.
3. **Slots.** One shared segment of `slot_count` slots, owned by the daemon alone. A computation
   (RunForward, RunBackward) names one slot with its payload; the worker copies the
   payload out and writes the answer's payload **into the same slot**. The answer returns the slot
   to the daemon. The worker therefore never waits for a slot and cannot be part of a deadlock; the
   number of slots bounds the number of requests that it holds.
4. **Order.** Between two computations the worker drains its inbox. Control requests are carried out
   there, in order of arrival and ahead of queued computations; then one computation
   (`swarm_shared.volunteer_rules.compute_order`). Under a duty cycle a rest precedes it, and
   control requests are carried out during the rest. A caller that needs a control request after a
   computation awaits the answer of the computation first.
5. **Steps.** A worker at parameter version v computes microbatches of step v + 1 only, or of v + 1
   and v + 2 where the manifest's staleness is 1; each step has an accumulator of its own.
   PrepareRound, ComputeNorm, DigestSums and ApplyUpdate belong to step v + 1, whatever is computed
   of step v + 2 meanwhile. ApplyUpdate drops what is in flight of its step; LoadStageState and
   ReinitialiseStage drop everything accumulated or in flight. A RunBackward for a dropped
   microbatch is Failed "unknown_microbatch".
6. **Once.** A microbatch is in the accumulator at most once, `added` reports whether this request
   put it there, and a failed request leaves no trace.
7. **Owed.** A BackwardDone may come before the gradients of the weights are computed. It is `owed`
   then, and RunWeights or Discard is to follow.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from swarm_client.ipc.numbered import Failure, Numbered, RequestNumber
from swarm_client.machine.device_names import NAME_PATTERN
from swarm_client.stage.protocol.errors import FailureCode, RequestFailed
from swarm_shared.base.frozen_model import FrozenModel
from swarm_shared.base.transcript import KeptTensors, Transcript
from swarm_shared.base.types import (
    MAX_REDUCTION_MEMBERS,
    ArithmeticClass,
    LinearDigests,
    Magnitude,
    MicrobatchIndex,
    NormSketch,
    NormSketches,
    SampledBlocks,
    Seed,
    StageIndex,
    Step,
    Version,
)

Bytes = Annotated[int, Field(ge=0, lt=2**53)]
DeviceName = Annotated[str, Field(pattern=NAME_PATTERN)]
Slot = Annotated[int, Field(ge=0, lt=65_536)]
Microbatches = Annotated[tuple[MicrobatchIndex, ...], Field(max_length=65_536)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
SliceStops = Annotated[tuple[Bytes, ...], Field(max_length=MAX_REDUCTION_MEMBERS)]
"""Ends of the slices of a part of the gradient, in elements, in group order; the first slice begins
at 0."""
SquaredNorm = Annotated[float, Field(ge=0)]


# ------------------------------------------------------------------------- daemon to worker


class ConfigureStage(Numbered):
    """Build the stage from the manifest's seed, at version 0; its frozen parameters, if any, from
    the file at `base_path`."""

    kind: Literal["configure_stage"] = "configure_stage"
    manifest_json: Annotated[str, Field(max_length=8 * 2**20)]
    stage: StageIndex
    device: DeviceName
    threads: int = Field(ge=1, le=1024)
    graph_budget_bytes: Bytes
    """Memory for autograd graphs between forward and backward; beyond it they are recomputed."""
    streamed_bytes: Bytes = 0
    """Memory of the device that is too little for the weights: so much of them lies in host
    memory."""
    host_graph_bytes: Bytes = 0
    """Host memory for graphs, where a device has memory of its own."""
    kept_budget_bytes: Bytes
    """Host memory for inputs and gradients of accumulated microbatches, with which they can be
    taken out again; the oldest are dropped first."""
    slot_bytes: Bytes
    slot_count: int = Field(ge=1, le=65_536)
    namespace: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    """Prefix of the names of the shared memory."""
    base_path: str | None = None


class RunSelfTest(Numbered):
    """Test the device (`swarm_client.stage.worker.self_test`), in the place of ConfigureStage; the
    worker ends after its answer."""

    kind: Literal["run_self_test"] = "run_self_test"
    device: DeviceName
    threads: int = Field(ge=1, le=1024)
    seconds: float = Field(gt=0, le=86_400)
    memory_bytes: Bytes
    """Most memory of the device that is filled with a pattern."""
    duty_cycle: float = Field(default=1.0, gt=0, le=1)


class RunForward(Numbered):
    """Run one microbatch forward; the slot holds its input and, on the last stage, its targets.

    On the last stage the backward pass follows at once and the answer is a BackwardDone. On other
    stages the answer is a ForwardDone with the output activation, and a RunBackward is to follow.
    """

    kind: Literal["run_forward"] = "run_forward"
    step: Step
    microbatch: MicrobatchIndex
    accumulate: bool
    slot: Slot
    nbytes: Bytes


class RunBackward(Numbered):
    """Run the backward pass; the slot holds the gradient of the output of an earlier RunForward."""

    kind: Literal["run_backward"] = "run_backward"
    forward: RequestNumber
    """Request number of that RunForward."""
    slot: Slot
    nbytes: Bytes


class RunWeights(Numbered):
    """Compute the gradients of weights that an answer has left owed, and accumulate them."""

    kind: Literal["run_weights"] = "run_weights"
    computation: RequestNumber
    """Number of the request with that answer: a RunBackward, on the last stage a RunForward."""


class SaveKept(Numbered):
    """Write tensors of a microbatch in the accumulator to `path`, for an auditor. What is computed
    is written as `ShownTensors`, with these blocks of the gradient."""

    kind: Literal["save_kept"] = "save_kept"
    step: Step
    microbatch: MicrobatchIndex
    path: str
    tensors: KeptTensors
    blocks: SampledBlocks = ()


class ShownFile(FrozenModel):
    """The file of what another peer shows of a microbatch (`ShownTensors`)."""

    path: str
    blocks: SampledBlocks
    """The blocks of the gradient that are in it."""
    claimed: Transcript
    """The digests that its content must have."""


class RunAudit(Numbered):
    """Compute a microbatch of another peer's from the file of its inputs; nothing is accumulated.

    With `shown`, measure the distance to what the other peer has computed. With `secret`, compute
    the linear digests of the gradient where it is counted exactly.
    """

    kind: Literal["run_audit"] = "run_audit"
    step: Step
    microbatch: MicrobatchIndex
    inputs_path: str
    shown: ShownFile | None = None
    secret: Seed | None = None


class Discard(Numbered):
    """Discard the computation with this number, queued or waiting for its RunBackward or
    RunWeights. No answer.

    A queued computation is answered with Failed "discarded"; one that is running ends so at its
    next layer; a finished one stays finished (RoundPrepared lists it).
    """

    kind: Literal["discard"] = "discard"


class Uncommit(Numbered):
    """Take these microbatches out of the step's accumulator: all of them, or nothing changes.

    Microbatches that are not in it are skipped, so that a repeated Uncommit is harmless.
    """

    kind: Literal["uncommit"] = "uncommit"
    step: Step
    microbatches: Microbatches


class ResetAccumulator(Numbered):
    """Empty the step's accumulator and drop its microbatches in flight."""

    kind: Literal["reset_accumulator"] = "reset_accumulator"
    step: Step


class PrepareRound(Numbered):
    """Copy the step's accumulator into the `gradients` segment; the accumulator is unchanged."""

    kind: Literal["prepare_round"] = "prepare_round"
    step: Step


class ComputeNorm(Numbered):
    """Compute the squared norms of `result` divided by step_tokens."""

    kind: Literal["compute_norm"] = "compute_norm"
    step: Step
    step_tokens: int = Field(ge=1)


class DigestSums(Numbered):
    """Compute the linear digests of the slices of one part of `gradients` and of `result`; see
    `swarm_shared.protocol.SumCheck`."""

    kind: Literal["digest_sums"] = "digest_sums"
    step: Step
    part: Literal["own", "tied"]
    seed: Seed
    stops: SliceStops
    weights: Seed | None = None
    sketches: bool = False
    """Whether the whole part's sketches are computed, too."""


class ApplyUpdate(Numbered):
    """Clip to the whole model's norm, take the optimizer step, empty the step's accumulator.

    The version is then `step`.
    """

    kind: Literal["apply_update"] = "apply_update"
    step: Step
    step_tokens: int = Field(ge=1)
    global_norm: float = Field(ge=0, allow_inf_nan=False)
    learning_rate: float = Field(ge=0, allow_inf_nan=False)


class SaveStageState(Numbered):
    """Write parameters and optimizer state to `path`."""

    kind: Literal["save_stage_state"] = "save_stage_state"
    path: str
    version: Version


class LoadStageState(Numbered):
    """Load parameters and optimizer state from `path`."""

    kind: Literal["load_stage_state"] = "load_stage_state"
    path: str
    version: Version


class ReinitialiseStage(Numbered):
    """Start again from the manifest's seed, as version `version`."""

    kind: Literal["reinitialise_stage"] = "reinitialise_stage"
    version: Version


class SetLimits(Numbered):
    """Limit the use of the device from now on; may be sent at any time."""

    kind: Literal["set_limits"] = "set_limits"
    duty_cycle: float = Field(gt=0, le=1)
    """Share of the time spent computing."""
    threads: int = Field(ge=1, le=1024)
    """Number of threads, at most those of ConfigureStage."""
    vram_bytes: Bytes | None = None
    """Bound on the allocator's share of GPU memory; None for all of it."""
    graph_bytes: Bytes
    """Memory of the device for autograd graphs."""
    host_graph_bytes: Bytes
    """Memory of the host for those of a device with memory of its own."""


ComputeRequest = RunForward | RunBackward
WorkerRequest = Annotated[
    ConfigureStage | RunSelfTest | RunForward | RunBackward | RunWeights | SaveKept | RunAudit
    | Discard | Uncommit
    | ResetAccumulator | PrepareRound | ComputeNorm | DigestSums | ApplyUpdate
    | SaveStageState | LoadStageState | ReinitialiseStage | SetLimits,
    Field(discriminator="kind"),
]  # fmt: skip


# ------------------------------------------------------------------------- worker to daemon


class Awake(Numbered):
    """Sent once, without a request: from now on answers come without delay."""

    kind: Literal["awake"] = "awake"


class StageConfigured(Numbered):
    """Answer to ConfigureStage: the stage is ready, at version 0."""

    kind: Literal["stage_configured"] = "stage_configured"
    digest: str
    arithmetic: ArithmeticClass
    streamed_bytes: Bytes = 0
    """Bytes of the stage's weights that lie in host memory."""
    own_elements: Bytes
    tied_elements: Bytes
    slots_name: str
    gradients_name: str
    result_name: str


class SelfTested(Numbered):
    """Answer to RunSelfTest."""

    kind: Literal["self_tested"] = "self_tested"
    rounds: int
    seconds: float
    memory_bytes: Bytes
    """Memory that was filled with a pattern."""
    fault: str
    """The fault that was found, as a sentence without its full stop; empty if there is none."""
    arithmetic: ArithmeticClass


class Computed(Numbered):
    """Base of the answers to a computation."""

    seconds: Finite
    """Compute time without the time in the queue, with the rest that a duty cycle requires."""


class ForwardDone(Computed):
    """Answer to RunForward on all stages but the last."""

    kind: Literal["forward_done"] = "forward_done"
    nbytes: Bytes


class BackwardDone(Computed):
    """Answer to RunBackward; the slot holds the gradient of the input (`nbytes` 0 on stage 0).

    loss_sum (a sum over `tokens`, in nats) is set on the last stage only.
    """

    kind: Literal["backward_done"] = "backward_done"
    nbytes: Bytes
    tokens: Bytes
    added: bool
    loss_sum: Finite | None = None
    transcript: Transcript | None = None
    """The transcript of the gradient in the accumulator, if the microbatch is in it and was to be
    accumulated."""
    owed: bool = False
    """Whether RunWeights has to follow before the microbatch is accumulated."""


class WeightsDone(Computed):
    """Answer to RunWeights; `transcript` as in BackwardDone."""

    kind: Literal["weights_done"] = "weights_done"
    added: bool
    transcript: Transcript | None = None


class AuditDone(Numbered):
    """Answer to RunAudit. `distance` is None without a comparison, or if the files do not have the
    claimed digests."""

    kind: Literal["audit_done"] = "audit_done"
    transcript: Transcript
    loss_sum: Finite | None = None
    distance: Magnitude | None = None
    sums: tuple[LinearDigests, ...] = Field(default=(), max_length=2)
    """The digests of the own part, then those of the tied part, if there is one."""
    sketches: tuple[NormSketches, ...] = Field(default=(), max_length=2)
    """The sketches of the same."""


class Uncommitted(Numbered):
    """Answer to Uncommit; `ok` False if nothing was changed."""

    kind: Literal["uncommitted"] = "uncommitted"
    ok: bool


class RoundPrepared(Numbered):
    """Answer to PrepareRound; the segment holds the gradients of exactly these microbatches, which
    are sorted."""

    kind: Literal["round_prepared"] = "round_prepared"
    microbatches: Microbatches
    finite: bool = True


class NormComputed(Numbered):
    """Answer to ComputeNorm, equal to the bit on all members. If `finite` is False, the result must
    not be applied and the squares are 0."""

    kind: Literal["norm_computed"] = "norm_computed"
    own_squared: SquaredNorm
    tied_squared: SquaredNorm
    finite: bool


class SumsDigested(Numbered):
    """Answer to DigestSums: one digest per slice."""

    kind: Literal["sums_digested"] = "sums_digested"
    parts: LinearDigests
    results: LinearDigests
    part_sketch: NormSketch | None = None
    result_sketch: NormSketch | None = None


class UpdateApplied(Numbered):
    """Answer to ApplyUpdate."""

    kind: Literal["update_applied"] = "update_applied"
    digest: str
    norm: Finite
    """Norm of the parameters."""


class StageStateLoaded(Numbered):
    """Answer to LoadStageState and ReinitialiseStage."""

    kind: Literal["stage_state_loaded"] = "stage_state_loaded"
    digest: str


class Done(Numbered):
    """Answer to SaveKept, ResetAccumulator, SaveStageState and SetLimits: it is done."""

    kind: Literal["done"] = "done"


class Failed(Failure):
    """Answer to any request that could not be carried out."""

    kind: Literal["failed"] = "failed"
    code: FailureCode
    message: str

    def error(self) -> RequestFailed:
        return RequestFailed(self.code, self.message)


WorkerAnswer = Annotated[
    Awake | StageConfigured | SelfTested | ForwardDone | BackwardDone | WeightsDone | AuditDone
    | Uncommitted | RoundPrepared | NormComputed | SumsDigested | UpdateApplied | StageStateLoaded
    | Done | Failed,
    Field(discriminator="kind"),
]  # fmt: skip

worker_requests: TypeAdapter[WorkerRequest] = TypeAdapter(WorkerRequest)
worker_answers: TypeAdapter[WorkerAnswer] = TypeAdapter(WorkerAnswer)
