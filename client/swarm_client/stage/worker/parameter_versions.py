"""Parameter sets: copies of a stage at one parameter version each, with their accumulators.

Without staleness there is one set, and every step uses it. With staleness 1 there are two: step s
uses set s % 2, which holds version s - 2 (at least 0), while the other set holds version s - 1 for
step s + 1. The microbatches of two steps can therefore be computed in any order. When step s is
applied, its set copies the other set's parameters and the optimizer steps there: it then holds
version s, with which step s + 2 is computed. Nothing in the other set changes, including the
autograd graphs of step s + 1.

Owns which set a step uses. Does not own the parameter version, nor when a step is applied.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import Tensor

from swarm_client.stage.worker.accelerator import Accelerator
from swarm_client.stage.worker.accumulation.accumulator import Accumulator
from swarm_client.stage.worker.transfer.pieces_to_host import PiecesToHost, pieces_to_host
from swarm_client.stage.worker.transfer.weight_stream import stream_weights
from swarm_shared.base.types import StageIndex, Step, Version
from swarm_shared.model import FlatLayout, Stage, build_stage
from swarm_shared.model.fixed_point_sums import Quantum, quantum_of
from swarm_shared.run.manifest import Manifest


class ParameterSet:
    """One copy of the stage, and the accumulator of the step that is computed with it."""

    def __init__(
        self, stage: Stage, layout: FlatLayout, device: torch.device, kept_budget_bytes: int,
        quantum: Quantum | None, pieces: PiecesToHost | None,
    ) -> None:  # fmt: skip
        self.stage = stage
        self.parameters: list[Tensor] = [parameter for _, parameter in stage.all_parameters()]
        self.accumulator = Accumulator(layout, device, kept_budget_bytes, quantum, pieces)

    def take_parameters(self, source: ParameterSet) -> None:
        """Copy the other set's version into this set's own memory."""
        with torch.no_grad():
            torch._foreach_copy_(self.parameters, source.parameters)


def _copy(stage: Stage) -> Stage:
    """Return a copy with trained parameters of its own, and the same frozen ones."""
    return copy.deepcopy(stage, {id(frozen): frozen for _, frozen in stage.frozen_parameters()})


class ParameterSets:
    """All parameter sets of a stage, at version 0. `kept_budget_bytes` is their common budget, and
    so many `streamed_bytes` of their weights lie in host memory."""

    def __init__(
        self, manifest: Manifest, stage_index: StageIndex, accelerator: Accelerator,
        kept_budget_bytes: int, streamed_bytes: int,
    ) -> None:  # fmt: skip
        count, device = manifest.training.staleness + 1, accelerator.device
        stage = build_stage(manifest, stage_index, device)
        stages = [stage, *(_copy(stage) for _ in range(count - 1))]
        self.weights = stream_weights(stages, streamed_bytes, accelerator)
        """The weights that lie in host memory, if any do. They leave the device before the sums
        take memory of it."""
        self.layout = FlatLayout.of(stage)
        self.quantum = quantum_of(manifest)
        budget_bytes = kept_budget_bytes // count
        pieces = pieces_to_host(accelerator)
        self._parameter_sets = [
            ParameterSet(stage_copy, self.layout, device, budget_bytes, self.quantum, pieces)
            for stage_copy in stages
        ]

    @property
    def streamed_bytes(self) -> int:
        """The bytes of weights in host memory."""
        return 0 if self.weights is None else self.weights.host_bytes

    def change(self) -> None:
        """Forget which weights are on the device; call this before any parameter changes."""
        if self.weights is not None:
            self.weights.forget()

    def __iter__(self) -> Iterator[ParameterSet]:
        return iter(self._parameter_sets)

    def open_steps(self, version: Version) -> range:
        """The steps that can be worked on; the first of them is applied next."""
        return range(version + 1, version + 1 + len(self._parameter_sets))

    def for_step(self, step: Step) -> ParameterSet:
        """Return the set with which a step is computed, in whose accumulator it is counted."""
        return self._parameter_sets[step % len(self._parameter_sets)]

    def newest(self, version: Version) -> ParameterSet:
        """The set that holds `version`, if that is the newest version."""
        return self.for_step(Step(version + len(self._parameter_sets)))

    def previous(self, version: Version) -> ParameterSet | None:
        """The set that holds the version before; None where the state does not need it."""
        return self.for_step(Step(version + 1)) if len(self._parameter_sets) > 1 else None
