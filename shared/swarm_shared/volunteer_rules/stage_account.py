"""What a held stage has accumulated, receipted and committed: the volunteer's half of "every
microbatch counts exactly once".

Three parties keep a microbatch: the stage worker has its gradient in the accumulator
(`swarm_shared.volunteer_rules.accumulated_set`), this account has its receipt, and the
coordinator's table has the cell that the receipt fills. The coordinator commits what it has a
receipt of, and a close removes from the accumulator what was not committed.

Invariants, for every step in progress:

1. A receipt exists if and only if the worker has answered that the microbatch is in the
   accumulator, and no answer since then has removed it.
2. A microbatch has at most one receipt in this stage, and it is signed once.
3. Between `settle` and `reopen` or `applied` no new computation of the closing step is asked to
   accumulate.
4. A computation that began before a removal signs nothing: its answer may be about what the removal
   took out. The microbatch is then in the accumulator without a receipt, as after a cancelled
   request, and its next request or the next close finds it.
5. The receipts of a step end with the step: `applied` and `emptied` drop them, reported or not.
6. The version grows by one step at a time.

Pure: signing is a function of the constructor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from swarm_shared.base.transcript import Transcript
from swarm_shared.base.types import MicrobatchIndex, StageIndex, Step, Version

ReceiptT = TypeVar("ReceiptT")


@dataclass(frozen=True, slots=True)
class Computation:
    """One request for a training microbatch, from its acceptance to the worker's answer."""

    step: Step
    microbatch: MicrobatchIndex
    accumulate: bool
    """Whether the worker is asked to add the gradient."""
    removals: int
    """Number of times that the microbatch was removed from the accumulator before the request."""


@dataclass(frozen=True, slots=True)
class Counted:
    """The content of a receipt. `loss_sum` (nats over `tokens`) is set on the last stage."""

    step: Step
    microbatch: MicrobatchIndex
    tokens: int
    loss_sum: float | None
    transcript: Transcript


@dataclass(slots=True, eq=False)
class _OpenStep(Generic[ReceiptT]):
    """One step in progress."""

    receipts: dict[MicrobatchIndex, ReceiptT] = field(default_factory=dict)
    removed: Counter[MicrobatchIndex] = field(default_factory=Counter)
    emptied: int = 0

    def removals(self, microbatch: MicrobatchIndex) -> int:
        return self.emptied + self.removed[microbatch]


class StageAccount(Generic[ReceiptT]):
    """The account of one held stage; every stage tenure starts a new one."""

    def __init__(
        self,
        stage: StageIndex,
        version: Version,
        staleness: int,
        sign: Callable[[Counted], ReceiptT],
    ) -> None:
        """`staleness`: number of steps after the next one that can be computed as well."""
        self.stage = stage
        self.version = version
        self.staleness = staleness
        self._sign = sign
        self._steps: dict[Step, _OpenStep[ReceiptT]] = {}
        self._unreported: dict[tuple[Step, MicrobatchIndex], ReceiptT] = {}
        self._closing = False

    # ---- steps

    @property
    def step(self) -> Step:
        """The step that is applied next: the only one that can close."""
        return Step(self.version + 1)

    def works_on(self, step: Step) -> bool:
        """Whether training microbatches of this step can be computed now."""
        return self.step <= step <= self.step + self.staleness

    @property
    def closing(self) -> bool:
        """Whether the coordinator closes the step now."""
        return self._closing

    def closes(self, step: Step) -> bool:
        """Whether the step's commit set is settled, so that nothing may be added."""
        return self._closing and step == self.step

    # ---- counting

    def begin(
        self, step: Step, microbatch: MicrobatchIndex, mask: Collection[StageIndex]
    ) -> Computation:
        """Accept a training microbatch of a step that `works_on`; `mask` has the stages that have
        not counted it."""
        if not self.works_on(step):
            raise ValueError(f"step {step} is not open; this stage is at version {self.version}")
        opened = self._steps.setdefault(step, _OpenStep())
        accumulate = (
            self.stage in mask and microbatch not in opened.receipts and not self.closes(step)
        )
        return Computation(step, microbatch, accumulate, opened.removals(microbatch))

    def finish(
        self, computation: Computation, *, added: bool, tokens: int, loss_sum: float | None,
        transcript: Transcript | None,
    ) -> ReceiptT | None:  # fmt: skip
        """Record the worker's answer; return the microbatch's receipt, signed now or before.

        Not only a microbatch that was `added` just now is signed: an earlier request may have been
        cancelled after the worker had added it. The worker does not add it again, and without a
        receipt it would be leased again and again. `transcript` is of the gradient in the
        accumulator; None when the worker holds none.
        """
        step, microbatch = computation.step, computation.microbatch
        opened = self._steps.get(step)
        if opened is None:
            return None
        held = added or (computation.accumulate and not self.closes(step))
        if (
            held
            and transcript is not None
            and microbatch not in opened.receipts
            and computation.removals == opened.removals(microbatch)
        ):
            receipt = self._sign(Counted(step, microbatch, tokens, loss_sum, transcript))
            opened.receipts[microbatch] = self._unreported[step, microbatch] = receipt
        return opened.receipts.get(microbatch)

    def receipt(self, step: Step, microbatch: MicrobatchIndex) -> ReceiptT | None:
        """The receipt of the microbatch, if there is one."""
        opened = self._steps.get(step)
        return None if opened is None else opened.receipts.get(microbatch)

    def count(self, step: Step) -> int:
        """Number of the step's receipts."""
        opened = self._steps.get(step)
        return 0 if opened is None else len(opened.receipts)

    # ---- reporting

    def receipts(self) -> tuple[ReceiptT, ...]:
        """The receipts of all steps; a new session reports them again."""
        return tuple(
            receipt for opened in self._steps.values() for receipt in opened.receipts.values()
        )

    def take_unreported(self) -> tuple[ReceiptT, ...]:
        """Receipts of all steps that have not been taken before."""
        batch, self._unreported = self._unreported, {}
        return tuple(batch.values())

    # ---- closing

    def settle(self) -> None:
        """Record that the coordinator closes the step, so that its commit set is fixed."""
        self._closing = True

    def reopen(self) -> None:
        """Record that the attempt to close has ended without an apply."""
        self._closing = False

    def removed(self, step: Step, microbatches: Collection[MicrobatchIndex]) -> None:
        """Drop the receipts of microbatches that were taken out of the accumulator, or are not in
        it."""
        opened = self._steps.get(step)
        if opened is not None:
            opened.removed.update(microbatches)
            for microbatch in microbatches:
                opened.receipts.pop(microbatch, None)
                self._unreported.pop((step, microbatch), None)

    def emptied(self, step: Step) -> None:
        """Drop the step's receipts: its accumulator is empty."""
        opened = self._steps.get(step)
        if opened is not None:
            self.removed(step, tuple(opened.receipts))
            opened.emptied += 1

    def applied(self, version: Version) -> None:
        """Record that the step is applied and its accumulator is empty."""
        if version != self.version + 1:
            raise ValueError(f"version {version} does not follow version {self.version}")
        step = self.step
        self.emptied(step)
        self._steps.pop(step, None)
        self.version = version
        self._closing = False
