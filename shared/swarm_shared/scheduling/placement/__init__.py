"""The assignment of peers to stages: pure functions, used by coordinator and client.

    joining        the stage that a joining peer takes
    moves          which peers move to another stage during the run, and why
    loads          stages and peers as the numbers that the rules use
    reduce_shares  how much of its stage's gradients each member reduces

The pipeline runs at its slowest stage (design: placement), so all of them improve the slowest. No
clock, no randomness, no I/O: the coordinator, its simulator and the tests run the same code.
"""

from swarm_shared.scheduling.placement.joining import most_underserved_stage
from swarm_shared.scheduling.placement.loads import PeerLoad, StageLoad, stage_rates
from swarm_shared.scheduling.placement.moves import Move, MoveDecision, MovePolicy, choose_moves
from swarm_shared.scheduling.placement.reduce_shares import reduce_weights, round_seconds

__all__ = [
    "Move",
    "MoveDecision",
    "MovePolicy",
    "PeerLoad",
    "StageLoad",
    "choose_moves",
    "most_underserved_stage",
    "reduce_weights",
    "round_seconds",
    "stage_rates",
]
