"""The receipts of the steps in progress: signed once, reported in batches, kept until applied."""

from __future__ import annotations

from collections.abc import Callable

from swarm_shared.base.types import Generation, MicrobatchIndex, RunId, StageIndex, Step
from swarm_shared.identity.credentials import Receipt, sign_receipt
from swarm_shared.identity.keys import Identity
from swarm_shared.identity.signing import encode_envelope


class ReceiptBook:
    """This peer's receipts of each step. Every stage tenure starts a new book."""

    def __init__(
        self,
        identity: Identity,
        run: RunId,
        stage: StageIndex,
        generation: Callable[[], Generation],
    ) -> None:
        self._identity = identity
        self._run = run
        self._stage = stage
        self._generation = generation
        self._held: dict[Step, dict[MicrobatchIndex, str]] = {}
        self._unreported: list[tuple[Step, str]] = []

    def add(
        self,
        step: Step,
        microbatch: MicrobatchIndex,
        samples: int,
        tokens: int,
        loss_sum: float | None,
    ) -> str:
        """Sign a receipt for a microbatch that has just been accumulated; return the envelope in
        base64."""
        receipt = Receipt(
            run=self._run,
            generation=self._generation(),
            step=step,
            microbatch=microbatch,
            stage=self._stage,
            peer=self._identity.peer_id,
            samples=samples,
            tokens=tokens,
            loss_sum=loss_sum,
        )
        envelope = encode_envelope(sign_receipt(self._identity, receipt))
        self._held.setdefault(step, {})[microbatch] = envelope
        self._unreported.append((step, envelope))
        return envelope

    def get(self, step: Step, microbatch: MicrobatchIndex) -> str | None:
        """The receipt of the microbatch, if there is one."""
        return self._held.get(step, {}).get(microbatch)

    def all(self) -> tuple[str, ...]:
        """The receipts of all steps."""
        return tuple(envelope for held in self._held.values() for envelope in held.values())

    def count(self, step: Step) -> int:
        return len(self._held.get(step, {}))

    def take_unreported(self) -> tuple[str, ...]:
        """Receipts of all steps that have not been taken before."""
        batch, self._unreported = self._unreported, []
        return tuple(envelope for _, envelope in batch)

    def drop(self, step: Step, microbatches: tuple[MicrobatchIndex, ...]) -> None:
        """Remove receipts of microbatches that were removed from the step's accumulator."""
        held = self._held.get(step, {})
        for microbatch in microbatches:
            held.pop(microbatch, None)

    def clear(self, step: Step) -> None:
        """Remove the step's receipts: it is applied, or its accumulator was emptied."""
        self._held.pop(step, None)
        self._unreported = [entry for entry in self._unreported if entry[0] != step]
