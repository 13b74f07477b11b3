"""A stage as plain torch trains it: its gradient as one flat vector, and its optimizer.

Microbatches add to the gradient in autograd; a step ends with the norm of the whole model, which a
contender sums over its stages, and with the reference's own optimizer step.
"""

from __future__ import annotations

from swarm_coordinator.offline.reference import apply_gradient
from swarm_shared.model.flat_gradients import FlatLayout, bind_gradients, squared_norm
from swarm_shared.model.llama import Stage
from swarm_shared.model.optimizer import make_optimizer
from swarm_shared.run.manifest import Manifest


class StageTraining:
    """The gradient of one stage, summed over a step, and the optimizer that applies it."""

    def __init__(self, manifest: Manifest, stage: Stage) -> None:
        self._manifest = manifest
        self._layout = FlatLayout.of(stage)
        assert self._layout.tied_count == 0, "no contender sums the gradients of a tied table"
        self._optimizer = make_optimizer(stage, manifest.optimizer)
        self.gradient = self._layout.new_flat()
        bind_gradients(stage, self._layout, self.gradient)

    def squared_norm(self) -> float:
        """Divide the gradient by the tokens of the step, once, and return its squared norm."""
        self.gradient.div_(self._manifest.tokens_per_step)
        return squared_norm(self.gradient)

    def apply(self, step: int, norm: float) -> None:
        """Take the step, clipped by the norm of the whole model; the next one begins at zero."""
        apply_gradient(self._manifest, step, self._optimizer, self._layout, self.gradient, norm)
        self.gradient.zero_()
