"""The receipts of the step in progress: signed once, reported in batches, kept until applied."""

from __future__ import annotations

import base64
from collections.abc import Callable

from swarm_shared.credentials import Receipt, sign_receipt
from swarm_shared.identity import Identity
from swarm_shared.types import Generation, MicrobatchIndex, RunId, StageIndex, Step


class ReceiptBook:
    """What this peer holds of one step. A new book for every stage that it takes."""

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
        self._held: dict[MicrobatchIndex, str] = {}
        self._unreported: list[str] = []

    def add(
        self,
        step: Step,
        microbatch: MicrobatchIndex,
        samples: int,
        tokens: int,
        loss_sum: float | None,
    ) -> str:
        """Sign for a microbatch that has just been accumulated; returns the envelope in base64."""
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
        envelope = base64.b64encode(sign_receipt(self._identity, receipt)).decode()
        self._held[microbatch] = envelope
        self._unreported.append(envelope)
        return envelope

    def get(self, microbatch: MicrobatchIndex) -> str | None:
        """The receipt, when the microbatch is held already."""
        return self._held.get(microbatch)

    def all(self) -> tuple[str, ...]:
        return tuple(self._held.values())

    def take_unreported(self) -> tuple[str, ...]:
        batch, self._unreported = tuple(self._unreported), []
        return batch

    def drop(self, microbatches: tuple[MicrobatchIndex, ...]) -> None:
        """These were taken out of the accumulator again."""
        for microbatch in microbatches:
            self._held.pop(microbatch, None)

    def clear(self) -> None:
        """The step is applied, or the accumulator was emptied."""
        self._held.clear()
        self._unreported.clear()
