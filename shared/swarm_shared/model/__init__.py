"""The trained model, its optimizer and its state.

With the tensor codecs this is the only room that imports torch; `swarm_shared.run.schedule` and
`swarm_shared.run.stage_cut` hold what needs no torch.
"""

from __future__ import annotations

from swarm_shared.model.flat_gradients import (
    FlatLayout,
    bind_gradients,
    global_norm,
    squared_norm,
)
from swarm_shared.model.initialise import (
    build_stage,
    build_whole,
    initialise,
    initialise_trained,
)
from swarm_shared.model.llama import Linear, Stage, check_token_values
from swarm_shared.model.optimizer import Fingerprint, apply_step, fingerprint, make_optimizer
from swarm_shared.model.profile import profile_layers
from swarm_shared.model.state import (
    StoredState,
    load_frozen,
    load_parameters,
    load_state,
    open_state,
    save_state,
    state_to_tensors,
)

__all__ = [
    "Fingerprint",
    "FlatLayout",
    "Linear",
    "Stage",
    "StoredState",
    "apply_step",
    "bind_gradients",
    "build_stage",
    "build_whole",
    "check_token_values",
    "fingerprint",
    "global_norm",
    "initialise",
    "initialise_trained",
    "load_frozen",
    "load_parameters",
    "load_state",
    "make_optimizer",
    "open_state",
    "profile_layers",
    "save_state",
    "squared_norm",
    "state_to_tensors",
]
