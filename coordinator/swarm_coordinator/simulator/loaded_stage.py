"""A stage that a simulated volunteer has loaded: its rules, and its worker's accumulator."""

from __future__ import annotations

from dataclasses import dataclass, field

from swarm_shared.base.types import Generation, MicrobatchIndex, PeerId, RunId, StageIndex, Step
from swarm_shared.identity.credentials import Receipt
from swarm_shared.protocol import AssignStage
from swarm_shared.run.manifest import Manifest
from swarm_shared.volunteer_rules.accumulated_set import AccumulatedSet
from swarm_shared.volunteer_rules.stage_account import Computation, Counted, StageAccount
from swarm_shared.volunteer_rules.step_close import StepClose


@dataclass(frozen=True, slots=True)
class _Inputs:
    """The kept inputs of a microbatch; a simulated worker can always compute it again."""

    nbytes: int = 0


INPUTS = _Inputs()


@dataclass(slots=True, eq=False)
class LoadedStage:
    """One stage in one worker, from its loading to its end or its next loading."""

    account: StageAccount[Receipt]
    close: StepClose[Receipt]
    accumulated: AccumulatedSet[_Inputs] = field(default_factory=lambda: AccumulatedSet(0))
    committed: tuple[MicrobatchIndex, ...] = ()
    """The commit set of the latest Close."""

    def count(self, computation: Computation) -> Receipt | None:
        """Add a computed microbatch as the worker does; return its receipt, if there is one."""
        account = self.account
        added = account.works_on(computation.step) and self.accumulated.wants(
            computation.microbatch, computation.accumulate
        )
        if added:
            self.accumulated.add(computation.microbatch, INPUTS)
        return account.finish(computation, added=added, tokens=0, loss_sum=None)


def load_stage(
    assignment: AssignStage, staleness: int, form: ReceiptForm, peer: PeerId
) -> LoadedStage:
    """Return the stage as it is after loading."""

    def sign(counted: Counted) -> Receipt:
        return form.filled(peer, assignment.stage, counted.step, counted.microbatch)

    account = StageAccount(assignment.stage, assignment.version, staleness, sign)
    return LoadedStage(account, StepClose(account))


class ReceiptForm:
    """The receipts of a run, as the coordinator gets them from their envelopes."""

    def __init__(self, manifest: Manifest) -> None:
        self._samples = manifest.training.sequences_per_microbatch
        self._tokens = manifest.tokens_per_microbatch
        self._last_stage = manifest.stage_count - 1

    def filled(
        self, peer: PeerId, stage: StageIndex, step: Step, microbatch: MicrobatchIndex
    ) -> Receipt:
        return Receipt(
            run=RunId("simulated"), generation=Generation(1), step=step, microbatch=microbatch,
            stage=stage, peer=peer, samples=self._samples, tokens=self._tokens,
            loss_sum=1.0 if stage == self._last_stage else None,
        )  # fmt: skip
