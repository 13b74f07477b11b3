"""Microbatches in a stage: between their passes, and between their answer and the gradients of the
weights."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass

from swarm_client.stage.worker.accumulation.accumulator import KeptMicrobatch
from swarm_client.stage.worker.backward_pass import Graph, ParameterGradients
from swarm_client.stage.worker.payloads import MicrobatchInput
from swarm_shared.base.transcript import Transcript
from swarm_shared.base.types import MicrobatchIndex, Step


@dataclass(slots=True)
class Digests:
    """The digests of one microbatch, while it is computed (`swarm_shared.base.transcript`)."""

    step: Step
    microbatch: MicrobatchIndex
    input: str
    output: str = ""
    output_gradient: str = ""
    input_gradient: str = ""
    gradient: str = ""

    def transcript(self) -> Transcript:
        return Transcript(
            input=self.input,
            output=self.output,
            output_gradient=self.output_gradient,
            input_gradient=self.input_gradient,
            gradient=self.gradient,
        )


@dataclass(slots=True, eq=False)
class InFlight:
    """A microbatch between its forward and its backward pass."""

    step: Step
    microbatch: MicrobatchIndex
    accumulate: bool
    digests: Digests | None
    """The digests of what is exchanged; None for a microbatch that is not to be accumulated."""
    wire_inputs: bytearray
    """The inputs as they came, if it is to be accumulated."""
    inputs: MicrobatchInput | None
    graph: Graph | None


@dataclass(frozen=True, slots=True)
class OwedWeights:
    """A microbatch between its answer and the gradients of the weights."""

    digests: Digests
    kept: KeptMicrobatch
    gradients: ParameterGradients
    nbytes: int


class CountedWeights:
    """The result of `StageRunner.count_weights`. The gradient may still be hashed in the
    background, and `transcript` waits for that."""

    def __init__(
        self, *, added: bool, transcribe: Callable[[], Transcript | None],
        hashing: Future[str] | None = None,
    ) -> None:  # fmt: skip
        self.added = added
        """Whether this call added the gradient; False if the accumulator had it already."""
        self._transcribe = functools.cache(transcribe)
        self._hashing = hashing

    def is_hashed(self, wait_seconds: float = 0.0) -> bool:
        """Whether the gradient is hashed, now or within `wait_seconds`; `transcript` then returns
        at once."""
        return self._hashing is None or bool(wait((self._hashing,), wait_seconds).done)

    def transcript(self) -> Transcript | None:
        """Wait until the gradient is hashed; return the transcript of what is in the
        accumulator."""
        return self._transcribe()
