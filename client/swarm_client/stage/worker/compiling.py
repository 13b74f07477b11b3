"""torch.compile for a stage's layers, where whoever runs the worker wants it.

Off unless the environment says so: compiling takes minutes at the start, and whether it pays
depends on the device (`make bench-gpu` measures both ways). Each layer is compiled by itself: all
are alike, so that it is compiled once, and what the worker does between two layers stays outside.

A compiled layer computes the same values but for rounding. Replicas stay equal to the bit all the
same: each microbatch's gradient is computed by one of them, and all of them apply the same average.
"""

from __future__ import annotations

import os

import torch

from swarm_shared.base.errors import ConfigurationError
from swarm_shared.model import Stage

COMPILE_VARIABLE = "SWARM_COMPILE"
BACKENDS = ("inductor", "aot_eager")
"""`aot_eager` generates no code: for tests, and to see which part of the compiler is at fault."""


def backend_from_environment() -> str | None:
    """None: layers are not compiled."""
    wanted = os.environ.get(COMPILE_VARIABLE, "")
    if wanted in ("", "0"):
        return None
    if wanted == "1":
        return BACKENDS[0]
    if wanted not in BACKENDS:
        raise ConfigurationError(
            f"{COMPILE_VARIABLE} is {wanted!r}; give 1, 0, or one of {', '.join(BACKENDS)}"
        )
    return wanted


def compile_layers(stage: Stage, backend: str) -> None:
    """From now on; the first microbatch takes as long as compiling does."""
    for layer in stage.model.layers.values():
        # The forward alone: hooks on the layer go on to be called as they are.
        layer.forward = torch.compile(layer.forward, backend=backend, dynamic=False)
