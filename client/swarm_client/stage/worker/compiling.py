"""torch.compile for a stage's layers, switched on by an environment variable.

Off by default: compiling takes minutes at the start, and its benefit depends on the device (`make
bench-gpu` measures both ways). Each layer is compiled by itself: all are alike, so that one
compilation serves them all, and the worker's code between two layers stays outside.

A compiled layer computes the same values but for rounding. Replicas stay equal to the bit all the
same: one of them computes each microbatch's gradient, and all of them apply the same average.
"""

from __future__ import annotations

import os

import torch

from swarm_shared.base.errors import ConfigurationError
from swarm_shared.model import Stage

COMPILE_VARIABLE = "SWARM_COMPILE"
BACKENDS = ("inductor", "aot_eager")
"""Permitted backends. `aot_eager` generates no code: for tests, and to find the failing part of the
compiler."""


def backend_from_environment() -> str | None:
    """The backend that the environment selects; None for no compilation."""
    value = os.environ.get(COMPILE_VARIABLE, "")
    if value in ("", "0"):
        return None
    if value == "1":
        return BACKENDS[0]
    if value not in BACKENDS:
        raise ConfigurationError(
            f"{COMPILE_VARIABLE} is {value!r}; give 1, 0, or one of {', '.join(BACKENDS)}"
        )
    return value


def compile_layers(stage: Stage, backend: str) -> None:
    """Compile the layers; the first microbatch of each shape then takes as long as compiling
    does (`StageRunner.warm_up`)."""
    for layer in stage.model.layers.values():
        # Only the forward is replaced, so that hooks on the layer are still called.
        layer.forward = torch.compile(layer.forward, backend=backend, dynamic=False)
