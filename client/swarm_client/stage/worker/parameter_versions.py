"""What steps are computed with: parameters of one version each, and the gradients summed there.

Without staleness there is one lane, and every step uses it. With staleness 1 there are two: step s
uses lane s % 2, which holds version s - 2 (at least 0), while the other lane holds version s - 1
for step s + 1. So the microbatches of two steps can be computed in any order. When step s is
applied its lane takes over the other one's parameters and the optimizer steps there: it then holds
version s, which is what step s + 2 is computed with. Nothing in the other lane is touched, the
autograd graphs of step s + 1 included.

Owns which lane a step uses. Does not own the parameter version, nor when a step is applied.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import Tensor

from swarm_client.stage.worker.accumulator import Accumulator
from swarm_shared.base.types import StageIndex, Step, Version
from swarm_shared.model import FlatLayout, Stage, build_stage
from swarm_shared.model.fixed_point_sums import Quantum, quantum_of
from swarm_shared.run.manifest import Manifest


class Lane:
    """One copy of the stage, and the accumulator of the step that is computed with it."""

    def __init__(
        self, stage: Stage, layout: FlatLayout, device: torch.device, kept_budget_bytes: int,
        quantum: Quantum | None,
    ) -> None:  # fmt: skip
        self.stage = stage
        self.parameters: list[Tensor] = [parameter for _, parameter in stage.all_parameters()]
        self.accumulator = Accumulator(layout, device, kept_budget_bytes, quantum)

    def take_parameters(self, other: Lane) -> None:
        """Hold the other lane's version, in this lane's own memory."""
        with torch.no_grad():
            torch._foreach_copy_(self.parameters, other.parameters)


class Lanes:
    """All lanes of a stage, at version 0. `kept_budget_bytes` is for all of them together."""

    def __init__(
        self, manifest: Manifest, stage_index: StageIndex, device: torch.device,
        kept_budget_bytes: int,
    ) -> None:  # fmt: skip
        count = manifest.training.staleness + 1
        stage = build_stage(manifest, stage_index, device)
        stages = [stage, *(copy.deepcopy(stage) for _ in range(count - 1))]
        self.layout = FlatLayout.of(stage)
        self.quantum = quantum_of(manifest)
        budget_bytes = kept_budget_bytes // count
        self._lanes = [Lane(one, self.layout, device, budget_bytes, self.quantum) for one in stages]

    def __iter__(self) -> Iterator[Lane]:
        return iter(self._lanes)

    def open_steps(self, version: Version) -> range:
        """The steps that can be worked on; the first of them is the next to be applied."""
        return range(version + 1, version + 1 + len(self._lanes))

    def of(self, step: Step) -> Lane:
        return self._lanes[step % len(self._lanes)]

    def newest(self, version: Version) -> Lane:
        """The lane that holds `version`, when that is the newest."""
        return self.of(Step(version + len(self._lanes)))

    def previous(self, version: Version) -> Lane | None:
        """The lane that holds the version before it; None where none is needed any more."""
        return self.of(Step(version + 1)) if len(self._lanes) > 1 else None
